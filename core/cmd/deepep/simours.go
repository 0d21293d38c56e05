package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/deepep-go/deepep/core/cmd/deepep/internal/costs"
	"github.com/deepep-go/deepep/core/cmd/deepep/internal/nicsim"
	"github.com/deepep-go/deepep/internal/plan"
)

// simOurs predicts this library's kernels beside upstream's published figures.
type simOurs struct {
	on             bool
	costs, machine string
	sms, qps       int
	markdown       string
	ranks          []int
	seed           uint64
	json           bool
	file           *costs.File
}

// oursRanks are the groups of the tables: 16 to 64 as published in both modes, 128 and 256 in low latency.
var oursRanks = []int{16, 32, 64, 128, 256}

// oursCalls are the calls of the tables, in their order.
var oursCalls = []struct {
	operation, format string
	published         nicsim.Operation
}{
	{"dispatch", "fp8", nicsim.Dispatch}, {"dispatch", "bf16", nicsim.Dispatch}, {"combine", "bf16", nicsim.Combine},
	{"low-latency dispatch", "fp8", nicsim.LowLatencyDispatch}, {"low-latency combine", "bf16", nicsim.LowLatencyCombine},
}

// publishedBF16 is the dispatch of BF16 rows in GB/s, logical, on H100 at 400 Gb/s by a fork of upstream's V1: issue 7 of
// Infrawaves/DeepEP_ibrc_dual-ports_multiQP. Upstream's own tables have FP8 alone.
var publishedBF16 = map[int]float64{16: 60, 32: 59, 64: 52}

// oursReport is the result.
type oursReport struct {
	Source   string         `json:"source"`
	Machine  string         `json:"machine"`
	SMs      int            `json:"sms"`
	QPs      int            `json:"num_qps_per_rank"`
	Seed     uint64         `json:"seed"`
	Measured []oursMeasured `json:"measured"`
	Results  []*oursResult  `json:"results"`
	kernels  map[string]*costs.Kernel
	on       costs.Machine // Machine's
}

// oursMeasured is a measurement beside its prediction.
type oursMeasured struct {
	costs.Measurement
	Predicted float64 `json:"predicted_us"`
	Miss      float64 `json:"miss"`
	Binds     string  `json:"binds"`
}

// oursResult is a prediction beside the published figure.
type oursResult struct {
	Operation   string  `json:"operation"`
	Format      string  `json:"format"`
	Ranks       int     `json:"ranks"`
	Published   float64 `json:"published,omitempty"` // as published; 0: none
	Unit        string  `json:"unit"`
	PublishedUS float64 `json:"published_us,omitempty"`
	costs.Prediction
}

func (o *oursResult) name() string { return o.Operation + " " + strings.ToUpper(o.Format) }

// load reads the costs and checks the flags.
func (s *simOurs) load() (err error) {
	if s.file, err = readCosts(s.costs); err != nil {
		return err
	}
	if _, ok := s.file.Machines[s.machine]; !ok {
		return fmt.Errorf("machine: %q; allowed are those of the costs: %s", s.machine, strings.Join(slices.Sorted(maps.Keys(s.file.Machines)), ", "))
	}
	if len(s.ranks) == 0 {
		s.ranks = oursRanks
	}
	return nil
}

func (s *simOurs) report() (*oursReport, error) {
	r := &oursReport{Source: s.file.Source, Machine: s.machine, SMs: s.sms, QPs: s.qps, Seed: s.seed, kernels: s.file.Kernels, on: s.file.Machines[s.machine]}
	for i := range s.file.Measured {
		m := &s.file.Measured[i]
		p, miss, err := s.file.Compare(m)
		if err != nil {
			return nil, err
		}
		r.Measured = append(r.Measured, oursMeasured{*m, p.US + m.HostUS, miss, p.Binds()})
	}
	for _, call := range oursCalls {
		for _, ranks := range s.ranks {
			one, err := s.predict(call.operation, call.format, call.published, ranks)
			if err != nil {
				return nil, err
			}
			r.Results = append(r.Results, one)
		}
	}
	return r, nil
}

