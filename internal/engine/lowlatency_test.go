package engine_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

func TestTickets(t *testing.T) {
	r := newRig(t)
	first, err := r.half(1, 0, 1)
	r.must(err)
	second, err := r.half(1, 0, 1)
	r.must(err)
	if _, err := r.half(1, 0, 1); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "a third has no room") {
		t.Errorf("third send: %v", err)
	}
	if _, err := r.half(3, 0, 1); !errors.Is(err, status.ErrInvalidState) {
		t.Errorf("whole call beside two sends: %v", err)
	}
	if trace := r.read(); strings.Contains(trace, "ll_dispatch #3") {
		t.Errorf("a refused send was launched: %s", trace)
	}
	if _, err := r.half(2, first, 2); !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "argument stream") {
		t.Errorf("receive on another stream: %v", err)
	}
	r.read()
	_, err = r.half(2, second, 1)
	r.must(err)
	_, err = r.half(2, first, 1)
	r.must(err)
	r.expect("receives in any order", "ll_dispatch #2 on 1 phases 2 ticket 1", "record a on 1", "ll_dispatch #1 on 1 phases 2 ticket 0", "record a on 1")
	for _, stale := range []uint32{first, second, 0, 77} {
		if _, err := r.half(2, stale, 1); !errors.Is(err, status.ErrInvalidArgument) {
			t.Errorf("ticket %d: %v", stale, err)
		}
	}
	_, err = r.half(3, 0, 1)
	r.must(err)
	r.expect("whole call", "ll_dispatch #3 on 1 phases 3 ticket 0", "record a on 1")
	_, err = r.send(3, 0, &engine.Call{Stream: 1, Async: true})
	r.must(err)
	r.expect("asynchronous", "record a on 1", "C waits a", "ll_dispatch #4 on C phases 3 ticket 0")
}

// A send whose hook is lost keeps its slot: the second send after it has no room, until a clean.
func TestLostHook(t *testing.T) {
	r := newRig(t)
	lost, err := r.half(1, 0, 1)
	r.must(err)
	_, err = r.half(3, 0, 1)
	r.must(err)
	for range 2 {
		_, err = r.half(3, 0, 1)
		if !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "low_latency_dispatch #1 is without its receive half") || !strings.Contains(err.Error(), "clean_low_latency_buffer") {
			t.Errorf("the second call after a lost hook: %v", err)
		}
	}
	r.must(r.Check())
	r.must(r.Clean(0, 0, 0, &engine.Call{Stream: 1}))
	for range 3 {
		_, err = r.half(3, 0, 1)
		r.must(err)
	}
	if _, err := r.half(2, lost, 1); !errors.Is(err, status.ErrInvalidArgument) {
		t.Errorf("a receive half of before the clean: %v", err)
	}
}

// The newer of two sends may be received first; the older one's slot stays taken.
func TestReceiveOfTheNewerSendFirst(t *testing.T) {
	r := newRig(t)
	older, err := r.half(1, 0, 1)
	r.must(err)
	newer, err := r.half(1, 0, 1)
	r.must(err)
	_, err = r.half(2, newer, 1)
	r.must(err)
	if _, err := r.half(1, 0, 1); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "low_latency_dispatch #1") {
		t.Errorf("a send into a taken slot: %v", err)
	}
	_, err = r.half(2, older, 1)
	r.must(err)
	_, err = r.half(1, 0, 1)
	r.must(err)
}

