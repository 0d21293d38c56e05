package core

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/plan"
)

// environment is a set of variables.
type environment map[string]string

func (e environment) set(t *testing.T) {
	for name, value := range e {
		t.Setenv(name, value)
	}
}

// plannedSettings are settings that decide about a buffer.
var plannedSettings = []environment{
	{},
	{"NUM_MAX_NVL_PEERS": "2"},
	{"DEEPEP_NUM_MAX_NVL_PEERS": "1", "DEEPEP_NUM_QPS_PER_RANK": "4"},
	{"NUM_MAX_NVL_PEERS": "2", "NVSHMEM_QP_DEPTH": "4096", "DEEPEP_NUM_NICS": "2"},
	{"NUM_MAX_NVL_PEERS": "2", "DEEP_EP_NUM_MAX_RDMA_TOKENS": "1000"},
	{"NUM_MAX_NVL_PEERS": "2", "NUM_MAX_RDMA_PEERS": "2", "NUM_WORKSPACE_BYTES": "33554432"},
	{"DEEPEP_TIMEOUT_MS": "21000", "DEEPEP_FIRST_TIMEOUT_MS": "22000"},
	{"NUM_MAX_NVL_PEERS": "2", "DEEPEP_ZERO_COPY_BYTES": "4096", "DEEPEP_STATS": "off"},
}

// plannedShapes are groups, buffers and calls.
func plannedShapes() (all []PlanOptions) {
	for _, size := range []int{1, 2, 4} {
		all = append(all,
			PlanOptions{Size: size, NumTokens: 64, Hidden: 256, NumTopK: 4, NumExperts: 8},
			PlanOptions{Size: size, NumMaxTokens: 16, Hidden: 256, NumTopK: 4, NumExperts: 8},
			PlanOptions{Size: size, NumTokens: 100, NumMaxTokens: 5, Hidden: 520, NumTopK: 2, NumExperts: 16, NumSMs: 4, Buffer: BufferOptions{NumQPsPerRank: 7, Shrink: true}},
			PlanOptions{Size: size, NumMaxTokens: 8, Hidden: 128, NumTopK: 1, NumExperts: 4, Buffer: BufferOptions{DisableNVLink: true, Timeout: 9 * time.Second}},
			PlanOptions{Size: size, Buffer: BufferOptions{NumNVLBytes: 1<<20 + 1, NumRDMABytes: 70001, NumQPsPerRank: 1}})
	}
	for _, size := range []int{2, 4} {
		all = append(all,
			PlanOptions{Size: size, Elastic: &ElasticOptions{NumMaxTokens: 40, Hidden: 256, NumTopK: 4}},
			PlanOptions{Size: size, Elastic: &ElasticOptions{NumBytes: 3 * ElasticUnit, FP8: true}})
	}
	// One machine's ranks as other nodes than the settings say.
	return append(all, PlanOptions{Size: 6, NumNVLPeers: 3, NumTokens: 32, NumMaxTokens: 4, Hidden: 384, NumTopK: 3, NumExperts: 12})
}

// Every number that the plan says of a buffer is that of the buffer which is then made, on every rank.
func TestPlanIsWhatIsBuilt(t *testing.T) {
	needEngine(t)
	const wanted = 60
	compared := 0
	for i, settings := range plannedSettings {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			settings.set(t)
			for _, o := range plannedShapes() {
				if strings.Contains(settings["NUM_MAX_NVL_PEERS"], "2") && o.NumNVLPeers == 0 && o.Size%2 != 0 && o.Size > 2 {
					continue
				}
				compared += comparePlan(t, o)
			}
		})
	}
	if compared < wanted {
		t.Errorf("%d buffers were compared with their plans, want %d", compared, wanted)
	}
}

