package env_test

import (
	"errors"
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

func from(vars map[string]string) func(string) string {
	return func(n string) string { return vars[n] }
}

func TestDefaults(t *testing.T) {
	got, err := env.Load(from(nil))
	want := env.Settings{
		Engine: "auto", Timeout: 100 * time.Second, FirstTimeout: 300 * time.Second, LogLevel: "warn",
		MaxNVLPeers: 8, Heartbeat: 100 * time.Millisecond, Stats: true, ISA: "auto", RDMA: env.RDMA{MaxPeers: 1024}, RowSegment: -1,
		PreinitBytes: 256 << 20,
	}
	if err != nil || got != want {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
}

func TestEverySettingIsRead(t *testing.T) {
	got, err := env.Load(from(map[string]string{
		"DEEPEP_ENGINE": "CPU", "DEEPEP_KERNELS": "/opt/k", "DEEPEP_TIMEOUT_MS": "1500", "DEEPEP_FIRST_TIMEOUT_MS": " 2500\n",
		"DEEPEP_LOG": "Debug:/tmp/a:b.log", "DEEPEP_NUM_MAX_NVL_PEERS": "4", "NUM_MAX_NVL_PEERS": "2", "DEEPEP_INTERFACE": "ib0",
		"DEEPEP_HEARTBEAT_MS": "20", "DEEPEP_STATS": "off", "DEEPEP_ISA": "avx2", "DEEPEP_PREINIT_BYTES": "12345",
		"DEEPEP_NUM_MAX_RDMA_PEERS": "20", "NUM_MAX_RDMA_PEERS": "21", "DEEPEP_NUM_WORKSPACE_BYTES": "33554432", "DEEPEP_NUM_QPS_PER_RANK": "12",
		"DEEPEP_QP_DEPTH": "2048", "NVSHMEM_QP_DEPTH": "512", "DEEPEP_NUM_MAX_RDMA_TOKENS": "256", "DEEPEP_QP_ORDER": "linear", "DEEPEP_SOFTWARE_RDMA": "18446744073709551615:Late",
		"DEEPEP_NUM_NICS": "2", "DEEPEP_NICS": "mlx5_0:1,mlx5_1", "DEEPEP_SERVICE_LEVEL": "3", "DEEPEP_TRAFFIC_CLASS": "106", "DEEPEP_ZERO_COPY_BYTES": "0", "DEEPEP_LL_TRANSFER": "Copy", "DEEPEP_LL_SMS": "32", "DEEPEP_NORMAL_TRANSFER": "copy",
	}))
	want := env.Settings{
		Engine: "cpu", Kernels: "/opt/k", Timeout: 1500 * time.Millisecond, FirstTimeout: 2500 * time.Millisecond,
		LogLevel: "debug", LogPath: "/tmp/a:b.log", MaxNVLPeers: 4, Interface: "ib0", Heartbeat: 20 * time.Millisecond,
		Stats: false, ISA: "avx2", PreinitBytes: 12345, LLTransfer: plan.CopyTransfer, LLSMs: 32, NormalCopies: true,
		RDMA: env.RDMA{MaxPeers: 20, WorkspaceBytes: 32 << 20, QPs: 12, QPDepth: 2048, MaxTokens: 256, Order: plan.Linear, DepthFrom: "DEEPEP_QP_DEPTH", TokensFrom: "DEEPEP_NUM_MAX_RDMA_TOKENS", Seed: math.MaxUint64, Late: true,
			NICs: env.NICs{PerRank: 2, Names: "mlx5_0:1,mlx5_1", NamesFrom: "DEEPEP_NICS", ServiceLevel: 3, TrafficClass: 106}},
	}
	if err != nil || got != want {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
}

func TestOldNameOfNVLPeers(t *testing.T) {
	got, err := env.Load(from(map[string]string{"NUM_MAX_NVL_PEERS": "2"}))
	if err != nil || got.MaxNVLPeers != 2 {
		t.Errorf("got %d, %v", got.MaxNVLPeers, err)
	}
	_, err = env.Load(from(map[string]string{"NUM_MAX_NVL_PEERS": "two"}))
	if err == nil || !strings.HasPrefix(err.Error(), "variable NUM_MAX_NVL_PEERS: ") {
		t.Errorf("the error must name the variable that was set: %v", err)
	}
}

// Load reads the names of V1's sources and of NVSHMEM after the library's, in a fixed order.
func TestOldNamesOfRDMASettings(t *testing.T) {
	for _, c := range []struct {
		vars map[string]string
		want env.RDMA
	}{
		{map[string]string{"NUM_MAX_RDMA_PEERS": "20"}, env.RDMA{MaxPeers: 20}},
		{map[string]string{"NUM_WORKSPACE_BYTES": "4096"}, env.RDMA{MaxPeers: 1024, WorkspaceBytes: 4096}},
		{map[string]string{"DEEPEP_NUM_WORKSPACE_BYTES": "1", "NUM_WORKSPACE_BYTES": "2"}, env.RDMA{MaxPeers: 1024, WorkspaceBytes: 1}},
		{map[string]string{"NVSHMEM_IBGDA_QP_DEPTH": "256"}, env.RDMA{MaxPeers: 1024, QPDepth: 256, DepthFrom: "NVSHMEM_IBGDA_QP_DEPTH"}},
		{map[string]string{"NVSHMEM_IBGDA_QP_DEPTH": "256", "NVSHMEM_QP_DEPTH": "128"}, env.RDMA{MaxPeers: 1024, QPDepth: 128, DepthFrom: "NVSHMEM_QP_DEPTH"}},
		{map[string]string{"DEEPEP_QP_DEPTH": "7", "NVSHMEM_IBGDA_QP_DEPTH": "256"}, env.RDMA{MaxPeers: 1024, QPDepth: 7, DepthFrom: "DEEPEP_QP_DEPTH"}},
		{map[string]string{"DEEP_EP_NUM_MAX_RDMA_TOKENS": "64"}, env.RDMA{MaxPeers: 1024, MaxTokens: 64, TokensFrom: "DEEP_EP_NUM_MAX_RDMA_TOKENS"}},
		{map[string]string{"DEEPEP_NUM_MAX_RDMA_TOKENS": "65", "DEEP_EP_NUM_MAX_RDMA_TOKENS": "64"}, env.RDMA{MaxPeers: 1024, MaxTokens: 65, TokensFrom: "DEEPEP_NUM_MAX_RDMA_TOKENS"}},
		{map[string]string{"DEEPEP_QP_ORDER": "Planned"}, env.RDMA{MaxPeers: 1024, Order: plan.Planned}},
		{map[string]string{"NVSHMEM_IB_SL": "5", "NVSHMEM_IB_TRAFFIC_CLASS": "96"}, env.RDMA{MaxPeers: 1024, NICs: env.NICs{ServiceLevel: 5, TrafficClass: 96}}},
		{map[string]string{"EP_OVERRIDE_RDMA_SL": "4", "DEEPEP_SERVICE_LEVEL": "4"}, env.RDMA{MaxPeers: 1024, NICs: env.NICs{ServiceLevel: 4}}},
		{map[string]string{"NVSHMEM_HCA_LIST": "^mlx5_2"}, env.RDMA{MaxPeers: 1024, NICs: env.NICs{Names: "^mlx5_2", NamesFrom: "NVSHMEM_HCA_LIST"}}},
		{map[string]string{"NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:2"}, env.RDMA{MaxPeers: 1024, NICs: env.NICs{Mapping: "mlx5_0:1:2", MappingFrom: "NVSHMEM_HCA_PE_MAPPING", SingleFrom: "NVSHMEM_HCA_PE_MAPPING"}}},
		{map[string]string{"DEEPEP_SOFTWARE_RDMA": "7"}, env.RDMA{MaxPeers: 1024, Seed: 7}},
	} {
		if got, err := env.Load(from(c.vars)); err != nil || got.RDMA != c.want {
			t.Errorf("%v: got %+v, %v\nwant %+v", c.vars, got.RDMA, err, c.want)
		}
	}
	if _, err := env.Load(from(map[string]string{"NVSHMEM_QP_DEPTH": "deep"})); err == nil || !strings.HasPrefix(err.Error(), "variable NVSHMEM_QP_DEPTH: ") {
		t.Errorf("the error must name the variable that was set: %v", err)
	}
}

func TestBadValuesNameVariableValueAllowed(t *testing.T) {
	for _, c := range []struct{ name, value, allowed string }{
		{"DEEPEP_ENGINE", "tpu", "auto, cpu, cuda"},
		{"DEEPEP_KERNELS", "a\x00b", "a path of at most 4095 bytes without NUL"},
		{"DEEPEP_TIMEOUT_MS", "0", "a whole number from 1 to 604800000"},
		{"DEEPEP_FIRST_TIMEOUT_MS", "1e3", "a whole number from 1 to 604800000"},
		{"DEEPEP_LOG", "loud", "debug, info, warn, error, off, each with an optional :path after it"},
		{"DEEPEP_NUM_MAX_NVL_PEERS", "0", "a whole number from 1 to 1024"},
		{"DEEPEP_INTERFACE", "eth 0", "the name or address of a network interface"},
		{"DEEPEP_HEARTBEAT_MS", "5", "a whole number from 10 to 1000"},
		{"DEEPEP_STATS", "maybe", "on, off"},
		{"DEEPEP_NUM_MAX_RDMA_PEERS", "0", "a whole number from 1 to 1024"},
		{"DEEPEP_NUM_WORKSPACE_BYTES", "32MB", "a whole number from 1 to 140737488355328"},
		{"DEEPEP_NUM_QPS_PER_RANK", "1025", "a whole number from 1 to 1024"},
		{"DEEPEP_QP_DEPTH", "65536", "a whole number from 1 to 32768"},
		{"DEEP_EP_NUM_MAX_RDMA_TOKENS", "16384", "a whole number from 1 to 16383"},
		{"DEEPEP_QP_ORDER", "random", "auto, linear, planned, rotated, spread"},
		{"DEEPEP_LL_TRANSFER", "dma", "auto, sm, copy, stream"},
		{"DEEPEP_LL_SMS", "-1", "a whole number from 0 to 1024"},
		{"DEEPEP_NORMAL_TRANSFER", "auto", "sm, copy"},
		{"DEEPEP_SERVICE_LEVEL", "16", "a whole number from 0 to 15"},
		{"NVSHMEM_IB_TRAFFIC_CLASS", "256", "a whole number from 0 to 255"},
		{"DEEPEP_NICS", "mlx5_0;mlx5_1", plan.NICListForm},
		{"NVSHMEM_HCA_LIST", "mlx5_0:zero", plan.NICListForm},
		{"DEEPEP_NIC_MAPPING", "mlx5_0:1", plan.NICMappingForm},
		{"DEEPEP_SOFTWARE_RDMA", "7:early", "a seed (a whole number), with an optional :late after it"},
		{"DEEPEP_SOFTWARE_RDMA", "late", "a seed (a whole number), with an optional :late after it"},
		{"DEEPEP_SOFTWARE_RDMA", "7:", "a seed (a whole number), with an optional :late after it"},
		{"DEEPEP_ISA", "sse9", "auto, baseline, avx2, avx512"},
	} {
		_, err := env.Load(from(map[string]string{c.name: c.value}))
		if !errors.Is(err, status.ErrInvalidArgument) {
			t.Errorf("%s=%q: %v", c.name, c.value, err)
			continue
		}
		shown := strings.ReplaceAll(c.value, "\x00", `\x00`)
		if want := "variable " + c.name + `: got "` + shown + `", allowed ` + c.allowed; err.Error() != want {
			t.Errorf("text %q\nwant %q", err, want)
		}
	}
}

func TestAllBadValuesAtOnce(t *testing.T) {
	_, err := env.Load(from(map[string]string{"DEEPEP_ISA": "x", "DEEPEP_ENGINE": strings.Repeat("ä", 500)}))
	if err == nil || !strings.Contains(err.Error(), "DEEPEP_ISA") || !strings.Contains(err.Error(), "DEEPEP_ENGINE") {
		t.Fatalf("both must be named: %v", err)
	}
	if len(err.Error()) > 400 || !strings.Contains(err.Error(), "ä…") {
		t.Errorf("a long value must be clipped on a character: %d bytes", len(err.Error()))
	}
}

// For every value of a variable, Load returns settings within their limits or an error that names the variable.
func FuzzLoad(f *testing.F) {
	names := []string{
		"DEEPEP_ENGINE", "DEEPEP_KERNELS", "DEEPEP_TIMEOUT_MS", "DEEPEP_FIRST_TIMEOUT_MS", "DEEPEP_LOG", "DEEPEP_NUM_MAX_NVL_PEERS",
		"NUM_MAX_NVL_PEERS", "DEEPEP_INTERFACE", "DEEPEP_HEARTBEAT_MS", "DEEPEP_STATS", "DEEPEP_ISA",
		"NUM_MAX_RDMA_PEERS", "NUM_WORKSPACE_BYTES", "DEEPEP_NUM_QPS_PER_RANK", "NVSHMEM_QP_DEPTH", "DEEPEP_NUM_MAX_RDMA_TOKENS", "DEEPEP_SOFTWARE_RDMA", "DEEPEP_QP_ORDER",
	}
	for i, v := range []string{"cpu", "/x", "100", "+7", "info:/tmp/x", "8", "9", "eth0", "99", "on", "0", "avx512", "\xff:", "-0", "5:late", "33554432", "spread"} {
		f.Add(i, v)
	}
	f.Fuzz(func(t *testing.T, which int, value string) {
		name := names[int(uint(which)%uint(len(names)))]
		s, err := env.Load(from(map[string]string{name: value}))
		if err != nil {
			if !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), name) {
				t.Fatalf("%s=%q: %v", name, value, err)
			}
			return
		}
		if s.Timeout < time.Millisecond || s.FirstTimeout < time.Millisecond || s.Heartbeat < 10*time.Millisecond ||
			s.Heartbeat > time.Second || s.MaxNVLPeers < 1 || s.RDMA.MaxPeers < 1 || s.RDMA.QPDepth < 0 || s.Engine == "" || s.ISA == "" || s.LogLevel == "" {
			t.Fatalf("%s=%q accepted as %+v", name, value, s)
		}
	})
}

// Settings of depth and tokens count only where there are queue pairs, and the fix of the error works as typed.
func TestDepthAndTokensMatterOnlyToQueuePairs(t *testing.T) {
	block := map[string]string{"NVSHMEM_IBGDA_QP_DEPTH": "1024", "DEEP_EP_NUM_MAX_RDMA_TOKENS": "2048"}
	one, two := plan.Topology{Ranks: 8, Peers: 8}, plan.Topology{Ranks: 16, Peers: 8}
	queues := func(g env.Group) (plan.Queues, error) {
		s, err := env.Load(from(block))
		if err != nil {
			t.Fatal(err)
		}
		return s.RDMA.Queues(g)
	}
	for _, g := range []env.Group{{Topology: one}, {Topology: one, LowLatency: true}, {Topology: plan.Topology{Ranks: 1, Peers: 8}, Everywhere: true}} {
		if _, err := queues(g); err != nil {
			t.Errorf("%+v has no queue pair: %v", g, err)
		}
	}
	for _, other := range []map[string]string{nil, {"NVSHMEM_QP_DEPTH": "128"}, {"NVSHMEM_QP_DEPTH": "4096", "DEEPEP_QP_DEPTH": "9"}} {
		for _, g := range []env.Group{{Topology: two}, {Topology: one, LowLatency: true, Everywhere: true}} {
			block = map[string]string{"NVSHMEM_IBGDA_QP_DEPTH": "1024", "DEEP_EP_NUM_MAX_RDMA_TOKENS": "2048"}
			maps.Copy(block, other)
			_, err := queues(g)
			if !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "; fix: export ") {
				t.Fatalf("%+v: %v", g, err)
			}
			_, fix, _ := strings.Cut(err.Error(), "; fix: export ")
			name, value, _ := strings.Cut(fix, "=")
			block[name] = value
			if q, err := queues(g); err != nil || q.Depth != 8192 {
				t.Errorf("%v, %+v: after %q depth %d, %v", other, g, fix, q.Depth, err)
			}
		}
	}
	block = map[string]string{"NUM_MAX_RDMA_PEERS": "1", "DEEPEP_NUM_QPS_PER_RANK": "3"}
	if _, err := queues(env.Group{Topology: two}); err == nil || !strings.Contains(err.Error(), "DEEPEP_NUM_MAX_RDMA_PEERS = 1") {
		t.Errorf("two nodes of one: %v", err)
	}
	if q, err := queues(env.Group{Topology: two, LowLatency: true, QPs: 7}); err != nil || q.PerPeer != 3 {
		t.Errorf("the environment's number: %+v, %v", q, err)
	}
}
