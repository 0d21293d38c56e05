// Command hostcost measures what an asynchronous low-latency call costs its caller: one rank, one token, CPU engine.
// Calls come in bursts with a pause between them; ../hostcost.py says why.
//
//	hostcost CALLS
//
// It prints {"dispatch": [us, …], "combine": [us, …]}.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/deepep-go/deepep/core"
)

const (
	hidden       = 128
	one          = 0x3f80 // 1.0 in BF16
	warmupBursts = 50
	burst        = 4
	pause        = 200 * time.Microsecond
)

type times struct {
	Dispatch []float64 `json:"dispatch"`
	Combine  []float64 `json:"combine"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "hostcost:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 {
		return errors.New("usage: hostcost CALLS")
	}
	calls, err := strconv.Atoi(os.Args[1])
	if err != nil || calls < burst {
		return fmt.Errorf("CALLS: got %q, allowed an int >= %d", os.Args[1], burst)
	}
	group, err := core.NewGroup(context.Background(), core.GroupOptions{Exchanger: core.NewLocal(1)[0]})
	if err != nil {
		return err
	}
	bytes, err := core.LowLatencySizeHint(1, hidden, 1, 1)
	if err != nil {
		return err
	}
	buffer, err := group.NewBuffer(context.Background(), core.BufferOptions{
		Engine: core.EngineCPU, NumRDMABytes: bytes, LowLatency: true, Preinitialize: true,
	})
	if err != nil {
		return err
	}
	result, err := measure(buffer, calls)
	if err != nil {
		return err
	}
	if err := errors.Join(buffer.Destroy(), group.Destroy()); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// tensors of one token of one rank with one expert.
type tensors struct {
	x, answers, combined []uint16
	received             []uint8
	scales, weights      []float32
	experts, ranges      []int64
	count, sources       []int32
	pin                  runtime.Pinner
}

func newTensors() *tensors {
	return &tensors{
		x: slices.Repeat([]uint16{one}, hidden), answers: slices.Repeat([]uint16{one}, hidden), combined: make([]uint16, hidden),
		received: make([]uint8, hidden), scales: make([]float32, 1), weights: []float32{1},
		experts: make([]int64, 1), ranges: make([]int64, 1), count: make([]int32, 1), sources: make([]int32, 1),
	}
}

func (t *tensors) dispatch() *core.LLDispatchArgs {
	return &core.LLDispatchArgs{
		Phases: core.SendRecv, NumTokens: 1, NumMaxTokens: 1, Hidden: hidden, NumTopK: 1, NumExperts: 1,
		IndexType: core.Int64, UseFP8: 1, X: core.AddressOf(&t.pin, t.x), TopKIdx: core.AddressOf(&t.pin, t.experts),
		RecvX: core.AddressOf(&t.pin, t.received), RecvXScales: core.AddressOf(&t.pin, t.scales), RecvCount: core.AddressOf(&t.pin, t.count),
		SrcInfo: core.AddressOf(&t.pin, t.sources), LayoutRange: core.AddressOf(&t.pin, t.ranges),
	}
}

func (t *tensors) combine() *core.LLCombineArgs {
	return &core.LLCombineArgs{
		Phases: core.SendRecv, NumTokens: 1, NumMaxTokens: 1, Hidden: hidden, NumTopK: 1, NumExperts: 1,
		IndexType: core.Int64, X: core.AddressOf(&t.pin, t.answers), TopKIdx: core.AddressOf(&t.pin, t.experts),
		TopKWeights: core.AddressOf(&t.pin, t.weights), SrcInfo: core.AddressOf(&t.pin, t.sources),
		LayoutRange: core.AddressOf(&t.pin, t.ranges), CombinedX: core.AddressOf(&t.pin, t.combined),
	}
}

// measure times the calls from their start to their return, not what the communication stream then does.
func measure(buffer *core.Buffer, calls int) (*times, error) {
	event, err := buffer.NewEvent()
	if err != nil {
		return nil, err
	}
	t := newTensors()
	defer t.pin.Unpin()
	dispatch, combine, call := t.dispatch(), t.combine(), &core.Call{Async: true, Event: event}
	timed := func(f func() error) ([]float64, error) {
		time.Sleep(pause)
		us := make([]float64, burst)
		for i := range us {
			start := time.Now()
			err := f()
			us[i] = float64(time.Since(start).Nanoseconds()) / 1e3
			if err != nil {
				return nil, err
			}
		}
		return us, event.Wait(-1)
	}
	result := &times{}
	for i := range warmupBursts + calls/burst {
		sent, err := timed(func() error { return buffer.LowLatencyDispatch(dispatch, call) })
		if err != nil {
			return nil, err
		}
		back, err := timed(func() error { return buffer.LowLatencyCombine(combine, call) })
		if err != nil {
			return nil, err
		}
		if i >= warmupBursts {
			result.Dispatch, result.Combine = append(result.Dispatch, sent...), append(result.Combine, back...)
		}
	}
	if t.count[0] != 1 || !slices.Equal(t.combined, t.x) {
		return nil, errors.New("the row did not come back as it was sent")
	}
	return result, event.Destroy()
}