// comparePlan makes the planned buffer and returns 1.
func comparePlan(t *testing.T, o PlanOptions) int {
	t.Helper()
	if o.Buffer.Engine == "" {
		o.Buffer.Engine, o.Buffer.Device = EngineCPU, -1
	}
	o.RanksOfHost = o.Size
	exchangers := NewLocal(o.Size)
	var ranks sync.WaitGroup
	for rank := range o.Size {
		ranks.Go(func() {
			defer reportFail(t)
			m, o := &member{t: t, rank: rank}, o
			o.Rank = rank
			planned, err := Plan(o)
			m.must(err)
			g, err := NewGroup(context.Background(), GroupOptions{Exchanger: exchangers[rank], NumNVLPeers: o.NumNVLPeers, Timeout: 20 * time.Second})
			m.must(err)
			defer func() { m.must(g.Destroy()) }()
			b := o.Buffer
			b.NumNVLBytes, b.NumRDMABytes, b.LowLatency = planned.NVLBytes, planned.RDMABytes, planned.LowLatency
			if o.Elastic != nil { // made by the sizes that are asked for before there is a group
				e := *o.Elastic
				e.NumRanks = o.Size
				sizes, err := ElasticSizes(e)
				m.must(err)
				b.NumNVLBytes, b.NumRDMABytes = sizes.NumNVLBytes, sizes.NumRDMABytes
				m.check(planned.Elastic.NumBytes == sizes.NumBytes && planned.Elastic.NumSMs == sizes.NumSMs, "%+v, %+v", planned.Elastic, sizes)
			}
			made, err := g.NewBuffer(context.Background(), b)
			m.must(err)
			defer func() { m.must(made.Destroy()) }()
			got := made.Info()
			m.check(got.Ready && planned.Library == "libdeepep_"+o.Buffer.Engine+".so" && planned.ControlBytes > 0 && planned.Reason == "", "%+v", planned)
			want := planned.Info
			want.Device, want.NumDeviceSMs, want.DeviceName, want.ISA, want.CommStream, want.Ready = got.Device, got.NumDeviceSMs, got.DeviceName, got.ISA, got.CommStream, true
			if !got.HostStream { // a device allocates in units of 2 MiB
				want.TotalBytes = (want.TotalBytes + 2<<20 - 1) >> 21 << 21
			}
			m.check(got == want, "%+v:\nplanned %+v\nmade    %+v", o, want, got)
			usable(m, made, &o)
		})
	}
	ranks.Wait()
	return 1
}

// usable makes the calls that the plan was for.
func usable(m *member, b *Buffer, o *PlanOptions) {
	w := WarmupOptions{}
	if o.NumTokens > 0 {
		w.NumTokens, w.Hidden, w.NumTopK, w.NumExperts = 3, int32(o.Hidden), int32(o.NumTopK), int32(o.NumExperts)
	}
	if o.Elastic != nil {
		w.NumTokens, w.Hidden, w.NumTopK, w.NumExperts = 3, 64, 2, int32(2*o.Size)
	}
	if o.NumMaxTokens > 0 && o.Hidden%128 == 0 {
		w.LLNumMaxTokens, w.LLHidden, w.LLNumTopK, w.LLNumExperts = int32(o.NumMaxTokens), int32(o.Hidden), int32(o.NumTopK), int32(o.NumExperts)
	}
	_, err := b.Warmup(w)
	m.must(err)
}

// Each setting changes the plan where it changes the buffer. What a plan without settings says stands beside it.
func TestEverySettingReachesThePlan(t *testing.T) {
	needEngine(t)
	o := PlanOptions{Size: 16, Rank: 3, NumTokens: 4096, NumMaxTokens: 128, Hidden: 7168, NumTopK: 8, NumExperts: 256, Buffer: BufferOptions{Engine: EngineCPU, Device: -1}}
	for _, c := range []struct {
		settings environment
		what     func(p BufferPlan) any
		before   any
		after    any
	}{
		{environment{"NUM_MAX_NVL_PEERS": "16"}, func(p BufferPlan) any { return p.NumRDMARanks }, 2, 1},
		{environment{"DEEPEP_NUM_MAX_NVL_PEERS": "4"}, func(p BufferPlan) any { return p.QPPeers }, 8, 12},
		{environment{"DEEPEP_NUM_QPS_PER_RANK": "4"}, func(p BufferPlan) any { return p.QPs }, 24 * 8, 4 * 8},
		{environment{"NVSHMEM_QP_DEPTH": "4096"}, func(p BufferPlan) any { return p.QPDepth }, 1024, 4096},
		{environment{"DEEP_EP_NUM_MAX_RDMA_TOKENS": "2048"}, func(p BufferPlan) any { return p.QPDepth }, 1024, 8192},
		{environment{"DEEPEP_TIMEOUT_MS": "1500"}, func(p BufferPlan) any { return p.Timeout }, 100 * time.Second, 1500 * time.Millisecond},
		{environment{"DEEPEP_FIRST_TIMEOUT_MS": "2500"}, func(p BufferPlan) any { return p.FirstTimeout }, 300 * time.Second, 2500 * time.Millisecond},
	} {
		t.Run(fmt.Sprint(c.settings), func(t *testing.T) {
			before, err := Plan(o)
			if err != nil {
				t.Fatal(err)
			}
			c.settings.set(t)
			after, err := Plan(o)
			if err != nil {
				t.Fatal(err)
			}
			if c.what(before) != c.before || c.what(after) != c.after {
				t.Errorf("%v without the setting, %v with it; want %v and %v", c.what(before), c.what(after), c.before, c.after)
			}
		})
	}
}

