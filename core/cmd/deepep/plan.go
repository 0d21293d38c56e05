package main

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

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
		Long: `Prints what construction would make for a shape, by the settings of the environment: the
bytes of every region, time limits, queue pairs with their depth and the order in which one rank makes them; the SMs that
calls would take; and with --memory the largest B (num_max_dispatch_tokens_per_rank) that fits, with the limit that binds.
Sizes are those of one rank. What construction would refuse is an error.`,
		Example: `  deepep plan --ranks 8 --experts 256 --hidden 7168 --max-tokens 128
  deepep plan --ranks 64 --engine cuda --memory 8GiB
  deepep plan --ranks 4 --engine cuda --elastic-tokens 4096
  NUM_MAX_NVL_PEERS=4 deepep plan --ranks 16`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := s.plan()
			if err != nil {
				return err
			}
			if s.memory != "" {
				memory, err := parseSize(s.memory)
				if err != nil {
					return err
				}
				if err := p.fit(&s, memory); err != nil {
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
	flags.StringVar(&s.engine, "engine", "auto", "cpu, cuda (also where there is no GPU), or auto: the one that a buffer here would get")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	flags.IntVar(&s.elastic.NumMaxTokens, "elastic-tokens", 0, "M, num_max_tokens_per_rank of a V2 buffer (ElasticBuffer), for which the plan is then; 0: for V1's")
	flags.BoolVar(&s.elastic.FP8, "fp8", false, "the V2 buffer is for FP8 rows (use_fp8_dispatch)")
	flags.BoolVar(&s.elastic.Unreduced, "single-reduction", false, "the V2 buffer is made with allow_multiple_reduction=False")
	cmd.MarkFlagsMutuallyExclusive("elastic-tokens", "memory")
	return cmd
}

func (p *sizes) print(w io.Writer) error {
	t := newTable()
	t.AppendHeader(table.Row{"", "size", "bytes", "what it is for"})
	size := func(name string, n uint64, why string) {
		t.AppendRow(table.Row{name, sizeText(n), strconv.FormatUint(n, 10), why})
	}
	if p.Tokens > 0 {
		size("num_nvl_bytes", p.NVLBytes, fmt.Sprintf("normal mode, hint for %s", count(p.Channels, "channel")))
		if p.Nodes > 1 {
			size("num_rdma_bytes", p.RDMABytes, "normal mode between nodes")
		}
	}
	if p.MaxTokens > 0 {
		size("num_rdma_bytes", p.LLBytes, "low-latency mode, two slots")
	}
	if p.ElasticBytes > 0 {
		size("num_bytes", p.ElasticBytes, "V2: get_buffer_size_hint")
		size("num_nvl_bytes", p.NVLBytes, "V2: staging")
		if p.Nodes > 1 {
			size("num_rdma_bytes", p.RDMABytes, "V2 between nodes")
		}
	}
	if p.Library != "" {
		size("private", p.PrivateBytes, fmt.Sprintf("%s: flags and counts %s, staging %s", p.Library, sizeText(p.ControlBytes), sizeText(p.WireBytes)))
	}
	size("one buffer for all", p.TotalBytes, "what construction allocates")
	if p.RowSegmentBytes > 0 {
		size("row segment", p.RowSegmentBytes, "received rows of normal mode that peers write without a copy (DEEPEP_ZERO_COPY_BYTES)")
	}
	if p.MaxTokens > 0 {
		t.AppendSeparator()
		size("output, FP8", p.OutputFP8, "recv_x of one low-latency dispatch")
		size("output, BF16", p.OutputBF16, "recv_x of one low-latency dispatch")
	}
	if p.ElasticBytes > 0 {
		t.AppendSeparator()
		t.AppendRow(table.Row{"SMs", p.ElasticSMs, "", "V2: get_theoretical_num_sms"})
	}
	if p.Tokens > 0 {
		t.AppendSeparator()
		t.AppendRow(table.Row{"SMs", fmt.Sprintf("%d / %d / %d", p.DispatchSMsFP8, p.DispatchSMsBF16, p.CombineSMs), "",
			fmt.Sprintf("normal mode, %d tokens: dispatch FP8 / BF16 / combine", p.Tokens)})
	}
	t.AppendRow(table.Row{"time limits", milliseconds(p.TimeoutMS), "", "of a wait for a peer; in the first call of an operation " + milliseconds(p.FirstTimeoutMS)})
	if p.QPPeers > 0 {
		t.AppendSeparator()
		p.printQueues(t)
	}
	title := fmt.Sprintf("%s on %s, engine %s, %d experts (%d a rank), hidden %d, top-%d, B = %d",
		count(p.Ranks, "rank"), count(p.Nodes, "node"), p.Engine, p.Experts, p.LocalExperts, p.Hidden, p.TopK, p.MaxTokens)
	if _, err := fmt.Fprintf(w, "%s\n%s\n", title, t.Render()); err != nil {
		return err
	}
	return p.printLimits(w)
}

func milliseconds(n int64) string { return (time.Duration(n) * time.Millisecond).String() }

// printQueues adds the rows about queue pairs.
func (p *sizes) printQueues(t table.Writer) {
	t.AppendRow(table.Row{"queue pairs", p.QPs, "", fmt.Sprintf("of a rank in all; %d to each of %s that it reaches by them",
		p.QPsPerPeer, count(p.QPPeers, "rank"))})
	used := fmt.Sprintf("the calls have use for so many of the %d: local expert e uses e mod %d, channel c c mod %d", p.QPsPerPeer, p.QPsPerPeer, p.QPsPerPeer)
	if p.QPsUsed > p.QPsPerPeer {
		used = fmt.Sprintf("so many would be used; %d are taken in turn: local expert e uses e mod %d, channel c c mod %d", p.QPsPerPeer, p.QPsPerPeer, p.QPsPerPeer)
	}
	t.AppendRow(table.Row{"which are used", p.QPsUsed, "", used})
	t.AppendRow(table.Row{"NUM_RC_PER_PE", p.QPsPerNIC, "", "NVSHMEM_IBGDA_NUM_RC_PER_PE: toward a peer, on each NIC of a rank, which has " + strconv.Itoa(p.NICs)})
	if p.Network != nil {
		t.AppendRow(table.Row{"NICs", p.NICs, "", fmt.Sprintf("of a rank: %s; service level %d, traffic class %d",
			cmp.Or(p.Network.NICMapping, p.Network.NICs, "the nearest"), p.Network.ServiceLevel, p.Network.TrafficClass)})
	}
	depth := fmt.Sprintf("B tokens want %d, 2 × (B + 1) to a power of two: with less a full queue pair makes a call wait", p.QPDepthForTokens)
	switch {
	case p.MaxTokens == 0:
		depth = "operations in flight on a queue pair"
	case p.QPDepthForTokens == 0:
		depth = fmt.Sprintf("B tokens want 2 × (B + 1), NVSHMEM has at most %d: a full queue pair makes a call wait", plan.MaxDepth)
	case p.QPDepthForTokens <= p.QPDepth:
		depth = fmt.Sprintf("B tokens want %d, 2 × (B + 1) to a power of two", p.QPDepthForTokens)
	}
	t.AppendRow(table.Row{"NVSHMEM_QP_DEPTH", p.QPDepth, "", depth})
	t.AppendRow(table.Row{"order of creation", "", "", fmt.Sprintf("%s, rank %d: %s", p.QPOrderName, p.QPRank, someOf(p.QPOrder))})
	if p.Nodes > 1 {
		t.AppendRow(table.Row{"RDMA sub-team", len(p.RDMATeam), "", fmt.Sprintf("of rank %d: %s; rows of normal mode cross between these ranks alone", p.QPRank, someOf(p.RDMATeam))})
	}
}

// someOf lists the ends of a long list.
func someOf[N int | int32](numbers []N) string {
	const head, tail = 9, 3
	var words []string
	for i, n := range numbers {
		switch {
		case len(numbers) <= head+tail || i < head || i >= len(numbers)-tail:
			words = append(words, strconv.Itoa(int(n)))
		case i == head:
			words = append(words, "…")
		}
	}
	return strings.Join(words, " ")
}

func (p *sizes) printLimits(w io.Writer) error {
	lines := ""
	if p.Library == "" {
		lines += "No kernel library can be loaded: what it keeps for itself is not in the sum. " + p.Reason + "\n"
	}
	if p.Network != nil {
		for _, warning := range p.Network.Warnings {
			lines += warning + "\n"
		}
	}
	if p.QPPeers == 0 {
		lines += "One node: no queue pairs, no RDMA.\n"
	}
	if p.MemoryBytes > 0 {
		lines += fmt.Sprintf("Largest B in %s: %d. It is bound by %s.\n", sizeText(p.MemoryBytes), p.LargestB, p.LimitedBy)
	}
	_, err := io.WriteString(w, lines)
	return err
}
