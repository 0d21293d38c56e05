package main

import (
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/deepep-go/deepep/core/cmd/deepep/internal/nicsim"
	"github.com/deepep-go/deepep/internal/plan"
)

// simEP is a comparison with upstream's published figures.
type simEP struct {
	flags            simFlags
	ranks            []int
	mode, nic, order string
	fit              bool
	ours             simOurs
}

func simEPCommand() *cobra.Command {
	var s simEP
	cmd := &cobra.Command{
		Use:   "ep",
		Short: "Upstream's published figures beside the model's",
		Long: `Simulates the calls of upstream's performance tables: low latency with 128 tokens a
rank, normal mode with 4096, hidden 7168, top-8 of 256 experts, FP8 dispatch, BF16
combine, H800 with 400 Gb/s. Two constants of the model come from the lines marked fit,
all other lines check it; which was decided before there was a model. Other numbers of
ranks, up to 1024, have no published figure; from 256 on a rank has one expert.

Low latency is the ranks' mean time. Normal mode is logical bandwidth as upstream counts
it: rows for every node that has an expert of the token, its own included (on one
node: for every rank), over the mean time.

--ours predicts this library's kernels instead, from what they were measured to cost: the
fixed part of a call and the slowest of NIC, NVLink, SMs, streams, queue pairs and memory,
beside the published figures, with the measurements that the costs come from and how far each
is missed (docs/scale.md). --costs names a file with other costs, which deepep sim costs
makes from the output of bench_ops.`,
		Example: `  deepep sim ep
  deepep sim ep --mode low-latency --ranks 256,512,1024
  deepep sim ep --routing static --picture published.svg
  deepep sim ep --fit
  deepep sim ep --ours
  deepep sim ep --ours --costs mine.json --markdown docs/scale.md`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.checkFlags(cmd.Flags()); err != nil {
				return err
			}
			if !s.ours.on {
				return s.run(cmd)
			}
			s.ours.ranks, s.ours.seed, s.ours.json = s.ranks, s.flags.seed, s.flags.json
			return s.ours.run(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&s.ranks, "ranks", nil, "numbers of ranks; none: the published ones")
	f.StringVar(&s.mode, "mode", "all", "all, low-latency or normal")
	f.StringVar(&s.nic, "nic", "turns", "what NICs do; see deepep sim qp --help")
	f.StringVar(&s.order, "order", "planned", "order of queue pairs; see deepep sim qp --help")
	f.BoolVar(&s.ours.on, "ours", false, "predict this library's kernels; of the other flags --ranks, --seed and --json count")
	f.StringVar(&s.ours.costs, "costs", "", "file with what the kernels cost; none: docs/performance.md's (only with --ours)")
	f.StringVar(&s.ours.machine, "machine", "h800", "machine of the costs to predict for (only with --ours)")
	f.IntVar(&s.ours.sms, "sms", nicsim.PublishedSMs, "SMs of normal mode (only with --ours)")
	f.IntVar(&s.ours.qps, "qps", plan.DefaultQueuePairs, "queue pairs toward each peer (only with --ours)")
	f.StringVar(&s.ours.markdown, "markdown", "", "write the tables between the marks of this page too (only with --ours)")
	f.BoolVar(&s.fit, "fit", false, "fit the two constants again, to the network that the flags describe, and use them")
	s.flags.register(f)
	return cmd
}

// checkFlags refuses flags that would change nothing: those of the network with --ours, those of --ours without it.
func (s *simEP) checkFlags(f *pflag.FlagSet) error {
	others, why := []string{"costs", "machine", "sms", "qps", "markdown"}, "counts only with --ours"
	if s.ours.on {
		others, why = []string{"mode", "nic", "order", "fit", "routing", "fabric", "buffer", "picture"}, "does not count with --ours, which has no network of switches"
	}
	for _, name := range others {
		if f.Changed(name) {
			return fmt.Errorf("--%s %s", name, why)
		}
	}
	return nil
}

// epReport is the result.
type epReport struct {
	Routing  string      `json:"routing"`
	Fabric   string      `json:"fabric"`
	Buffer   string      `json:"buffer"`
	NIC      string      `json:"nic"`
	Order    string      `json:"order"`
	Seed     uint64      `json:"seed"`
	CallUS   float64     `json:"call_us"`
	CopyGBs  float64     `json:"copy_gb_s"`
	Within20 int         `json:"checks_within_20_percent"`
	Checks   int         `json:"checks"`
	Results  []*epResult `json:"results"`
}

// epResult is one line.
type epResult struct {
	Operation    string  `json:"operation"`
	Ranks        int     `json:"ranks"`
	Unit         string  `json:"unit"`
	Published    float64 `json:"published,omitempty"` // 0: none
	Model        float64 `json:"model"`
	Role         string  `json:"role,omitempty"` // fit or check
	SlowestUS    float64 `json:"slowest_us"`
	GBs          float64 `json:"nic_gb_s"`
	LargestQueue int64   `json:"largest_queue_bytes"`

	published nicsim.Published
}

// miss is the model's relative error against the published figure.
func (e *epResult) miss() float64 { return e.Model/e.Published - 1 }

const allowedMiss = 0.2

func (s *simEP) run(cmd *cobra.Command) error {
	hardware, err := s.flags.hardware()
	if err != nil {
		return err
	}
	i := slices.IndexFunc(schedules, func(n schedule) bool { return n.name == s.nic })
	if i < 0 {
		return fmt.Errorf("nic: %q; allowed are turns, backlog, lowest and drain", s.nic)
	}
	schedules[i].apply(&hardware)
	order, err := orderOf(s.order)
	if err != nil {
		return err
	}
	r, err := s.report()
	if err != nil {
		return err
	}
	if s.fit {
		if hardware.Call, hardware.CopyRate, err = nicsim.Fit(hardware); err != nil {
			return err
		}
	}
	r.CallUS, r.CopyGBs = simMicros(hardware.Call), float64(hardware.CopyRate)/1e3
	err = inParallel(cmd.Context(), len(r.Results), func(i int) error { return r.Results[i].simulate(hardware, order, s.flags.seed) })
	if err != nil {
		return err
	}
	r.judge()
	return s.flags.show(cmd.OutOrStdout(), r)
}

// report lists the calls to simulate.
func (s *simEP) report() (*epReport, error) {
	mode, err := oneOf("mode", s.mode, []string{"all", "low-latency", "normal"})
	if err != nil {
		return nil, err
	}
	r := &epReport{Routing: s.flags.routing, Fabric: s.flags.fabric, Buffer: s.flags.buffer, NIC: s.nic, Order: s.order, Seed: s.flags.seed}
	for o := nicsim.LowLatencyDispatch; o <= nicsim.Combine; o++ {
		low := o <= nicsim.LowLatencyCombine
		if mode == 1 && !low || mode == 2 && low {
			continue
		}
		for _, p := range s.lines(o) {
			if _, err := nicsim.PublishedJob(o, p.Ranks); err != nil {
				return nil, err
			}
			one := &epResult{Operation: o.String(), Ranks: p.Ranks, Unit: "us", Published: p.Value, published: p}
			if !low {
				one.Unit = "GB/s"
			}
			if p.Fitted {
				one.Role = "fit"
			} else if p.Value > 0 {
				one.Role = "check"
			}
			r.Results = append(r.Results, one)
		}
	}
	return r, nil
}

// lines are the figures of an operation: the published ones, or those of the flags.
func (s *simEP) lines(o nicsim.Operation) (list []nicsim.Published) {
	known := map[int]nicsim.Published{}
	for _, p := range nicsim.PublishedTable {
		if p.Operation == o {
			known[p.Ranks] = p
			if len(s.ranks) == 0 {
				list = append(list, p)
			}
		}
	}
	for _, n := range s.ranks {
		p, ok := known[n]
		if !ok {
			p = nicsim.Published{Operation: o, Ranks: n}
		}
		list = append(list, p)
	}
	return list
}

func (e *epResult) simulate(hardware nicsim.Hardware, order nicsim.Order, seed uint64) error {
	j, err := nicsim.PublishedJob(e.published.Operation, e.Ranks)
	if err != nil {
		return err
	}
	j.Order, j.Seed = order, seed
	r, err := nicsim.Run(hardware, j)
	if err != nil {
		return err
	}
	e.Model, e.SlowestUS, e.GBs, e.LargestQueue = e.published.Of(r), simMicros(r.Max), r.Throughput, r.LargestQueue
	return nil
}

func (r *epReport) judge() {
	for _, one := range r.Results {
		if one.Role != "check" {
			continue
		}
		r.Checks++
		if math.Abs(one.miss()) <= allowedMiss {
			r.Within20++
		}
	}
}

func (r *epReport) print(w io.Writer, flags *simFlags) error {
	fmt.Fprintf(w, "hidden %d, top-%d, FP8 dispatch, BF16 combine; %s, NIC %s, %s order\nfitted: %.1f us of a low-latency call are not transfer; SMs of normal mode copy %.1f GB/s\n",
		nicsim.PublishedHidden, nicsim.PublishedTopK, flags.network(), r.NIC, r.Order, r.CallUS, r.CopyGBs)
	t := newTable()
	header := table.Row{"operation", "EP", "published", "model", "miss", "role", "slowest rank", "GB/s a NIC", "largest queue"}
	t.AppendHeader(header)
	rightAlign(t, 1, len(header))
	for i, one := range r.Results {
		if i > 0 && one.Operation != r.Results[i-1].Operation {
			t.AppendSeparator()
		}
		published, miss, rate, queue := "-", "-", "-", "-"
		if one.Published > 0 {
			published, miss = fmt.Sprintf("%.0f %s", one.Published, one.Unit), percentText(one.miss())
		}
		if one.LargestQueue > 0 {
			rate, queue = fmt.Sprintf("%.1f", one.GBs), sizeText(uint64(one.LargestQueue))
		}
		t.AppendRow(table.Row{one.Operation, one.Ranks, published, fmt.Sprintf("%.1f %s", one.Model, one.Unit), miss, one.Role, fmt.Sprintf("%.0f us", one.SlowestUS), rate, queue})
	}
	_, err := fmt.Fprintf(w, "%s\n%s", t.Render(), r.verdict())
	return err
}

// verdict summarizes the lines that check the model.
func (r *epReport) verdict() string {
	var worst *epResult
	for _, one := range r.Results {
		if one.Role == "check" && (worst == nil || math.Abs(one.miss()) > math.Abs(worst.miss())) {
			worst = one
		}
	}
	if worst == nil {
		return "No line checks the model.\n"
	}
	return fmt.Sprintf("%d of %d figures that check the model are within 20 %%; the worst is %s at EP %d, %s.\n",
		r.Within20, r.Checks, worst.Operation, worst.Ranks, percentText(worst.miss()))
}
