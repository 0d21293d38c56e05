package core

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

func TestDispatchAndCombine(t *testing.T) {
	for _, c := range []normal{{1, 9, 8, 1, 1}, {2, 16, 64, 2, 3}, {3, 20, 24, 3, 2}, {4, 33, 1032, 8, 16}, {8, 12, 16, 5, 1}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			onRanks(t, c.ranks, BufferOptions{NumNVLBytes: 4 << 20}, func(m *member) { m.normalRounds(c, 6) })
		})
	}
}

// normal is a shape of normal mode: at most so many tokens a rank.
type normal struct{ ranks, tokens, hidden, k, perRank int }

// normalRounds sends random routings there and back, and checks every row.
func (m *member) normalRounds(c normal, rounds int) {
	var out Arrived
	var back Combined
	for round := range rounds {
		all := routing(round, c.ranks, c.tokens, c.k, c.perRank*c.ranks)
		own := all[m.rank]
		in := &Tokens{Hidden: c.hidden, TopKIdx: own.index, TopKWeights: own.weights, NumTopK: c.k, NumExperts: c.perRank * c.ranks}
		for token := range own.tokens {
			for range c.hidden {
				in.X = append(in.X, ToBF16(elem(m.rank, token)))
			}
		}
		m.must(m.DispatchTokens(in, &out))
		m.checkArrived(&out, all, c.k, c.perRank)
		m.must(m.CombineTokens(out.X, out.TopKWeights, &out, &back))
		m.checkCombined(&back, own, c.k, c.perRank, c.hidden)
	}
}

// checkArrived compares the received rows with those of the routing, in order.
func (m *member) checkArrived(out *Arrived, all []route, k, local int) {
	row := 0
	counts := make([]int32, local)
	for source, r := range all {
		for token := range r.tokens {
			if !r.sends(token, k, m.rank, local) {
				continue
			}
			m.check(row < int(out.Handle.NumRecvTokens), "only %d rows came", out.Handle.NumRecvTokens)
			for h, x := range out.X[row*out.hidden : (row+1)*out.hidden] {
				m.check(FromBF16(x) == elem(source, token), "row %d, element %d: %v, want %v", row, h, FromBF16(x), elem(source, token))
			}
			m.check(int(out.source[row]) == token, "row %d: source token %d, want %d", row, out.source[row], token)
			for i, e := range r.index[token*k : (token+1)*k] {
				idx, weight := int64(-1), float32(0)
				if e >= 0 && int(e)/local == m.rank {
					idx, weight = e%int64(local), r.weights[token*k+i]
					counts[idx]++ // as often as the token names the expert
				}
				m.check(out.TopKIdx[row*k+i] == idx && out.TopKWeights[row*k+i] == weight, "row %d: choice %d is %d with %v, want %d with %v",
					row, i, out.TopKIdx[row*k+i], out.TopKWeights[row*k+i], idx, weight)
			}
			row++
		}
	}
	m.check(row == int(out.Handle.NumRecvTokens), "%d rows came, want %d", out.Handle.NumRecvTokens, row)
	for e, n := range counts {
		m.check(out.PerExpert[e] == n, "expert %d has %d rows, want %d", e, out.PerExpert[e], n)
	}
}

func (m *member) checkCombined(back *Combined, own route, k, local, hidden int) {
	for token := range own.tokens {
		copies := 0
		for to := range m.size {
			if own.sends(token, k, to, local) {
				copies++
			}
		}
		want := float32(copies) * elem(m.rank, token)
		for h, x := range back.X[token*hidden : (token+1)*hidden] {
			m.check(x == ToBF16(want), "token %d, element %d: %v, want %v", token, h, FromBF16(x), want)
		}
		for i, e := range own.index[token*k : (token+1)*k] {
			weight := own.weights[token*k+i]
			if e < 0 {
				weight = 0
			}
			m.check(back.TopKWeights[token*k+i] == weight, "token %d: weight %d is %v, want %v", token, i, back.TopKWeights[token*k+i], weight)
		}
	}
}

