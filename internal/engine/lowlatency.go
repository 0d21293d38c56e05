package engine

import (
	"fmt"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// placeOf returns the phases of a low-latency call, those of its kernel, and where it runs.
func (b *Buffer) placeOf(given op.Phase, c *Call) (phases, launched uint32, where place, err error) {
	switch {
	case given == op.Send && b.halvesOnStream():
		return abi.PhaseSend, abi.PhaseBoth, onComm, nil
	case given == op.Send || given == op.Recv:
		return uint32(given), uint32(given), onCurrent, nil
	case given != op.SendRecv && given != 0:
		return 0, 0, 0, status.InvalidArg("phases", given, "SEND = 1, RECV = 2 or SEND_RECV = 3")
	}
	return abi.PhaseBoth, abi.PhaseBoth, placeOfWhole(c), nil
}

// LowLatencyDispatch sends every token to its experts, or receives what was sent, or both. Collective.
func (b *Buffer) LowLatencyDispatch(a *op.LLDispatchArgs, c *Call) error {
	phases, launched, where, err := b.placeOf(a.Phases, c)
	if err != nil {
		return err
	}
	shape := plan.LowLatency{NumTokens: a.NumTokens, NumMaxTokens: a.NumMaxTokens, Hidden: a.Hidden, NumTopK: a.NumTopK,
		NumExperts: a.NumExperts, IndexType: a.IndexType, Flags: a.Flags, FP8: a.UseFP8 != 0 && a.FP4 == 0, FP4: a.FP4}
	if err := shape.CheckDispatch(b.top, &b.limits); err != nil {
		return err
	}
	if err := b.checkRDMATokens(a.NumMaxTokens); err != nil {
		return err
	}
	if err := checkLLDispatch(a, launched); err != nil {
		return err
	}
	p := &b.params.llDispatch
	half := half{which: opDispatch, phases: phases, launched: launched, where: where, ticket: &a.Ticket, shape: &shape, header: &p.OpHeader,
		srcInfo: uint64(a.SrcInfo), outputs: outputs{a.RecvX, a.RecvXScales, a.RecvCount, a.SrcInfo, a.LayoutRange, a.CumulativeRecvStats, a.WaitRecvCostStats}}
	return b.launchHalf(c, &half, func(t *ticket, _ *slotLayout) int32 {
		p.Phases, p.Ticket, p.Flags = launched, t.word, uint32(a.Flags)
		p.X, p.TopKIdx, p.TopKWeights = uint64(a.X), uint64(a.TopKIdx), uint64(a.TopKWeights)
		p.NumTokens, p.NumTopK, p.IndexBytes = a.NumTokens, a.NumTopK, a.IndexType.Size()
		p.NumMaxTokens, p.Hidden, p.NumExperts = a.NumMaxTokens, a.Hidden, a.NumExperts
		p.Format, p.XScales = formatOf(a), uint64(a.XScales)
		p.RecvX, p.RecvScales, p.RecvCount = uint64(a.RecvX), uint64(a.RecvXScales), uint64(a.RecvCount)
		p.SrcInfo, p.LayoutRange = uint64(a.SrcInfo), uint64(a.LayoutRange)
		p.CumulativeStats, p.WaitStats = uint64(a.CumulativeRecvStats), uint64(a.WaitRecvCostStats)
		return b.opt.Library.LLDispatch(p)
	})
}

// formatOf returns the format of a dispatch's rows.
func formatOf(a *op.LLDispatchArgs) int32 {
	switch {
	case a.FP4 == op.FP4Packed:
		return abi.FormatFP4
	case a.FP4 == op.FP4Cast:
		return abi.FormatNVFP4
	case a.UseFP8 != 0:
		return abi.FormatFP8
	}
	return abi.FormatBF16
}

func checkLLDispatch(a *op.LLDispatchArgs, phases uint32) error {
	in, send, recv := a.NumTokens > 0, phases&abi.PhaseSend != 0, phases&abi.PhaseRecv != 0
	return need(
		given{"x", a.X, in && send, 16}, given{"topk_idx", a.TopKIdx, in && send, uintptr(a.IndexType.Size())},
		given{"topk_weights", a.TopKWeights, false, 4},
		given{"recv_x", a.RecvX, recv, 16}, given{"recv_x_scales", a.RecvXScales, recv && formatOf(a) != abi.FormatBF16, 4},
		given{"x_scales", a.XScales, in && send && a.FP4 == op.FP4Packed, 4},
		given{"recv_count", a.RecvCount, recv, 4}, given{"src_info", a.SrcInfo, recv, 4}, given{"layout_range", a.LayoutRange, recv, 8},
		given{"cumulative_recv_stats", a.CumulativeRecvStats, false, 4}, given{"wait_recv_cost_stats", a.WaitRecvCostStats, false, 8})
}

// LowLatencyCombine sends the experts' rows back and sums them by weight, or does one half of that. Collective.
func (b *Buffer) LowLatencyCombine(a *op.LLCombineArgs, c *Call) error {
	phases, launched, where, err := b.placeOf(a.Phases, c)
	if err != nil {
		return err
	}
	shape := plan.LowLatency{NumTokens: a.NumTokens, NumMaxTokens: a.NumMaxTokens, Hidden: a.Hidden, NumTopK: a.NumTopK,
		NumExperts: a.NumExperts, IndexType: a.IndexType, Flags: a.Flags}
	if err := shape.CheckCombine(b.top, &b.limits); err != nil {
		return err
	}
	if err := b.checkRDMATokens(a.NumMaxTokens); err != nil {
		return err
	}
	if err := checkLLCombine(a, launched); err != nil {
		return err
	}
	p := &b.params.llCombine
	half := half{which: opCombine, phases: phases, launched: launched, where: where, ticket: &a.Ticket, shape: &shape, header: &p.OpHeader,
		srcInfo: uint64(a.SrcInfo), outputs: outputs{a.CombinedX, a.WaitRecvCostStats}}
	return b.launchHalf(c, &half, func(t *ticket, layout *slotLayout) int32 {
		p.Phases, p.Ticket, p.Flags = launched, t.word, uint32(a.Flags)
		p.X, p.XRowStride = uint64(a.X), 2*uint64(a.Hidden)
		if a.Flags&op.LLZeroCopy != 0 {
			p.X, p.XRowStride = b.zeroCopy(layout, t.slot), layout.rowStride
		}
		p.TopKIdx, p.TopKWeights = uint64(a.TopKIdx), uint64(a.TopKWeights)
		p.SrcInfo, p.LayoutRange = uint64(a.SrcInfo), uint64(a.LayoutRange)
		p.NumTokens, p.NumTopK, p.IndexBytes = a.NumTokens, a.NumTopK, a.IndexType.Size()
		p.NumMaxTokens, p.Hidden, p.NumExperts = a.NumMaxTokens, a.Hidden, a.NumExperts
		p.CombinedX, p.WaitStats = uint64(a.CombinedX), uint64(a.WaitRecvCostStats)
		return b.opt.Library.LLCombine(p)
	})
}

func checkLLCombine(a *op.LLCombineArgs, phases uint32) error {
	in, send, recv := a.NumTokens > 0, phases&abi.PhaseSend != 0, phases&abi.PhaseRecv != 0
	if recv {
		if err := checkCombinedX(a, send); err != nil {
			return err
		}
	}
	return need(
		given{"x", a.X, send && a.Flags&op.LLZeroCopy == 0, 16}, given{"topk_idx", a.TopKIdx, in, uintptr(a.IndexType.Size())},
		given{"topk_weights", a.TopKWeights, in, 4}, given{"src_info", a.SrcInfo, send, 4},
		given{"layout_range", a.LayoutRange, send, 8}, given{"combined_x", a.CombinedX, in && recv, 16},
		given{"wait_recv_cost_stats", a.WaitRecvCostStats, false, 8})
}

// checkCombinedX refuses an output that lies where the call, or its receive half, still reads.
func checkCombinedX(a *op.LLCombineArgs, send bool) error {
	tokens, hidden := uint64(max(a.NumTokens, 0)), uint64(a.Hidden)
	entries := tokens * uint64(a.NumTopK)
	out := tensor{"combined_x", a.CombinedX, tokens * hidden * 2}
	err := apart(out, tensor{"topk_idx", a.TopKIdx, entries * uint64(a.IndexType.Size())}, tensor{"topk_weights", a.TopKWeights, entries * 4})
	if err != nil || !send {
		return err
	}
	rows := uint64(a.NumExperts) * uint64(a.NumMaxTokens) // L * R * B
	x := tensor{"x", a.X, rows * hidden * 2}
	if a.Flags&op.LLZeroCopy != 0 {
		x.address = 0
	}
	return apart(out, x, tensor{"src_info", a.SrcInfo, rows * 4}, tensor{"layout_range", a.LayoutRange, uint64(a.NumExperts) * 8})
}

// half is a low-latency call, or one half of it.
type half struct {
	which            int    // opDispatch, opCombine
	phases, launched uint32 // of the call; of its kernel
	where            place
	ticket           *uint32 // in for a receive half, out for the others
	shape            *plan.LowLatency
	header           *abi.OpHeader
	srcInfo          uint64 // of the handle
	outputs          outputs
}

// runsBeside reports whether this is the send half of a call that runs whole on the communication stream.
func (h *half) runsBeside() bool { return h.phases != h.launched }

// outputs are what a call writes to, in the order of outputNames.
type outputs [7]uintptr

var outputNames = [2][len(outputs{})]string{
	{"recv_x", "recv_x_scales", "recv_count", "src_info", "layout_range", "cumulative_recv_stats", "wait_recv_cost_stats"},
	{"combined_x", "wait_recv_cost_stats"},
}

// launchHalf is launch for low-latency operations. It finds or makes the ticket, whose number is the call's.
func (b *Buffer) launchHalf(c *Call, h *half, run func(*ticket, *slotLayout) int32) error {
	if err := b.checkLowLatency(); err != nil {
		return err
	}
	if h.phases == abi.PhaseRecv && b.halvesOnStream() {
		return b.joinHalf(c, h)
	}
	if h.runsBeside() {
		later := *c
		later.Async = true
		c = &later
	}
	number := op.Operation(abi.OpLLDispatch + h.which)
	stream, err := b.begin(c, number, h.where, h.phases == abi.PhaseRecv)
	if err != nil {
		return err
	}
	layout, err := b.slot(h.shape.NumMaxTokens, h.shape.Hidden, h.shape.NumExperts)
	if err == nil && h.phases&abi.PhaseSend != 0 && h.which == opCombine {
		err = b.handles.check(h.srcInfo)
	}
	if err != nil {
		return b.abandon(err)
	}
	t, err := b.ticketFor(h.which, h.phases, *h.ticket, h.shape, stream)
	if err != nil {
		return b.abandon(err)
	}
	b.header(h.header, uint32(number), h.launched, stream, t.number)
	h.header.NumSMs = b.lowLatencySMs(h)
	first := b.beforeLaunch(number)
	code := run(t, layout)
	b.afterLaunch(first)
	*h.ticket = b.updateTicket(t, h.phases, code)
	if code == 0 && h.phases&abi.PhaseRecv != 0 && h.which == opDispatch {
		b.handles.add(h.srcInfo)
	}
	err = b.launched(number, code, h.header.DeviceError)
	if err == nil && h.runsBeside() {
		err = b.leaveOnStream(c, h, t, stream)
	}
	return b.finish(c, h.where, stream, callID{uint32(number), t.number}, err)
}

// streamSMs are those of a call beside other work: with fewer it ends later than that, with more it keeps SMs from it
// (docs/gpu-runs.md, 27 November 2026, evening).
const streamSMs = 64

// lowLatencySMs is the number of SMs of a call; 0: the kernel library's choice.
func (b *Buffer) lowLatencySMs(h *half) int32 {
	if b.opt.LLSMs == 0 && h.runsBeside() {
		return streamSMs
	}
	return int32(b.opt.LLSMs)
}

// leaveOnStream notes in the ticket of a send half what the receive half needs to know: the whole call runs on stream,
// the communication stream.
func (b *Buffer) leaveOnStream(c *Call, h *half, t *ticket, stream device.Stream) (err error) {
	t.stream, t.outputs = device.Stream(c.Stream), h.outputs
	if t.captured, err = b.dev.Capturing(stream); err != nil {
		return err
	}
	return t.end.Record(stream)
}

// joinHalf is the receive half of a call that runs on the communication stream since its send half: the caller's stream
// waits for its end, and for nothing that was issued after it.
func (b *Buffer) joinHalf(c *Call, h *half) error {
	if err := b.checkStream(c.Stream); err != nil {
		return err
	}
	number, current := op.Operation(abi.OpLLDispatch+h.which), device.Stream(c.Stream)
	if err := b.lockFor(number, true); err != nil {
		return err
	}
	t, err := b.openTicket(h.which, *h.ticket, h.shape, current)
	if err == nil {
		err = t.checkOutputs(h)
	}
	if err == nil {
		err = b.checkCapture(number, t, current)
	}
	if err == nil && c.Previous != nil {
		err = c.Previous.ev.Join(current)
	}
	if err == nil {
		err = t.end.Join(current)
	}
	if err == nil && c.Event != nil {
		err = c.Event.ev.Record(current)
	}
	if err == nil {
		b.updateTicket(t, abi.PhaseRecv, 0)
		if h.which == opDispatch {
			b.handles.add(h.srcInfo)
		}
	}
	return b.abandon(err)
}

// checkCapture refuses a receive half inside the capture of a graph whose send half is outside, and the other way
// round: a stream cannot wait across that border, and the graph's replays would be half calls.
func (b *Buffer) checkCapture(number op.Operation, t *ticket, current device.Stream) error {
	captured, err := b.dev.Capturing(current)
	if err != nil || captured == t.captured {
		return err
	}
	if captured {
		return status.Errorf(status.InvalidState, "%s #%d was sent before the capture of this graph began: receive it before that", number, t.number)
	}
	t.open = false
	return status.Errorf(status.InvalidState, "%s #%d was sent in the capture of a graph: its receive half belongs into the same capture", number, t.number)
}

// checkLowLatency refuses low-latency operations of a buffer that was not made for them.
func (b *Buffer) checkLowLatency() error {
	if !b.opt.LowLatency {
		return status.Errorf(status.InvalidState, "low-latency calls need a buffer made with low_latency_mode")
	}
	return nil
}

const numShapes = 4

// slotLayout is where the low-latency data of one shape lies in the rdma region.
type slotLayout struct {
	numMaxTokens, hidden, experts int32
	zeroCopy                      [2]uint64
	rowStride                     uint64
}

// slot returns the layout of a shape, or an error if the buffer is too small for it. b.mu is held.
func (b *Buffer) slot(numMaxTokens, hidden, experts int32) (*slotLayout, error) {
	for i := range b.slots {
		if s := &b.slots[i]; s.numMaxTokens == numMaxTokens && s.hidden == hidden && s.experts == experts {
			return s, nil
		}
	}
	p := &abi.LLLayoutParams{
		NumRanks: int32(b.size), NumMaxTokens: numMaxTokens, Hidden: hidden, NumExperts: experts, NumNVLPeers: int32(b.top.NodeSize()), Flags: b.teamFlags(),
	}
	if code := b.opt.Library.LLLayout(p); code != 0 {
		return nil, kern.Error("dk_ll_layout", code, p.DeviceError)
	}
	if p.RDMABytes > b.opt.RDMABytes || p.WireBytes > b.regions.Wire.Bytes {
		hint, err := plan.LowLatencyBytes(int64(numMaxTokens), int64(hidden), int64(b.size), int64(experts), &b.limits)
		if err != nil {
			return nil, err
		}
		size := fmt.Sprintf("get_low_latency_rdma_size_hint = %d", hint)
		if needed := b.rdmaBytesFor(max(hint, p.RDMABytes), p.WireBytes); needed > hint {
			size = fmt.Sprintf("num_rdma_bytes = %d", needed)
		}
		return nil, status.Errorf(status.InvalidArgument, "num_rdma_bytes = %d of the buffer is too small for "+
			"num_max_dispatch_tokens_per_rank = %d, hidden = %d, num_experts = %d on %d ranks: make it with %s",
			b.opt.RDMABytes, numMaxTokens, hidden, experts, b.size, size)
	}
	copy(b.slots[1:], b.slots[:numShapes-1])
	b.slots[0] = slotLayout{numMaxTokens, hidden, experts, p.ZeroCopyOffset, p.ZeroCopyRowStride}
	return &b.slots[0], nil
}

// rdmaBytesFor is the smallest size of the rdma region, from least on, whose buffer has a wire region of so many bytes:
// that region holds the headers of low latency, and grows with the rdma region.
func (b *Buffer) rdmaBytesFor(least, wire uint64) uint64 {
	enough := func(rdma uint64) bool {
		p := b.blockSizes(0)
		p.RDMABytes = rdma
		return b.opt.Library.BlockSizes(p) != 0 || p.WireBytes >= wire
	}
	low, high := least, least // low-1 is not enough, high is
	for high < 1<<60 && !enough(high) {
		low, high = high+1, 2*high+1
	}
	for low < high {
		if middle := low + (high-low)/2; enough(middle) {
			high = middle
		} else {
			low = middle + 1
		}
	}
	return high
}

func (b *Buffer) zeroCopy(l *slotLayout, slot uint64) uint64 {
	return b.block.Addresses[b.rank] + b.regions.RDMA.Offset + l.zeroCopy[slot&1]
}

// NextCombineBuffer returns where the rows of the next low-latency combine with zero copy go: [L, R*B, H] BF16,
// rowStride bytes from row to row. Valid until that combine was issued.
func (b *Buffer) NextCombineBuffer(numMaxTokens, hidden, experts int32) (address uintptr, rowStride uint64, err error) {
	if err := plan.CheckSlots(numMaxTokens, hidden, experts, b.top, &b.limits); err != nil {
		return 0, 0, err
	}
	if err := b.checkLowLatency(); err != nil {
		return 0, 0, err
	}
	if err := b.startAwake(); err != nil {
		return 0, 0, err
	}
	defer b.leave()
	b.mu.Lock()
	defer b.mu.Unlock()
	layout, err := b.slot(numMaxTokens, hidden, experts)
	if err != nil {
		return 0, 0, err
	}
	b.viewed.Store(true)
	return uintptr(b.zeroCopy(layout, b.combines)), layout.rowStride, nil
}
