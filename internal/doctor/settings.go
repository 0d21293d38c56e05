package doctor

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/plan"
)

// otherSettings are variables that something else than env reads: the Python package, and the build.
var otherSettings = []string{"DEEPEP_LIBRARY", "DEEPEP_BUILD", recycleOutputs, torchFace}

// Switches that the Python package reads: 0 or 1.
const (
	recycleOutputs = "DEEPEP_RECYCLE_OUTPUTS"
	torchFace      = "DEEPEP_TORCH_FACE"
)

// checkSettings parses this library's variables as the constructor does, and finds names that the library does not
// read.
func checkSettings(e *exam) {
	known := map[string]bool{}
	for _, name := range otherSettings {
		known[name] = true
	}
	s, err := env.Load(func(name string) string {
		known[name] = true
		v, _ := e.root.env(name)
		return v
	})
	if err != nil {
		e.fail(Line{Read: err.Error(), File: "environment", Cause: "construction refuses a setting that it cannot read",
			Fix: "give it one of the allowed values, or unset it (docs/environment.md)"})
		return
	}
	e.switches(recycleOutputs, torchFace)
	e.queueSettings(&s.RDMA)
	set := 0
	for _, kv := range e.root.Environ {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, "DEEPEP_") || strings.HasPrefix(name, "DEEPEP_TEST_") {
			continue
		}
		set++
		if known[name] {
			continue
		}
		// Without its value: what the library does not read may be a secret of another program.
		e.warn(Line{Subject: name, Read: name + " is set", File: "environment",
			Cause: "this library reads no variable of this name", Fix: "did you mean " + nearestName(name, known) + "? Else unset it"})
	}
	e.ok(Line{Read: fmt.Sprintf("engine %s, longest wait %v, %s set", s.Engine, s.Timeout, plural(set, "DEEPEP variable")), File: "environment",
		Facts: map[string]string{"engine": s.Engine, "timeout": s.Timeout.String()}})
}

// switches checks what the Python package refuses.
func (e *exam) switches(names ...string) {
	for _, name := range names {
		v, _ := e.root.env(name)
		if v = strings.TrimSpace(v); v == "" || v == "0" || v == "1" {
			continue
		}
		e.fail(Line{Subject: name, Read: fmt.Sprintf("got %q, allowed 0 or 1", v), File: "environment",
			Cause: "the Python package refuses a setting that it cannot read", Fix: "give it one of the allowed values, or unset it (docs/environment.md)"})
	}
}

// queueSettings asks what construction asks: whether the settings of queue pairs agree with each other and with the
// planned group. Without a plan a group of several nodes stands in, since the settings matter to no other.
func (e *exam) queueSettings(r *env.RDMA) {
	g, planned := env.Group{Topology: e.opt.Topology}, e.opt.Topology.Ranks > 0
	if !planned {
		if e.opt.For == ForCPU || e.opt.For == ForIntranode {
			return
		}
		g = env.Group{Topology: plan.Topology{Ranks: 2, Peers: 1}, LowLatency: true}
	}
	grave := planned || e.opt.For == ForInternode
	if _, err := r.Queues(g); err != nil {
		read, fix, found := strings.Cut(err.Error(), "; fix: ")
		if !found {
			fix = "raise the limit, or unset it (docs/environment.md)"
		}
		e.when(grave, Line{Subject: "queue pairs", Read: read, File: "environment", Cause: "construction refuses a buffer whose ranks lie on several nodes", Fix: fix})
	}
	if o := r.Order; o != plan.DefaultOrder && o != plan.Rotated && len(e.usableGPUs()) > 0 && g.Topology.Nodes() > 1 {
		e.when(grave && e.opt.For == ForInternode, Line{Subject: "order", Read: "DEEPEP_QP_ORDER=" + o.String(), File: "environment",
			Cause: "NVSHMEM makes its queue pairs itself, in rotated order; construction refuses any other on GPUs of several nodes", Fix: "unset DEEPEP_QP_ORDER"})
	}
}

// checkRDMATeam says which ranks of the planned group form the RDMA sub-teams.
func checkRDMATeam(e *exam) {
	t := e.opt.Topology
	l := Line{Read: "no group is planned", File: "the plan (--ranks, --ranks-per-node)"}
	if t.Ranks == 0 || t.Nodes() == 1 {
		if t.Ranks > 0 {
			l.Read = "one node: each rank is alone in its sub-team"
		}
		e.na(l)
		return
	}
	first := t.RDMATeam(0)
	l.Read = fmt.Sprintf("%s of %s, of equal index on each node: %s, and so on to %s", plural(t.NodeSize(), "sub-team"), plural(first.Size, "rank"),
		ranksText(first.Ranks()), ranksText(t.RDMATeam(t.NodeSize()-1).Ranks()))
	if gpus := len(e.usableGPUs()); gpus > 0 && gpus < t.NodeSize() {
		l.Cause = fmt.Sprintf("the ranks of a node lie on one host, a GPU each, and this host has %s", plural(gpus, "GPU"))
		l.Fix = fmt.Sprintf("export DEEPEP_NUM_MAX_NVL_PEERS=%d", gpus)
		e.warn(l)
		return
	}
	l.Facts = map[string]string{"stride": strconv.Itoa(first.Stride), "size": strconv.Itoa(first.Size)}
	e.ok(l)
}

// ranksText lists ranks, the ends alone of a long list.
func ranksText(ranks []int) string {
	const most = 6
	words := make([]string, len(ranks))
	for i, r := range ranks {
		words[i] = strconv.Itoa(r)
	}
	if len(words) > most {
		words = append(append(words[:most-1:most-1], "…"), words[len(words)-1])
	}
	return strings.Join(words, " ")
}

// nearestName is the known name with the smallest edit distance, among equals the first by the alphabet.
func nearestName(name string, known map[string]bool) string {
	best, at := "", 1<<30
	for k := range known {
		if d := edits(name, k); d < at || d == at && k < best {
			best, at = k, d
		}
	}
	return best
}

// edits is the edit distance of a and b.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
