package main

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/plan"
)

func planned(t *testing.T, args ...string) sizes {
	t.Helper()
	out, stderr, code := deepep(t, append([]string{"plan", "--json"}, args...)...)
	var p sizes
	if err := json.Unmarshal([]byte(out), &p); err != nil || code != 0 {
		t.Fatalf("%d %v %s", code, err, stderr)
	}
	return p
}

func TestPlanSizes(t *testing.T) {
	p := planned(t, "--ranks", "16", "--experts", "256", "--hidden", "7168", "--max-tokens", "128", "--sms", "24")
	ll, err := plan.LowLatencyBytes(128, 7168, 16, 256, nil)
	if err != nil {
		t.Fatal(err)
	}
	if p.LLBytes != ll || p.Nodes != 2 || p.LocalExperts != 16 || p.Channels != 12 || p.QPsPerPeer != 24 || p.QPs != 192 || p.QPPeers != 8 || p.QPsUsed != 16 ||
		p.QPDepth != 1024 || p.QPDepthForTokens != 512 || p.CombineSMs != 24 || p.TimeoutMS != 100_000 || p.FirstTimeoutMS != 300_000 {
		t.Errorf("%+v", p)
	}
	if q := planned(t, "--ranks", "6", "--ranks-per-node", "2", "--experts", "6", "--qps", "5", "--rank", "3", "--engine", "cpu"); q.QPsPerPeer != 5 ||
		q.QPsPerNIC != 5 || q.QPRank != 3 || !slices.Equal(q.QPOrder, []int32{5, 4, 1, 0}) {
		t.Errorf("%d queue pairs, %d a NIC, order of rank %d %v", q.QPsPerPeer, q.QPsPerNIC, q.QPRank, q.QPOrder)
	}
	if q := planned(t, "--ranks", "6", "--ranks-per-node", "2", "--experts", "6", "--rank", "3", "--engine", "cpu"); !slices.Equal(q.RDMATeam, []int{1, 3, 5}) {
		t.Errorf("sub-team of rank 3 %v", q.RDMATeam)
	}
	if p.TotalBytes < p.NVLBytes+max(p.RDMABytes, p.LLBytes)+p.PrivateBytes {
		t.Errorf("total %d", p.TotalBytes)
	}
	if rows := uint64(16 * 16 * 128); p.OutputBF16 != rows*7168*2 || p.OutputFP8 != rows*(7168+56*4) {
		t.Errorf("outputs %d %d", p.OutputBF16, p.OutputFP8)
	}
	if one := planned(t, "--ranks", "8", "--engine", "cuda"); one.CombineSMs != 16 || one.DispatchSMsFP8 != 12 || one.DispatchSMsBF16 != 10 {
		t.Errorf("SMs by formula: %+v", one)
	}
	if one := planned(t, "--ranks", "8"); one.QPs != 0 || one.RDMABytes != 0 {
		t.Errorf("one node has queue pairs: %+v", one)
	}
}

// With --elastic-tokens the plan is a V2 buffer's: its bytes and what the kernel library adds, and no other mode's.
func TestPlanOfV2(t *testing.T) {
	p := planned(t, "--ranks", "4", "--engine", "cuda", "--elastic-tokens", "4096")
	if p.ElasticBytes != 226<<20 || p.NVLBytes != 126<<20 || p.RowSegmentBytes != 112<<20 || p.ElasticSMs != 24 || p.Tokens != 0 || p.MaxTokens != 0 {
		t.Errorf("%+v", p)
	}
	if p.Library != "" && (p.TotalBytes < p.NVLBytes+p.PrivateBytes || p.PrivateBytes == 0) {
		t.Errorf("workspace %d of %d", p.PrivateBytes, p.TotalBytes)
	}
	p = planned(t, "--ranks", "4", "--engine", "cpu", "--elastic-tokens", "4096", "--fp8", "--single-reduction")
	if p.ElasticBytes != 450<<20 || p.RowSegmentBytes != 0 {
		t.Errorf("%+v", p)
	}
	out, stderr, code := deepep(t, "plan", "--ranks", "4", "--engine", "cpu", "--elastic-tokens", "4096")
	if code != 0 || !strings.Contains(out, "226.0 MiB") || !strings.Contains(out, "V2: staging") {
		t.Errorf("%d %s %s", code, out, stderr)
	}
}

