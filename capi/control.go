package main

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"sync"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

//export dpgo_clean_low_latency_buffer
func dpgo_clean_low_latency_buffer(id C.uintptr_t, tokens, hidden, experts C.int32_t, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		return b.Clean(int32(tokens), int32(hidden), int32(experts), call)
	})
}

//export dpgo_barrier
func dpgo_barrier(id C.uintptr_t, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error { return b.Barrier(call) })
}

//export dpgo_update_mask
func dpgo_update_mask(id C.uintptr_t, rank, masked C.int32_t, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error { return b.UpdateMask(int32(rank), masked != 0, call) })
}

//export dpgo_query_mask
func dpgo_query_mask(id, out C.uintptr_t, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error { return b.QueryMask(uintptr(out), call) })
}

//export dpgo_clean_mask
func dpgo_clean_mask(id C.uintptr_t, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error { return b.CleanMask(call) })
}

var segments sync.Map // address: *core.Segment

//export dpgo_segment_create
func dpgo_segment_create(id C.uintptr_t, bytes C.uint64_t, index *C.int32_t, address *C.uint64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		s, err := b.NewSegment(context.Background(), uint64(bytes))
		if err != nil {
			return err
		}
		segments.Store(s.Address, s)
		*index, *address = C.int32_t(s.Number), C.uint64_t(s.Address)
		return nil
	})
}

//export dpgo_segment_release
func dpgo_segment_release(address C.uintptr_t) C.int32_t {
	return guard(func() error {
		s, ok := segments.LoadAndDelete(uintptr(address))
		if !ok {
			return status.InvalidArg("address", uintptr(address), "that of a segment which has not been released")
		}
		return s.(*core.Segment).Release()
	})
}

func microseconds(d time.Duration) C.double { return C.double(float64(d) / float64(time.Microsecond)) }

//export dpgo_stats
func dpgo_stats(id C.uintptr_t, out *C.deepep_op_stats, bytesToPeer, waitPerPeer *C.uint64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		s, err := b.Stats(op.Operation(out.op))
		if err != nil {
			return err
		}
		out.calls, out.errors, out.bytes = C.uint64_t(s.Calls), C.uint64_t(s.Errors), C.uint64_t(s.Bytes)
		out.wait_ns, out.total_ns = C.uint64_t(s.Wait), C.uint64_t(s.Total)
		out.mean_us, out.p50_us, out.p99_us = microseconds(s.Mean), microseconds(s.P50), microseconds(s.P99)
		out.p999_us, out.max_us = microseconds(s.P999), microseconds(s.Max)
		if bytesToPeer != nil {
			for i, n := range s.BytesToPeer {
				unsafe.Slice(bytesToPeer, len(s.BytesToPeer))[i] = C.uint64_t(n)
			}
		}
		if waitPerPeer != nil {
			for i, d := range s.WaitForPeer {
				unsafe.Slice(waitPerPeer, len(s.WaitForPeer))[i] = C.uint64_t(d)
			}
		}
		return nil
	})
}
