package core

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
)

// laterRank makes a rank's first message that of a later version: docs/compatibility.md says what stays in it for ever.
type laterRank struct {
	Exchanger
	version string
}

func (l laterRank) AllGather(ctx context.Context, blob []byte) ([][]byte, error) {
	text, ok := bytes.CutPrefix(blob, []byte("deepep-hello\n{"))
	ours := fmt.Appendf(nil, `"Version":%q`, versionText())
	if !ok || !bytes.Contains(text, ours) {
		return nil, errors.New("a hello begins in another way")
	}
	text = bytes.Replace(text, ours, fmt.Appendf(nil, `"Version":%q`, l.version), 1)
	return l.Exchanger.AllGather(ctx, append([]byte("deepep-hello\n{\"LaterField\":{\"a\":[1]},"), text...))
}

// Ranks of two versions do not start together, and both say who has which.
func TestRanksOfTwoVersions(t *testing.T) {
	for _, later := range []string{"0.98.7", "98.0.0"} {
		exchangers := NewLocal(2)
		errs := make([]error, 2)
		var ranks sync.WaitGroup
		for rank, exchanger := range []Exchanger{exchangers[0], laterRank{exchangers[1], later}} {
			ranks.Go(func() {
				g, err := NewGroup(context.Background(), GroupOptions{Exchanger: exchanger})
				if errs[rank] = err; err == nil {
					_ = g.Destroy()
				}
			})
		}
		ranks.Wait()
		for rank, err := range errs {
			want := fmt.Sprintf("library version: rank 0 has %q; rank 1 has %q", versionText(), later)
			if !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), want) {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
	}
}
