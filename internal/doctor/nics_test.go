package doctor

import (
	"strings"
	"testing"
)

func TestNICsThatATransportCanUse(t *testing.T) {
	const unknown = "this host has no RDMA device of that name"
	for _, c := range []struct {
		what   string
		change func(h *host)
		count  int
		each   int
		causes []string // of lines about single NICs, in order
	}{
		{"a NIC for each GPU", func(*host) {}, 8, 1, nil},
		{"one port is down", func(h *host) { h.file(h.portFolder("mlx5_3")+"/state", "1: DOWN\n") }, 7, 1, nil},
		{"named", func(h *host) { h.setenv("NVSHMEM_HCA_LIST=mlx5_0:1,mlx5_4") }, 2, 1, nil},
		{"named here", func(h *host) { h.setenv("DEEPEP_NICS=mlx5_0,mlx5_4,mlx5_5") }, 3, 1, nil},
		{"left out", func(h *host) { h.setenv("NVSHMEM_HCA_LIST=^mlx5_0") }, 7, 1, nil},
		{"another prefix", func(h *host) { h.setenv("NVSHMEM_HCA_PREFIX=bnxt") }, 0, 1, nil},
		{"a name that is not there", func(h *host) { h.setenv("NVSHMEM_HCA_LIST=mlx5_0,mlx5_8,ib0") }, 1, 1, []string{unknown, unknown}},
		{"left out and not there", func(h *host) { h.setenv("DEEPEP_NICS=^mlx5_9") }, 8, 1, []string{unknown}},
		{"a port that is not there", func(h *host) { h.setenv("DEEPEP_NICS=mlx5_0:2") }, 1, 1, []string{"the device has no port 2"}},
		{"a mapping", func(h *host) { h.setenv("DEEPEP_NIC_MAPPING=mlx5_0:1:4,mlx5_1:1:4") }, 2, 1, nil},
		{"a mapping to nothing", func(h *host) { h.setenv("DEEPEP_NIC_MAPPING=mlx5_0:1:4,mlx5_x:1:4") }, 1, 1, []string{unknown}},
		{"a name without its prefix", func(h *host) { h.setenv("DEEPEP_NICS=mlx5_0", "NVSHMEM_HCA_PREFIX=bnxt") }, 0, 1, []string{"begin with bnxt"}},
		{"named and down", func(h *host) { h.setenv("DEEPEP_NICS=mlx5_3").file(h.portFolder("mlx5_3")+"/state", "1: DOWN\n") }, 0, 1, []string{"not active"}},
		{"two a rank", func(h *host) { h.setenv("DEEPEP_NUM_NICS=2"); h.opt.Ranks = 4 }, 8, 2, nil},
		{"its share", func(h *host) { h.setenv("NVSHMEM_IBGDA_ENABLE_MULTI_PORT=1"); h.opt.Ranks = 4 }, 8, 2, nil},
		{"two asked for, one given", func(h *host) { h.setenv("DEEPEP_NUM_NICS=2", "NVSHMEM_ENABLE_NIC_PE_MAPPING=1") }, 8, 1, nil},
	} {
		h := gpuHost("InfiniBand")
		c.change(h)
		h.opt.For = ForInternode
		e := newExam(t.Context(), h.root(), h.opt)
		s, prefix := e.nicSettings()
		if count := len(e.usableNICs(&s, prefix)); count != c.count || e.nicsOfRank() != c.each {
			t.Errorf("%s: %d NICs, %d a rank; want %d, %d", c.what, count, e.nicsOfRank(), c.count, c.each)
		}
		checkNICs(e)
		last := len(e.lines) - 1
		if last != len(c.causes) {
			t.Errorf("%s: %+v", c.what, e.lines)
			continue
		}
		for i, cause := range c.causes {
			if l := e.lines[i]; !strings.Contains(l.Cause, cause) || l.Subject == "" || l.Fix == "" || (l.Status != Fail) != strings.Contains(l.Read, "^") {
				t.Errorf("%s: %+v, want %q", c.what, l, cause)
			}
		}
		if (e.lines[last].Status == OK) != (c.count > 0) {
			t.Errorf("%s: %+v", c.what, e.lines[last])
		}
	}
	h := plainHost()
	e := newExam(t.Context(), h.root(), h.opt)
	if checkNICs(e); len(e.lines) != 1 || e.lines[0].Status != NA {
		t.Errorf("a host without NICs: %+v", e.lines)
	}
}

// The line of the check says what a rank has, and what it could have.
func TestNICsOfARank(t *testing.T) {
	for _, c := range []struct {
		ranks   int
		setting string
		status  Status
		says    string
	}{
		{8, "", OK, "8 usable NICs of 8: mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7; 1 a rank, service level 0, traffic class 0"},
		{4, "", OK, "1 a rank, service level 0, traffic class 0 (there are 2 for each of 4 ranks: DEEPEP_NUM_NICS=2 uses them)"},
		{4, "DEEPEP_NUM_NICS=2", OK, "2 a rank, service level 0"},
		{8, "DEEPEP_NUM_NICS=2", Fail, "2 a rank, service level 0"},
		{8, "DEEPEP_SERVICE_LEVEL=3", OK, "service level 3, traffic class 0"},
	} {
		h := gpuHost("InfiniBand")
		h.opt.Ranks, h.opt.For = c.ranks, ForInternode
		if c.setting != "" {
			h.setenv(c.setting)
		}
		e := newExam(t.Context(), h.root(), h.opt)
		if checkNICs(e); len(e.lines) != 1 || e.lines[0].Status != c.status || !strings.Contains(e.lines[0].Read, c.says) {
			t.Errorf("%d ranks, %s: %+v, want %q", c.ranks, c.setting, e.lines, c.says)
		}
	}
}

// A rank's queue pairs are divided over its NICs: with two NICs a rank each device carries half of them.
func TestQPBudgetDividesOverNICs(t *testing.T) {
	for _, c := range []struct {
		ranks   int
		setting string
		want    string
	}{
		{8, "", "planned 96 × 1 rank"}, {4, "", "planned 96 × 1 rank"}, {16, "", "planned 96 × 2 ranks"},
		{4, "DEEPEP_NUM_NICS=2", "planned 48 × 1 rank"}, {8, "DEEPEP_NUM_NICS=2", "planned 48 × 2 ranks"}, {4, "NVSHMEM_ENABLE_MULTI_PORT=1", "planned 48 × 1 rank"},
	} {
		h := gpuHost("InfiniBand")
		h.opt.Ranks = c.ranks
		if c.setting != "" {
			h.setenv(c.setting)
		}
		e := newExam(t.Context(), h.root(), h.opt)
		checkQPBudget(e)
		if len(e.lines) == 0 || !strings.Contains(e.lines[0].Read, c.want) {
			t.Errorf("%d ranks, %s: %+v, want %q", c.ranks, c.setting, e.lines, c.want)
		}
	}
}