// The largest B fits, and one more does not.
func TestPlanLargestB(t *testing.T) {
	for _, c := range []struct {
		args  []string
		bound string
	}{
		{[]string{"--ranks", "8", "--memory", "4GiB"}, "memory"},
		{[]string{"--ranks", "64", "--memory", "7.5g"}, "memory"},
		{[]string{"--ranks", "16", "--experts", "16", "--hidden", "128", "--memory", "1TiB"}, "depth of a queue pair"},
		{[]string{"--ranks", "1", "--experts", "1", "--hidden", "8", "--memory", "1024TiB"}, "largest B"},
	} {
		p := planned(t, c.args...)
		if !strings.Contains(p.LimitedBy, c.bound) {
			t.Errorf("%v: limited by %q, want %q", c.args, p.LimitedBy, c.bound)
		}
		if c.bound != "memory" {
			continue
		}
		s := shape{ranks: p.Ranks, experts: p.Experts, hidden: p.Hidden, topK: p.TopK, tokens: p.Tokens, engine: "cpu"}
		for extra, want := range map[int]bool{0: true, 1: false} {
			s.maxTokens = p.LargestB + extra
			again, err := s.plan()
			if err != nil {
				t.Fatal(err)
			}
			if fits := again.TotalBytes <= p.MemoryBytes; fits != want {
				t.Errorf("%v: B = %d takes %d of %d", c.args, s.maxTokens, again.TotalBytes, p.MemoryBytes)
			}
		}
	}
	if p := planned(t, "--memory", "1M"); p.LargestB != 0 || !strings.Contains(p.LimitedBy, "even B = 1") {
		t.Errorf("B = %d in 1 MiB", p.LargestB)
	}
}

