package env

import (
	"slices"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// misnamedDepth is named by guides; NVSHMEM has no such variable.
const misnamedDepth = "NVSHMEM_IBGDA_QP_DEPTH"

// rdma reads the settings of nodes joined by RDMA.
func (p *parser) rdma() RDMA {
	number := func(def, low, high int, names ...string) (value int, from string) {
		from = p.firstSet(names...)
		if value = p.number(from, def, low, high); value == def {
			from = ""
		}
		return value, from
	}
	var r RDMA
	var workspace int
	r.MaxPeers, _ = number(maxNodes, 1, maxNodes, "DEEPEP_NUM_MAX_RDMA_PEERS", "NUM_MAX_RDMA_PEERS")
	workspace, _ = number(0, 1, maxWorkspace, "DEEPEP_NUM_WORKSPACE_BYTES", "NUM_WORKSPACE_BYTES")
	r.WorkspaceBytes = uint64(workspace)
	r.QPs, _ = number(0, 1, plan.MaxQueuePairs, "DEEPEP_NUM_QPS_PER_RANK")
	r.QPDepth, r.DepthFrom = number(0, 1, plan.MaxDepth, "DEEPEP_QP_DEPTH", "NVSHMEM_QP_DEPTH", misnamedDepth)
	r.MaxTokens, r.TokensFrom = number(0, 1, maxTokens, "DEEPEP_NUM_MAX_RDMA_TOKENS", "DEEP_EP_NUM_MAX_RDMA_TOKENS")
	r.NICs = p.nics()
	r.Order = plan.Order(slices.Index(plan.OrderNames(), p.choice("DEEPEP_QP_ORDER", plan.OrderNames()...)))
	r.Seed, r.Late = p.softwareRDMA("DEEPEP_SOFTWARE_RDMA")
	return r
}

// softwareRDMA accepts seed[:late].
func (p *parser) softwareRDMA(name string) (seed uint64, late bool) {
	v := p.value(name)
	if v == "" {
		return 0, false
	}
	number, mode, some := strings.Cut(v, ":")
	seed, err := strconv.ParseUint(number, 10, 64)
	if late = strings.EqualFold(mode, "late"); err != nil || some && !late {
		p.reject(name, v, "a seed (a whole number), with an optional :late after it")
		return 0, false
	}
	return seed, late
}

// Group is what the settings of queue pairs are checked against: the ranks, and which of their calls use queue pairs.
type Group struct {
	Topology   plan.Topology
	LowLatency bool // the buffer is for low-latency calls
	Everywhere bool // which use queue pairs inside a node too
	QPs        int  // the caller's number of queue pairs; 0: the default
}

// Queues checks the settings against a group, and plans its queue pairs. Construction and the doctor both ask here. The
// settings of depth and tokens count only where there are queue pairs. The environment's number of them overrides the
// caller's: it is for programs that cannot be changed.
func (r *RDMA) Queues(g Group) (plan.Queues, error) {
	if nodes := g.Topology.Nodes(); !g.LowLatency && nodes > r.MaxPeers {
		return plan.Queues{}, status.Errorf(status.InvalidArgument, "%d ranks with num_nvl_peers = %d are %d nodes: DEEPEP_NUM_MAX_RDMA_PEERS = %d allows no more for normal mode",
			g.Topology.Ranks, g.Topology.Peers, nodes, r.MaxPeers)
	}
	o := plan.QueueOptions{PerPeer: r.QPs, Order: r.Order}
	if o.PerPeer == 0 {
		o.PerPeer = g.QPs
	}
	if o.PerPeer == 0 {
		o.PerPeer = plan.DefaultQueuePairs
	}
	if g.Topology.ByQueues(g.Everywhere) {
		o.MaxTokens, o.TokensFrom, o.Depth, o.DepthFrom, o.DepthFix = r.MaxTokens, r.TokensFrom, r.QPDepth, r.DepthFrom, r.DepthFrom
		if r.DepthFrom == misnamedDepth {
			o.DepthFix = "NVSHMEM_QP_DEPTH" // which NVSHMEM reads, and which is read before the other here
		}
	}
	return plan.NewQueues(g.Topology, o)
}
