package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/deepep-go/deepep/internal/plan"
)

func planCommand() *cobra.Command {
	var s shape
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Sizes of buffers and queues for a shape; no GPU needed",
		Long: `Prints the bytes of every buffer, channels, queue pairs with their depth and the
order in which one rank makes them, for a shape, and with --memory the largest B (num_max_dispatch_tokens_per_rank) that
fits, with the limit that binds. Sizes are those of one rank.`,
		Example: `  deepep plan --ranks 8 --experts 256 --hidden 7168 --max-tokens 128
  deepep plan --ranks 64 --ranks-per-node 8 --memory 8GiB`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := s.plan()
			if err != nil {
				return err
			}
			if err := p.askLibrary(s.engine); err != nil {
				return err
			}
			if s.memory != "" {
				memory, err := parseSize(s.memory)
				if err != nil {
					return err
				}
				if err := p.fit(memory); err != nil {
					return err
				}
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), p)
			}
			return p.print(cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	s.register(flags)
	flags.IntVar(&s.rank, "rank", 0, "whose order of queue pairs is shown")
	flags.StringVar(&s.memory, "memory", "", "find the largest B for this much memory a rank, as 8GiB")
	flags.StringVar(&s.engine, "engine", "auto", "whose own needs to add: cpu, cuda, or auto for the first that is installed")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// askLibrary adds the bytes that the kernel library needs for itself. With auto a missing library is not an error: the
// sizes that users pass do not depend on it.
func (p *sizes) askLibrary(engine string) error {
	kinds := []string{"cuda", "cpu"}
	switch engine {
	case "auto":
	case "cpu", "cuda":
		kinds = []string{engine}
	default:
		return fmt.Errorf("engine: %q; allowed are auto, cpu and cuda", engine)
	}
	var failure error
	for _, kind := range kinds {
		l, err := loadKernels(kind)
		if err == nil {
			p.library, p.Library = l, kind
			return p.bytes(p.MaxTokens)
		}
		failure = err
	}
	if engine == "auto" {
		return nil
	}
	return failure
}

func (p *sizes) print(w io.Writer) error {
	t := newTable()
	t.AppendHeader(table.Row{"", "size", "bytes", "what it is for"})
	size := func(name string, n uint64, why string) {
		t.AppendRow(table.Row{name, sizeText(n), strconv.FormatUint(n, 10), why})
	}
	size("num_nvl_bytes", p.NVLBytes, fmt.Sprintf("normal mode, %d SMs, %s", p.SMs, count(p.Channels, "channel")))
	if p.Nodes > 1 {
		size("num_rdma_bytes", p.RDMABytes, "normal mode between nodes")
	}
	size("num_rdma_bytes", p.LLBytes, "low-latency mode, two slots")
	if p.library != nil {
		size("private", p.PrivateBytes, "flags and staging of libdeepep_"+p.Library+".so")
	}
	size("one buffer for both", p.TotalBytes, "what construction allocates")
	t.AppendSeparator()
	size("output, FP8", p.OutputFP8, "recv_x of one low-latency dispatch")
	size("output, BF16", p.OutputBF16, "recv_x of one low-latency dispatch")
	if p.Nodes > 1 {
		t.AppendSeparator()
		p.printQueues(t)
	}
	title := fmt.Sprintf("%s on %s, %d experts (%d a rank), hidden %d, top-%d, B = %d",
		count(p.Ranks, "rank"), count(p.Nodes, "node"), p.Experts, p.LocalExperts, p.Hidden, p.TopK, p.MaxTokens)
	if _, err := fmt.Fprintf(w, "%s\n%s\n", title, t.Render()); err != nil {
		return err
	}
	return p.printLimits(w)
}

// printQueues adds the rows about queue pairs.
func (p *sizes) printQueues(t table.Writer) {
	t.AppendRow(table.Row{"queue pairs", p.RemoteQPs, "", fmt.Sprintf("%d to each of %d ranks on other nodes; NVSHMEM makes %d, to all %d others",
		p.QPsPerPeer, p.Topology.NumRemote(), p.QPs, p.Ranks-1)})
	t.AppendRow(table.Row{"NUM_RC_PER_PE", p.QPsPerNIC, "", "NVSHMEM_IBGDA_NUM_RC_PER_PE: toward a peer, on each NIC"})
	depth := "2 × (B + 1), to a power of two"
	if p.QPDepth == 0 {
		depth = fmt.Sprintf("none: B tokens need 2 × (B + 1), NVSHMEM has at most %d", plan.MaxDepth)
	}
	t.AppendRow(table.Row{"NVSHMEM_QP_DEPTH", p.QPDepth, "", depth})
	t.AppendRow(table.Row{"order of creation", "", "", fmt.Sprintf("rank %d: %s", p.QPRank, someOf(p.QPOrder))})
	t.AppendRow(table.Row{"which is used", "", "", fmt.Sprintf("local expert e: e mod %d; channel c: c mod %d", p.QPsPerPeer, p.QPsPerPeer)})
}

// someOf lists the ends of a long list.
func someOf(numbers []int) string {
	const head, tail = 9, 3
	var words []string
	for i, n := range numbers {
		switch {
		case len(numbers) <= head+tail || i < head || i >= len(numbers)-tail:
			words = append(words, strconv.Itoa(n))
		case i == head:
			words = append(words, "…")
		}
	}
	return strings.Join(words, " ")
}

func (p *sizes) printLimits(w io.Writer) error {
	lines := ""
	if p.library == nil {
		lines += "No kernel library was found: what it keeps for itself is not in the sum (set DEEPEP_KERNELS).\n"
	}
	if p.Nodes == 1 {
		lines += "One node: no queue pairs, no RDMA.\n"
	}
	if p.MemoryBytes > 0 {
		lines += fmt.Sprintf("Largest B in %s: %d. It is bound by %s.\n", sizeText(p.MemoryBytes), p.LargestB, p.LimitedBy)
	}
	_, err := io.WriteString(w, lines)
	return err
}
