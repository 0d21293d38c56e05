package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// faultPhases are what the ranks do when the fault comes.
var faultPhases = []string{
	"normal", "asynchronous", "cached", "combine", "low-latency", "low-latency fp8", "low-latency hooks", "masks",
	"barrier", "clean", "warm-up", "construct", "regroup", "destroy",
}

// faultKinds are the faults, with how often each comes.
//
//	kill         SIGKILL
//	segv         a segmentation fault
//	exit         the program ends without a word
//	exec         the program becomes another one, which lives on
//	exception    the program's own error: it ends its buffer and its group in good order
//	stop         SIGSTOP, and SIGCONT long after the others have given up
//	pause        SIGSTOP, and SIGCONT soon: no one may notice
//	close        the program closes a descriptor that is not its own
//	full         /dev/shm is full: no one may notice
//	partition    the rank's software NIC sends nothing any more
//	congestion   the same for a moment: no one may notice
var faultKinds = []struct {
	name   string
	weight int
}{
	{"kill", 24}, {"segv", 10}, {"exit", 10}, {"exec", 8}, {"exception", 12}, {"stop", 4}, {"pause", 12}, {"close", 10}, {"full", 8},
	{"partition", 3}, {"congestion", 5},
}

type faultsFlags struct {
	rounds, ranks, first, jobs int
	perNode                    int
	seed                       uint64
	engine, markdown           string
	phases, faults             []string
	progress                   bool
}

