package main

/*
#include "shim.h"
*/
import "C"

import (
	"unsafe"

	"github.com/deepep-go/deepep/core"
)

// The header's unit is the library's.
var _ [C.DEEPEP_ELASTIC_UNIT]struct{} = [core.ElasticUnit]struct{}{}

//export dpgo_elastic_sizes
func dpgo_elastic_sizes(o *C.deepep_elastic_options, out *C.deepep_elastic_info) C.int32_t {
	return guard(func() error {
		i, err := core.ElasticSizes(elasticOptions(o))
		if err != nil {
			return err
		}
		out.num_sms, out.num_allocated_qps, out.num_qps = C.int32_t(i.NumSMs), C.int32_t(i.NumAllocatedQPs), C.int32_t(i.NumQPs)
		out.num_bytes, out.row_segment_bytes = C.uint64_t(i.NumBytes), C.uint64_t(i.RowSegmentBytes)
		out.num_nvl_bytes, out.num_rdma_bytes = C.uint64_t(i.NumNVLBytes), C.uint64_t(i.NumRDMABytes)
		return nil
	})
}

func elasticOptions(o *C.deepep_elastic_options) core.ElasticOptions {
	return core.ElasticOptions{
		NumRanks: int(o.num_ranks), NumNVLPeers: int(o.num_nvl_peers), NumMaxTokens: int(o.num_max_tokens), Hidden: int(o.hidden), NumTopK: int(o.num_topk),
		FP8: o.use_fp8_dispatch != 0, Unreduced: o.unreduced != 0, Direct: o.is_direct != 0, NumAllocatedQPs: int(o.num_allocated_qps),
		NumSMs: int(o.num_sms), NumDeviceSMs: int(o.num_device_sms), ComputeCapability: int(o.compute_capability), NumBytes: uint64(o.num_bytes),
	}
}

//export dpgo_plan
func dpgo_plan(o *C.deepep_plan_options, b *C.deepep_buffer_options, e *C.deepep_elastic_options, out *C.deepep_plan_info, order *C.int32_t) C.int32_t {
	return guard(func() error {
		var elastic *core.ElasticOptions
		if e != nil {
			options := elasticOptions(e)
			elastic = &options
		}
		p, err := core.Plan(core.PlanOptions{
			Rank: int(o.rank), Size: int(o.size), NumNVLPeers: int(o.num_nvl_peers), NICs: int(o.num_nics), RanksOfHost: int(o.num_local_ranks),
			ComputeCapability: int(o.compute_capability), NumTokens: int(o.num_tokens), NumMaxTokens: int(o.num_max_tokens), Hidden: int(o.hidden),
			NumTopK: int(o.num_topk), NumExperts: int(o.num_experts), NumSMs: int(o.num_sms), Buffer: bufferOptions(b), Elastic: elastic,
		})
		if err != nil {
			return err
		}
		fillPlan(out, &p)
		if order != nil {
			copy(unsafe.Slice((*int32)(order), p.QPPeers), p.QPOrder)
		}
		return nil
	})
}

func fillPlan(out *C.deepep_plan_info, p *core.BufferPlan) {
	number := func(n int) C.int32_t { return C.int32_t(n) }
	bytes := func(n uint64) C.uint64_t { return C.uint64_t(n) }
	out.num_rdma_ranks, out.num_nvl_peers, out.rdma_rank, out.nvl_rank = number(p.NumRDMARanks), number(p.NumNVLPeers), number(p.RDMARank), number(p.NVLRank)
	out.num_local_experts, out.num_channels = number(p.LocalExperts), number(p.NumChannels)
	out.dispatch_sms_fp8, out.dispatch_sms_bf16, out.combine_sms = number(p.DispatchSMsFP8), number(p.DispatchSMsBF16), number(p.CombineSMs)
	out.num_qp_peers, out.num_qps_per_peer, out.qp_depth = number(p.QPPeers), number(p.QPsPerPeer), number(p.QPDepth)
	out.num_nics, out.num_qps_per_nic, out.num_qps = number(p.NICs), number(p.QPsPerNIC), number(p.QPs)
	out.num_qps_used, out.qp_depth_for_tokens = number(p.QPsUsed), number(p.QPDepthForTokens)
	out.nvl_hint, out.rdma_hint, out.low_latency_hint = bytes(p.NVLHint), bytes(p.RDMAHint), bytes(p.LowLatencyHint)
	out.num_nvl_bytes, out.num_rdma_bytes = bytes(p.NVLBytes), bytes(p.RDMABytes)
	out.control_bytes, out.wire_bytes, out.total_bytes = bytes(p.ControlBytes), bytes(p.WireBytes), bytes(p.TotalBytes)
	out.row_segment_bytes, out.elastic_bytes = bytes(p.RowSegmentBytes), bytes(p.Elastic.NumBytes)
	out.elastic_sms, out.elastic_qps = number(p.Elastic.NumSMs), number(p.Elastic.NumQPs)
	out.output_bytes_fp8, out.output_bytes_bf16 = bytes(p.OutputFP8), bytes(p.OutputBF16)
	out.timeout_ms, out.first_timeout_ms = C.int64_t(p.Timeout.Milliseconds()), C.int64_t(p.FirstTimeout.Milliseconds())
	copyString(out.engine[:], p.Engine)
	copyString(out.library[:], p.Library)
	copyString(out.reason[:], p.Reason)
}
