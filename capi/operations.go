package main

/*
#include "shim.h"
*/
import "C"

import (
	"unsafe"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

// args is a struct of C as Go's of the same layout, which lies in C's memory and points to C's memory alone. shim.c has
// completed it, so that every field is there.
func args[Go, C any](p *C) *Go { return (*Go)(unsafe.Pointer(p)) }

// callOptions converts the order of a call.
func callOptions(c *C.dp_call) (core.Call, error) {
	call := core.Call{Async: c.is_async != 0, Stream: uintptr(c.stream)}
	var err error
	if c.previous_event != 0 {
		if call.Previous, err = find[*core.Event](uintptr(c.previous_event), "previous_event"); err != nil {
			return call, err
		}
	}
	if c.event != 0 {
		if call.Event, err = find[*core.Event](uintptr(c.event), "event"); err != nil {
			return call, err
		}
	}
	if c.has_config != 0 {
		call.Config = args[op.Config](&c.config)
	}
	return call, nil
}

// operate finds the buffer and the order of an operation and runs it.
func operate(id C.uintptr_t, c *C.dp_call, f func(*core.Buffer, *core.Call) error) C.int32_t {
	return guard(func() error {
		b, err := buffer(uintptr(id))
		if err != nil {
			return err
		}
		call, err := callOptions(c)
		if err != nil {
			return err
		}
		return f(b, &call)
	})
}

//export dpgo_get_layout
func dpgo_get_layout(id C.uintptr_t, a *C.deepep_layout, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error { return b.Layout(args[op.LayoutArgs](a), call) })
}

//export dpgo_notify_counts
func dpgo_notify_counts(id C.uintptr_t, a *C.deepep_notify, c *C.dp_call, token *C.uint64_t) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		n, err := b.Notify(args[op.NotifyArgs](a), call)
		*token = C.uint64_t(n)
		return err
	})
}

//export dpgo_wait_counts
func dpgo_wait_counts(id C.uintptr_t, token C.uint64_t, ms C.int64_t, rows, perExpert *C.int32_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		var counts []int32
		if perExpert != nil {
			n, err := b.CountsLen(uint64(token))
			if err != nil {
				return err
			}
			counts = unsafe.Slice((*int32)(perExpert), n)
		}
		n, err := b.WaitCounts(uint64(token), timeout(ms), counts)
		*rows = C.int32_t(n)
		return err
	})
}

//export dpgo_dispatch
func dpgo_dispatch(id C.uintptr_t, a *C.deepep_dispatch_args, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error { return b.Dispatch(args[op.DispatchArgs](a), call) })
}

//export dpgo_dispatch_at_once
func dpgo_dispatch_at_once(id C.uintptr_t, n *C.deepep_notify, a *C.deepep_dispatch_args, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		return b.DispatchAtOnce(args[op.NotifyArgs](n), args[op.DispatchArgs](a), call)
	})
}

//export dpgo_cancel_dispatch
func dpgo_cancel_dispatch(id C.uintptr_t, token C.uint64_t, reason C.int32_t, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		var why error
		if reason != 0 {
			why = &status.Error{Code: status.Code(reason)}
		}
		return b.CancelDispatch(uint64(token), why, call)
	})
}

//export dpgo_combine
func dpgo_combine(id C.uintptr_t, a *C.deepep_combine_args, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error { return b.Combine(args[op.CombineArgs](a), call) })
}

//export dpgo_balance_workspace
func dpgo_balance_workspace(id C.uintptr_t, a *C.deepep_balance_args, reduce C.int32_t, bytes *C.uint64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		n, err := b.BalanceWorkspace(args[op.BalanceArgs](a), reduce != 0)
		*bytes = C.uint64_t(n)
		return err
	})
}

//export dpgo_prefetch_weights
func dpgo_prefetch_weights(id C.uintptr_t, a *C.deepep_balance_args, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		return b.PrefetchWeights(args[op.BalanceArgs](a), call)
	})
}

//export dpgo_reduce_grads
func dpgo_reduce_grads(id C.uintptr_t, a *C.deepep_balance_args, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error { return b.ReduceGrads(args[op.BalanceArgs](a), call) })
}

//export dpgo_low_latency_dispatch
func dpgo_low_latency_dispatch(id C.uintptr_t, a *C.deepep_ll_dispatch_args, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		return b.LowLatencyDispatch(args[op.LLDispatchArgs](a), call)
	})
}

//export dpgo_low_latency_combine
func dpgo_low_latency_combine(id C.uintptr_t, a *C.deepep_ll_combine_args, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		return b.LowLatencyCombine(args[op.LLCombineArgs](a), call)
	})
}

//export dpgo_next_low_latency_combine_buffer
func dpgo_next_low_latency_combine_buffer(id C.uintptr_t, tokens, hidden, experts C.int32_t, address, stride *C.uint64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		a, s, err := b.NextCombineBuffer(int32(tokens), int32(hidden), int32(experts))
		*address, *stride = C.uint64_t(a), C.uint64_t(s)
		return err
	})
}