func faultsCommand() *cobra.Command {
	var f faultsFlags
	cmd := &cobra.Command{
		Use:   "faults",
		Short: "Kill, stop and break ranks at random moments, and check what the others see",
		Long: `Starts rank processes of this host. In each round one of them, chosen at random,
has a fault at a random microsecond of a phase, and the round checks: the others
name that rank, within 2 s of a death and within the deadline + 2 s otherwise;
the survivors' new group gives right results, and within a node in half of the
rounds their failed buffers too, after they have regrouped; nothing is left over (descriptors,
threads, goroutines, mappings, statistics pages). Some faults nobody may notice.

Phases: ` + strings.Join(faultPhases, ", ") + `.
Faults: ` + strings.Join(kindNames(), ", ") + `.
"full" needs a /dev/shm of its own, "partition" and "congestion" ptrace and the
CPU engine; where they cannot be had they are left out, with a word.`,
		Example: `  deepep faults --rounds 200
  deepep faults --engine cuda --ranks 2 --faults kill,stop,exception
  deepep faults --rounds 10000 --jobs 16 --markdown faults.md
  deepep faults --first 1234 --rounds 1`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.add(cmd.Flags())
	flags := cmd.Flags()
	flags.IntVar(&f.jobs, "jobs", 0, "rounds that are played side by side; 0: two for each core, on GPUs one")
	flags.StringVar(&f.markdown, "markdown", "", "write the summary to this file too, as tables in Markdown")
	flags.IntVar(&f.rounds, "rounds", 200, "rounds to play")
	flags.IntVar(&f.first, "first", 0, "number of the first round; a round's number and the seed fix all that is drawn")
	flags.BoolVar(&f.progress, "progress", false, "print a line for each round")
	return cmd
}

// add adds the flags that a job has too.
func (f *faultsFlags) add(flags *pflag.FlagSet) {
	flags.IntVar(&f.ranks, "ranks", 4, "rank processes, at least 2")
	flags.IntVar(&f.perNode, "ranks-per-node", 0, "ranks of a node on the CPU engine, which divide the ranks; 0: drawn for each round")
	flags.Uint64Var(&f.seed, "seed", 1, "of phases, faults and moments")
	flags.StringVar(&f.engine, "engine", "cpu", "cpu or cuda")
	flags.StringSliceVar(&f.phases, "phases", nil, "only these")
	flags.StringSliceVar(&f.faults, "faults", nil, "only these")
}

func kindNames() []string {
	names := make([]string, len(faultKinds))
	for i, k := range faultKinds {
		names[i] = k.name
	}
	return names
}

func (f *faultsFlags) check() error {
	for _, p := range f.phases {
		if !slices.Contains(faultPhases, p) {
			return fmt.Errorf("phases: %q; allowed are %s", p, strings.Join(faultPhases, ", "))
		}
	}
	for _, k := range f.faults {
		if !slices.Contains(kindNames(), k) {
			return fmt.Errorf("faults: %q; allowed are %s", k, strings.Join(kindNames(), ", "))
		}
	}
	switch {
	case f.rounds < 1:
		return fmt.Errorf("rounds: %d; allowed is 1 or more", f.rounds)
	case f.jobs < 0:
		return fmt.Errorf("jobs: %d; allowed is 1 or more, or 0", f.jobs)
	case f.ranks < 2 || f.ranks > maxBenchRanks:
		return fmt.Errorf("ranks: %d; allowed is 2 to %d", f.ranks, maxBenchRanks)
	case f.perNode < 0 || f.perNode > f.ranks || f.perNode > 0 && f.ranks%f.perNode != 0:
		return fmt.Errorf("ranks-per-node: %d; allowed is a divisor of %d ranks, or 0", f.perNode, f.ranks)
	case f.perNode > 0 && f.engine != "cpu":
		return fmt.Errorf("ranks-per-node: %d; allowed on GPUs is 0: ranks of one host are one node there", f.perNode)
	case f.engine != "cpu" && f.engine != "cuda":
		return fmt.Errorf("engine: %q; allowed are cpu and cuda", f.engine)
	}
	return nil
}

func (f *faultsFlags) wants(fault string) bool {
	return len(f.faults) == 0 || slices.Contains(f.faults, fault)
}

// faultRound is what is drawn for a round.
type faultRound struct {
	number  int
	phase   string
	fault   string
	victim  int
	perNode int
	delay   time.Duration
	limit   time.Duration
	seed    uint64
	moves   bool // the survivors' buffers regroup before they are destroyed
}

func (r *faultRound) String() string {
	text := fmt.Sprintf("round %d: %s in %s after %v, rank %d, %d ranks a node", r.number, r.fault, r.phase, r.delay, r.victim, r.perNode)
	if r.moves {
		text += ", survivors regroup"
	}
	return text
}

// usualLimit is long, so that only ranks that are stopped are late; shortLimit is for rounds in which one is.
const (
	usualLimit = 20 * time.Second
	shortLimit = time.Second
)

// deaths end the victim's process.
var deaths = []string{"kill", "segv", "exit", "exec"}

// draw makes a round of its number and the seed alone.
func (s *faultSession) draw(number int) *faultRound {
	g := rand.New(rand.NewPCG(s.seed, uint64(number)))
	r := &faultRound{number: number, victim: g.IntN(s.ranks), perNode: s.ranks, limit: usualLimit, seed: g.Uint64()}
	if s.engine == "cpu" {
		r.perNode = []int{s.ranks, s.ranks, (s.ranks + 1) / 2, 1}[g.IntN(4)]
		if s.ranks%r.perNode != 0 {
			r.perNode = 1
		}
		if s.perNode > 0 {
			r.perNode = s.perNode
		}
	}
	for {
		r.phase, r.fault = faultPhases[g.IntN(len(faultPhases))], drawFault(g)
		if (len(s.phases) == 0 || slices.Contains(s.phases, r.phase)) && s.wants(r.fault) && s.missing[r.fault] == "" && r.sensible(s.ranks) {
			break
		}
		if g.IntN(64) == 0 && s.engine == "cpu" && s.perNode == 0 { // such a fault may need several nodes
			r.perNode = 1
		}
	}
	r.delay = time.Duration(g.IntN(int(r.longestDelay()/time.Microsecond))) * time.Microsecond
	if r.fault == "stop" || r.fault == "partition" {
		r.limit = shortLimit
	}
	// Where every survivor's buffer fails: half of these rounds, within a node, where a place may stay empty.
	r.moves = r.seed&1 == 0 && r.perNode == s.ranks && slices.Contains([]string{"kill", "segv", "exit", "exec", "exception", "stop"}, r.fault) &&
		!slices.Contains([]string{"masks", "construct", "destroy"}, r.phase)
	return r
}

func drawFault(g *rand.Rand) string {
	sum := 0
	for _, k := range faultKinds {
		sum += k.weight
	}
	at := g.IntN(sum)
	for _, k := range faultKinds {
		if at -= k.weight; at < 0 {
			return k.name
		}
	}
	return ""
}

// sensible leaves out what says nothing: there is no NIC inside a node, and not always one in construction and regroup.
func (r *faultRound) sensible(ranks int) bool {
	switch r.fault {
	case "partition", "congestion":
		return r.perNode < ranks && !slices.Contains([]string{"construct", "regroup", "destroy", "masks"}, r.phase)
	}
	return true
}

// kind is the fault, and whether the start's limit holds in place of the usual ones.
func (r *faultRound) kind() string {
	if r.startLimit() > 0 {
		return r.fault + inStart
	}
	return r.fault
}

const inStart = ", start"

// startLimit is that of a group's start in which a rank has a fault, or of a warm-up, which has the same; 0: the usual.
func (r *faultRound) startLimit() time.Duration {
	switch {
	case r.phase == "construct":
		return 3 * time.Second
	case r.phase == "warm-up" && (r.fault == "stop" || r.fault == "partition"):
		return 5 * time.Second // the start before it must not fail on a busy machine
	}
	return 0
}

// longestDelay is about the time of what the phase does once.
func (r *faultRound) longestDelay() time.Duration {
	switch r.phase {
	case "construct":
		return 60 * time.Millisecond
	case "warm-up":
		return 20 * time.Millisecond
	case "destroy":
		return 4 * time.Millisecond
	}
	return 5 * time.Millisecond
}