// fixed is a call with the same T on every rank, as raw arguments, for what DispatchTokens does not do.
type fixed struct {
	tokens, k, experts, hidden int
	x                          []uint8 // [T,hidden] one byte each
	index                      []int64
	weights                    []float32
	perRank, perExpert         []int32
	inRank                     []uint8
	prefix, head, source       []int32
	handle                     Handle
	pin                        *runtime.Pinner
}

func newFixed(m *member, tokens, k, experts, hidden int) *fixed {
	f := &fixed{
		tokens: tokens, k: k, experts: experts, hidden: hidden, x: make([]uint8, tokens*hidden+16), index: make([]int64, tokens*k),
		weights: make([]float32, tokens*k+64), perRank: make([]int32, m.size), perExpert: make([]int32, experts),
		inRank: make([]uint8, tokens*m.size), prefix: make([]int32, m.size*m.size), head: make([]int32, tokens*m.size),
	}
	for t := range tokens {
		for h := range hidden {
			f.x[t*hidden+h] = uint8(m.rank*40 + t)
		}
		for i := range k {
			f.index[t*k+i] = int64((t*3 + i*(experts/k) + m.rank) % experts)
			f.weights[t*k+i] = 1
		}
	}
	f.pin = &m.pin
	f.handle = Handle{RankPrefixMatrix: address(m, f.prefix), SendHead: address(m, f.head)}
	return f
}

func (f *fixed) notifyArgs(worst int) NotifyArgs {
	return NotifyArgs{
		NumTokens: int32(f.tokens), NumTopK: int32(f.k), NumExperts: int32(f.experts), NumWorstTokens: int32(worst), NumScales: 2, XType: FP8,
		Hidden: int64(f.hidden), ExpertAlignment: 8, NumTokensPerRank: AddressOf(f.pin, f.perRank), NumTokensPerExpert: AddressOf(f.pin, f.perExpert),
		IsTokenInRank: AddressOf(f.pin, f.inRank), Handle: &f.handle,
	}
}

// dispatchArgs are those of the second step, with the tensors that a dispatch reads.
func (f *fixed) dispatchArgs(token uint64, worst int, scales []float32) DispatchArgs {
	n := f.notifyArgs(worst)
	a := n.Dispatch(token)
	a.IndexType, a.X, a.XScales, a.TopKIdx, a.TopKWeights = Int64, AddressOf(f.pin, f.x), AddressOf(f.pin, scales), AddressOf(f.pin, f.index), AddressOf(f.pin, f.weights)
	return a
}

func (f *fixed) layout(m *member) {
	m.must(m.Layout(&LayoutArgs{
		NumTokens: int32(f.tokens), NumTopK: int32(f.k), NumExperts: int32(f.experts), IndexType: Int64, TopKIdx: address(m, f.index),
		NumTokensPerRank: address(m, f.perRank), NumTokensPerExpert: address(m, f.perExpert), IsTokenInRank: address(m, f.inRank),
	}, &Call{}))
}

func (f *fixed) notify(m *member, worst int) (uint64, error) {
	args := f.notifyArgs(worst)
	return m.Notify(&args, &Call{})
}

// FP8 rows with strided scales, aligned counts, then the same rows once more through the handle.
func TestScalesAndCachedDispatch(t *testing.T) {
	onRanks(t, 4, BufferOptions{NumNVLBytes: 1 << 20}, scalesAndCached)
}

