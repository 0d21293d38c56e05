package main

/*
#include "shim.h"
*/
import "C"

import (
	"unsafe"

	"github.com/deepep-go/deepep/core"
)

// at is an address that C gave, as a number: it may be of a device, and Go must not follow it.
func at[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

// how converts a call's order.
func how(c *C.dp_call) (core.Call, error) {
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
		config := fromConfig(&c.config)
		call.Config = &config
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
		call, err := how(c)
		if err != nil {
			return err
		}
		return f(b, &call)
	})
}

//export dpgo_get_layout
func dpgo_get_layout(id C.uintptr_t, a *C.deepep_layout, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		return b.Layout(&core.LayoutArgs{
			NumTokens: int32(a.num_tokens), NumTopK: int32(a.num_topk), NumExperts: int32(a.num_experts),
			IndexType: core.Type(a.index_type), TopKIdx: uintptr(a.topk_idx), TokensPerRank: at(a.num_tokens_per_rank),
			TokensPerNode: at(a.num_tokens_per_rdma_rank), TokensPerExpert: at(a.num_tokens_per_expert),
			TokenInRank: at(a.is_token_in_rank),
		}, call)
	})
}

func fromHandle(h *C.deepep_handle) core.Handle {
	return core.Handle{
		NumRanks: int32(h.num_ranks), NumTokens: int32(h.num_tokens), NumRecvTokens: int32(h.num_recv_tokens),
		RankPrefixMatrix: at(h.rank_prefix_matrix), SendHead: at(h.send_head), RecvSrcIdx: at(h.recv_src_idx),
	}
}

//export dpgo_notify_counts
func dpgo_notify_counts(id C.uintptr_t, a *C.deepep_notify, h *C.deepep_handle, c *C.dp_call, token *C.uint64_t) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		handle := fromHandle(h)
		n, err := b.Notify(&core.NotifyArgs{
			Rows: core.Rows{
				NumTokens: int32(a.num_tokens), NumTopK: int32(a.num_topk), NumExperts: int32(a.num_experts),
				NumWorstTokens: int32(a.num_worst_tokens), NumScales: int32(a.num_scales), XType: core.Type(a.x_type), Hidden: int64(a.hidden),
			},
			ExpertAlignment: int32(a.expert_alignment), TokensPerRank: at(a.num_tokens_per_rank),
			TokensPerExpert: at(a.num_tokens_per_expert), TokenInRank: at(a.is_token_in_rank), Handle: &handle,
		}, call)
		*token = C.uint64_t(n)
		h.num_tokens, h.num_ranks = C.int32_t(handle.NumTokens), C.int32_t(handle.NumRanks)
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
		n, err := b.WaitCounts(uint64(token), slice(ms), counts)
		*rows = C.int32_t(n)
		return err
	})
}

//export dpgo_dispatch
func dpgo_dispatch(id C.uintptr_t, a *C.deepep_dispatch_args, h *C.deepep_handle, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		handle := fromHandle(h)
		return b.Dispatch(&core.DispatchArgs{
			Rows: core.Rows{
				NumTokens: int32(a.num_tokens), NumTopK: int32(a.num_topk), NumExperts: int32(a.num_experts),
				NumWorstTokens: int32(a.num_worst_tokens), NumScales: int32(a.num_scales), XType: core.Type(a.x_type), Hidden: int64(a.hidden),
			},
			Cached: a.cached != 0, Token: uint64(a.token), IndexType: core.Type(a.index_type), X: uintptr(a.x), XScales: uintptr(a.x_scales),
			ScaleTokenStride: int64(a.scale_token_stride), ScaleStride: int64(a.scale_stride), TopKIdx: uintptr(a.topk_idx),
			TopKWeights: at(a.topk_weights), Handle: &handle, RecvSegment: int32(a.recv_segment),
			RecvSegmentOffset: uint64(a.recv_segment_offset), RecvX: uintptr(a.recv_x), RecvXScales: uintptr(a.recv_x_scales),
			RecvTopKIdx: uintptr(a.recv_topk_idx), RecvTopKWeights: at(a.recv_topk_weights),
		}, call)
	})
}

//export dpgo_combine
func dpgo_combine(id C.uintptr_t, a *C.deepep_combine_args, h *C.deepep_handle, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		handle := fromHandle(h)
		return b.Combine(&core.CombineArgs{
			NumTopK: int32(a.num_topk), Hidden: int64(a.hidden), XSegment: int32(a.x_segment), XSegmentOffset: uint64(a.x_segment_offset),
			X: uintptr(a.x), TopKWeights: at(a.topk_weights), Bias: [2]uintptr{uintptr(a.bias[0]), uintptr(a.bias[1])}, Handle: &handle,
			CombinedX: uintptr(a.combined_x), CombinedTopKWeights: at(a.combined_topk_weights),
		}, call)
	})
}

//export dpgo_low_latency_dispatch
func dpgo_low_latency_dispatch(id C.uintptr_t, a *C.deepep_ll_dispatch_args, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		args := core.LLDispatchArgs{
			Phases: uint32(a.phases), Ticket: uint32(a.ticket), Flags: int32(a.flags), NumTokens: int32(a.num_tokens),
			NumMaxTokens: int32(a.num_max_tokens), Hidden: int32(a.hidden), NumTopK: int32(a.num_topk), NumExperts: int32(a.num_experts),
			IndexType: core.Type(a.index_type), UseFP8: a.use_fp8 != 0, X: uintptr(a.x), TopKIdx: uintptr(a.topk_idx),
			TopKWeights: at(a.topk_weights), RecvX: uintptr(a.recv_x), RecvXScales: uintptr(a.recv_x_scales), RecvCount: at(a.recv_count),
			SrcInfo: at(a.src_info), LayoutRange: at(a.layout_range), CumulativeStats: at(a.cumulative_recv_stats),
			WaitStats: at(a.wait_recv_cost_stats),
		}
		err := b.LowLatencyDispatch(&args, call)
		a.ticket = C.uint32_t(args.Ticket)
		return err
	})
}

//export dpgo_low_latency_combine
func dpgo_low_latency_combine(id C.uintptr_t, a *C.deepep_ll_combine_args, c *C.dp_call) C.int32_t {
	return operate(id, c, func(b *core.Buffer, call *core.Call) error {
		args := core.LLCombineArgs{
			Phases: uint32(a.phases), Ticket: uint32(a.ticket), Flags: int32(a.flags), NumTokens: int32(a.num_tokens),
			NumMaxTokens: int32(a.num_max_tokens), Hidden: int32(a.hidden), NumTopK: int32(a.num_topk), NumExperts: int32(a.num_experts),
			IndexType: core.Type(a.index_type), X: uintptr(a.x), TopKIdx: uintptr(a.topk_idx), TopKWeights: at(a.topk_weights),
			SrcInfo: at(a.src_info), LayoutRange: at(a.layout_range), CombinedX: uintptr(a.combined_x), WaitStats: at(a.wait_recv_cost_stats),
		}
		err := b.LowLatencyCombine(&args, call)
		a.ticket = C.uint32_t(args.Ticket)
		return err
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
