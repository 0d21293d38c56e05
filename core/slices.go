package core

import (
	"fmt"
	"math"
	"runtime"

	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Tokens are this rank's tokens as plain slices, for the CPU engine. T is len(TopKIdx) / NumTopK.
type Tokens struct {
	X           []uint16  // [T,H] BF16 bits
	Hidden      int       // H, a multiple of 8
	TopKIdx     []int64   // [T,K] experts; -1 selects nothing
	TopKWeights []float32 // [T,K]
	NumTopK     int
	NumExperts  int
}

// Arrived are the rows that this rank received, ordered by source rank and then by token there, and what CombineTokens
// needs to send them back. DispatchTokens uses its slices again: keep one for each dispatch whose combine is still to
// come.
type Arrived struct {
	X           []uint16  // [N,H]
	TopKIdx     []int64   // [N,K] local expert, or -1 where the expert is not here
	TopKWeights []float32 // [N,K], 0 there
	PerExpert   []int32   // [L] rows for each local expert
	Handle      Handle

	hidden, topK         int
	prefix, head, source []int32
	perRank, allExperts  []int32
	inRank               []uint8
}

// Combined are this rank's tokens after combine. CombineTokens uses its slices again.
type Combined struct {
	X           []uint16  // [T,H] BF16: the plain sum of the rows that came from each token
	TopKWeights []float32 // [T,K] likewise; only if weights were given
}

// DispatchTokens sends every token to the ranks of its experts: Layout, Notify, WaitCounts and Dispatch in one, over Go
// slices. Collective; it returns when the rows are there. CPU engine only, else ErrUnsupported; other errors are those
// of the four. in is read during the call alone, out belongs to the caller.
func (b *Buffer) DispatchTokens(in *Tokens, out *Arrived) error {
	if err := b.checkTokens(in, out); err != nil {
		return err
	}
	t, k, e, r := len(in.TopKIdx)/in.NumTopK, in.NumTopK, in.NumExperts, b.Group().size
	out.hidden, out.topK = in.Hidden, k
	grow(&out.perRank, r)
	grow(&out.allExperts, e)
	grow(&out.inRank, t*r)
	grow(&out.prefix, r*r)
	grow(&out.head, t*r)
	grow(&out.PerExpert, e/r)
	var pin runtime.Pinner
	defer pin.Unpin()
	out.Handle = Handle{RankPrefixMatrix: AddressOf(&pin, out.prefix), SendHead: AddressOf(&pin, out.head)}
	notify := NotifyArgs{
		NumTokens: int32(t), NumTopK: int32(k), NumExperts: int32(e), ExpertAlignment: 1, XType: BF16, Hidden: int64(in.Hidden), Handle: &out.Handle,
		NumTokensPerRank: AddressOf(&pin, out.perRank), NumTokensPerExpert: AddressOf(&pin, out.allExperts), IsTokenInRank: AddressOf(&pin, out.inRank),
	}
	token, err := b.countTokens(&pin, in, &notify)
	if err != nil {
		return err
	}
	n, err := b.WaitCounts(token, -1, out.PerExpert)
	if err != nil {
		return err
	}
	out.Handle.NumRecvTokens = int32(n)
	grow(&out.X, n*in.Hidden)
	grow(&out.TopKIdx, n*k)
	grow(&out.TopKWeights, n*k)
	grow(&out.source, n)
	out.Handle.RecvSrcIdx = AddressOf(&pin, out.source)
	args := notify.Dispatch(token)
	args.IndexType, args.X, args.TopKIdx, args.TopKWeights = Int64, AddressOf(&pin, in.X), AddressOf(&pin, in.TopKIdx), AddressOf(&pin, in.TopKWeights)
	args.RecvX, args.RecvTopKIdx, args.RecvTopKWeights = AddressOf(&pin, out.X), AddressOf(&pin, out.TopKIdx), AddressOf(&pin, out.TopKWeights)
	return b.Dispatch(&args, &Call{})
}

func (b *Buffer) checkTokens(in *Tokens, out *Arrived) error {
	if !b.Info().HostStream {
		return status.Errorf(status.Unsupported, "slices are memory of the CPU engine; engine %s wants device addresses", b.Info().Engine)
	}
	switch {
	case in == nil || out == nil:
		return status.InvalidArg("in, out", "nil", "this rank's tokens, and where to put what arrives")
	case in.NumTopK < 1:
		return status.InvalidArg("NumTopK", in.NumTopK, "1 or more")
	case in.Hidden < 1:
		return status.InvalidArg("Hidden", in.Hidden, "a multiple of 8")
	case len(in.TopKIdx)%in.NumTopK != 0:
		return status.InvalidArg("TopKIdx", len(in.TopKIdx), "a multiple of NumTopK")
	case len(in.TopKWeights) != len(in.TopKIdx):
		return status.InvalidArg("TopKWeights", len(in.TopKWeights), "as many as TopKIdx")
	case len(in.TopKIdx) > math.MaxInt32 || in.Hidden > math.MaxInt32 || in.NumExperts > math.MaxInt32:
		return status.InvalidArg("TopKIdx, Hidden and NumExperts", fmt.Sprint(len(in.TopKIdx), " choices, ", in.Hidden, " and ", in.NumExperts), "at most 2147483647 each")
	case len(in.X) != len(in.TopKIdx)/in.NumTopK*in.Hidden:
		return status.InvalidArg("X", len(in.X), "Hidden elements for each token")
	case in.NumExperts < 1 || in.NumExperts%b.Group().size != 0:
		return status.InvalidArg("NumExperts", in.NumExperts, "a multiple of the group's size")
	}
	shape := plan.Rows{
		NumTokens: int32(len(in.TopKIdx) / in.NumTopK), NumTopK: int32(min(in.NumTopK, math.MaxInt32)), NumExperts: int32(in.NumExperts),
		XType: BF16, Hidden: int64(in.Hidden),
	}
	return shape.Check(b.Group().topology) // before memory is made for these numbers
}

func (b *Buffer) countTokens(pin *runtime.Pinner, in *Tokens, n *NotifyArgs) (token uint64, err error) {
	if err := b.Layout(&LayoutArgs{
		NumTokens: n.NumTokens, NumTopK: n.NumTopK, NumExperts: n.NumExperts, IndexType: Int64, TopKIdx: AddressOf(pin, in.TopKIdx),
		NumTokensPerRank: n.NumTokensPerRank, NumTokensPerExpert: n.NumTokensPerExpert, IsTokenInRank: n.IsTokenInRank,
	}, &Call{}); err != nil {
		return 0, err
	}
	return b.Notify(n, &Call{Async: true})
}

// CombineTokens sums the rows x [N,H] (BF16, one for each that arrived) into the tokens that they came from, and
// weights [N,K] likewise unless nil: Combine over Go slices. Collective; it returns when the sums are in out.
func (b *Buffer) CombineTokens(x []uint16, weights []float32, from *Arrived, out *Combined) error {
	if from == nil || out == nil {
		return status.InvalidArg("from, out", "nil", "what DispatchTokens has filled, and where to put the sums")
	}
	n, t := int(from.Handle.NumRecvTokens), int(from.Handle.NumTokens)
	if len(x) != n*from.hidden {
		return status.InvalidArg("x", len(x), "as many elements as rows arrived")
	}
	if weights != nil && len(weights) != n*from.topK {
		return status.InvalidArg("weights", len(weights), "as many as arrived, or none")
	}
	grow(&out.X, t*from.hidden)
	var pin runtime.Pinner
	defer pin.Unpin()
	handle := from.Handle // its matrices are pinned again: the dispatch has unpinned them
	handle.RankPrefixMatrix, handle.SendHead, handle.RecvSrcIdx = AddressOf(&pin, from.prefix), AddressOf(&pin, from.head), AddressOf(&pin, from.source)
	args := CombineArgs{Hidden: int64(from.hidden), X: AddressOf(&pin, x), Handle: &handle, CombinedX: AddressOf(&pin, out.X)}
	out.TopKWeights = out.TopKWeights[:0]
	if weights != nil {
		grow(&out.TopKWeights, t*from.topK)
		args.NumTopK, args.TopKWeights, args.CombinedTopKWeights = int32(from.topK), AddressOf(&pin, weights), AddressOf(&pin, out.TopKWeights)
	}
	return b.Combine(&args, &Call{})
}

// grow makes a slice n long, in its own memory if that is large enough. Rows must begin at a multiple of 16 bytes,
// which Go's allocator gives for all but the smallest sizes: those get room to spare.
func grow[T any](s *[]T, n int) {
	if cap(*s) < n {
		*s = make([]T, max(n, 64))
	}
	*s = (*s)[:n]
}

// ToBF16 rounds to the nearest BF16 bits, ties to even; NaN stays NaN.
func ToBF16(f float32) uint16 {
	bits := math.Float32bits(f)
	if f != f {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// FromBF16 widens BF16 bits.
func FromBF16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }
