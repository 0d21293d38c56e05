package core

import (
	"context"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

// errNoArgs refuses a call without arguments.
var errNoArgs = status.InvalidArg("a", "nil", "the call's arguments")

// Letters in the shapes below: T tokens of this rank, N received rows, H elements of a row (hidden), S scales of a row,
// K choices of a token (top-k), E experts of all ranks, L = E/R experts of this rank, R ranks, B = NumMaxTokens.

// Layout counts, from the experts that each token chose, the tokens for each rank and each expert, and marks which
// ranks a token goes to. Local.
//
// In: TopKIdx int32 or int64 [T,K], -1 for no choice. Out: NumTokensPerRank int32 [R], NumTokensPerRDMARank int32
// [nodes] or 0, NumTokensPerExpert int32 [E], IsTokenInRank uint8 [T,R], 1 where a token has an expert at that rank.
//
// Stream order, memory and errors are those of every operation (see Buffer).
func (b *Buffer) Layout(a *LayoutArgs, c *Call) error {
	if a == nil {
		return errNoArgs
	}
	return b.live().Layout(a, c.engine())
}

// Notify is the first step of a normal-mode dispatch: it exchanges the counts of rows among all ranks and fills the
// handle's matrices. The token that it returns names the exchange in WaitCounts, CountsLen and Dispatch. Collective:
// all ranks call it with equal Hidden, XType, NumTopK, NumExperts, NumScales and NumWorstTokens, else all get
// ErrMismatch.
//
// In: NumTokensPerRank int32 [R], NumTokensPerExpert int32 [E] or 0 and IsTokenInRank uint8 [T,R], as Layout writes
// them; ExpertAlignment is what the counts of WaitCounts are rounded up to. Out: Handle.RankPrefixMatrix int32 [R,R]
// and Handle.SendHead int32 [T,R], in the caller's memory, filled on the stream; Handle.NumTokens and NumRanks are set
// before Notify returns. With NumWorstTokens > 0 no rank waits for counts: recv_x has so many rows.
//
// An exchange that is never dispatched is given up after 15 more.
func (b *Buffer) Notify(a *NotifyArgs, c *Call) (token uint64, err error) {
	if a == nil {
		return 0, errNoArgs
	}
	return b.live().Notify(a, c.engine())
}

// WaitCounts waits on the host for the counts of an exchange: it returns the number of rows that this rank will receive
// and fills perExpert (nil, or as long as CountsLen says) with the rows for each local expert, rounded up to the
// alignment. It waits up to slice, without a limit if slice is negative, and returns ErrInterrupted if the counts are
// not there by then. Local; callers may repeat it. Dispatch needs the number in Handle.NumRecvTokens.
//
// Errors: ErrInvalidArgument for a token whose dispatch was issued or that has NumWorstTokens; ErrTimeout, ErrPeerDead,
// ErrMismatch if the exchange failed.
func (b *Buffer) WaitCounts(token uint64, slice time.Duration, perExpert []int32) (received int, err error) {
	return b.live().WaitCounts(token, slice, perExpert)
}

// CountsLen returns the number of entries that WaitCounts fills for an exchange: L, or 0 where Notify was given no
// counts per expert. Local; it does not wait.
func (b *Buffer) CountsLen(token uint64) (int, error) { return b.live().CountsLen(token) }

// Dispatch is the second step of a normal-mode dispatch: it sends each token's row, scales, choices and weights to the
// ranks of its experts. Rows arrive ordered by source rank and then by token. Collective.
//
// In: X [T,H] of XType; XScales [T,S] of 4-byte elements or 0, with strides in elements; TopKIdx [T,K] of IndexType and
// TopKWeights float32 [T,K], both or neither; Token and Handle of Notify, with Handle.NumRecvTokens from WaitCounts.
// Out: RecvX [N,H], RecvXScales [N,S] contiguous, RecvTopKIdx [N,K] (local expert, -1 for experts of other ranks),
// RecvTopKWeights [N,K] (0 there), Handle.RecvSrcIdx int32 [N]. N is Handle.NumRecvTokens, or NumWorstTokens.
//
// With Cached the call repeats the routing of an earlier dispatch from its handle alone: no token, no top-k. RecvX may
// lie in a Segment (RecvSegment, RecvSegmentOffset), so that senders write rows in place.
//
// Errors beside those of Buffer: ErrInvalidState if the counts were not waited for; ErrInvalidArgument if the shape
// differs from Notify's, or num_nvl_bytes or num_rdma_bytes cannot stage a row of this size.
func (b *Buffer) Dispatch(a *DispatchArgs, c *Call) error {
	if a == nil {
		return errNoArgs
	}
	return b.live().Dispatch(a, c.engine())
}

// DispatchAtOnce is both steps of a dispatch whose outputs have room for any routing (NumWorstTokens above 0), in place
// of Notify and Dispatch. Collective; all ranks make the call like this or none does. On GPUs one kernel counts and
// sends few rows, in half the time: with a Routing NumMaxTokens × ranks up to 1024, without one room for up to 1024
// rows, which then all ranks have, or all have room for more (else ErrMismatch).
//
// In and out: as Notify and Dispatch have them; d has no Token, and its Handle is n's, or nil.
//
// Errors: those of Notify and of Dispatch. Where it returns one, the handle is as before.
func (b *Buffer) DispatchAtOnce(n *NotifyArgs, d *DispatchArgs, c *Call) error {
	if n == nil || d == nil {
		return errNoArgs
	}
	return b.live().DispatchAtOnce(n, d, c.engine())
}

// CancelDispatch takes the place of Dispatch on a rank that cannot go on after Notify, for example because it has no
// memory for the rows that arrive: the other ranks, which have its counts, refuse that dispatch at once with an error
// that names this rank and the kind of reason (nil: none); no row moves, and the buffers work on. The handle's matrices must stay until it is
// done, as with Dispatch. Collective with the others' Dispatch.
//
// Errors: ErrInvalidArgument for a token whose dispatch was issued or refused.
func (b *Buffer) CancelDispatch(token uint64, reason error, c *Call) error {
	return b.live().CancelDispatch(token, reason, c.engine())
}

// Combine is the way back of a normal-mode dispatch: it sends each received row to its source and sums there the rows
// that came from each token, without weights. Collective.
//
// In: X BF16 [N,H], one row for each that Handle's dispatch delivered; TopKWeights float32 [N,K] or 0; Bias, up to two
// BF16 [T,H] or 0, which are added; Handle with RecvSrcIdx. Out: CombinedX BF16 [T,H], summed in float32 and rounded
// once; CombinedTopKWeights float32 [T,K] or 0. X may lie in a Segment, so that receivers read rows in place.
//
// Stream order, memory and errors are those of every operation (see Buffer).
func (b *Buffer) Combine(a *CombineArgs, c *Call) error {
	if a == nil {
		return errNoArgs
	}
	return b.live().Combine(a, c.engine())
}

// BalanceWorkspace returns the bytes of workspace that PrefetchWeights, or with reduce ReduceGrads, needs; of the
// arguments it reads the numbers alone. Local.
func (b *Buffer) BalanceWorkspace(a *BalanceArgs, reduce bool) (uint64, error) {
	if a == nil {
		return 0, errNoArgs
	}
	return b.live().BalanceWorkspace(a, reduce)
}

// PrefetchWeights copies experts' tensors to the slots that other ranks have for copies of them ("redundant experts").
// Collective, with equal Mapping, NumSlots, NumLocalExperts and ExpertBytes; it counts as calls of Dispatch.
//
// In: Mapping int32 [R, NumSlots], the expert, rank * NumLocalExperts + local, of each slot, any other number for none;
// Experts, NumTensors tensors [NumLocalExperts, ExpertBytes]; Workspace of BalanceWorkspace bytes. Out: Copies,
// [NumSlots, ExpertBytes]; slots of none stay. ExpertBytes are multiples of 16, and there are at most 32 ranks.
func (b *Buffer) PrefetchWeights(a *BalanceArgs, c *Call) error {
	if a == nil {
		return errNoArgs
	}
	return b.live().PrefetchWeights(a, c.engine())
}

// ReduceGrads adds the float32 of Copies to the Experts that they are copies of, in the order of rank and slot, so that
// the result repeats bit for bit; arguments and errors are those of PrefetchWeights. A call that was refused has added
// nothing. Collective.
func (b *Buffer) ReduceGrads(a *BalanceArgs, c *Call) error {
	if a == nil {
		return errNoArgs
	}
	return b.live().ReduceGrads(a, c.engine())
}

// LowLatencyDispatch sends each token's row to each expert that it chose, straight into that expert's part of RecvX,
// without an exchange of counts. Collective; the buffer was made with LowLatency.
//
// Phases is Send, Recv, or SendRecv or 0 for both. Send issues the rows and sets Ticket; Recv, with that ticket, the
// same shape and the same stream, waits for the rows and writes the outputs. Other work may run in between. Two sends
// may be without their receive; a third is ErrInvalidState.
//
// In: X BF16 [T,H] with T <= B; TopKIdx [T,K] of IndexType, -1 for no choice; TopKWeights float32 [T,K] or 0: sent
// along, so that the combine may reduce at the experts' rank. Out: RecvX [L, R*B, H], BF16, or e4m3 with UseFP8;
// RecvXScales, with UseFP8, float32 [L, H/128, R*B] in memory, or int32 [L, H/512, R*B] with LLUE8M0; RecvCount int32
// [L]; SrcInfo int32 [L, R*B], the row's token at its source; LayoutRange int64 [L,R], (first row << 32) | count.
// CumulativeRecvStats int32 [L] and WaitRecvCostStats int64 [R] (ns waited for each rank) are added to, or 0. Rows past
// RecvCount are undefined.
//
// With FP4 (H a multiple of 128; UseFP8 does not count) RecvX is [L, R*B, H/2], two e2m1 in a byte. FP4Packed: X
// [T, H/2] and XScales [T, H/16] are bytes that are moved, RecvXScales is [L, R*B, H/16]. FP4Cast: X is BF16, XScales
// one float32 or 0, RecvXScales e4m3 in the tiles that deepep.h describes at recv_x_scales.
//
// Errors beside those of Buffer: ErrInvalidArgument also for the kernel library's limits and for a shape that
// num_rdma_bytes is too small for, with the size that it takes.
func (b *Buffer) LowLatencyDispatch(a *LLDispatchArgs, c *Call) error {
	if a == nil {
		return errNoArgs
	}
	return b.live().LowLatencyDispatch(a, c.engine())
}

// LowLatencyCombine sends the experts' rows back to their sources and sums them there by TopKWeights. Collective;
// Phases and Ticket are as in LowLatencyDispatch.
//
// In: X BF16 [L, R*B, H], laid out as RecvX was, ignored with LLZeroCopy (see NextCombineBuffer); TopKIdx [T,K] and
// TopKWeights float32 [T,K] of this rank's tokens; SrcInfo and LayoutRange of the dispatch. Out: CombinedX BF16 [T,H];
// WaitRecvCostStats int64 [R] or 0 is added to. X must not change before the receive half is done.
func (b *Buffer) LowLatencyCombine(a *LLCombineArgs, c *Call) error {
	if a == nil {
		return errNoArgs
	}
	return b.live().LowLatencyCombine(a, c.engine())
}

// NextCombineBuffer returns where the X of the next LowLatencyCombine with LLZeroCopy goes, in the buffer's own memory:
// [L, R*B, H] BF16, rowStride bytes from row to row. The address is valid until that combine was issued. Local.
func (b *Buffer) NextCombineBuffer(numMaxTokens, hidden, experts int32) (address uintptr, rowStride uint64, err error) {
	return b.live().NextCombineBuffer(numMaxTokens, hidden, experts)
}

// Clean empties the low-latency slots of a shape on every rank, of all shapes if the three sizes are 0. It is needed
// once after the caller has written to Region(true). Tickets of sends without their receive become invalid. Collective,
// on the caller's stream.
func (b *Buffer) Clean(numMaxTokens, hidden, experts int32, c *Call) error {
	return b.live().Clean(numMaxTokens, hidden, experts, c.engine())
}

// Barrier lets the caller's stream go on once the streams of all ranks have come to their Barrier. Collective.
func (b *Buffer) Barrier(c *Call) error { return b.live().Barrier(c.engine()) }

// UpdateMask masks a rank, so that calls neither send to it nor wait for it, or lifts the mask. Local, on
// the caller's stream. ErrInvalidState unless the buffer was made with Shrink.
func (b *Buffer) UpdateMask(rank int32, masked bool, c *Call) error {
	return b.live().UpdateMask(rank, masked, c.engine())
}

// QueryMask fills int32 [R] at out: 1 for a masked rank, masked by UpdateMask or by a call that gave up on it. Local,
// on the caller's stream. ErrInvalidState unless the buffer was made with Shrink.
func (b *Buffer) QueryMask(out uintptr, c *Call) error { return b.live().QueryMask(out, c.engine()) }

// CleanMask lifts all masks. Local, on the caller's stream. ErrInvalidState unless the buffer was made with Shrink.
func (b *Buffer) CleanMask(c *Call) error { return b.live().CleanMask(c.engine()) }

// Warmup makes calls of each mode on memory of its own, so that the first real call is as fast as the steady ones. With
// WarmupOptions{} it warms every mode that the buffer allows; shapes that are not given are those of
// BufferOptions.Shape, of the size hints that this process asked for, or the largest that the buffer's memory holds,
// within 2 s and 1 GiB. It returns, and logs at level info, what it did and how long each part took. Collective, with
// equal options, else ErrMismatch; it waits on the host until done.
func (b *Buffer) Warmup(o WarmupOptions) (StartupReport, error) { return b.live().Warmup(o) }

// StartupReport says where the time of construction, of warm-ups and of the first call of each operation went. Local;
// it waits for the start and for no call.
func (b *Buffer) StartupReport() (StartupReport, error) { return b.live().StartupReport() }

// Stats reads what was counted of an operation (OpLayout to OpMask) since the buffer was made. Local; it waits for no
// call, and at most 50 ms for a busy device, whose newest calls may then be missing.
func (b *Buffer) Stats(o Operation) (OpStats, error) { return b.live().Stats(o) }

// Info describes the buffer. Local; it never waits: before the start is complete, what is not known yet is zero.
func (b *Buffer) Info() Info { return b.live().Info() }

// RDMATeam lists the ranks of this one's RDMA sub-team: the rank of its place on each node, itself among them. Rows of
// normal mode cross between these ranks alone.
func (b *Buffer) RDMATeam() []int { return b.live().Info().RDMATeam.Ranks() }

// Region returns the address and size of the NumNVLBytes or, with rdma, NumRDMABytes that the buffer owns. The caller
// may use the memory while no call is in flight, until Destroy. Local; it waits for the start. See Clean for what
// writing to it means.
func (b *Buffer) Region(rdma bool) (address uintptr, bytes uint64, err error) {
	return b.live().Region(rdma)
}

// Ready reports whether the start has succeeded. Local; it does not wait.
func (b *Buffer) Ready() bool { return b.live().Ready() }

// WaitReady waits up to slice for the start that Background left running, without a limit if slice is negative. It
// returns the start's error, or ErrInterrupted if the start goes on. Local.
func (b *Buffer) WaitReady(slice time.Duration) error { return b.live().WaitReady(slice) }

// Release gives back the buffer's memory, of this device and of this host, and keeps its addresses and the group; all of
// it is free once every rank has called. It waits up to slice, without a limit if slice is negative, for this rank's
// calls in flight, and returns ErrInterrupted if there are some. Until Restore calls are refused, and replays of graphs
// that were captured before leave at once. Peers let go of segments, whose numbers end; a Segment's own memory stays.
// Local; once released it does nothing.
//
// Errors: ErrInvalidState for a low-latency call without its receive half and while a graph is captured; ErrUnsupported
// for GPUs on several nodes, or without virtual memory.
func (b *Buffer) Release(slice time.Duration) error { return b.live().Release(slice) }

// Restore has the memory again, zeroed, at the addresses of before Release. Calls are numbered anew, masks are lifted, a
// failure of before is over, statistics go on; handles and tokens of before are refused. It waits up to slice, without a
// limit if slice is negative, and returns ErrInterrupted if it goes on; then it is to be called again. Collective. Without
// a Release it does nothing.
//
// Errors: ErrOutOfMemory, ErrPeerDead, ErrTimeout with the ranks: the buffer stays released, and all ranks may call it
// again; ErrInvalidState where a peer has released the buffer's memory and this rank has not.
func (b *Buffer) Restore(slice time.Duration) error { return b.live().Restore(slice) }

// Check returns the failure that made the buffer unusable, nil if there is none. Local; it does not wait.
func (b *Buffer) Check() error { return b.live().Check() }

// NewEvent makes an event, to be ended by Event.Destroy. It counts as done until it is recorded. Local.
func (b *Buffer) NewEvent() (*Event, error) {
	e, err := b.live().NewEvent()
	return (*Event)(e), err
}

// NewSegment allocates bytes of memory on every rank, into which peers can write rows and from which they can read
// them. Collective, with equal bytes; it waits on the host. ErrUnsupported where Info.PeerRows is false,
// ErrInvalidState for more than 64 segments. The caller ends it with Segment.Release.
func (b *Buffer) NewSegment(ctx context.Context, bytes uint64) (*Segment, error) {
	s, err := b.live().NewSegment(ctx, bytes)
	if err != nil {
		return nil, err
	}
	return &Segment{Number: s.Number, Address: s.Address, Bytes: s.Bytes, engine: s}, nil
}
