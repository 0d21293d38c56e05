package doctor

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/plan"
)

// variable is one rule about the environment. It returns a problem, or "".
type variable struct {
	name string
	rule func(e *exam, value string) (cause, fix string, grave bool)
}

var variables = []variable{
	{"NVSHMEM_IB_TRAFFIC_CLASS", func(e *exam, _ string) (string, string, bool) {
		return e.trafficClass("NVSHMEM_IB_TRAFFIC_CLASS")
	}},
	{"DEEPEP_TRAFFIC_CLASS", func(e *exam, _ string) (string, string, bool) {
		return e.trafficClass("DEEPEP_TRAFFIC_CLASS")
	}},
	{"NVSHMEM_QP_DEPTH", func(e *exam, v string) (string, string, bool) {
		return qpDepth(v, e.opt.Plan.MaxTokens)
	}},
	{"NVSHMEM_IBGDA_QP_DEPTH", func(e *exam, v string) (string, string, bool) {
		fix := "export NVSHMEM_QP_DEPTH=" + e.deepEnough(v) + " and unset this one"
		if _, set := e.root.env("NVSHMEM_QP_DEPTH"); set {
			fix = "unset it"
		}
		return "NVSHMEM has no such variable, though guides name it; this library takes its depth from it where NVSHMEM_QP_DEPTH is not set", fix, false
	}},
	{"NVSHMEM_IB_ENABLE_IBGDA", func(_ *exam, v string) (string, string, bool) {
		if env.Truth(v) {
			return "", "", false
		}
		return "GPU-initiated RDMA is switched off, so low-latency mode between nodes has no transport", "unset it, or set it to 1", true
	}},
	{"NVSHMEM_REMOTE_TRANSPORT", func(e *exam, v string) (string, string, bool) {
		if v == "ibgda" || v == "" {
			return "", "", false
		}
		ibgda, set := e.root.env("NVSHMEM_IB_ENABLE_IBGDA")
		if set && env.Truth(ibgda) {
			return "NVSHMEM_IB_ENABLE_IBGDA asks for GPU-initiated RDMA, this one for " + v, "unset one of the two", false
		}
		return "traffic between nodes goes through a CPU proxy, several times slower", "unset it for GPU-initiated RDMA", false
	}},
	{"NVSHMEM_IBGDA_NIC_HANDLER", func(_ *exam, v string) (string, string, bool) {
		if v == "auto" || v == "gpu" {
			return "", "", false
		}
		return "the CPU rings the doorbells, which is slower and, with 3.4.5, was seen to hang", "set the driver parameters (line driver-params) and unset it", false
	}},
	{"NVSHMEM_IBGDA_NUM_RC_PER_PE", func(e *exam, v string) (string, string, bool) {
		n, err := strconv.Atoi(v)
		switch {
		case err != nil || n < 0:
			return "not a number of queue pairs", "unset it: the library sets it from num_qps_per_rank", true
		case e.opt.Plan.QPPeers > 0 && n == 0:
			return "no reliable-connection queue pair is left; the kernels use these alone", "unset it", true
		}
		return "", "", false
	}},
	{"NVSHMEM_IBGDA_RC_MAP_BY", func(_ *exam, v string) (string, string, bool) {
		switch v {
		case "cta", "sm", "warp":
			return "NVSHMEM 3.5.21 to 3.7.2 ignores it; there each call takes the next queue pair", "unset it", false
		}
		return "not one of cta, sm and warp", "unset it", true
	}},
	{"NVSHMEM_DISABLE_P2P", func(_ *exam, v string) (string, string, bool) {
		if !env.Truth(v) {
			return "", "", false
		}
		return "peers of the same node are then reached through the NIC instead of NVLink", "unset it", false
	}},
	{"NVSHMEM_HCA_PE_MAPPING", func(e *exam, _ string) (string, string, bool) {
		mapping, set := e.root.env("NVSHMEM_ENABLE_NIC_PE_MAPPING")
		if !set || env.Truth(mapping) {
			return "", "", false
		}
		return "with NVSHMEM_ENABLE_NIC_PE_MAPPING=" + mapping + " it is not looked at", "unset NVSHMEM_ENABLE_NIC_PE_MAPPING: the library sets it to 1 for this one", false
	}},
	{"NCCL_P2P_DISABLE", func(_ *exam, v string) (string, string, bool) {
		if !env.Truth(v) {
			return "", "", false
		}
		return "torch's own collectives then leave NVLink; this library does not look at it", "unset it", false
	}},
}