func scalesAndCached(m *member) {
	f := newFixed(m, 6, 2, 2*m.size, 32)
	f.layout(m)
	token, err := f.notify(m, 0)
	m.must(err)
	counts := make([]int32, 2)
	n, err := m.WaitCounts(token, -1, counts)
	m.must(err)
	for e, c := range counts {
		m.check(c%8 == 0 && c > 0, "expert %d: %d rows, want a multiple of 8", e, c)
	}
	scales := make([]float32, 2*8*f.tokens) // stride 3 between scales, 8 between tokens
	for token := range f.tokens {
		scales[token*8], scales[token*8+3] = float32(token), float32(100+token)
	}
	f.handle.NumRecvTokens = int32(n)
	f.source = make([]int32, n+16)
	f.handle.RecvSrcIdx = address(m, f.source)
	recv, recvScales := make([]uint8, n*32+16), make([]float32, n*2+16)
	idx, weights := make([]int64, n*2+16), make([]float32, n*2+16)
	args := f.dispatchArgs(token, 0, scales)
	args.ScaleTokenStride, args.ScaleStride = 8, 3
	args.RecvX, args.RecvXScales, args.RecvTopKIdx, args.RecvTopKWeights = address(m, recv), address(m, recvScales), address(m, idx), address(m, weights)
	m.must(m.Dispatch(&args, &Call{}))
	check := func(what string) {
		for row := range n {
			source := 0
			for f.prefix[source*m.size+m.rank] <= int32(row) {
				source++
			}
			token := int(f.source[row])
			m.check(recv[row*32] == uint8(source*40+token) && recv[row*32+31] == recv[row*32], "%s: row %d: %d from rank %d token %d", what, row, recv[row*32], source, token)
			m.check(recvScales[row*2] == float32(token) && recvScales[row*2+1] == float32(100+token), "%s: row %d: scales %v", what, row, recvScales[row*2:row*2+2])
		}
	}
	check("first")
	m.check(status.CodeOf(m.Dispatch(&args, &Call{})) == status.InvalidArgument, "a token serves one dispatch")
	clear(recv)
	clear(recvScales)
	cached := args
	cached.Cached, cached.Token, cached.NumTopK, cached.NumExperts, cached.TopKIdx, cached.TopKWeights = 1, 0, 0, 0, 0, 0
	m.check(status.CodeOf(m.Dispatch(&cached, &Call{})) == status.InvalidArgument, "outputs of top-k without top-k")
	cached.RecvTopKIdx, cached.RecvTopKWeights = 0, 0
	m.must(m.Dispatch(&cached, &Call{}))
	check("cached")
}

// One step without waiting for counts: rows past the last one are marked.
func TestWorstCaseDispatch(t *testing.T) {
	onRanks(t, 2, BufferOptions{NumNVLBytes: 1 << 20}, worstCase)
}

func worstCase(m *member) {
	const worst = 40
	f := newFixed(m, 6, 2, 2*m.size, 32)
	f.layout(m)
	token, err := f.notify(m, worst)
	m.must(err)
	_, err = m.WaitCounts(token, -1, nil)
	m.check(status.CodeOf(err) == status.InvalidArgument, "waiting for counts that are never written: %v", err)
	for range 40 { // by other threads; their exchanges end, and take no place from this one
		other := newFixed(m, 6, 2, 2*m.size, 32)
		other.layout(m)
		one, err := other.notify(m, 0)
		m.must(err)
		m.must(m.CancelDispatch(one, status.Errorf(status.Aborted, "not wanted"), &Call{}))
	}
	scales := make([]float32, 2*f.tokens)
	f.source = make([]int32, worst)
	f.handle.RecvSrcIdx = address(m, f.source)
	recv, recvScales, idx, weights := make([]uint8, worst*32), make([]float32, worst*2), make([]int64, worst*2), make([]float32, worst*2)
	args := f.dispatchArgs(token, worst, scales)
	args.ScaleTokenStride, args.ScaleStride = 2, 1
	args.RecvX, args.RecvXScales, args.RecvTopKIdx, args.RecvTopKWeights = address(m, recv), address(m, recvScales), address(m, idx), address(m, weights)
	m.must(m.Dispatch(&args, &Call{}))
	n := int(f.prefix[(m.size-1)*m.size+m.rank])
	m.check(n > 0 && n < worst, "%d rows came", n)
	for row := range worst {
		empty := idx[row*2] == -1 && idx[row*2+1] == -1
		m.check(empty == (row >= n), "row %d of %d: choices %v", row, n, idx[row*2:row*2+2])
	}
}
