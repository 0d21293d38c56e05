package main

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/deepep-go/deepep/core/cmd/deepep/internal/nicsim"
)

func simCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Simulate the network between nodes; no NIC needed",
		Long: `Computes what NICs, links and switches do with the messages of dispatch and
combine at 8 to 1024 ranks. The same arguments give the same answer on every
machine. docs/simulation.md says what is modelled and where the constants are from.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(simQPCommand(), simEPCommand(), simCostsCommand())
	return cmd
}

// schedule is an assumption about NICs: which queue pair is served next.
type schedule struct {
	name, meaning string
	apply         func(*nicsim.Hardware)
}

var schedules = []schedule{
	{"turns", "a NIC starts with the first message posted and goes round by number, one message a queue pair", func(*nicsim.Hardware) {}},
	{"backlog", "likewise, but all messages are posted before it starts, so that it begins with the lowest number", func(h *nicsim.Hardware) { h.PostGap = 0 }},
	{"lowest", "after each message the lowest number that has one is next", func(h *nicsim.Hardware) { h.LowestFirst = true }},
	{"drain", "as backlog, but a queue pair is emptied before the next one's turn", func(h *nicsim.Hardware) { h.PostGap, h.Turn = 0, 0 }},
}

// orders are the names of nicsim's orders, from nicsim.Linear on.
var orders = []string{"linear", "planned", "rotated", "spread", "random"}

func orderOf(name string) (nicsim.Order, error) {
	i, err := oneOf("order", name, orders)
	return nicsim.Linear + nicsim.Order(i), err
}

var (
	routes  = []string{"adaptive", "ecmp", "static"}
	fabrics = []string{"rail", "pod"}
)

// simFlags are what both simulations let the user choose.
type simFlags struct {
	routing, fabric, buffer string
	seed                    uint64
	json                    bool
	picture                 string
}

func (s *simFlags) register(f *pflag.FlagSet) {
	f.StringVar(&s.routing, "routing", "adaptive", "way up from a leaf: "+strings.Join(routes, ", "))
	f.StringVar(&s.fabric, "fabric", "rail", "ranks on a leaf: rail (same index, different nodes) or pod (neighbouring nodes)")
	f.StringVar(&s.buffer, "buffer", "128KiB", "room at the far end of a link, as 64KiB; 0 for any")
	f.Uint64Var(&s.seed, "seed", 1, "of the random choices")
	f.BoolVar(&s.json, "json", false, "print JSON")
	f.StringVar(&s.picture, "picture", "", "draw the results into this file, .svg or .png")
}

// hardware is the H800 cluster with what the flags change.
func (s *simFlags) hardware() (nicsim.Hardware, error) {
	h := nicsim.H800
	routing, err := oneOf("routing", s.routing, routes)
	if err != nil {
		return h, err
	}
	fabric, err := oneOf("fabric", s.fabric, fabrics)
	if err != nil {
		return h, err
	}
	h.Routing, h.Fabric = nicsim.Routing(routing), nicsim.Fabric(fabric)
	var bytes uint64
	if s.buffer != "0" {
		if bytes, err = parseSize(s.buffer); err != nil {
			return h, fmt.Errorf("buffer: %q; allowed is a size like 64KiB, or 0 for no limit", s.buffer)
		}
	}
	h.WithBuffer(int64(bytes))
	return h, h.Check()
}

// network says in words what the flags chose.
func (s *simFlags) network() string {
	buffer := "unlimited buffers"
	if s.buffer != "0" {
		buffer = "buffers of " + s.buffer
	}
	return fmt.Sprintf("%s routing, %s fabric, %s, seed %d", s.routing, s.fabric, buffer, s.seed)
}

// oneOf is the index of a word among the allowed ones.
func oneOf(name, word string, allowed []string) (int, error) {
	if i := slices.Index(allowed, word); i >= 0 {
		return i, nil
	}
	return 0, fmt.Errorf("%s: %q; allowed are %s", name, word, strings.Join(allowed, ", "))
}

// inParallel calls f for 0 to n-1 on all cores. After the first error, which it returns, no further call begins.
func inParallel(ctx context.Context, n int, f func(i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range n {
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return guarded(func() error { return f(i) })
		})
	}
	return group.Wait()
}

func percentText(share float64) string { return fmt.Sprintf("%+.1f%%", 100*share) }

func simMicros(t nicsim.Time) float64 { return float64(t/nicsim.Nanosecond) / 1e3 }

// simReport is the result of a simulation.
type simReport interface {
	picture(file string) error
	print(w io.Writer, flags *simFlags) error
}

// show draws the picture if the flags name one, and prints the report as text or JSON.
func (f *simFlags) show(w io.Writer, r simReport) error {
	if f.picture != "" {
		if err := r.picture(f.picture); err != nil {
			return err
		}
	}
	if f.json {
		return printJSON(w, r)
	}
	return r.print(w, f)
}
