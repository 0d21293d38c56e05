package main

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/status"
)

// benchReport is the result of `deepep bench`.
type benchReport struct {
	Spec    benchSpec     `json:"spec"`
	Engine  string        `json:"engine"`
	Device  string        `json:"device"`
	ISA     string        `json:"isa,omitempty"`
	Results []benchResult `json:"results"`
	Starts  []benchStart  `json:"starts,omitempty"`
}

// benchStart is where the slowest rank's time of a start went.
type benchStart struct {
	Start  string       `json:"start"`
	Tokens int          `json:"tokens"`
	Stages []benchStage `json:"stages"`
}

// benchStage is one of its lines.
type benchStage struct {
	Name string  `json:"stage"`
	US   float64 `json:"us"`
}

// benchResult is one line. Each iteration counts the slowest rank's time.
type benchResult struct {
	Operation string  `json:"operation"`
	Tokens    int     `json:"tokens"`
	Calls     int     `json:"calls"`
	P50US     float64 `json:"p50_us"`
	P99US     float64 `json:"p99_us"`
	MaxUS     float64 `json:"max_us"`
	Bytes     uint64  `json:"bytes"` // largest number that a rank sends in a call
	GBs       float64 `json:"gb_s"`  // Bytes over p50
	KernelUS  float64 `json:"kernel_us,omitempty"`
	WaitShare float64 `json:"wait_share,omitempty"`
}

// merge makes a line of each series that all ranks measured.
func (r *benchReport) merge(ranks []*rankResult) error {
	first := ranks[0]
	r.Engine, r.Device, r.ISA = first.Engine, first.Device, first.ISA
	for i, s := range first.Series {
		slowest := slices.Clone(s.Times)
		bytes := s.Bytes
		for rank, other := range ranks {
			if len(other.Series) != len(first.Series) || len(other.Series[i].Times) != len(slowest) {
				return fmt.Errorf("rank %d measured other operations than rank 0", rank)
			}
			o := other.Series[i]
			bytes = max(bytes, o.Bytes)
			for k, ns := range o.Times {
				slowest[k] = max(slowest[k], ns)
			}
		}
		slices.Sort(slowest)
		line := benchResult{
			Operation: s.Operation, Tokens: s.Tokens, Calls: len(slowest), Bytes: bytes,
			P50US: percentile(slowest, 0.5), P99US: percentile(slowest, 0.99), MaxUS: percentile(slowest, 1), KernelUS: float64(s.KernelNS) / 1e3,
		}
		if line.P50US > 0 {
			line.GBs = float64(bytes) / line.P50US / 1e3
		}
		if s.KernelNS > 0 {
			line.WaitShare = float64(s.WaitNS) / float64(s.KernelNS)
		}
		r.Results = append(r.Results, line)
	}
	r.mergeStarts(ranks)
	return nil
}

// mergeStarts takes each stage from the rank that it took longest.
func (r *benchReport) mergeStarts(ranks []*rankResult) {
	for i, first := range ranks[0].Starts {
		merged := benchStart{Start: first.Start, Tokens: first.Tokens}
		for _, rank := range ranks {
			for k, stage := range rank.Starts[i].stages() {
				if k == len(merged.Stages) {
					merged.Stages = append(merged.Stages, stage)
				}
				merged.Stages[k].US = max(merged.Stages[k].US, stage.US)
			}
		}
		r.Starts = append(r.Starts, merged)
	}
}

// stages are the lines of a start's table.
func (s *rankStart) stages() (all []benchStage) {
	r := &s.Report
	add := func(name string, ns uint64) { all = append(all, benchStage{name, float64(ns) / 1e3}) }
	for phase, when := range []string{core.StartConstruction: "construction: ", core.StartWarmup: "warm-up: "} {
		add(when+"kernels", r.LoadNS[phase])
		add(when+"memory", r.MemoryNS[phase])
		add(when+"connections", r.ConnectNS[phase])
		if phase == int(core.StartWarmup) {
			add(when+"calls", r.LaunchNS[phase])
		}
	}
	add("first call", uint64(s.First))
	add("of it page faults, about", r.MemoryNS[core.StartFirstCalls])
	add("of it launches", r.LaunchNS[core.StartFirstCalls])
	return all
}

// percentile of sorted times in microseconds: the smallest time that this share of them does not exceed.
func percentile(sorted []int64, share float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := int(share*float64(len(sorted))+0.999999) - 1
	return float64(sorted[min(max(i, 0), len(sorted)-1)]) / 1e3
}

func (r *benchReport) print(w io.Writer) error {
	s := &r.Spec
	device := r.Device
	if r.ISA != "" {
		device += ", " + r.ISA
	}
	ranks := count(s.Ranks, "rank")
	if nodes := s.topology().Nodes(); nodes > 1 {
		ranks += " on " + count(nodes, "node")
	}
	fmt.Fprintf(w, "%s engine (%s), %s, hidden %d, top-%d of %d experts, %s routing\n",
		r.Engine, device, ranks, s.Hidden, s.TopK, s.Experts, s.Routing)
	t := newTable()
	header := table.Row{"operation", "tokens", "p50", "p99", "max", "sent", "GB/s", "kernels", "waiting", "calls"}
	t.AppendHeader(header)
	rightAlign(t, 1, len(header))
	last := 0
	for _, l := range r.Results {
		if l.Tokens != last && last != 0 {
			t.AppendSeparator()
		}
		last = l.Tokens
		sent, rate, kernels, waiting := "-", "-", "-", "-"
		if l.Bytes > 0 {
			sent, rate = sizeText(l.Bytes), rateText(l.GBs)
		}
		if l.KernelUS > 0 {
			kernels, waiting = microText(l.KernelUS), fmt.Sprintf("%.0f%%", 100*l.WaitShare)
		}
		t.AppendRow(table.Row{l.Operation, l.Tokens, microText(l.P50US), microText(l.P99US), microText(l.MaxUS), sent, rate, kernels, waiting, l.Calls})
	}
	_, err := fmt.Fprintln(w, t.Render())
	status.Keep(&err, r.printStarts(w))
	return err
}

// printStarts prints a table for each number of tokens: stages by ways to begin.
func (r *benchReport) printStarts(w io.Writer) error {
	var all error
	for _, tokens := range r.Spec.Tokens {
		shown := slices.DeleteFunc(slices.Clone(r.Starts), func(s benchStart) bool { return s.Tokens != tokens })
		if len(shown) == 0 {
			continue
		}
		t := newTable()
		header := table.Row{fmt.Sprintf("where the time goes, %d tokens", tokens)}
		for _, s := range shown {
			header = append(header, s.Start)
		}
		t.AppendHeader(header)
		rightAlign(t, 1, len(header))
		for i, stage := range shown[0].Stages {
			row := table.Row{stage.Name}
			for _, s := range shown {
				row = append(row, microText(s.Stages[i].US))
			}
			t.AppendRow(row)
		}
		_, err := fmt.Fprintln(w, t.Render())
		status.Keep(&all, err)
	}
	return all
}

func microText(us float64) string { return timeText(time.Duration(us * 1e3)) }