func (s *simOurs) predict(operation, format string, published nicsim.Operation, ranks int) (*oursResult, error) {
	j, err := nicsim.PublishedJob(published, ranks)
	if err != nil {
		return nil, err
	}
	c := costs.Call{Operation: operation, Format: format, Ranks: ranks, RanksPerNode: plan.DefaultPeers, Tokens: j.Tokens, Hidden: j.Hidden, TopK: j.TopK,
		Experts: j.Experts, Groups: j.Groups, SMs: s.sms, QPs: s.qps, Seed: s.seed}
	one := &oursResult{Operation: operation, Format: format, Ranks: ranks, Unit: "us"}
	if one.Prediction, err = s.file.Predict(c, s.file.Machines[s.machine]); err != nil {
		return nil, err
	}
	for _, p := range nicsim.PublishedTable {
		if p.Operation == published && p.Ranks == ranks && (format == "fp8" || operation != "dispatch") {
			one.Published = p.Value
		}
	}
	if operation == "dispatch" && format == "bf16" {
		one.Published = publishedBF16[ranks]
	}
	if one.PublishedUS = one.Published; published >= nicsim.Dispatch {
		one.Unit = "GB/s"
		if one.Published > 0 { // logical: rows for every node, on one node for every rank, the token's own included
			rows := one.Counts.NodeRows
			if j.Topology.Nodes() == 1 {
				rows = one.Counts.RankRows
			}
			one.PublishedUS = rows * c.RowBytes() / one.Published / 1e3
		}
	}
	return one, nil
}

// run prints the tables, as text, JSON or into a page.
func (s *simOurs) run(w io.Writer) error {
	if err := s.load(); err != nil {
		return err
	}
	r, err := s.report()
	if err != nil {
		return err
	}
	if s.markdown != "" {
		if err := r.intoPage(s.markdown); err != nil {
			return err
		}
	}
	if s.json {
		return printJSON(w, r)
	}
	return r.print(w, func(t table.Writer) string { return t.Render() })
}

// print writes the tables, drawn by render.
func (r *oursReport) print(w io.Writer, render func(table.Writer) string) error {
	measured, sources := r.measured()
	_, err := fmt.Fprintf(w, "%s\n\n%s\n\n%s\n\n%s\n\n%s\n\n%s\n%s\n", wrapped(r.title()), render(r.predictions()), render(r.growth()), wrapped(r.validation()),
		render(measured), numbered(sources), render(r.costTable()))
	return err
}

func (r *oursReport) title() string {
	network := "the network is NVLink"
	if r.on.NICGBs > 0 {
		network = fmt.Sprintf("NIC %.0f GB/s a GPU", r.on.NICGBs)
	}
	return fmt.Sprintf("Costs: %s. Machine %s: %s, NVLink %.0f GB/s, memory %.0f GB/s; %d SMs, %d queue pairs a peer, seed %d.",
		r.Source, r.Machine, network, r.on.NVLinkGBs, r.on.MemoryGBs, r.SMs, r.QPs, r.Seed)
}

func micros(us float64) string {
	if us < 100 {
		return fmt.Sprintf("%.1f", us)
	}
	return fmt.Sprintf("%.0f", us)
}

// predictions is the table of ours beside the published figures, with each limit by itself.
func (r *oursReport) predictions() table.Writer {
	t := newTable()
	header := table.Row{"operation", "EP", "published", "us", "ours, us", "ours ÷ published", "binds", "fixed"}
	for _, name := range costs.Limits {
		header = append(header, name)
	}
	t.AppendHeader(header)
	rightAlign(t, 1, len(header))
	for i, one := range r.Results {
		if i > 0 && one.name() != r.Results[i-1].name() {
			t.AppendSeparator()
		}
		published, us, ratio := "-", "-", "-"
		if one.Published > 0 {
			published, us = fmt.Sprintf("%.0f %s", one.Published, one.Unit), micros(one.PublishedUS)
			ratio = fmt.Sprintf("%.2f", one.US/one.PublishedUS)
		}
		row := table.Row{one.name(), one.Ranks, published, us, micros(one.US), ratio, one.Binds(), micros(one.FixedUS)}
		for _, name := range costs.Limits {
			row = append(row, micros(one.Limit(name)))
		}
		t.AppendRow(row)
	}
	return t
}

