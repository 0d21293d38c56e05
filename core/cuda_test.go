package core

import (
	"testing"
	"time"

	"github.com/deepep-go/deepep/core/op"
)

// The same engine over the CUDA library: every operation once, on memory and streams of a device that the ranks share.
func TestCUDA(t *testing.T) {
	info, err := QueryEngine(EngineCUDA)
	if err != nil {
		t.Fatal(err)
	}
	if !info.Available {
		t.Skipf("needs a GPU and the CUDA kernel library: %s", info.Reason)
	}
	o := roomFor(t, 2, 16, 512, 8)
	o.Engine, o.Device, o.NumNVLBytes, o.Preinitialize, o.Shrink = EngineCUDA, 0, 16<<20, true, true
	onRanks(t, 2, o, func(m *member) {
		i := m.Info()
		m.check(i.Engine == EngineCUDA && !i.HostStream && i.CommStream != 0 && i.NumDeviceSMs > 0, "%+v", i)
		for _, fp8 := range []bool{false, true} {
			m.warmup(WarmupOptions{NumTokens: 64, Hidden: 512, NumTopK: 3, NumExperts: 8, LLNumMaxTokens: 16, LLHidden: 512, LLNumTopK: 3, LLNumExperts: 8, UseFP8: op.Bool(fp8)})
		}
		comm := i.CommStream
		done := m.event()
		m.must(m.Barrier(&Call{Stream: comm, Event: done}))
		m.must(done.Wait(-1))
		m.must(m.Clean(16, 512, 8, &Call{Stream: comm}))
		m.must(m.UpdateMask(0, false, &Call{Stream: comm}))
		m.must(m.CleanMask(&Call{Stream: comm, Event: done}))
		m.must(done.Wait(10 * time.Second))
		m.must(done.Destroy())
		for _, number := range []Operation{OpLayout, OpNotify, OpDispatch, OpCombine, OpLLDispatch, OpLLCombine} {
			s, err := m.Stats(number)
			m.must(err)
			calls := uint64(2)
			if number == OpLLDispatch || number == OpLLCombine {
				calls = 4 // each warm-up fills both slots
			}
			m.check(s.Calls == calls && s.Errors == 0, "%s: %+v", number, s)
			if m.rank == 0 {
				t.Logf("%s: %v %v", number, s.P50, s.Max)
			}
		}
		err := m.LowLatencyDispatch(&LLDispatchArgs{NumMaxTokens: 2, Hidden: 512, NumTopK: 40, NumExperts: 8}, nil)
		m.check(err != nil && err.Error() == "argument num_topk: got 40, allowed 1 to 32 with libdeepep_cuda.so", "the library's limit: %v", err)
		segment, err := m.NewSegment(t.Context(), 1<<20)
		m.must(err)
		m.must(segment.Release())
	})
}
