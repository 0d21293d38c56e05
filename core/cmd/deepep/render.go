package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/deepep-go/deepep/internal/monitor"
)

// render draws a view. clock is monotonic() at the time of the view; width 0 is unlimited.
func (h *hostView) render(now time.Time, clock uint64, width int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s  %s  %s\n", text.Bold.Sprint("deepep top"), now.Format(time.TimeOnly), count(len(h.buffers), "buffer"))
	if len(h.buffers) == 0 && len(h.damaged) == 0 {
		fmt.Fprintf(&b, "No buffer of this user on this host. Pages are looked for in %s; DEEPEP_STATS=0 switches them off.\n", strings.Join(monitor.Folders(), " and "))
	}
	for i := range h.buffers {
		h.buffers[i].render(&b, clock, width)
	}
	for _, e := range h.damaged {
		fmt.Fprintf(&b, "%s %v\n", text.FgYellow.Sprint("skipped:"), e.Err)
	}
	return b.String()
}

func (b *bufferView) render(out *strings.Builder, clock uint64, width int) {
	first := b.ranks[0]
	fmt.Fprintf(out, "\n%s  buffer %d  %s  %d of %d ranks here\n", text.Bold.Sprint("group "+b.group), b.buffer, first.Engine, b.distinct(), b.numRanks)
	for _, t := range []table.Writer{b.operations(), b.rankTable(clock)} {
		t.SetAllowedRowLength(width)
		fmt.Fprintln(out, t.Render())
	}
	waits := b.waits()
	slow, found := waits.Slowest()
	if t := waitTable(waits, slow, found); t != nil {
		fmt.Fprintln(out, "Mean wait in a round (one call of each operation); each row waits for each column:")
		t.SetAllowedRowLength(width)
		fmt.Fprintln(out, t.Render())
	}
	if found {
		fmt.Fprintln(out, text.Colors{text.FgRed, text.Bold}.Sprintf("rank %d is slow:", slow.Rank),
			fmt.Sprintf("the others wait %s for it in each round, %s for the median of the rest", timeText(nanos(slow.Mean)), timeText(nanos(slow.Others))))
	}
	for _, r := range b.ranks {
		if r.dead {
			fmt.Fprintln(out, text.FgRed.Sprintf("rank %d is dead:", r.Rank), fmt.Sprintf("process %d has ended", r.PID))
		}
	}
}

// distinct counts the ranks on this host.
func (b *bufferView) distinct() int {
	seen := map[int]bool{}
	for _, r := range b.ranks {
		seen[r.Rank] = true
	}
	return len(seen)
}

func nanos(f float64) time.Duration { return time.Duration(f) }

// operations has a line for each operation, over all ranks on this host.
func (b *bufferView) operations() table.Writer {
	t := newTable()
	header := table.Row{"operation", "calls/s", "sent/s", "p50", "p99", "p99.9", "max", "mean", "waiting", "calls", "errors"}
	t.AppendHeader(header)
	rightAlign(t, 1, len(header))
	for _, op := range monitor.Ops() {
		if !b.active(op) {
			continue
		}
		s, seconds := b.sum(op)
		ranks := float64(len(b.ranks))
		t.AppendRow(table.Row{
			op.String(),
			rateText(float64(s.Calls) / seconds / ranks), // a call of all ranks counts once
			flowText(float64(s.Bytes) / seconds),
			timeText(s.Percentile(0.5)), timeText(s.Percentile(0.99)), timeText(s.Percentile(0.999)),
			timeText(s.Max()), timeText(s.Mean()), shareText(s.WaitNS, s.TotalNS),
			b.calls(op), errorText(b.errors(op)),
		})
	}
	return t
}

// calls is the largest number of calls of a rank since the buffer was made.
func (b *bufferView) calls(op monitor.Op) uint64 {
	var largest uint64
	for _, r := range b.ranks {
		largest = max(largest, r.Ops[op].Calls)
	}
	return largest
}

func (b *bufferView) errors(op monitor.Op) uint64 {
	var all monitor.OpStats
	for _, r := range b.ranks {
		all.Add(&r.Ops[op])
	}
	return all.Errors
}

func shareText(part, whole uint64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100*min(float64(part)/float64(whole), 1))
}

func errorText(n uint64) string {
	if n == 0 {
		return "0"
	}
	return text.FgRed.Sprint(n)
}

// rankTable has a line for each rank on this host.
func (b *bufferView) rankTable(clock uint64) table.Writer {
	t := newTable()
	header := table.Row{"rank", "pid", "device", "state", "calls/s", "sent/s", "waiting", "last call"}
	t.AppendHeader(header)
	rightAlign(t, 4, 7)
	for i := range b.ranks {
		r := &b.ranks[i]
		s := r.totals()
		t.AppendRow(table.Row{
			r.Rank, r.PID, r.Device, r.stateText(),
			rateText(float64(s.Calls) / r.seconds), flowText(float64(s.Bytes) / r.seconds),
			shareText(s.WaitNS, s.TotalNS), r.lastText(clock),
		})
	}
	return t
}

func (r *rankView) stateText() string {
	switch {
	case r.dead:
		return text.FgRed.Sprint("dead")
	case r.State == monitor.Live:
		return r.State.String()
	}
	return text.FgYellow.Sprint(r.State)
}

func (r *rankView) lastText(clock uint64) string {
	op, start, found := r.last()
	if !found {
		return "-"
	}
	s := fmt.Sprintf("%s, %s", op, timeText(time.Duration(min(r.Ops[op].LastNS, 1<<62))))
	if start > 0 && clock > start {
		s += fmt.Sprintf(", %s ago", timeText(time.Duration(clock-start)))
	}
	return s
}

// maxColumns bounds the columns of the table of waits: the ranks with the longest waits for them are shown.
const maxColumns = 16

// waitTable shows how long each rank waited for each; nil if none waited.
func waitTable(w monitor.Waits, slow monitor.Slow, found bool) table.Writer {
	columns := longest(w)
	if len(columns) == 0 {
		return nil
	}
	t := newTable()
	header := table.Row{"rank"}
	means := table.Row{"mean"}
	for _, j := range columns {
		name := fmt.Sprint(j)
		if found && j == slow.Rank {
			name = text.Colors{text.FgRed, text.Bold}.Sprintf("%d ◄ slow", j)
		}
		header = append(header, name)
		means = append(means, timeText(nanos(w.MeanFor(j))))
	}
	t.AppendHeader(header)
	rightAlign(t, 1, len(header))
	for i, row := range w.Mean {
		if !w.Seen[i] {
			continue
		}
		line := table.Row{i}
		for _, j := range columns {
			cell := timeText(nanos(row[j]))
			switch {
			case i == j:
				cell = "·"
			case found && j == slow.Rank:
				cell = text.FgRed.Sprint(cell)
			}
			line = append(line, cell)
		}
		t.AppendRow(line)
	}
	t.AppendFooter(means)
	return t
}

// longest lists the ranks to show as columns, in order of rank.
func longest(w monitor.Waits) []int {
	var columns []int
	waited := false
	for j := range w.Mean {
		columns = append(columns, j)
		waited = waited || w.MeanFor(j) > 0
	}
	if !waited {
		return nil
	}
	if len(columns) > maxColumns {
		slices.SortFunc(columns, func(a, b int) int {
			switch x, y := w.MeanFor(a), w.MeanFor(b); {
			case x > y:
				return -1
			case x < y:
				return 1
			}
			return a - b
		})
		columns = columns[:maxColumns]
		slices.Sort(columns)
	}
	return columns
}
