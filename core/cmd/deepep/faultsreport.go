package main

import (
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// faultsTotal counts the rounds of all jobs.
type faultsTotal struct {
	flags *faultsFlags
	out   io.Writer
	began time.Time
	jobs  int

	mu               sync.Mutex
	next             int // number of the next round
	played, failures int
	moved            int // rounds in which the survivors' buffers regrouped
	missing          map[string]string
	cells            map[[2]string]int        // rounds by phase and fault
	outcomes         map[[2]string]int        // by fault and outcome
	slowest          map[string]time.Duration // by kind
	longest          time.Duration            // of a round
}

// take returns the number of a round that nobody has played; false: there is none left.
func (t *faultsTotal) take() (number int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.next >= t.flags.first+t.flags.rounds {
		return 0, false
	}
	t.next++
	return t.next - 1, true
}

// leaveOut prints which faults cannot be made, once.
func (t *faultsTotal) leaveOut(missing map[string]string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.missing != nil {
		return
	}
	t.missing = map[string]string{}
	for _, kind := range kindNames() {
		if reason := missing[kind]; reason != "" && t.flags.wants(kind) {
			t.missing[kind] = reason
			fmt.Fprintf(t.out, "left out: %s: %s\n", kind, reason)
		}
	}
}

func (t *faultsTotal) add(r *roundResult) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cells == nil {
		t.cells, t.outcomes, t.slowest = map[[2]string]int{}, map[[2]string]int{}, map[string]time.Duration{}
	}
	t.played++
	if r.Moves && len(r.Bad) == 0 {
		t.moved++
	}
	t.cells[[2]string{r.Phase, r.Fault}]++
	t.outcomes[[2]string{r.Fault, r.Outcome}]++
	t.longest = max(t.longest, r.Took)
	for kind, took := range r.Slowest {
		t.slowest[kind] = max(t.slowest[kind], took)
	}
	if t.flags.progress {
		fmt.Fprintf(t.out, "%s: %s, %.2f s\n", r.Text, r.Outcome, r.Took.Seconds())
	}
	if len(r.Bad) > 0 {
		t.failures++
		fmt.Fprintf(t.out, "FAILED %s\n  %s\n", r.Text, strings.Join(r.Bad, "\n  "))
	}
}

func (t *faultsTotal) faultRounds(fault string) (n int) {
	for cell, rounds := range t.cells {
		if cell[1] == fault {
			n += rounds
		}
	}
	return n
}

// seen returns the faults that were made, in the order in which the program lists them.
func (t *faultsTotal) seen() (faults []string) {
	for _, fault := range kindNames() {
		if t.faultRounds(fault) > 0 {
			faults = append(faults, fault)
		}
	}
	return faults
}

func (t *faultsTotal) report() {
	fmt.Fprintln(t.out, t.head())
	for _, fault := range slices.Sorted(slices.Values(t.seen())) {
		line := fmt.Sprintf("  %-10s %5d", fault, t.faultRounds(fault))
		if d := t.slowest[fault]; d > 0 {
			line += fmt.Sprintf("  slowest to be named: %.3f s", d.Seconds())
		}
		if d := t.slowest[fault+inStart]; d > 0 {
			line += fmt.Sprintf("  in a start: %.3f s", d.Seconds())
		}
		fmt.Fprintln(t.out, line)
	}
	fmt.Fprintf(t.out, "%d passed, %d failed, %d skipped\n", t.played-t.failures, t.failures, len(t.missing))
}

func (t *faultsTotal) head() string {
	return fmt.Sprintf("%d rounds in %.0f s, seed %d, %d side by side on %d cores; the longest took %.1f s; in %d the survivors' buffers regrouped",
		t.played, time.Since(t.began).Seconds(), t.flags.seed, t.jobs, runtime.NumCPU(), t.longest.Seconds(), t.moved)
}

// tables are the summary in Markdown: outcomes and longest times of each fault, and how often it met each phase.
func (t *faultsTotal) tables() string {
	var b strings.Builder
	row := func(cells ...string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	rule := func(columns int) { fmt.Fprintf(&b, "|%s\n", strings.Repeat("---|", columns)) }
	number := func(n int) string {
		if n == 0 {
			return ""
		}
		return fmt.Sprint(n)
	}
	longest := func(kind string) string {
		if t.slowest[kind] == 0 {
			return ""
		}
		return fmt.Sprintf("%.3f s", t.slowest[kind].Seconds())
	}
	fmt.Fprintf(&b, "%s.\n\n", t.head())
	outcomes := []string{outcomeNamed, outcomeMasked, outcomeUnnoticed, outcomeBroken}
	row(append(append([]string{"fault", "rounds"}, outcomes...), "longest until named or masked", "in a start or warm-up")...)
	rule(len(outcomes) + 4)
	for _, fault := range t.seen() {
		cells := []string{fault, number(t.faultRounds(fault))}
		for _, outcome := range outcomes {
			cells = append(cells, number(t.outcomes[[2]string{fault, outcome}]))
		}
		row(append(cells, longest(fault), longest(fault+inStart))...)
	}
	fmt.Fprintln(&b)
	row(append([]string{"phase"}, t.seen()...)...)
	rule(len(t.seen()) + 1)
	for _, phase := range faultPhases {
		cells := []string{phase}
		for _, fault := range t.seen() {
			cells = append(cells, number(t.cells[[2]string{phase, fault}]))
		}
		row(cells...)
	}
	for _, kind := range slices.Sorted(maps.Keys(t.missing)) {
		fmt.Fprintf(&b, "\nLeft out: %s: %s.\n", kind, t.missing[kind])
	}
	return b.String()
}