func TestZeroCopyAlternates(t *testing.T) {
	r := newRig(t)
	var seen []uintptr
	for range 3 {
		at, stride, err := r.NextCombineBuffer(2, 128, 1)
		r.must(err)
		if again, _, _ := r.NextCombineBuffer(2, 128, 1); again != at || stride != 256 {
			t.Errorf("asking twice: %#x then %#x, stride %d", at, again, stride)
		}
		seen = append(seen, at)
		r.must(r.LowLatencyCombine(&op.LLCombineArgs{Phases: 3, Flags: op.LLZeroCopy, NumTokens: 1, NumMaxTokens: 2, Hidden: 128, NumTopK: 1,
			NumExperts: 1, IndexType: op.Int64, TopKIdx: somewhere, TopKWeights: somewhere, SrcInfo: somewhere, LayoutRange: somewhere,
			CombinedX: somewhere + 4096}, &engine.Call{Stream: r.Info().CommStream, Async: true}))
		if trace := r.read(); !strings.HasSuffix(trace, "x+"+strconv.Itoa(int(at&1023))+"\n") {
			t.Errorf("combine read from elsewhere than %#x: %s", at, trace)
		}
	}
	if seen[0] == seen[1] || seen[0] != seen[2] {
		t.Errorf("slots %#x", seen)
	}
	_, _, err := r.NextCombineBuffer(2048, 8192, 1)
	if !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "num_rdma_bytes = 65536") || !strings.Contains(err.Error(), "get_low_latency_rdma_size_hint") {
		t.Errorf("a shape that does not fit: %v", err)
	}
	// The size hint is of the rows; with more headers than rows the error names the first size that has room for those.
	_, _, err = r.NextCombineBuffer(2, 128, 256)
	if !errors.Is(err, status.ErrInvalidArgument) || !strings.HasSuffix(err.Error(), "make it with num_rdma_bytes = 2097152") {
		t.Errorf("headers that do not fit: %v", err)
	}
}

// An output that lies where the call reads is refused before anything is launched: kernels would read sums.
func TestCombinedXLiesInNoInput(t *testing.T) {
	r := newRig(t)
	call := &engine.Call{Stream: 1}
	const far = somewhere + 1<<20
	inputs := func(at string) *op.LLCombineArgs {
		a := &op.LLCombineArgs{Phases: 3, NumTokens: 1, NumMaxTokens: 2, Hidden: 128, NumTopK: 1, NumExperts: 1, IndexType: op.Int64,
			X: far, TopKIdx: far, TopKWeights: far, SrcInfo: far, LayoutRange: far, CombinedX: somewhere}
		const last = somewhere + 256 - 16 // the output's last bytes
		switch at {
		case "x":
			a.X = last
		case "topk_idx":
			a.TopKIdx = last
		case "topk_weights":
			a.TopKWeights = last
		case "src_info":
			a.SrcInfo = last
		case "layout_range":
			a.LayoutRange = last
		}
		return a
	}
	for _, name := range []string{"x", "topk_idx", "topk_weights", "src_info", "layout_range"} {
		err := r.LowLatencyCombine(inputs(name), call)
		if !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "combined_x: got 256 bytes") || !strings.Contains(err.Error(), "overlap "+name) {
			t.Errorf("an output that lies in %s: %v", name, err)
		}
	}
	beside := inputs("")
	beside.TopKWeights = somewhere + 256
	r.must(r.LowLatencyCombine(beside, call))
	zeroCopy := inputs("x") // x is not read
	zeroCopy.Flags = op.LLZeroCopy
	r.must(r.LowLatencyCombine(zeroCopy, call))
}

// What the kernel library cannot do is refused before the call, by the argument's name, with the limit and whose it is.
func TestLimitsOfTheLibraryAreNamed(t *testing.T) {
	r := newRig(t)
	call := &engine.Call{Stream: 1}
	dispatch := func(tokens, topk, experts int32) error {
		return r.LowLatencyDispatch(&op.LLDispatchArgs{Phases: 3, NumMaxTokens: tokens, Hidden: 128, NumTopK: topk, NumExperts: experts}, call)
	}
	combine := func(tokens, topk, experts int32) error {
		return r.LowLatencyCombine(&op.LLCombineArgs{Phases: 3, NumMaxTokens: tokens, Hidden: 128, NumTopK: topk, NumExperts: experts}, call)
	}
	next := func(tokens, _, experts int32) error {
		_, _, err := r.NextCombineBuffer(tokens, 128, experts)
		return err
	}
	clean := func(tokens, _, experts int32) error { return r.Clean(tokens, 128, experts, call) }
	topk := "argument num_topk: got 40, allowed 1 to 32 with libfake.so"
	tokens := "argument num_max_dispatch_tokens_per_rank: got 70000, allowed 1 to 65535 with libfake.so"
	experts := "argument num_experts: got 300, allowed at most 256 (256 local experts on each of 1 ranks) with libfake.so"
	for _, c := range []struct {
		what                  string
		f                     func(tokens, topk, experts int32) error
		tokens, topk, experts int32
		want                  string
	}{
		{"dispatch, top-k", dispatch, 2, 40, 8, topk}, {"dispatch, tokens", dispatch, 70000, 2, 8, tokens}, {"dispatch, experts", dispatch, 2, 2, 300, experts},
		{"combine, top-k", combine, 2, 40, 8, topk}, {"combine, tokens", combine, 70000, 2, 8, tokens}, {"combine, experts", combine, 2, 2, 300, experts},
		{"next combine buffer", next, 70000, 0, 8, tokens}, {"clean", clean, 70000, 0, 8, tokens},
	} {
		if err := c.f(c.tokens, c.topk, c.experts); !errors.Is(err, status.ErrInvalidArgument) || err.Error() != c.want {
			t.Errorf("%s: %v, want %s", c.what, err, c.want)
		}
	}
	r.expect("nothing was launched")
}

