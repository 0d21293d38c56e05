package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/deepep-go/deepep/core/cmd/deepep/internal/nicsim"
	"github.com/deepep-go/deepep/internal/plan"
)

// simQP is a comparison of queue pairs.
type simQP struct {
	flags                                         simFlags
	ranks, perNode, experts, hidden, topK, tokens int
	operation                                     string
	nics, orders                                  []string
	queues                                        []int
	allRDMA, inTurn                               bool
	skew                                          time.Duration
}

// Claims about a rotated order, for comparison.
const (
	claimedLatency    = -0.42
	claimedThroughput = 1.33
)

func simQPCommand() *cobra.Command {
	var s simQP
	var names, meanings []string
	for _, n := range schedules {
		names = append(names, n.name)
		meanings = append(meanings, fmt.Sprintf("  %-8s %s", n.name, n.meaning))
	}
	cmd := &cobra.Command{
		Use:   "qp",
		Short: "What the order and the number of queue pairs change",
		Long: `Simulates a low-latency call with queue pairs made in different orders, and with
different numbers of them toward each peer. NICs serve queue pairs by number, that is
in the order in which they were made. What that does depends on what one assumes of
the NIC (--nic):
` + strings.Join(meanings, "\n") + `
Orders: linear (0, 1, 2 …), planned (other nodes first, then (i + 1 + rank) mod ranks),
rotated (the same over all ranks, as NVSHMEM makes its own), spread (other nodes first,
rotated by node and by index: the library's default, see DEEPEP_QP_ORDER), random.`,
		Example: `  deepep sim qp
  deepep sim qp --ranks 256 --qps 1,12 --nic lowest --buffer 32KiB
  deepep sim qp --operation combine --picture orders.svg`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd) },
	}
	f := cmd.Flags()
	f.IntVar(&s.ranks, "ranks", 64, "ranks of the group")
	f.IntVar(&s.perNode, "ranks-per-node", plan.DefaultPeers, "ranks of one NVLink domain")
	f.IntVar(&s.experts, "experts", nicsim.PublishedExperts, "experts of all ranks together")
	f.IntVar(&s.hidden, "hidden", nicsim.PublishedHidden, "hidden size")
	f.IntVar(&s.topK, "top-k", nicsim.PublishedTopK, "experts a token")
	f.IntVar(&s.tokens, "tokens", 128, "tokens of each rank")
	f.StringVar(&s.operation, "operation", "dispatch", "dispatch (FP8) or combine (BF16), low latency")
	f.StringSliceVar(&s.nics, "nic", names, "what NICs do, one or several")
	f.StringSliceVar(&s.orders, "order", []string{"linear", "planned", "random", "spread"}, "orders to compare, of "+strings.Join(orders, ", "))
	f.IntSliceVar(&s.queues, "qps", []int{0, 1}, "queue pairs toward each peer, one or several numbers; 0: as many as the call has use for")
	f.BoolVar(&s.allRDMA, "all-rdma", false, "rows within a node go through the NIC too")
	f.BoolVar(&s.inTurn, "in-turn", false, "make one queue pair of each peer in turn, instead of all of one peer together")
	f.DurationVar(&s.skew, "skew", 0, "ranks start at random within this time, as 20us")
	s.flags.register(f)
	return cmd
}

// qpReport is the result.
type qpReport struct {
	Ranks     int         `json:"ranks"`
	Nodes     int         `json:"nodes"`
	Operation string      `json:"operation"`
	Tokens    int         `json:"tokens"`
	Hidden    int         `json:"hidden"`
	TopK      int         `json:"top_k"`
	Experts   int         `json:"experts"`
	Routing   string      `json:"routing"`
	Fabric    string      `json:"fabric"`
	Buffer    string      `json:"buffer"`
	SkewUS    float64     `json:"skew_us"`
	Seed      uint64      `json:"seed"`
	Results   []*qpResult `json:"results"`

	orders []string
}

// qpResult is one line. The slowest rank's time includes the constant part of the call; throughput excludes it.
type qpResult struct {
	NIC          string  `json:"nic"`
	Queues       int     `json:"qps_per_peer"`
	Order        string  `json:"order"`
	MeanUS       float64 `json:"mean_us"`
	SlowestUS    float64 `json:"slowest_us"`
	GBs          float64 `json:"gb_s"` // that a NIC sends
	LargestQueue int64   `json:"largest_queue_bytes"`
	Bytes        int64   `json:"rdma_bytes"`

	hardware nicsim.Hardware
	job      nicsim.Job
}

func (s *simQP) run(cmd *cobra.Command) error {
	r, err := s.report()
	if err != nil {
		return err
	}
	if err := inParallel(cmd.Context(), len(r.Results), func(i int) error { return r.Results[i].simulate() }); err != nil {
		return err
	}
	return s.flags.show(cmd.OutOrStdout(), r)
}

