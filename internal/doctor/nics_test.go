package doctor

import (
	"strings"
	"testing"
)

func TestNICsThatATransportCanUse(t *testing.T) {
	for _, c := range []struct {
		what    string
		change  func(h *host)
		count   int
		oneEach bool
	}{
		{"a NIC for each GPU", func(*host) {}, 8, false},
		{"one port is down", func(h *host) { h.file(h.portFolder("mlx5_3")+"/state", "1: DOWN\n") }, 7, false},
		{"named", func(h *host) { h.setenv("NVSHMEM_HCA_LIST=mlx5_0:1,mlx5_4") }, 2, false},
		{"left out", func(h *host) { h.setenv("NVSHMEM_HCA_LIST=^mlx5_0") }, 7, false},
		{"another prefix", func(h *host) { h.setenv("NVSHMEM_HCA_PREFIX=bnxt") }, 0, false},
		{"dealt out by NVSHMEM", func(h *host) { h.setenv("NVSHMEM_ENABLE_NIC_PE_MAPPING=1") }, 8, true},
	} {
		h := gpuHost("InfiniBand")
		c.change(h)
		if count, oneEach := NICs(h.root()); count != c.count || oneEach != c.oneEach {
			t.Errorf("%s: %d NICs, one each %t; want %d, %t", c.what, count, oneEach, c.count, c.oneEach)
		}
	}
	if count, _ := NICs(plainHost().root()); count != 0 {
		t.Errorf("a host without NICs has %d", count)
	}
}

// A rank's queue pairs are divided over its NICs: with two NICs a rank each device carries half of them.
func TestQPBudgetDividesOverNICs(t *testing.T) {
	for ranks, want := range map[int]string{8: "planned 96 × 1 rank", 4: "planned 48 × 1 rank", 16: "planned 96 × 2 ranks"} {
		h := gpuHost("InfiniBand")
		h.opt.Ranks = ranks
		e := newExam(t.Context(), h.root(), h.opt)
		checkQPBudget(e)
		if len(e.lines) == 0 || !strings.Contains(e.lines[0].Read, want) {
			t.Errorf("%d ranks: %+v, want %q", ranks, e.lines, want)
		}
	}
}