func TestSegments(t *testing.T) {
	r := newRig(t)
	first, err := r.NewSegment(context.Background(), 1000)
	r.must(err)
	second, err := r.NewSegment(context.Background(), 2000)
	r.must(err)
	r.must(first.Release())
	r.expect("made and released", "segment 0 of 0: 1000 bytes", "segment 1 of 0: 2000 bytes", "segment 0 of 0: 0 bytes")
	if err := first.Release(); !errors.Is(err, status.ErrInvalidState) {
		t.Errorf("released twice: %v", err)
	}
	third, err := r.NewSegment(context.Background(), 3000)
	r.must(err)
	if third.Number != 1 || second.Number != 2 {
		t.Errorf("numbers %d, %d", third.Number, second.Number)
	}
	args := &op.CombineArgs{Hidden: 8, XSegment: 2, XSegmentOffset: 1990, X: second.Address + 1990, CombinedX: somewhere,
		Handle: &op.Handle{NumRanks: 1, NumTokens: 1, NumRecvTokens: 1, RankPrefixMatrix: somewhere, SendHead: somewhere, RecvSrcIdx: somewhere}}
	if err := r.Combine(args, &engine.Call{}); !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "x_segment_offset") {
		t.Errorf("past the end: %v", err)
	}
	args.XSegment, args.XSegmentOffset, args.X = 1, 16, third.Address+16
	r.must(r.Combine(args, &engine.Call{}))
	args.XSegment = 5
	if err := r.Combine(args, &engine.Call{}); !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "argument x_segment") {
		t.Errorf("no such segment: %v", err)
	}
	r.must(r.Destroy())
	r.must(second.Release())
	r.must(third.Release())
}