// growth is how a call's cost grows from one number of ranks to the next.
func (r *oursReport) growth() table.Writer {
	t := newTable()
	header := table.Row{"operation", "EP", "rows over the NIC", "MB over the NIC", "fixed, us", "ours, us", "ours ÷ the first", "ranks ÷ the first"}
	t.AppendHeader(header)
	rightAlign(t, 1, len(header))
	var first *oursResult
	for _, one := range r.Results {
		if first == nil || first.name() != one.name() {
			if first != nil {
				t.AppendSeparator()
			}
			first = one
		}
		t.AppendRow(table.Row{one.name(), one.Ranks, fmt.Sprintf("%.0f", one.NICRows), fmt.Sprintf("%.1f", one.NICMB), micros(one.FixedUS), micros(one.US),
			fmt.Sprintf("%.2f", one.US/first.US), fmt.Sprintf("%.0f", float64(one.Ranks)/float64(first.Ranks))})
	}
	return t
}

func (r *oursReport) validation() string {
	checks, within, worst := 0, 0, -1
	for i, m := range r.Measured {
		if m.Fit {
			continue
		}
		checks++
		if abs(m.Miss) <= allowedMiss {
			within++
		}
		if worst < 0 || abs(m.Miss) > abs(r.Measured[worst].Miss) {
			worst = i
		}
	}
	if worst < 0 {
		return "No measurement checks the costs."
	}
	m := r.Measured[worst]
	return fmt.Sprintf("%d of %d measurements that check the costs are predicted within 20 %%; the worst is %s %s, EP %d, %d × %d: %s.",
		within, checks, m.Operation, strings.ToUpper(m.Format), m.Ranks, m.Tokens, m.Hidden, percentText(m.Miss))
}

// wrapped breaks a sentence into lines of the width of our pages.
func wrapped(sentence string) string { return text.WrapSoft(sentence, pageWidth) }

const pageWidth = 138

// numbered lists sources as the tables number them.
func numbered(sources []string) string {
	var list strings.Builder
	for i, source := range sources {
		list.WriteString(wrapped(fmt.Sprintf("%d. %s", i+1, source)) + "\n")
	}
	return list.String()
}

// measured is the table of measurements beside their predictions, and the sources that it numbers.
func (r *oursReport) measured() (t table.Writer, sources []string) {
	t = newTable()
	header := table.Row{"operation", "nodes × ranks", "tokens × hidden", "SMs", "measured, us", "predicted", "miss", "role", "binds", "source"}
	t.AppendHeader(header)
	rightAlign(t, 1, len(header)-1)
	for _, m := range r.Measured {
		if !slices.Contains(sources, m.Source) {
			sources = append(sources, m.Source)
		}
		name, role, sms := m.Operation+" "+strings.ToUpper(m.Format), "check", "-"
		switch {
		case m.Unreduced:
			name += ", each row"
		case m.Cached && m.Ranks > m.RanksPerNode:
			name += ", cached"
		}
		if m.Fit {
			role = "fit"
		}
		if m.SMs > 0 {
			sms = fmt.Sprint(m.SMs)
		}
		t.AppendRow(table.Row{name, fmt.Sprintf("%d × %d", m.Ranks/m.RanksPerNode, m.RanksPerNode), fmt.Sprintf("%d × %d", m.Tokens, m.Hidden), sms,
			micros(m.US), micros(m.Predicted), percentText(m.Miss), role, m.Binds, 1 + slices.Index(sources, m.Source)})
	}
	return t, sources
}

// costTable is the table of the costs themselves.
func (r *oursReport) costTable() table.Writer {
	t := newTable()
	t.AppendHeader(table.Row{"kernels", "costs", "source"})
	for _, name := range costs.KernelNames() {
		t.AppendRow(table.Row{name, r.kernels[name].String(), r.kernels[name].Source})
	}
	return t
}

func abs(f float64) float64 { return max(f, -f) }

// Marks of the part of a page that the command writes.
const oursBegin, oursEnd = "<!-- sim/ep: begin -->\n", "<!-- sim/ep: end -->"

// intoPage writes the tables between the page's marks.
func (r *oursReport) intoPage(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, found := strings.Cut(string(page), oursBegin)
	_, after, ended := strings.Cut(rest, oursEnd)
	if !found || !ended {
		return fmt.Errorf("%s: no line %q with %q after it", filepath.Base(path), strings.TrimSpace(oursBegin), oursEnd)
	}
	var out strings.Builder
	out.WriteString(before + oursBegin + "\n")
	if err := r.print(&out, func(t table.Writer) string { return t.RenderMarkdown() }); err != nil {
		return err
	}
	out.WriteString("\n" + oursEnd + after)
	return os.WriteFile(path, []byte(out.String()), 0o644)
}