// trafficClass is the rule for the variables of that name.
func (e *exam) trafficClass(name string) (cause, fix string, grave bool) {
	if e.layers()["Ethernet"] || !e.layers()["InfiniBand"] {
		return "", "", false
	}
	return "on InfiniBand NVSHMEM then fails to connect its queue pairs (INIT2RTR, status 121): a traffic class belongs to RoCE",
		"unset " + name + "; on InfiniBand use DEEPEP_SERVICE_LEVEL (NVSHMEM_IB_SL)", true
}

// checkVariables finds settings that contradict the hardware, the plan or each other.
func checkVariables(e *exam) {
	found, bad := 0, 0
	for _, kv := range e.root.Environ {
		if strings.HasPrefix(kv, "NVSHMEM_") {
			found++
		}
	}
	for _, v := range variables {
		value, set := e.root.env(v.name)
		if !set {
			continue
		}
		cause, fix, grave := v.rule(e, value)
		if cause == "" {
			continue
		}
		bad++
		l := Line{Subject: v.name, Read: v.name + "=" + value, File: "environment", Cause: cause, Fix: fix}
		e.when(grave, l)
	}
	settings, _ := e.nicSettings()
	for _, c := range settings.Contradictions() {
		bad++
		value, _ := e.root.env(c.Variable)
		e.warn(Line{Subject: c.Variable, Read: c.Variable + "=" + value, File: "environment", Cause: c.Cause, Fix: c.Fix})
	}
	if _, set := e.root.env("NVSHMEM_QP_DEPTH"); !set && e.opt.Plan.MaxTokens > 0 && 2*(e.opt.Plan.MaxTokens+1) > plan.DefaultDepth {
		bad++
		cause, fix, _ := qpDepth(strconv.Itoa(plan.DefaultDepth), e.opt.Plan.MaxTokens)
		e.warn(Line{Subject: "NVSHMEM_QP_DEPTH", Read: fmt.Sprintf("not set, %d by default", plan.DefaultDepth), File: "environment",
			Cause: cause + " (this library sets it itself when it starts NVSHMEM; a program that started NVSHMEM before keeps the default)", Fix: fix})
	}
	if bad == 0 {
		e.ok(Line{Read: plural(found, "NVSHMEM variable") + " set, no conflict", File: "environment"})
	}
}

// deepEnough is a depth, or the one that the tokens of the plan and of the settings need where that is deeper.
func (e *exam) deepEnough(depth string) string {
	n, err := strconv.Atoi(strings.TrimSpace(depth))
	if err != nil {
		n = plan.DefaultDepth
	}
	tokens := e.opt.Plan.MaxTokens
	if s, err := env.Load(func(name string) string { v, _ := e.root.env(name); return v }); err == nil {
		tokens = max(tokens, s.RDMA.MaxTokens)
	}
	return strconv.Itoa(plan.AllowedDepth(max(min(n, plan.MaxDepth), plan.DepthFor(tokens))))
}

// qpDepth checks the depth of queue pairs: each token of low-latency mode takes a data and a count request, so that 2 ×
// (B + 1) must fit.
func qpDepth(v string, tokens int) (cause, fix string, grave bool) {
	n, err := strconv.Atoi(strings.TrimSpace(v))
	need := 2 * (tokens + 1)
	want := max(plan.MinDepth, plan.DepthFor(tokens))
	switch {
	case err != nil:
		return "not a number", "unset it: the library sets it", true
	case need > plan.MaxDepth:
		return fmt.Sprintf("%d tokens a rank need a depth of %d, more than NVSHMEM's %d", tokens, need, plan.MaxDepth),
			fmt.Sprintf("num_max_dispatch_tokens_per_rank at most %d", plan.MaxDepth/2-1), true
	case n < need:
		return fmt.Sprintf("%d tokens a rank need a depth of at least 2 × (%d + 1) = %d; a full queue waits for ever", tokens, tokens, need),
			fmt.Sprintf("export NVSHMEM_QP_DEPTH=%d", want), true
	case n < plan.MinDepth || n > plan.MaxDepth || n&(n-1) != 0:
		return fmt.Sprintf("NVSHMEM takes powers of two from %d to %d", plan.MinDepth, plan.MaxDepth), fmt.Sprintf("export NVSHMEM_QP_DEPTH=%d", want), true
	}
	return "", "", false
}

// layers is the set of link layers of the active ports.
func (e *exam) layers() map[string]bool {
	set := map[string]bool{}
	for _, n := range e.nicList() {
		for _, p := range n.ports {
			if p.state == "ACTIVE" {
				set[p.layer] = true
			}
		}
	}
	return set
}