// A launch costs no garbage: the engine's own share of a call is paid millions of times.
func TestLaunchesAllocateNothing(t *testing.T) {
	if raced {
		t.Skip("the race detector makes pools forget at random: needs a plain build")
	}
	r := newRigWith(t, onStream)
	call := &engine.Call{Stream: 1}
	a := &op.LLDispatchArgs{Phases: 3, NumTokens: 1, NumMaxTokens: 2, Hidden: 128, NumTopK: 1, NumExperts: 1, IndexType: op.Int64,
		X: somewhere, TopKIdx: somewhere, RecvX: somewhere, RecvCount: somewhere, SrcInfo: somewhere, LayoutRange: somewhere}
	halves := *a
	for name, f := range map[string]func() error{
		"low-latency dispatch": func() error { return r.LowLatencyDispatch(a, call) },
		"its halves on the stream": func() error {
			halves.Phases = op.Send
			if err := r.LowLatencyDispatch(&halves, call); err != nil {
				return err
			}
			halves.Phases = op.Recv
			return r.LowLatencyDispatch(&halves, call)
		},
		"layout":  func() error { return r.layout(call) },
		"barrier": func() error { return r.Barrier(call) },
	} {
		r.must(f())
		r.silent(1)
		n := testing.AllocsPerRun(50, func() {
			if err := f(); err != nil {
				t.Error(err)
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
		r.silent(0)
	}
}

// The engine's own share of a call: checks, order, two streams' events, the way into the library and back.
func BenchmarkLaunch(b *testing.B) {
	r := newRig(b)
	r.silent(1)
	defer r.silent(0)
	a := &op.LLDispatchArgs{Phases: 3, NumTokens: 1, NumMaxTokens: 2, Hidden: 128, NumTopK: 1, NumExperts: 1, IndexType: op.Int64,
		X: somewhere, TopKIdx: somewhere, RecvX: somewhere, RecvCount: somewhere, SrcInfo: somewhere, LayoutRange: somewhere}
	for _, c := range []struct {
		name string
		call engine.Call
	}{{"synchronous", engine.Call{Stream: 1}}, {"own stream", engine.Call{Stream: r.Info().CommStream, Async: true}}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := r.LowLatencyDispatch(a, &c.call); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func onStream(o *engine.Options) { o.LLTransfer = plan.StreamTransfer }

// The send half issues the whole call on the communication stream, and nothing waits for it but the receive half, which
// waits for no later call.
func TestHalvesOnTheStream(t *testing.T) {
	r := newRigWith(t, onStream)
	first, err := r.half(1, 0, 1)
	r.must(err)
	r.expect("first", "record a on 1", "C waits a", "ll_dispatch #1 on C phases 3 ticket 0 sms 64", "record b on C")
	second, err := r.half(1, 0, 1)
	r.must(err)
	r.expect("second", "record a on 1", "C waits a", "ll_dispatch #2 on C phases 3 ticket 1 sms 64", "record b on C")
	if _, err := r.half(1, 0, 1); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "a third has no room") {
		t.Errorf("third send: %v", err)
	}
	r.read()
	if _, err := r.half(2, first, 2); !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "argument stream") {
		t.Errorf("receive on another stream: %v", err)
	}
	r.expect("a refused receive half")
	_, err = r.half(2, first, 1)
	r.must(err)
	r.expect("receive", "1 waits a")
	if _, err := r.half(2, first, 1); !errors.Is(err, status.ErrInvalidArgument) {
		t.Errorf("received again: %v", err)
	}
	_, err = r.half(2, second, 1)
	r.must(err)
	r.expect("receive of the other", "1 waits a")
	_, err = r.half(3, 0, 1)
	r.must(err)
	r.expect("whole call", "record a on C", "1 waits a", "ll_dispatch #3 on 1 phases 3 ticket 0", "record a on 1")
}

// The send half needs what the receive half writes, and that names the same.
func TestArgumentsOfHalvesOnTheStream(t *testing.T) {
	r := newRigWith(t, onStream)
	a := &op.LLCombineArgs{Phases: op.Send, NumTokens: 1, NumMaxTokens: 2, Hidden: 128, NumTopK: 1, NumExperts: 1, IndexType: op.Int64,
		X: somewhere, TopKIdx: somewhere, TopKWeights: somewhere, SrcInfo: somewhere, LayoutRange: somewhere}
	call := &engine.Call{Stream: 1}
	if err := r.LowLatencyCombine(a, call); !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "combined_x") {
		t.Errorf("a send half without output: %v", err)
	}
	a.CombinedX = somewhere + 1<<20
	r.must(r.LowLatencyCombine(a, call))
	a.Phases, a.CombinedX = op.Recv, somewhere+1<<21
	err := r.LowLatencyCombine(a, call)
	if !errors.Is(err, status.ErrInvalidArgument) || err.Error() != "argument combined_x: got 0x210000, allowed that of the send half: 0x110000" {
		t.Errorf("a receive half with another output: %v", err)
	}
	a.CombinedX = somewhere + 1<<20
	r.must(r.LowLatencyCombine(a, call))
}

// Halves of one call are in one capture, or in none.
func TestCaptureOfHalvesOnTheStream(t *testing.T) {
	r := newRigWith(t, onStream)
	comm := uint64(r.Info().CommStream)
	eager, err := r.half(1, 0, 1)
	r.must(err)
	r.capturing(1)
	if _, err := r.half(2, eager, 1); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "#1 was sent before the capture") {
		t.Errorf("received in a capture: %v", err)
	}
	r.capturing(0)
	_, err = r.half(2, eager, 1)
	r.must(err)
	r.capturing(comm) // which joins the capture when it waits for the caller's stream
	captured, err := r.half(1, 0, 1)
	r.must(err)
	r.capturing(0)
	if _, err := r.half(2, captured, 1); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "#2 was sent in the capture") {
		t.Errorf("received after its capture: %v", err)
	}
	for range 3 { // its slot is free again
		ticket, err := r.half(1, 0, 1)
		r.must(err)
		_, err = r.half(2, ticket, 1)
		r.must(err)
	}
}

