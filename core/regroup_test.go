package core

import (
	"context"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"weak"

	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

// kill ends a rank and waits until the survivors know.
func (c *crew) kill(victim int, survivors []int) {
	c.t.Helper()
	c.tell(survivors, "dispatch")
	c.all[victim].Kill()
	for _, i := range survivors {
		c.failure(i)
	}
}

// serve makes calls of both modes.
func (c *crew) serve(members []int) {
	c.t.Helper()
	for _, op := range []string{"dispatch", "combine", "roundtrip", "roundtrip", "barrier"} {
		c.do(members, "%s", op)
	}
}

// keyOf opens every member's door.
func (c *crew) keyOf(members []int) (key string) {
	c.t.Helper()
	c.tell(members, "key")
	for _, i := range members {
		got := strings.TrimSpace(c.all[i].Expect("ok"))
		if key != "" && got != key {
			c.t.Errorf("keys %s and %s", key, got)
		}
		key = got
	}
	return key
}

// newcomer starts a process that knocks, and returns its number once the members see it.
func (c *crew) newcomer(key string, rank int, members []int, options string) int {
	c.t.Helper()
	c.all = append(c.all, proctest.Start(c.t, "rank", nil, nil))
	i := len(c.all) - 1
	c.tell([]int{i}, "knock %s %d %s", key, rank, options)
	for limit := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		c.tell(members, "joins")
		seen := 0
		for _, m := range members {
			n, _ := strconv.Atoi(strings.TrimSpace(c.all[m].Expect("ok")))
			seen += n
		}
		if seen == len(members) {
			return i
		}
		if time.Now().After(limit) {
			c.t.Fatalf("the members see %d of %d", seen, len(members))
		}
	}
}

// regroup returns the longest time that it took a rank.
func (c *crew) regroup(members []int, how string) (longest time.Duration) {
	c.t.Helper()
	c.tell(members, "%s", how)
	for _, i := range members {
		us, _ := strconv.Atoi(strings.TrimSpace(c.all[i].Expect("ok")))
		longest = max(longest, time.Duration(us)*time.Microsecond)
	}
	return longest
}

func TestRegroupRenumbers(t *testing.T) {
	crew := newCrew(t, 4)
	crew.do([]int{0, 1, 2, 3}, "buffer")
	crew.serve([]int{0, 1, 2, 3})
	crew.kill(0, []int{1, 2, 3})
	t.Logf("regrouped in %v", crew.regroup([]int{1, 2, 3}, "renumber 1 2 3"))
	crew.serve([]int{1, 2, 3})
	crew.kill(2, []int{1, 3}) // rank 1 now
	t.Logf("regrouped in %v", crew.regroup([]int{1, 3}, "renumber 2 0"))
	crew.serve([]int{1, 3})
	crew.destroySoon([]int{1, 3})
}

func TestRejoin(t *testing.T) {
	crew := newCrew(t, 3)
	crew.do([]int{0, 1, 2}, "buffer")
	key := crew.keyOf([]int{0, 1, 2})
	crew.serve([]int{0, 1, 2})
	crew.kill(0, []int{1, 2}) // the root
	crew.regroup([]int{1, 2}, "renumber 1 2")
	crew.serve([]int{1, 2})
	newcomer := crew.newcomer(key, -1, []int{1, 2}, "")
	crew.serve([]int{1, 2}) // nothing waits for it
	took := crew.regroup([]int{1, 2}, "renumber 2 0 1")
	crew.expectOK([]int{newcomer})
	t.Logf("regrouped in %v", took)
	all := []int{1, 2, newcomer}
	crew.serve(all)
	crew.kill(newcomer, []int{1, 2}) // the newcomer is a rank as any other
	crew.regroup([]int{1, 2}, "renumber 1 2")
	crew.serve([]int{1, 2})
	crew.destroySoon([]int{1, 2})
}

