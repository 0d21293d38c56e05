package costs

import (
	"bufio"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/status"
)

// Names that bench_ops gives to calls, and what they are here. Other lines are left out: staged dispatches, graphs, and
// what is no call.
var benchNames = map[string][2]string{
	"dispatch FP8": {"dispatch", "fp8"}, "dispatch FP8 direct": {"dispatch", "fp8"}, "dispatch_fp8": {"dispatch", "fp8"},
	"dispatch BF16": {"dispatch", "bf16"}, "dispatch BF16 direct": {"dispatch", "bf16"}, "dispatch_bf16": {"dispatch", "bf16"},
	"combine BF16": {"combine", "bf16"}, "combine_bf16": {"combine", "bf16"}, "combine": {"combine", "bf16"},
	"combine, sums": {"combine", "bf16"}, "combine, each row": {"combine", "bf16"},
}

var (
	benchTimes = regexp.MustCompile(`^(\S.*?) +sms +(\d+) +median +[\d.]+ us .*in-kernel mean +([\d.]+) us`)
	benchLL    = regexp.MustCompile(`^LL (\S.*?) +median +[\d.]+ us .*inside +([\d.]+) us`)
	benchShape = regexp.MustCompile(`^done: \S+ ranks=(\d+) (?:nodes=(\d+) )?devices=\d+ tokens=(\d+) hidden=(\d+)`)
)

// bench collects what one program printed.
type bench struct {
	machine, source string
	open            []Measurement // of a run whose shape has not been read yet
	all             []Measurement
}

// ReadBench reads what bench_ops printed, in the modes normal, nodes, sweep, ll and llsweep, as measurements on a machine:
// times inside the kernel, with bench_ops' own routing: uniform, top-8 of 256 experts. Those with the most tokens and the
// largest rows of each kernel are for the fit, the others check.
func ReadBench(r io.Reader, machine, source string) ([]Measurement, error) {
	b := bench{machine: machine, source: source}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if err := b.line(lines.Text()); err != nil {
			return nil, err
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(b.open) > 0 {
		return nil, status.Errorf(status.InvalidArgument, "%s: %d lines of times with no line \"done: ... ranks=\" after them, which has the shape: the output is cut off", source, len(b.open))
	}
	if len(b.all) == 0 {
		return nil, status.Errorf(status.InvalidArgument, "%s: no times of bench_ops in it; its modes normal, nodes, sweep, ll and llsweep print them", source)
	}
	markFit(b.all)
	return b.all, nil
}

func (b *bench) line(text string) error {
	if m := benchTimes.FindStringSubmatch(text); m != nil {
		name, known := benchNames[m[1]]
		if known {
			b.open = append(b.open, Measurement{Operation: name[0], Format: name[1], SMs: number(m[2]), US: decimal(m[3]), Cached: name[0] == "dispatch"})
		}
		return nil
	}
	if m := benchLL.FindStringSubmatch(text); m != nil {
		if name, known := benchNames[m[1]]; known {
			b.open = append(b.open, Measurement{Operation: "low-latency " + name[0], Format: name[1], US: decimal(m[2]), Unreduced: m[1] == "combine, each row"})
		}
		return nil
	}
	if m := benchShape.FindStringSubmatch(text); m != nil {
		for _, one := range b.open {
			one.Ranks, one.Tokens, one.Hidden = number(m[1]), number(m[3]), number(m[4])
			b.add(one, max(1, number(m[2])))
		}
		b.open = nil
		return nil
	}
	if strings.HasPrefix(text, "csv,") {
		return b.csv(strings.Split(text, ",")[1:])
	}
	return nil
}

// csv reads a line of mode=sweep: sweep, isa, ranks, tokens, hidden, routing, sms, operation, link_bytes, median_us,
// worst_us, in_kernel_us; or of mode=llsweep: ranks, tokens, hidden, zipf, operation, median, p99, inside, inside_p99.
func (b *bench) csv(f []string) error {
	const sweepFields, lowLatencyFields = 12, 9
	switch {
	case f[0] == "sweep": // the names of the fields
	case len(f) == sweepFields:
		name, known := benchNames[f[7]]
		if known && f[5] == "uniform" && f[1] == "0" {
			b.add(Measurement{Operation: name[0], Format: name[1], Ranks: number(f[2]), Tokens: number(f[3]), Hidden: number(f[4]), SMs: number(f[6]),
				US: decimal(f[11]), Cached: name[0] == "dispatch"}, 1)
		}
	case len(f) == lowLatencyFields:
		name, known := benchNames[f[4]]
		if known && decimal(f[3]) == 0 {
			b.add(Measurement{Operation: "low-latency " + name[0], Format: name[1], Ranks: number(f[0]), Tokens: number(f[1]), Hidden: number(f[2]), US: decimal(f[7])}, 1)
		}
	default:
		return status.Errorf(status.InvalidArgument, "%s: a line of csv with %d fields; bench_ops prints %d (sweep) or %d (llsweep)", b.source, len(f), sweepFields, lowLatencyFields)
	}
	return nil
}

func (b *bench) add(m Measurement, nodes int) {
	m.RanksPerNode = m.Ranks / nodes
	m.Machine, m.Source = b.machine, b.source
	b.all = append(b.all, m)
}

// number and decimal are 0, which check refuses, where there is no number.
func number(text string) int {
	n, _ := strconv.Atoi(text)
	return n
}

func decimal(text string) float64 {
	f, _ := strconv.ParseFloat(text, 64)
	return f
}

func markFit(all []Measurement) {
	size := func(m *Measurement) int { return m.Tokens * m.Hidden }
	most := map[string]int{}
	for i := range all {
		name := all[i].kernel()
		most[name] = max(most[name], size(&all[i]))
	}
	for i := range all {
		all[i].Fit = size(&all[i]) == most[all[i].kernel()] && !all[i].Unreduced
	}
}

func (m *Measurement) kernel() string { return kernelOf(m.Operation, m.Ranks/max(1, m.RanksPerNode)) }

// Replace puts measurements in the place of those of the same kernels, which would mix two states of the library, and
// returns the kernels' names.
func (f *File) Replace(measured []Measurement) (kernels []string, err error) {
	names := map[string]bool{}
	for i := range measured {
		names[measured[i].kernel()] = true
	}
	var kept []Measurement
	for _, m := range f.Measured {
		if !names[m.kernel()] {
			kept = append(kept, m)
		}
	}
	f.Measured = append(kept, measured...)
	return slices.Sorted(maps.Keys(names)), f.check()
}