// Plan refuses what construction and the calls refuse, in the same words.
func TestPlanRefusesWhatConstructionRefuses(t *testing.T) {
	needEngine(t)
	both := environment{"NUM_MAX_NVL_PEERS": "2"}
	for _, c := range []struct {
		settings environment
		o        PlanOptions
	}{
		{environment{"NUM_MAX_RDMA_PEERS": "1"}, PlanOptions{Size: 4, Buffer: BufferOptions{NumNVLBytes: 1 << 20}}},
		{environment{"NUM_WORKSPACE_BYTES": "100"}, PlanOptions{Size: 4, Buffer: BufferOptions{NumNVLBytes: 1 << 20}}},
		{environment{"NVSHMEM_QP_DEPTH": "1024", "DEEP_EP_NUM_MAX_RDMA_TOKENS": "2048"}, PlanOptions{Size: 4, Buffer: BufferOptions{NumNVLBytes: 1 << 20}}},
		{environment{}, PlanOptions{Size: 3, Buffer: BufferOptions{NumNVLBytes: 1 << 20}}},
		{environment{}, PlanOptions{Size: 2, Buffer: BufferOptions{NumQPsPerRank: 1025}}},
		{environment{"DEEPEP_QP_DEPTH": "many"}, PlanOptions{Size: 2}},
	} {
		t.Run(fmt.Sprint(c.settings), func(t *testing.T) {
			maps.Copy(c.settings, both)
			c.settings.set(t)
			c.o.Buffer.Engine, c.o.Buffer.Device = EngineCPU, -1
			_, planned := Plan(c.o)
			if !errors.Is(planned, ErrInvalidArgument) {
				t.Fatalf("planned: %v", planned)
			}
			exchangers := NewLocal(c.o.Size)
			var ranks sync.WaitGroup
			for rank := range c.o.Size {
				ranks.Go(func() {
					built := func() error {
						g, err := NewGroup(context.Background(), GroupOptions{Exchanger: exchangers[rank], Timeout: 5 * time.Second})
						if err != nil {
							return err
						}
						defer g.Destroy()
						b, err := g.NewBuffer(context.Background(), c.o.Buffer)
						if err == nil {
							_ = b.Destroy()
						}
						return err
					}()
					if built == nil || !strings.HasSuffix(built.Error(), planned.Error()) {
						t.Errorf("rank %d: planned %v\nbuilt %v", rank, planned, built)
					}
				})
			}
			ranks.Wait()
		})
	}
	for name, o := range map[string]PlanOptions{
		"rank":                             {Size: 2, Rank: 2},
		"num_sms":                          {Size: 2, NumSMs: 3, NumTokens: 1, Hidden: 8, NumTopK: 1, NumExperts: 2},
		"hidden":                           {Size: 2, NumTokens: 1, Hidden: 7, NumTopK: 1, NumExperts: 2},
		"num_experts":                      {Size: 2, NumMaxTokens: 1, Hidden: 8, NumTopK: 1, NumExperts: 3},
		"num_topk":                         {Size: 2, NumMaxTokens: 1, Hidden: 8, NumTopK: 0, NumExperts: 4},
		"num_max_dispatch_tokens_per_rank": {Size: 2, NumMaxTokens: 1 << 25, Hidden: 8, NumTopK: 1, NumExperts: 4},
		"num_rdma_bytes":                   {Size: 2, NumMaxTokens: 128, Hidden: 512, NumTopK: 1, NumExperts: 4, Buffer: BufferOptions{NumRDMABytes: 1}},
		"engine":                           {Size: 2, Buffer: BufferOptions{Engine: "tpu"}},
	} {
		if _, err := Plan(o); !errors.Is(err, ErrInvalidArgument) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A plan needs no kernel library: the sizes that users pass do not depend on it.
func TestPlanWithoutALibrary(t *testing.T) {
	t.Setenv("DEEPEP_KERNELS", t.TempDir())
	p, err := Plan(PlanOptions{Size: 8, NumTokens: 4096, NumMaxTokens: 128, Hidden: 7168, NumTopK: 8, NumExperts: 256, Buffer: BufferOptions{Engine: EngineCUDA}})
	hint, _ := plan.LowLatencyBytes(128, 7168, 8, 256, nil)
	if err != nil || p.Library != "" || !strings.Contains(p.Reason, "libdeepep_cuda.so") || p.PrivateBytes != 0 || p.RDMABytes != hint || p.TotalBytes < p.NVLBytes+hint {
		t.Errorf("%+v %v", p, err)
	}
	if p.DispatchSMsBF16 != plan.NumSMs(plan.SMQuery{Topology: plan.Topology{Ranks: 8, Peers: 8}, RowBytes: 14336, Tokens: 4096, TopK: 8, ComputeCapability: 90}) {
		t.Errorf("%d SMs", p.DispatchSMsBF16)
	}
	t.Setenv("DEEPEP_NUM_NICS", "3")
	p, err = Plan(PlanOptions{Size: 16, Hidden: 7168, NumTopK: 8, NumExperts: 256, NumMaxTokens: 128, Buffer: BufferOptions{Engine: EngineCUDA}})
	if err != nil || p.NICs != 3 || p.QPsPerPeer != 24 || p.QPsPerNIC != 8 || p.QPPeers != 8 || p.QPs != 24*15 || p.QPsUsed != 16 {
		t.Errorf("%+v %v", p, err)
	}
}

// A V2 plan refuses what ElasticSizes refuses, and sizes of another buffer beside it.
func TestPlanOfV2Refuses(t *testing.T) {
	for _, c := range []struct {
		o    PlanOptions
		want string
	}{
		{PlanOptions{Size: 2, Elastic: &ElasticOptions{Hidden: 64}}, "num_max_tokens_per_rank"},
		{PlanOptions{Size: 2, Elastic: &ElasticOptions{NumBytes: 5}}, "num_bytes"},
		{PlanOptions{Size: 2, Elastic: &ElasticOptions{NumBytes: ElasticUnit, NumAllocatedQPs: -1}}, "num_allocated_qps"},
		{PlanOptions{Size: 2, Elastic: &ElasticOptions{NumBytes: ElasticUnit}, Buffer: BufferOptions{NumNVLBytes: 1}}, "elastic"},
		{PlanOptions{Size: 2, Elastic: &ElasticOptions{NumBytes: ElasticUnit}, NumMaxTokens: 4, NumExperts: 2, Hidden: 128}, "elastic"},
	} {
		if _, err := Plan(c.o); !errors.Is(err, ErrInvalidArgument) || !strings.Contains(err.Error(), "argument "+c.want+":") {
			t.Errorf("%s: %v", c.want, err)
		}
		if c.want == "elastic" {
			continue
		}
		e := *c.o.Elastic
		e.NumRanks = c.o.Size
		if _, err := ElasticSizes(e); !errors.Is(err, ErrInvalidArgument) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("sizes, %s: %v", c.want, err)
		}
	}
	if _, err := ElasticSizes(ElasticOptions{NumMaxTokens: 4, Hidden: 64}); !errors.Is(err, ErrInvalidArgument) || !strings.Contains(err.Error(), "num_ranks") {
		t.Errorf("no ranks: %v", err)
	}
}