func TestRejoinWithMasks(t *testing.T) {
	crew := newCrew(t, 4)
	crew.do([]int{0, 1, 2, 3}, "buffer shrink")
	key := crew.keyOf([]int{0, 1, 2, 3})
	crew.do([]int{0, 1, 2, 3}, "roundtrip")
	crew.tell([]int{0, 3}, "roundtrip")
	crew.all[1].Kill()
	crew.all[2].Kill()
	crew.expectOK([]int{0, 3})
	crew.regroup([]int{0, 3}, "regroup 0 3") // their numbers stay, the others are masked
	masks := func(members []int, want string) {
		t.Helper()
		crew.tell(members, "masks")
		for _, i := range members {
			if got := strings.TrimSpace(crew.all[i].Expect("ok")); got != want {
				t.Errorf("process %d: masks %s, want %s", i, got, want)
			}
		}
	}
	masks([]int{0, 3}, "[0110]")
	crew.do([]int{0, 3}, "roundtrip")
	second := crew.newcomer(key, 2, []int{0, 3}, "shrink")
	crew.regroup([]int{0, 3}, "regroup 0 2 3") // rank 1 is still missing
	crew.expectOK([]int{second})
	masks([]int{0, second, 3}, "[0100]")
	crew.do([]int{0, second, 3}, "roundtrip")
	first := crew.newcomer(key, 1, []int{0, second, 3}, "shrink")
	crew.tell([]int{0, second, 3}, "regroup 0 1 2 3")
	crew.expectOK([]int{0, second, 3, first})
	all := []int{0, first, second, 3}
	masks(all, "[0000]")
	crew.serve(all)
	crew.destroySoon(all)
}

func TestRegroupFailsByName(t *testing.T) {
	crew := newCrew(t, 3)
	crew.do([]int{0, 1, 2}, "buffer")
	crew.kill(1, []int{0, 2})
	fails := func(i int, code status.Code, parts ...string) {
		t.Helper()
		got, took, text := crew.failure(i)
		if got != code || took > 7*time.Second {
			t.Errorf("rank %d: code %v after %v: %s", i, got, took, text)
		}
		for _, part := range parts {
			if !strings.Contains(text, part) {
				t.Errorf("rank %d: %q is not in %q", i, part, text)
			}
		}
	}
	crew.tell([]int{0, 2}, "regroup 0 1 2")
	for _, i := range []int{0, 2} {
		fails(i, status.InvalidState, "no process waits to join in the place of rank 1 (")
	}
	crew.tell([]int{0, 2}, "regroup 0 2")
	for _, i := range []int{0, 2} {
		fails(i, status.InvalidArgument, "argument members", "enable_shrink")
	}
	crew.tell([]int{0}, "renumber 0 2")
	crew.tell([]int{2}, "renumber 2 0")
	for _, i := range []int{0, 2} {
		fails(i, status.Mismatch, "ranks disagree: ", "rank 0 has members = [0 2]", "rank 2 has members = [2 0]")
	}
	crew.tell([]int{0}, "soon 0 2") // rank 2 does not come
	fails(0, status.Timeout, "nothing from rank 2 (", ") after ", "not done within its time limit")
	crew.regroup([]int{0, 2}, "renumber 0 2")
	crew.serve([]int{0, 2})
	crew.destroySoon([]int{0, 2})
}

func TestDeathInARegroup(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 6 {
		crew := newCrew(t, 4)
		crew.do([]int{0, 1, 2, 3}, "buffer")
		crew.kill(3, []int{0, 1, 2})
		crew.tell([]int{1}, "renumber 2 1 0")
		crew.tell([]int{0, 2}, "persist 2 1 0 or 2 0")
		delay := time.Duration(rng.IntN(6000)) * time.Microsecond
		time.Sleep(delay)
		crew.all[1].Kill()
		left := []int{0, 2}
		first, second := crew.all[0].Expect("ok"), crew.all[2].Expect("ok")
		if first != second {
			t.Errorf("round %d, %v: process 0 came to %s, process 2 to %s", round, delay, first, second)
			continue
		}
		if first == "1" { // a group whose rank 1 is dead: the next call says so
			crew.tell(left, "dispatch")
			for _, i := range left {
				crew.failure(i)
			}
			crew.regroup(left, "renumber 0 2") // process 2 is rank 0 there
		}
		crew.serve(left)
		crew.destroySoon(left)
	}
}

