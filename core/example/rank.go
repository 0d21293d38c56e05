package main

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/deepep-go/deepep/core"
)

// The model: every rank holds two experts, a token chooses three of them.
const (
	tokens  = 64
	hidden  = 256
	topK    = 3
	perRank = 2
)

// runRank runs one rank: it joins the group, makes a buffer, communicates, and leaves.
func runRank(exchanger core.Exchanger) (err error) {
	ctx := context.Background()
	group, err := core.NewGroup(ctx, core.GroupOptions{Exchanger: exchanger})
	if err != nil {
		return err
	}
	defer keep(&err, group.Destroy)
	buffer, err := group.NewBuffer(ctx, core.BufferOptions{
		Engine: core.EngineCPU, Device: -1, NumNVLBytes: 8 << 20, NumRDMABytes: lowLatencyBytes(group.Size()), LowLatency: true,
	})
	if err != nil {
		return err
	}
	defer keep(&err, buffer.Destroy)
	if err := normalMode(buffer, group.Rank(), group.Size()); err != nil {
		return fmt.Errorf("rank %d, normal mode: %w", group.Rank(), err)
	}
	if err := lowLatencyMode(buffer, group.Rank(), group.Size()); err != nil {
		return fmt.Errorf("rank %d, low-latency mode: %w", group.Rank(), err)
	}
	if err := buffer.Barrier(&core.Call{}); err != nil {
		return err
	}
	if group.Rank() == 0 {
		return report(buffer)
	}
	return nil
}

// keep runs a clean-up and keeps its error if there is none before it.
func keep(err *error, clean func() error) {
	if e := clean(); *err == nil {
		*err = e
	}
}

// normalMode dispatches every token to its experts' ranks, multiplies the rows there by each expert's factor and
// weight, and checks the sums that combine returns.
func normalMode(buffer *core.Buffer, rank, ranks int) error {
	in := route(rank, ranks)
	var arrived core.Arrived
	if err := buffer.DispatchTokens(in, &arrived); err != nil {
		return err
	}
	for row := range int(arrived.Handle.NumRecvTokens) {
		var factor float32
		for k := range topK {
			if local := arrived.TopKIdx[row*topK+k]; local >= 0 {
				factor += arrived.TopKWeights[row*topK+k] * expertFactor(rank*perRank+int(local))
			}
		}
		scale(arrived.X[row*hidden:(row+1)*hidden], factor)
	}
	var home core.Combined
	if err := buffer.CombineTokens(arrived.X, nil, &arrived, &home); err != nil {
		return err
	}
	fmt.Printf("rank %d: sent %d tokens, computed %d rows, checking sums\n", rank, tokens, arrived.Handle.NumRecvTokens)
	return check(in, home.X)
}

// route makes tokens of small numbers and a random choice of different experts for each.
func route(rank, ranks int) *core.Tokens {
	rng := rand.New(rand.NewPCG(1, uint64(rank)))
	in := &core.Tokens{Hidden: hidden, NumTopK: topK, NumExperts: perRank * ranks, X: make([]uint16, tokens*hidden)}
	for i := range in.X {
		in.X[i] = core.ToBF16(float32(rng.IntN(8)))
	}
	for range tokens {
		for k, expert := range rng.Perm(max(topK, in.NumExperts))[:topK] {
			if expert >= in.NumExperts {
				expert = -1 // fewer experts than choices
			}
			in.TopKIdx = append(in.TopKIdx, int64(expert))
			in.TopKWeights = append(in.TopKWeights, 1/float32(k+1))
		}
	}
	return in
}

// expertFactor is what an expert multiplies a row by.
func expertFactor(expert int) float32 { return float32(expert + 1) }

func scale(row []uint16, by float32) {
	for i, x := range row {
		row[i] = core.ToBF16(core.FromBF16(x) * by)
	}
}

// check compares sums with what one process would have computed. Every partial sum is rounded to BF16 once, which has 8
// bits of precision.
func check(in *core.Tokens, sums []uint16) error {
	for token := range tokens {
		var factor float32
		for k := range topK {
			if expert := in.TopKIdx[token*topK+k]; expert >= 0 {
				factor += in.TopKWeights[token*topK+k] * expertFactor(int(expert))
			}
		}
		for h := range hidden {
			at := token*hidden + h
			want, got := core.FromBF16(in.X[at])*factor, core.FromBF16(sums[at])
			if diff := got - want; diff > want/64 || diff < -want/64 {
				return fmt.Errorf("token %d, channel %d: got %v, want %v", token, h, got, want)
			}
		}
	}
	return nil
}

// report prints the buffer's statistics.
func report(buffer *core.Buffer) error {
	fmt.Printf("%-22s %6s %12s %10s %10s\n", "operation (rank 0)", "calls", "bytes", "p50", "p99")
	for op := core.OpLayout; op < core.NumOps; op++ {
		s, err := buffer.Stats(op)
		if err != nil {
			return err
		}
		if s.Calls > 0 {
			fmt.Printf("%-22s %6d %12d %10v %10v\n", op, s.Calls, s.Bytes, s.P50, s.P99)
		}
	}
	return nil
}