// report lists the calls to simulate.
func (s *simQP) report() (*qpReport, error) {
	base, err := s.flags.hardware()
	if err != nil {
		return nil, err
	}
	operation, err := oneOf("operation", s.operation, []string{"dispatch", "combine"})
	if err != nil {
		return nil, err
	}
	topology, err := plan.NewTopology(s.ranks, s.perNode)
	if err != nil {
		return nil, err
	}
	if topology.Nodes() == 1 && !s.allRDMA {
		return nil, fmt.Errorf("ranks: %d of one node of %d; allowed is more than one node, or --all-rdma: nothing else crosses a NIC", s.ranks, s.perNode)
	}
	r := &qpReport{
		Ranks: s.ranks, Nodes: topology.Nodes(), Operation: s.operation, Tokens: s.tokens, Hidden: s.hidden, TopK: s.topK, Experts: s.experts,
		Routing: s.flags.routing, Fabric: s.flags.fabric, Buffer: s.flags.buffer, SkewUS: s.skew.Seconds() * 1e6, Seed: s.flags.seed, orders: s.orders,
	}
	for _, name := range s.nics {
		i := slices.IndexFunc(schedules, func(n schedule) bool { return n.name == name })
		if i < 0 {
			return nil, fmt.Errorf("nic: %q; allowed are turns, backlog, lowest and drain", name)
		}
		for _, queues := range s.queues {
			for _, order := range s.orders {
				o, err := orderOf(order)
				if err != nil {
					return nil, err
				}
				one := &qpResult{NIC: name, Order: order, hardware: base, job: nicsim.Job{
					Operation: nicsim.Operation(operation), Topology: topology, Tokens: s.tokens, Hidden: s.hidden, TopK: s.topK, Experts: s.experts,
					Queues: queues, Order: o, InTurn: s.inTurn, AllRDMA: s.allRDMA, Skew: nicsim.Time(s.skew) * nicsim.Nanosecond, Seed: s.flags.seed,
				}}
				schedules[i].apply(&one.hardware)
				if err := one.job.Check(); err != nil {
					return nil, err
				}
				one.Queues = one.job.Queues
				r.Results = append(r.Results, one)
			}
		}
	}
	return r, nil
}

func (q *qpResult) simulate() error {
	r, err := nicsim.Run(q.hardware, q.job)
	if err != nil {
		return err
	}
	q.MeanUS, q.SlowestUS, q.GBs = simMicros(r.Mean), simMicros(r.Max), r.Throughput
	q.LargestQueue, q.Bytes = r.LargestQueue, r.RDMABytes
	return nil
}

// linear is the result of the linear order, with which others are compared; nil if it was not simulated.
func (r *qpReport) linear(of *qpResult) *qpResult {
	for _, one := range r.Results {
		if one.NIC == of.NIC && one.Queues == of.Queues && one.Order == "linear" {
			return one
		}
	}
	return nil
}

func (r *qpReport) print(w io.Writer, flags *simFlags) error {
	fmt.Fprintf(w, "%s on %s, low-latency %s, %d tokens a rank, hidden %d, top-%d of %d experts\n%s; changes are against linear\n",
		count(r.Ranks, "rank"), count(r.Nodes, "node"), r.Operation, r.Tokens, r.Hidden, r.TopK, r.Experts, flags.network())
	t := newTable()
	header := table.Row{"NIC", "QPs a peer", "order", "slowest rank", "", "GB/s a NIC", "", "largest queue"}
	t.AppendHeader(header)
	rightAlign(t, 3, len(header))
	for i, one := range r.Results {
		if i > 0 && (one.NIC != r.Results[i-1].NIC || one.Queues != r.Results[i-1].Queues) {
			t.AppendSeparator()
		}
		slower, faster := "", ""
		if l := r.linear(one); l != nil && l != one {
			slower, faster = percentText(one.SlowestUS/l.SlowestUS-1), percentText(one.GBs/l.GBs-1)
		}
		t.AppendRow(table.Row{one.NIC, one.Queues, one.Order, fmt.Sprintf("%.1f us", one.SlowestUS), slower, fmt.Sprintf("%.1f", one.GBs), faster, sizeText(uint64(one.LargestQueue))})
	}
	_, err := fmt.Fprintf(w, "%s\n%s", t.Render(), r.summary())
	return err
}

// summary compares the planned orders with linear for each NIC model, for the first number of queue pairs.
func (r *qpReport) summary() string {
	var b strings.Builder
	last := ""
	for _, one := range r.Results {
		l := r.linear(one)
		if one.Order == "linear" || one.Order == "random" || l == nil || one.Queues != r.Results[0].Queues {
			continue
		}
		if one.NIC != last {
			i := slices.IndexFunc(schedules, func(n schedule) bool { return n.name == one.NIC })
			fmt.Fprintf(&b, "%s: %s.\n", one.NIC, schedules[i].meaning)
			last = one.NIC
		}
		fmt.Fprintf(&b, "  %s instead of linear: %s\n", one.Order, change(one, l))
	}
	if b.Len() > 0 {
		fmt.Fprintf(&b, "Claimed for a rotated order: latency %s, throughput %s (of one and the same transfer, the former would be throughput %s).\n",
			percentText(claimedLatency), percentText(claimedThroughput), percentText(1/(1+claimedLatency)-1))
	}
	return b.String()
}

// change compares two results of the same traffic.
func change(one, before *qpResult) string {
	late, rate := one.SlowestUS/before.SlowestUS-1, one.GBs/before.GBs-1
	if math.Abs(late) < 0.01 && math.Abs(rate) < 0.01 {
		return "less than 1 % of time and throughput."
	}
	return fmt.Sprintf("latency %s, throughput %s, largest queue %s, was %s.",
		percentText(late), percentText(rate), sizeText(uint64(one.LargestQueue)), sizeText(uint64(before.LargestQueue)))
}
