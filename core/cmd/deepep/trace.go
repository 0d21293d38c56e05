package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/deepep-go/deepep/internal/monitor"
)

type traceFlags struct {
	pages  pagesFlags
	output string
	last   int
}

func traceCommand() *cobra.Command {
	var f traceFlags
	cmd := &cobra.Command{
		Use:   "trace",
		Short: "Write the last calls of every buffer as a Chrome trace",
		Long: `Writes the calls that the statistics pages still hold (the last 1024 of each
rank) as a trace for chrome://tracing or ui.perfetto.dev: a process for each
rank, a line for each operation. Ranks of one host share a clock.`,
		Example: `  deepep trace --output calls.json
  deepep trace --last 100 --output - | gzip > calls.json.gz`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.last < 1 {
				return fmt.Errorf("last: %d; allowed is 1 or more", f.last)
			}
			return f.run(cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.pages.register(cmd)
	cmd.Flags().StringVarP(&f.output, "output", "o", "deepep-trace.json", "file to write, - for standard output")
	cmd.Flags().IntVarP(&f.last, "last", "n", monitor.DefaultTrace, "only the last N calls of each rank")
	return cmd
}

// traceEvent is an entry of Chrome's trace event format; times are in microseconds.
type traceEvent struct {
	Name  string         `json:"name"`
	Cat   string         `json:"cat,omitempty"`
	Phase string         `json:"ph"`
	TS    float64        `json:"ts"`
	Dur   *float64       `json:"dur,omitempty"`
	PID   int            `json:"pid"`
	TID   int            `json:"tid"`
	Args  map[string]any `json:"args,omitempty"`
}

type traceFile struct {
	TraceEvents     []traceEvent `json:"traceEvents"`
	DisplayTimeUnit string       `json:"displayTimeUnit"`
}

func (f *traceFlags) run(stdout, stderr io.Writer) error {
	entries, err := f.pages.list(stderr)
	if err != nil {
		return err
	}
	h := hostView{}
	for _, e := range entries {
		if e.Stats == nil {
			fmt.Fprintf(stderr, "deepep: skipped: %v\n", e.Err)
			continue
		}
		h.put(rankView{Stats: e.Stats, dead: e.Dead})
	}
	h.choose(f.pages.group)
	file, calls := h.trace(f.last)
	if f.output == "-" {
		return json.NewEncoder(stdout).Encode(file)
	}
	b, err := json.Marshal(file)
	if err != nil {
		return err
	}
	if err := os.WriteFile(f.output, append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	_, err = fmt.Fprintf(stdout, "%s of %s in %s: open it in ui.perfetto.dev or chrome://tracing\n", count(calls, "call"), count(len(h.buffers), "buffer"), f.output)
	return err
}

// phases names the phases of an operation, DK_PHASE_*.
var phases = map[uint32]string{1: " send", 2: " receive"}

// trace makes the events of all ranks. Every page is a process of the trace, numbered by buffer and rank.
func (h *hostView) trace(last int) (traceFile, int) {
	file := traceFile{TraceEvents: []traceEvent{}, DisplayTimeUnit: "ns"}
	number, calls := 0, 0
	for _, b := range h.buffers {
		for _, r := range b.ranks {
			number++
			list := r.Trace[max(0, len(r.Trace)-last):]
			calls += len(list)
			file.TraceEvents = append(file.TraceEvents, traceHead(number, r)...)
			file.TraceEvents = append(file.TraceEvents, traceCalls(number, list)...)
		}
	}
	return file, calls
}

func traceHead(number int, r rankView) []traceEvent {
	name := fmt.Sprintf("rank %d, group %s, buffer %d (pid %d, %s)", r.Rank, r.Group, r.Buffer, r.PID, r.Device)
	events := []traceEvent{
		{Name: "process_name", Phase: "M", PID: number, Args: map[string]any{"name": name}},
		{Name: "process_sort_index", Phase: "M", PID: number, Args: map[string]any{"sort_index": number}},
	}
	for _, op := range monitor.Ops() {
		if r.Ops[op].Calls > 0 {
			events = append(events, traceEvent{Name: "thread_name", Phase: "M", PID: number, TID: int(op), Args: map[string]any{"name": op.String()}})
		}
	}
	return events
}

// traceCalls converts calls to events. Calls of a device without the host's clock have no start: they follow each
// other, so that their durations can be compared.
func traceCalls(number int, calls []monitor.Call) []traceEvent {
	events := make([]traceEvent, 0, len(calls))
	var end uint64
	for _, c := range calls {
		args := map[string]any{"call": c.Number}
		start := c.Start
		if start == 0 {
			start = end
			args["start"] = "not known"
		}
		end = start + uint64(c.Duration)
		dur := float64(c.Duration) / 1e3
		events = append(events, traceEvent{
			Name: c.Op.String() + phases[c.Phase], Cat: "deepep", Phase: "X",
			TS: float64(start) / 1e3, Dur: &dur, PID: number, TID: int(c.Op), Args: args,
		})
	}
	return events
}