func TestPlanTable(t *testing.T) {
	out, _, code := deepep(t, "plan", "--ranks", "64", "--memory", "8GiB", "--engine", "cpu")
	for _, want := range []string{"64 ranks on 8 nodes, engine cpu", "num_nvl_bytes", "libdeepep_cpu.so: flags and counts", "1m40s", "queue pairs", "24 to each of 56 ranks",
		"NVSHMEM_QP_DEPTH", "rank 0: 8 9 10 11 12 13 14 15 16 … 61 62 63", "Largest B in 8.0 GiB:", "bound by memory"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	out, _, _ = deepep(t, "plan", "--ranks", "16", "--experts", "16", "--hidden", "128", "--max-tokens", "20000", "--engine", "cpu")
	if !strings.Contains(out, "at most 32768") {
		t.Errorf("a depth that does not exist is not named:\n%s", out)
	}
	t.Setenv("DEEPEP_KERNELS", t.TempDir())
	out, _, code = deepep(t, "plan", "--ranks", "16", "--engine", "cuda", "--nics", "2")
	if code != 0 || !strings.Contains(out, "No kernel library can be loaded") || !strings.Contains(out, "on each NIC of a rank, which has 2") {
		t.Errorf("code %d:\n%s", code, out)
	}
}

// What NVSHMEM is told of the NICs, and what it cannot have together, without a GPU or a NIC.
func TestPlanShowsTheSettingsOfNICs(t *testing.T) {
	t.Setenv("DEEPEP_KERNELS", t.TempDir())
	arguments := []string{"plan", "--ranks", "16", "--engine", "cuda"}
	out, _, code := deepep(t, arguments...)
	if code != 0 || !strings.Contains(out, "of a rank: the nearest; service level 0, traffic class 0") {
		t.Errorf("code %d:\n%s", code, out)
	}
	for name, value := range map[string]string{"DEEPEP_NUM_NICS": "2", "DEEPEP_NICS": "mlx5_0,mlx5_1:1", "DEEPEP_SERVICE_LEVEL": "3", "NVSHMEM_IB_TRAFFIC_CLASS": "106"} {
		t.Setenv(name, value)
	}
	out, _, code = deepep(t, arguments...)
	if code != 0 || !strings.Contains(out, "of a rank: mlx5_0,mlx5_1:1; service level 3, traffic class 106") || !strings.Contains(out, "on each NIC of a rank, which has 2") {
		t.Errorf("code %d:\n%s", code, out)
	}
	p := planned(t, arguments[1:]...)
	lines := []string{"NVSHMEM_HCA_LIST=mlx5_0,mlx5_1:1", "NVSHMEM_IB_SL=3", "NVSHMEM_IB_TRAFFIC_CLASS=106", "NVSHMEM_IBGDA_ENABLE_MULTI_PORT=1", "NVSHMEM_ENABLE_MULTI_PORT=1"}
	if p.Network == nil || !slices.Equal(p.Network.Variables, lines) || p.QPsPerNIC != 12 {
		t.Errorf("%+v", p.Network)
	}
	if p := planned(t, "--ranks", "16", "--engine", "cpu"); p.Network != nil {
		t.Errorf("the software RDMA has NICs: %+v", p.Network)
	}
	t.Setenv("NVSHMEM_ENABLE_NIC_PE_MAPPING", "1")
	out, _, code = deepep(t, arguments...)
	if code != 0 || !strings.Contains(out, "DEEPEP_NUM_NICS: it asks for 2 NICs a rank, and NVSHMEM gives each rank one") || !strings.Contains(out, "a rank, which has 1") {
		t.Errorf("code %d:\n%s", code, out)
	}
	t.Setenv("NVSHMEM_IB_SL", "4")
	if _, stderr, code := deepep(t, arguments...); code == 0 || !strings.Contains(stderr, `variable NVSHMEM_IB_SL: got "4", allowed "3", which DEEPEP_SERVICE_LEVEL says`) {
		t.Errorf("code %d, %q", code, stderr)
	}
}

// The command reads the settings that construction reads, and refuses what it refuses.
func TestPlanReadsTheSettings(t *testing.T) {
	for name, want := range map[string]string{"NUM_MAX_NVL_PEERS=4": "16 ranks on 4 nodes", "DEEPEP_NUM_QPS_PER_RANK=3": "3 to each of 8 ranks",
		"NVSHMEM_QP_DEPTH=8192": "8192", "DEEPEP_TIMEOUT_MS=7000": "7s"} {
		t.Run(name, func(t *testing.T) {
			variable, value, _ := strings.Cut(name, "=")
			if out, _, _ := deepep(t, "plan", "--ranks", "16"); strings.Contains(out, want) {
				t.Errorf("%q is there without the setting", want)
			}
			t.Setenv(variable, value)
			if out, _, code := deepep(t, "plan", "--ranks", "16"); code != 0 || !strings.Contains(out, want) {
				t.Errorf("%q is not in\n%s", want, out)
			}
		})
	}
	t.Setenv("DEEP_EP_NUM_MAX_RDMA_TOKENS", "64")
	if _, stderr, code := deepep(t, "plan", "--ranks", "16"); code == 0 || !strings.Contains(stderr, "DEEPEP_NUM_MAX_RDMA_TOKENS = 64") {
		t.Errorf("128 tokens: code %d, %q", code, stderr)
	}
}

func TestPlanRefusesArgumentsOutOfRange(t *testing.T) {
	for flag, allowed := range map[string]string{"rank=8": "0 to 7", "rank=-1": "0 to", "nics=65": "0 to 64", "qps=2000": "to 1024"} {
		if _, stderr, code := deepep(t, "plan", "--ranks", "8", "--ranks-per-node", "4", "--"+flag); code == 0 || !strings.Contains(stderr, allowed) {
			t.Errorf("--%s: code %d, %q", flag, code, stderr)
		}
	}
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]uint64{"80GiB": 80 << 30, "512M": 512 << 20, "1.5g": 3 << 29, "4096": 4096, "7 kb": 7 << 10, "2TiB": 2 << 40} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("%q: %d %v", text, got, err)
		}
	}
	for _, bad := range []string{"", "x", "-1", "0", "1e30", "NaN", "Inf", "9999999T", "GiB"} {
		if got, err := parseSize(bad); err == nil {
			t.Errorf("%q: %d", bad, got)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	f.Add("80GiB")
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := parseSize(s); err == nil && n > math.MaxInt64 {
			t.Errorf("%q: %d", s, n)
		}
	})
}
