package core_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"

	"github.com/deepep-go/deepep/core"
)

const hidden = 128

// onTwoRanks runs f on two ranks that are goroutines of this process. The ranks of a real job are processes, which meet
// through core.DialTCP, core.OpenFile or an all-gather of the program's.
func onTwoRanks(f func(rank int, buffer *core.Buffer) error) {
	var all sync.WaitGroup
	for rank, exchanger := range core.NewLocal(2) {
		all.Go(func() {
			if err := oneRank(exchanger, f); err != nil {
				fmt.Printf("rank %d: %v\n", rank, err)
			}
		})
	}
	all.Wait()
}

func oneRank(exchanger core.Exchanger, f func(rank int, buffer *core.Buffer) error) error {
	ctx := context.Background()
	group, err := core.NewGroup(ctx, core.GroupOptions{Exchanger: exchanger})
	if err != nil {
		return err
	}
	defer group.Destroy()
	lowLatency, err := core.LowLatencySizeHint(2, hidden, int64(group.Size()), 2) // 2 tokens a rank, 2 experts
	if err != nil {
		return err
	}
	buffer, err := group.NewBuffer(ctx, core.BufferOptions{
		Engine: core.EngineCPU, Device: -1, NumNVLBytes: 1 << 20, NumRDMABytes: lowLatency, LowLatency: true,
	})
	if err != nil {
		return err
	}
	defer buffer.Destroy()
	return f(group.Rank(), buffer)
}

// row is a token's row with the same value in every channel.
func row(value float32) []uint16 {
	x := make([]uint16, hidden)
	for i := range x {
		x[i] = core.ToBF16(value)
	}
	return x
}

// value is what a row made by row, or a sum of such rows, has in every channel.
func value(row []uint16) float32 { return core.FromBF16(row[0]) }

// Normal mode, two ranks with one expert each. On rank r, token 0 has the value 10r + 1 and goes to expert 0, token 1
// has 10r + 2 and goes to both experts. The experts double what they receive.
func ExampleBuffer_DispatchTokens() {
	var received [2]int
	var sums [2][2]float32
	onTwoRanks(func(rank int, buffer *core.Buffer) error {
		in := &core.Tokens{
			X: append(row(float32(10*rank+1)), row(float32(10*rank+2))...), Hidden: hidden,
			TopKIdx: []int64{0, -1, 0, 1}, TopKWeights: []float32{1, 0, 0.5, 0.5}, NumTopK: 2, NumExperts: 2,
		}
		var arrived core.Arrived
		if err := buffer.DispatchTokens(in, &arrived); err != nil {
			return err
		}
		received[rank] = int(arrived.Handle.NumRecvTokens)
		for i, x := range arrived.X { // the expert
			arrived.X[i] = core.ToBF16(2 * core.FromBF16(x))
		}
		var back core.Combined
		if err := buffer.CombineTokens(arrived.X, nil, &arrived, &back); err != nil {
			return err
		}
		sums[rank] = [2]float32{value(back.X), value(back.X[hidden:])}
		return nil
	})
	for rank := range sums {
		fmt.Printf("rank %d received %d rows, its tokens became %v\n", rank, received[rank], sums[rank])
	}
	// Output:
	// rank 0 received 4 rows, its tokens became [2 8]
	// rank 1 received 2 rows, its tokens became [22 48]
}

// Low-latency mode in two halves, two ranks with one expert each. On rank r, token 0 goes to expert 0 and token 1 to
// expert 1. Between the halves a rank is free to compute.
func ExampleBuffer_LowLatencyDispatch() {
	var counts [2]int32
	var sums [2][2]float32
	onTwoRanks(func(rank int, buffer *core.Buffer) error {
		const tokens, ranks = 2, 2
		x := append(row(float32(10*rank+1)), row(float32(10*rank+2))...)
		experts, weights := []int64{0, 1}, []float32{1, 0.5} // [T,K], K = 1
		rows := make([]uint16, ranks*tokens*hidden)          // [L, R*B, H], L = 1
		count, source, ranges := make([]int32, 1), make([]int32, ranks*tokens), make([]int64, ranks)
		combined := make([]uint16, tokens*hidden)
		var pin runtime.Pinner
		defer pin.Unpin()
		dispatch := core.LLDispatchArgs{
			Phases: core.Send, NumTokens: tokens, NumMaxTokens: tokens, Hidden: hidden, NumTopK: 1, NumExperts: 2, IndexType: core.Int64,
			X: core.AddressOf(&pin, x), TopKIdx: core.AddressOf(&pin, experts), RecvX: core.AddressOf(&pin, rows),
			RecvCount: core.AddressOf(&pin, count), SrcInfo: core.AddressOf(&pin, source), LayoutRange: core.AddressOf(&pin, ranges),
		}
		if err := buffer.LowLatencyDispatch(&dispatch, nil); err != nil {
			return err
		}
		// Here the rank computes while rows travel.
		dispatch.Phases = core.Recv
		if err := buffer.LowLatencyDispatch(&dispatch, nil); err != nil {
			return err
		}
		counts[rank] = count[0]
		for i := range int(count[0]) * hidden { // the expert
			rows[i] = core.ToBF16(2 * core.FromBF16(rows[i]))
		}
		if err := buffer.LowLatencyCombine(&core.LLCombineArgs{
			Phases: core.SendRecv, NumTokens: tokens, NumMaxTokens: tokens, Hidden: hidden, NumTopK: 1, NumExperts: 2, IndexType: core.Int64,
			X: core.AddressOf(&pin, rows), TopKIdx: core.AddressOf(&pin, experts), TopKWeights: core.AddressOf(&pin, weights),
			SrcInfo: core.AddressOf(&pin, source), LayoutRange: core.AddressOf(&pin, ranges), CombinedX: core.AddressOf(&pin, combined),
		}, nil); err != nil {
			return err
		}
		sums[rank] = [2]float32{value(combined), value(combined[hidden:])}
		return nil
	})
	for rank := range sums {
		fmt.Printf("rank %d received %d rows, its tokens became %v\n", rank, counts[rank], sums[rank])
	}
	// Output:
	// rank 0 received 2 rows, its tokens became [2 2]
	// rank 1 received 2 rows, its tokens became [22 12]
}
