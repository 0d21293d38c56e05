package proctest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
)

// Exchanger is bootstrap.Exchanger.
type Exchanger interface {
	Rank() int
	Size() int
	AllGather(ctx context.Context, blob []byte) ([][]byte, error)
	Close() error
}

type renamed struct {
	Exchanger
	machine string
}

// OnMachine returns an Exchanger that rewrites the hello in this rank's blob, so that the other ranks take this one for
// a rank of the named machine.
func OnMachine(machine string, ex Exchanger) Exchanger { return &renamed{ex, machine} }

func (r *renamed) AllGather(ctx context.Context, blob []byte) ([][]byte, error) {
	blob, err := rename(blob, r.machine)
	if err != nil {
		return nil, err
	}
	return r.Exchanger.AllGather(ctx, blob)
}

// rename edits the JSON after a hello's first line.
func rename(blob []byte, machine string) ([]byte, error) {
	prefix, text, found := bytes.Cut(blob, []byte("\n"))
	var hello map[string]json.RawMessage
	if err := json.Unmarshal(text, &hello); err != nil || !found {
		return nil, fmt.Errorf("the blob is not a hello: %w", err)
	}
	var process string
	if err := json.Unmarshal(hello["Process"], &process); err != nil {
		return nil, fmt.Errorf("a hello without a process: %w", err)
	}
	for field, value := range map[string]string{"Host": machine, "Boot": "machine " + machine, "Process": process + " on " + machine} {
		quoted, err := json.Marshal(value)
		if err != nil {
			return nil, err
		}
		hello[field] = quoted
	}
	text, err := json.Marshal(hello)
	return append(append(prefix, '\n'), text...), err
}
