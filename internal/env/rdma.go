package env

import (
	"strconv"
	"strings"
)

// rdma reads the settings of nodes joined by RDMA.
func (p *parser) rdma() RDMA {
	number := func(def, low, high int, names ...string) int { return p.number(p.firstSet(names...), def, low, high) }
	r := RDMA{
		MaxPeers:       number(maxNodes, 1, maxNodes, "DEEPEP_NUM_MAX_RDMA_PEERS", "NUM_MAX_RDMA_PEERS"),
		WorkspaceBytes: uint64(number(0, 1, maxWorkspace, "DEEPEP_NUM_WORKSPACE_BYTES", "NUM_WORKSPACE_BYTES")),
		QPs:            number(0, 1, maxQPs, "DEEPEP_NUM_QPS_PER_RANK"),
		QPDepth:        number(0, 1, maxDepth, "DEEPEP_QP_DEPTH", "NVSHMEM_QP_DEPTH", "NVSHMEM_IBGDA_QP_DEPTH"),
		MaxTokens:      number(0, 1, maxTokens, "DEEPEP_NUM_MAX_RDMA_TOKENS", "DEEP_EP_NUM_MAX_RDMA_TOKENS"),
		NICs:           number(0, 1, MaxNICs, "DEEPEP_NUM_NICS"),
	}
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
