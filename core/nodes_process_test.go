package core

import (
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

// nodesOf makes groups of this process and its children out of nodes of so many ranks, with everything late.
func nodesOf(t *testing.T, perNode int) {
	t.Helper()
	t.Setenv("DEEPEP_NUM_MAX_NVL_PEERS", strconv.Itoa(perNode))
	t.Setenv("DEEPEP_SOFTWARE_RDMA", "5:late")
}

func TestProcessesOfNodes(t *testing.T) {
	nodesOf(t, 2)
	crew := newCrew(t, 6)
	all := []int{0, 1, 2, 3, 4, 5}
	for _, command := range []string{"buffer", "dispatch", "combine", "roundtrip", "hook", "dispatch", "combine", "barrier", "destroy"} {
		crew.do(all, "%s", command)
	}
}

// Every survivor, on the dead rank's node and on others, names it in the error, and the survivors can form a new group.
func TestDeathOnAnotherNode(t *testing.T) {
	all, survivors := []int{0, 1, 2, 3}, []int{0, 2, 3}
	for _, c := range []struct {
		name    string
		perNode int
		before  []string
		op      string // that the survivors are in when rank 1 dies
		again   []int  // ranks of the new group: full nodes
	}{
		{"dispatch", 2, nil, "dispatch", []int{0, 2}}, {"combine", 2, []string{"dispatch"}, "combine", []int{2, 3}},
		{"low latency", 2, nil, "roundtrip", []int{3, 0}}, {"barrier", 1, nil, "barrier", survivors},
		{"hook", 1, []string{"roundtrip"}, "hook", survivors},
	} {
		t.Run(c.name, func(t *testing.T) {
			nodesOf(t, c.perNode)
			crew := newCrew(t, 4)
			crew.do(all, "buffer")
			for _, op := range c.before {
				crew.do(all, "%s", op)
			}
			crew.killDuring(c.op, survivors, 1)
			crew.destroySoon(survivors)
			crew.join("second", c.again)
			crew.do(c.again, "buffer")
			for _, op := range []string{"dispatch", "combine", "roundtrip"} {
				crew.do(c.again, "%s", op)
			}
		})
	}
}

// A rank of another node that is stopped is late, and one that ends its buffer has left.
func TestLateAndGoneOnAnotherNode(t *testing.T) {
	nodesOf(t, 1)
	crew := newCrew(t, 2)
	crew.do([]int{0, 1}, "buffer hasty")
	crew.do([]int{0, 1}, "dispatch")
	crew.all[1].Signal(syscall.SIGSTOP)
	crew.tell([]int{0}, "combine")
	code, took, text := crew.failure(0)
	if code != status.Timeout || took < 400*time.Millisecond || took > 3*time.Second || !strings.Contains(text, "rank 1 (") || !strings.Contains(text, "alive but late") {
		t.Errorf("code %d after %v: %s", code, took, text)
	}
	crew.all[1].Signal(syscall.SIGCONT)
	crew.do([]int{0, 1}, "destroy")
	crew.join("second", []int{0, 1})
	crew.do([]int{0, 1}, "buffer")
	crew.tell([]int{0}, "roundtrip")
	time.Sleep(50 * time.Millisecond)
	crew.do([]int{1}, "destroy")
	since := time.Now()
	if _, _, text := crew.failure(0); !strings.Contains(text, "rank 1 (") || !strings.Contains(text, "left the group") || time.Since(since) > 2*time.Second {
		t.Errorf("after %v: %s", time.Since(since), text)
	}
	crew.do([]int{0}, "destroy")
}
