package core

import (
	"fmt"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

// How a dispatch knows its rows: a host waits for counts; outputs have room for any routing, in two calls or in one.
const (
	waits = iota
	worst
	atOnce
)

// A row for each choice, in the order of experts, and back.
func TestExpandedRows(t *testing.T) {
	for _, ranks := range []int{1, 3} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			onRanks(t, ranks, BufferOptions{NumNVLBytes: 1 << 20}, func(m *member) {
				m.expanded(waits)
				m.expanded(worst)
				m.expanded(atOnce)
			})
		})
	}
}

func (m *member) expanded(how int) {
	const tokens, k, local, hidden, align = 7, 3, 2, 16, 4
	most := tokens * m.size
	room := most*k + align*local
	x, index, weights := make([]uint16, tokens*hidden), make([]int64, tokens*k), make([]float32, tokens*k)
	expert := func(rank, token, i int) int64 { return int64((token*3+i*2+rank)%(local*m.size+1)) - 1 }
	for token := range tokens {
		for h := range hidden {
			x[token*hidden+h] = ToBF16(elem(m.rank, token))
		}
		for i := range k {
			index[token*k+i], weights[token*k+i] = expert(m.rank, token, i), float32(token*k+i)
		}
	}
	prefix, head, slot := make([]int32, m.size*m.size), make([]int32, tokens*m.size), make([]int32, tokens*k)
	byRank, byExpert, num, meta := make([]int32, m.size), make([]int32, local), make([]int32, local), make([]int32, most*(k+2))
	h := Handle{
		RankPrefixMatrix: address(m, prefix), SendHead: address(m, head), DstSlot: address(m, slot), PsumRecvTokensPerRank: address(m, byRank),
		PsumRecvTokensPerExpert: address(m, byExpert), NumRecvTokensPerExpert: address(m, num), RecvSrcMetadata: address(m, meta),
	}
	n := NotifyArgs{
		NumTokens: tokens, NumTopK: k, NumExperts: int32(local * m.size), ExpertAlignment: align, XType: BF16, Hidden: hidden, Handle: &h,
		Routing: RoutingExpanded, IndexType: Int64, NumMaxTokens: tokens, TopKIdx: address(m, index),
	}
	if how != waits {
		n.NumWorstTokens, n.NumWorstExpanded = int32(most), int32(room)
	}
	var token uint64
	if how != atOnce {
		var err error
		token, err = m.Notify(&n, &Call{})
		m.must(err)
	}
	h.NumRecvTokens, h.NumExpandedTokens = int32(most), int32(room)
	if how == waits {
		counts := make([]int32, local)
		rows, err := m.WaitCounts(token, -1, counts)
		m.must(err)
		h.NumRecvTokens, h.NumExpandedTokens = int32(rows), counts[0]+counts[1]
	}
	recv, recvWeights := make([]uint16, room*hidden), make([]float32, room)
	d := DispatchArgs{
		Token: token, XType: BF16, Hidden: hidden, NumTokens: tokens, NumWorstTokens: n.NumWorstTokens, X: address(m, x),
		TopKWeights: address(m, weights), Handle: &h, RecvX: address(m, recv), RecvTopKWeights: address(m, recvWeights),
	}
	other := d
	other.Handle = new(Handle)
	*other.Handle = h
	other.Handle.ExpertAlignment = 2 * align
	if how == atOnce {
		m.check(status.CodeOf(m.DispatchAtOnce(&n, &other, &Call{})) == status.InvalidArgument, "another handle")
		other = d
		other.Token = 1
		m.check(status.CodeOf(m.DispatchAtOnce(&n, &other, &Call{})) == status.InvalidArgument, "a token")
		counted := n
		counted.NumWorstTokens = 0
		m.check(status.CodeOf(m.DispatchAtOnce(&counted, &d, &Call{})) == status.InvalidArgument, "no room for any routing")
		m.check(h.Exchange == 0 && h.NumRanks == 0, "a refused call has written to the handle")
		m.must(m.DispatchAtOnce(&n, &d, &Call{}))
	} else {
		m.check(status.CodeOf(m.Dispatch(&other, &Call{})) == status.InvalidArgument, "a handle of another alignment")
		m.must(m.Dispatch(&d, &Call{}))
	}
	row := 0
	for e := range local {
		row = (row + align - 1) / align * align
		for rank := range m.size {
			for t := range tokens {
				for i := range k {
					if expert(rank, t, i) != int64(m.rank*local+e) {
						continue
					}
					m.check(recv[row*hidden] == ToBF16(elem(rank, t)) && recvWeights[row] == float32(t*k+i),
						"row %d: %v with weight %v, want token %d of rank %d", row, FromBF16(recv[row*hidden]), recvWeights[row], t, rank)
					row++
				}
			}
		}
		m.check(int(byExpert[e]) == row, "the rows of expert %d end at %d, want %d", e, byExpert[e], row)
	}
	out, returned := make([]uint16, tokens*hidden), make([]float32, tokens*k)
	c := CombineArgs{
		NumTopK: k, Hidden: hidden, X: address(m, recv), TopKWeights: address(m, recvWeights), Handle: &h, CombinedX: address(m, out),
		CombinedTopKWeights: address(m, returned), NumXRows: h.NumExpandedTokens,
	}
	m.must(m.Combine(&c, &Call{}))
	for t := range tokens {
		copies := 0
		for i := range k {
			want := weights[t*k+i]
			if index[t*k+i] < 0 {
				want = 0
			} else {
				copies++
			}
			m.check(returned[t*k+i] == want, "token %d: weight %d is %v, want %v", t, i, returned[t*k+i], want)
		}
		want := ToBF16(float32(copies) * elem(m.rank, t))
		m.check(out[t*hidden] == want, "token %d: %v, want %v", t, FromBF16(out[t*hidden]), FromBF16(want))
	}
}