func TestRegroupWithoutAStoppedRank(t *testing.T) {
	crew := newCrew(t, 3)
	crew.do([]int{0, 1, 2}, "buffer hasty")
	crew.serve([]int{0, 1, 2})
	crew.all[1].Signal(syscall.SIGSTOP)
	crew.tell([]int{0, 2}, "dispatch")
	for _, i := range []int{0, 2} {
		if code, _, text := crew.failure(i); code != status.Timeout {
			t.Errorf("code %v: %s", code, text)
		}
	}
	crew.regroup([]int{0, 2}, "renumber 0 2") // its memory is new, for rank 1 may still write to the old one
	crew.serve([]int{0, 2})
	crew.all[1].Signal(syscall.SIGCONT)
	crew.tell([]int{1}, "dispatch")
	if _, _, text := crew.failure(1); !strings.Contains(text, "rank 0 (") && !strings.Contains(text, "rank 2 (") {
		t.Errorf("the rank that was left out got: %s", text)
	}
	crew.serve([]int{0, 2})
	crew.destroySoon([]int{0, 1, 2})
}

func TestRegroupAcrossNodes(t *testing.T) {
	nodesOf(t, 1)
	crew := newCrew(t, 3)
	crew.do([]int{0, 1, 2}, "buffer shrink")
	key := crew.keyOf([]int{0, 1, 2})
	crew.serve([]int{0, 1, 2})
	crew.tell([]int{0, 2}, "roundtrip")
	crew.all[1].Kill()
	crew.expectOK([]int{0, 2})
	crew.regroup([]int{0, 2}, "renumber 0 2")
	crew.serve([]int{0, 2})
	newcomer := crew.newcomer(key, -1, []int{0, 2}, "shrink")
	crew.regroup([]int{0, 2}, "renumber 0 2 1")
	crew.expectOK([]int{newcomer})
	crew.serve([]int{0, 2, newcomer})
	crew.destroySoon([]int{0, 2, newcomer})
}

func TestRegroupsLeakNothing(t *testing.T) {
	count := func(dir string) int {
		all, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	maps := func() int {
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), "deepep")
	}
	var before, after [3]int
	var groups []weak.Pointer[Group]
	var buffers []weak.Pointer[engine.Buffer]
	onRanks(t, 2, roomFor(t, 2, 8, 256, 4), func(m *member) {
		c, first := lowLatencyShape{2, 8, 8, 256, 3, 4}, m.rank == 0
		regroup := func(rounds int) {
			for range rounds {
				if first {
					groups, buffers = append(groups, weak.Make(m.Group())), append(buffers, weak.Make(m.live()))
				}
				m.must(m.Regroup(context.Background(), RegroupOptions{Members: []int{1, 0}, Renumber: true}))
				m.rank = m.Group().Rank()
				m.check(m.Info().Rank == m.rank, "rank %d", m.Info().Rank)
				m.lowLatencyRounds(c, 1)
			}
			m.must(m.Barrier(&Call{}))
		}
		measure := func(into *[3]int) {
			if m.rank == 0 {
				*into = [3]int{count("/proc/self/fd"), maps(), runtime.NumGoroutine()}
			}
			m.must(m.Barrier(&Call{}))
		}
		regroup(4)
		measure(&before)
		regroup(40)
		measure(&after)
		if !first {
			m.must(m.Barrier(&Call{}))
			return
		}
		kept := func() (n int) {
			runtime.GC()
			for i := range groups {
				if groups[i].Value() != nil || buffers[i].Value() != nil {
					n++
				}
			}
			return n
		}
		left := kept()
		for limit := time.Now().Add(5 * time.Second); left > 4 && time.Now().Before(limit); left = kept() {
			time.Sleep(10 * time.Millisecond)
		}
		m.check(left <= 4, "%d of %d groups of before, or their buffers, are still in memory", left, len(groups))
		m.must(m.Barrier(&Call{}))
	})
	for i, what := range []string{"descriptors", "mappings", "goroutines"} {
		if after[i] > before[i]+4 {
			t.Errorf("%s: %d before, %d after 40 regroups", what, before[i], after[i])
		}
	}
}