// DEEPEP_LL_SMS reaches the kernels of both operations, halves and whole calls.
func TestSMsOfLowLatency(t *testing.T) {
	r := newRigWith(t, func(o *engine.Options) { o.LLSMs = 24 })
	ticket, err := r.half(1, 0, 1)
	r.must(err)
	_, err = r.half(2, ticket, 1)
	r.must(err)
	r.must(r.LowLatencyCombine(&op.LLCombineArgs{Phases: 3, NumTokens: 1, NumMaxTokens: 2, Hidden: 128, NumTopK: 1, NumExperts: 1, IndexType: op.Int64,
		X: somewhere, TopKIdx: somewhere, TopKWeights: somewhere, SrcInfo: somewhere, LayoutRange: somewhere, CombinedX: somewhere + 1<<20}, &engine.Call{Stream: 1}))
	if trace := r.read(); strings.Count(trace, "sms 24") != 3 {
		t.Error(trace)
	}
	r.must(r.Barrier(&engine.Call{Stream: 1}))
	if trace := r.read(); strings.Contains(trace, "sms") {
		t.Error(trace)
	}
}

// Copy engines move rows where the setting asks for them, the buffer is for low latency and its ranks are one node.
func TestWhoMovesLowLatencyRows(t *testing.T) {
	lib := fakeLibrary(t, "libfake.so")
	for _, c := range []struct {
		transfer         plan.Transfer
		lowLatency       bool
		copies, onStream bool
	}{{plan.AutoTransfer, true, false, false}, {plan.SMTransfer, true, false, false}, {plan.CopyTransfer, true, true, false},
		{plan.CopyTransfer, false, false, false}, {plan.StreamTransfer, true, false, true}, {plan.StreamTransfer, false, false, false}} {
		o := rigOptions(lib, plan.Topology{Ranks: 1, Peers: 8})
		o.LLTransfer, o.LowLatency = c.transfer, c.lowLatency
		b, err := engine.New(context.Background(), &alone{}, o)
		if err != nil {
			t.Fatal(err)
		}
		if i := b.Info(); i.LLCopies != c.copies || i.LLOnStream != c.onStream {
			t.Errorf("%+v: got %v, %v", c, i.LLCopies, i.LLOnStream)
		}
		if err := b.Destroy(); err != nil {
			t.Error(err)
		}
	}
}

// Copy engines move rows of normal mode where the setting asks for them and the buffer has a normal mode on one node,
// whose ranks all take part.
func TestWhoMovesNormalRows(t *testing.T) {
	lib := fakeLibrary(t, "libfake.so")
	for _, c := range []struct {
		copies, shrink bool
		bytes          uint64
		want           bool
	}{{false, false, 1 << 22, false}, {true, false, 1 << 22, true}, {true, true, 1 << 22, false}, {true, false, 0, false},
		{true, false, 1 << 18, false}} {
		o := rigOptions(lib, plan.Topology{Ranks: 1, Peers: 8})
		o.NormalCopies, o.LowLatency, o.Shrink, o.NVLBytes = c.copies, true, c.shrink, c.bytes
		b, err := engine.New(context.Background(), &alone{}, o)
		if err != nil {
			t.Fatal(err)
		}
		if got := b.Info().NormalCopies; got != c.want {
			t.Errorf("%+v: got %v", c, got)
		}
		r := watch(t, b, lib)
		r.read()
		for exchange, ours := range map[uint64]bool{7: true, 1<<61 | 7: false} { // of this buffer, whose options name no maker; of another one
			handle := &op.Handle{NumRanks: 1, NumTokens: 1, NumRecvTokens: 1, RankPrefixMatrix: somewhere, SendHead: somewhere, RecvSrcIdx: somewhere, Exchange: exchange}
			if c.bytes > 0 {
				r.must(r.Combine(&op.CombineArgs{Hidden: 8, X: somewhere, CombinedX: somewhere, Handle: handle}, &engine.Call{}))
				if got := strings.Contains(r.read(), " copies"); got != (c.want && ours) {
					t.Errorf("%+v, exchange %x: copies %v", c, exchange, got)
				}
			}
		}
		if err := b.Destroy(); err != nil {
			t.Error(err)
		}
	}
}
