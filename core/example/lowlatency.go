package main

import (
	"fmt"
	"runtime"

	"github.com/deepep-go/deepep/core"
)

// lowLatencyBytes is the memory that low-latency calls of the model need.
func lowLatencyBytes(ranks int) uint64 {
	bytes, err := core.LowLatencySizeHint(tokens, hidden, int64(ranks), int64(perRank*ranks))
	if err != nil {
		return 0 // NewBuffer's error says what is wrong
	}
	return bytes
}

// lowLatencyMode does the same as normalMode without an exchange of counts: outputs have room for the worst case, and a
// dispatch comes in two halves with other work in between.
func lowLatencyMode(buffer *core.Buffer, rank, ranks int) error {
	in := route(rank, ranks)
	room := ranks * tokens // rows for each expert
	rows := make([]uint16, perRank*room*hidden)
	count, source := make([]int32, perRank+16), make([]int32, perRank*room)
	ranges := make([]int64, perRank*ranks+16)
	var pin runtime.Pinner
	defer pin.Unpin()
	send := core.LLDispatchArgs{
		Phases: core.Send, NumTokens: tokens, NumMaxTokens: tokens, Hidden: hidden, NumTopK: topK, NumExperts: int32(perRank * ranks),
		IndexType: core.Int64, X: core.AddressOf(&pin, in.X), TopKIdx: core.AddressOf(&pin, in.TopKIdx), RecvX: core.AddressOf(&pin, rows),
		RecvCount: core.AddressOf(&pin, count), SrcInfo: core.AddressOf(&pin, source), LayoutRange: core.AddressOf(&pin, ranges),
	}
	if err := buffer.LowLatencyDispatch(&send, &core.Call{}); err != nil {
		return err
	}
	work := compute() // while rows travel
	receive := send
	receive.Phases = core.Recv
	if err := buffer.LowLatencyDispatch(&receive, &core.Call{}); err != nil {
		return err
	}
	total := 0
	for expert := range perRank {
		total += int(count[expert])
		for row := range int(count[expert]) {
			at := (expert*room + row) * hidden
			scale(rows[at:at+hidden], expertFactor(rank*perRank+expert))
		}
	}
	sums := make([]uint16, tokens*hidden)
	combine := core.LLCombineArgs{
		Phases: core.SendRecv, NumTokens: tokens, NumMaxTokens: tokens, Hidden: hidden, NumTopK: topK, NumExperts: int32(perRank * ranks),
		IndexType: core.Int64, X: core.AddressOf(&pin, rows), TopKIdx: core.AddressOf(&pin, in.TopKIdx), TopKWeights: core.AddressOf(&pin, in.TopKWeights),
		SrcInfo: core.AddressOf(&pin, source), LayoutRange: core.AddressOf(&pin, ranges), CombinedX: core.AddressOf(&pin, sums),
	}
	if err := buffer.LowLatencyCombine(&combine, &core.Call{}); err != nil {
		return err
	}
	fmt.Printf("rank %d: low latency, computed %d rows (and %d in between), checking sums\n", rank, total, work)
	return check(in, sums)
}

// compute does some work in place of a model's.
func compute() int {
	primes := 0
	for n := 2; n < 5000; n++ {
		prime := true
		for d := 2; d*d <= n && prime; d++ {
			prime = n%d != 0
		}
		if prime {
			primes++
		}
	}
	return primes
}
