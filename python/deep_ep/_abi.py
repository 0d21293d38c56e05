"""deepep.h for ctypes: constants, structs and prototypes. Written by tools/generate_abi.py; do not edit."""

from __future__ import annotations

import ctypes
from typing import Any

VP = ctypes.c_void_p
I32, I64 = ctypes.c_int32, ctypes.c_int64
U32, U64 = ctypes.c_uint32, ctypes.c_uint64

ALLGATHER = ctypes.CFUNCTYPE(I32, VP, VP, ctypes.c_size_t, VP)
LOG = ctypes.CFUNCTYPE(None, I32, ctypes.c_char_p, VP)

# Constants, without the prefix DEEPEP_.
VERSION_MAJOR = 0
VERSION_MINOR = 1
VERSION_PATCH = 0
JOIN_KEY_BYTES = 64
ELASTIC_UNIT = 2097152
HANDLE_MAGIC = 0x44504548
HANDLE_VERSION = 1
MAX_BALANCED = 16

OK = 0
ERROR_INVALID_ARGUMENT = 1
ERROR_INVALID_STATE = 2
ERROR_UNSUPPORTED = 3
ERROR_OUT_OF_MEMORY = 4
ERROR_SYSTEM = 5
ERROR_TIMEOUT = 6
ERROR_PEER_DEAD = 7
ERROR_MISMATCH = 8
ERROR_ABORTED = 9
ERROR_NOT_FOUND = 10
ERROR_VERSION = 11
ERROR_FORK = 12
PENDING = 13
ERROR_DEVICE = 14
ERROR_INTERNAL = 15
STATUS_COUNT = 16
STATUS_NAMES = (
    "DEEPEP_OK",
    "DEEPEP_ERROR_INVALID_ARGUMENT",
    "DEEPEP_ERROR_INVALID_STATE",
    "DEEPEP_ERROR_UNSUPPORTED",
    "DEEPEP_ERROR_OUT_OF_MEMORY",
    "DEEPEP_ERROR_SYSTEM",
    "DEEPEP_ERROR_TIMEOUT",
    "DEEPEP_ERROR_PEER_DEAD",
    "DEEPEP_ERROR_MISMATCH",
    "DEEPEP_ERROR_ABORTED",
    "DEEPEP_ERROR_NOT_FOUND",
    "DEEPEP_ERROR_VERSION",
    "DEEPEP_ERROR_FORK",
    "DEEPEP_PENDING",
    "DEEPEP_ERROR_DEVICE",
    "DEEPEP_ERROR_INTERNAL",
)
STATUS_TEXTS = (
    "success",
    "invalid argument",
    "not possible in this state",
    "not supported here",
    "out of memory",
    "operating system error",
    "a wait ended at its deadline",
    "a peer died",
    "ranks disagree",
    "the buffer failed before",
    "library or symbol not found",
    "versions do not match",
    "used in a forked child; start processes with spawn",
    "not yet: the slice of waiting is over, call again",
    "device error",
    "internal error",
)

BOOTSTRAP_CALLBACK = 0
BOOTSTRAP_TCP = 1
BOOTSTRAP_FILE = 2
BOOTSTRAP_JOIN = 3

WARMUP_WHOLE = 0
WARMUP_BEGIN = 1
WARMUP_END = 2

START_CONSTRUCTION = 0
START_WARMUP = 1
START_FIRST_CALLS = 2

SHAPE_NONE = 0
SHAPE_GIVEN = 1
SHAPE_OPTIONS = 2
SHAPE_HINT = 3
SHAPE_REGION = 4

INT32 = 0
INT64 = 1
BF16 = 2
FP8_E4M3 = 3
FLOAT32 = 4
UINT8 = 5

ROUTING_NONE = 0
ROUTING_PLAIN = 1
ROUTING_EXPANDED = 2

SEND = 1
RECV = 2
SEND_RECV = 3

LL_ROUND_SCALE = 1
LL_UE8M0 = 2
LL_LOGFMT = 4
LL_ZERO_COPY = 8
LL_UNREDUCED = 16

FP4_PACKED = 1
FP4_CAST = 2

OP_NONE = 0
OP_LAYOUT = 1
OP_NOTIFY = 2
OP_DISPATCH = 3
OP_COMBINE = 4
OP_LL_DISPATCH = 5
OP_LL_COMBINE = 6
OP_CLEAN = 7
OP_BARRIER = 8
OP_MASK = 9
OP_COUNT = 10
OP_NAMES = (
    "none",
    "layout",
    "notify",
    "dispatch",
    "combine",
    "low_latency_dispatch",
    "low_latency_combine",
    "clean",
    "barrier",
    "mask",
)

# Structs. Without a __dict__: a field that C does not have cannot be set.


class EngineInfo(ctypes.Structure):
    # deepep_engine_info
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("available", I32),
        ("num_devices", I32),
        ("sm90_compiled", I32),
        ("name", ctypes.c_char * 16),
        ("path", ctypes.c_char * 256),
        ("build", ctypes.c_char * 64),
        ("reason", ctypes.c_char * 512),
    ]


class GroupOptions(ctypes.Structure):
    # deepep_group_options
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("bootstrap", I32),
        ("rank", I32),
        ("size", I32),
        ("allgather", ALLGATHER),
        ("user", VP),
        ("address", ctypes.c_char_p),
        ("directory", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("num_nvl_peers", I32),
        ("background", I32),
        ("timeout_ms", I64),
        ("engine", ctypes.c_char_p),
        ("device", I32),
        ("reserved0", I32),
    ]


class BufferOptions(ctypes.Structure):
    # deepep_buffer_options
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("device", I32),
        ("engine", ctypes.c_char_p),
        ("num_nvl_bytes", U64),
        ("num_rdma_bytes", U64),
        ("low_latency_mode", I32),
        ("num_qps_per_rank", I32),
        ("allow_nvlink_for_low_latency_mode", I32),
        ("allow_mnnvl", I32),
        ("use_fabric", I32),
        ("enable_shrink", I32),
        ("preinitialize", I32),
        ("background", I32),
        ("timeout_ms", I64),
        ("first_timeout_ms", I64),
        ("num_tokens", I32),
        ("hidden", I32),
        ("num_topk", I32),
        ("num_experts", I32),
    ]


class BufferInfo(ctypes.Structure):
    # deepep_buffer_info
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("rank", I32),
        ("size", I32),
        ("num_nvl_peers", I32),
        ("rdma_rank", I32),
        ("num_rdma_ranks", I32),
        ("nvl_rank", I32),
        ("device", I32),
        ("num_device_sms", I32),
        ("host_stream", I32),
        ("peer_rows", I32),
        ("ready", I32),
        ("num_nvl_bytes", U64),
        ("num_rdma_bytes", U64),
        ("total_bytes", U64),
        ("engine", ctypes.c_char * 16),
        ("device_name", ctypes.c_char * 64),
        ("comm_stream", VP),
        ("control_bytes", U64),
        ("wire_bytes", U64),
        ("row_segment_bytes", U64),
        ("num_qp_peers", I32),
        ("num_qps_per_peer", I32),
        ("qp_depth", I32),
        ("num_nics", I32),
        ("num_qps_per_nic", I32),
        ("num_qps", I32),
        ("timeout_ms", I64),
        ("first_timeout_ms", I64),
        ("rdma_team_start", I32),
        ("rdma_team_stride", I32),
        ("rdma_team_size", I32),
        ("reserved0", I32),
        ("ll_copies", I32),
        ("normal_copies", I32),
        ("ll_on_stream", I32),
        ("reserved1", I32),
    ]


class RegroupOptions(ctypes.Structure):
    # deepep_regroup_options
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("num_members", I32),
        ("members", VP),
        ("renumber", I32),
        ("reserved0", I32),
        ("timeout_ms", I64),
    ]


class ElasticOptions(ctypes.Structure):
    # deepep_elastic_options
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("num_ranks", I32),
        ("num_nvl_peers", I32),
        ("num_max_tokens", I32),
        ("hidden", I32),
        ("num_topk", I32),
        ("use_fp8_dispatch", I32),
        ("unreduced", I32),
        ("is_direct", I32),
        ("num_allocated_qps", I32),
        ("num_sms", I32),
        ("num_device_sms", I32),
        ("compute_capability", I32),
        ("num_bytes", U64),
    ]


class ElasticInfo(ctypes.Structure):
    # deepep_elastic_info
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("num_sms", I32),
        ("num_allocated_qps", I32),
        ("num_qps", I32),
        ("num_bytes", U64),
        ("num_nvl_bytes", U64),
        ("num_rdma_bytes", U64),
        ("row_segment_bytes", U64),
    ]


class PlanOptions(ctypes.Structure):
    # deepep_plan_options
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("rank", I32),
        ("size", I32),
        ("num_nvl_peers", I32),
        ("num_nics", I32),
        ("num_local_ranks", I32),
        ("compute_capability", I32),
        ("num_tokens", I32),
        ("num_max_tokens", I32),
        ("hidden", I32),
        ("num_topk", I32),
        ("num_experts", I32),
        ("num_sms", I32),
        ("buffer", VP),
        ("elastic", VP),
    ]


class PlanInfo(ctypes.Structure):
    # deepep_plan_info
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("num_rdma_ranks", I32),
        ("num_nvl_peers", I32),
        ("rdma_rank", I32),
        ("nvl_rank", I32),
        ("num_local_experts", I32),
        ("num_channels", I32),
        ("dispatch_sms_fp8", I32),
        ("dispatch_sms_bf16", I32),
        ("combine_sms", I32),
        ("num_qp_peers", I32),
        ("num_qps_per_peer", I32),
        ("qp_depth", I32),
        ("num_nics", I32),
        ("num_qps_per_nic", I32),
        ("num_qps", I32),
        ("num_qps_used", I32),
        ("qp_depth_for_tokens", I32),
        ("nvl_hint", U64),
        ("rdma_hint", U64),
        ("low_latency_hint", U64),
        ("num_nvl_bytes", U64),
        ("num_rdma_bytes", U64),
        ("control_bytes", U64),
        ("wire_bytes", U64),
        ("total_bytes", U64),
        ("row_segment_bytes", U64),
        ("output_bytes_fp8", U64),
        ("output_bytes_bf16", U64),
        ("timeout_ms", I64),
        ("first_timeout_ms", I64),
        ("engine", ctypes.c_char * 16),
        ("library", ctypes.c_char * 64),
        ("reason", ctypes.c_char * 512),
        ("elastic_bytes", U64),
        ("elastic_sms", I32),
        ("elastic_qps", I32),
    ]


class WarmupOptions(ctypes.Structure):
    # deepep_warmup_options
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("num_tokens", I32),
        ("hidden", I32),
        ("num_topk", I32),
        ("num_experts", I32),
        ("ll_num_max_tokens", I32),
        ("ll_hidden", I32),
        ("ll_num_topk", I32),
        ("ll_num_experts", I32),
        ("use_fp8", I32),
        ("max_ms", I32),
        ("part", I32),
        ("max_bytes", U64),
    ]


class StartupReport(ctypes.Structure):
    # deepep_startup_report
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("preinitialized", I32),
        ("num_warmups", I32),
        ("shape_from", I32),
        ("ll_shape_from", I32),
        ("num_tokens", I32),
        ("hidden", I32),
        ("num_topk", I32),
        ("num_experts", I32),
        ("ll_num_max_tokens", I32),
        ("ll_hidden", I32),
        ("ll_num_topk", I32),
        ("ll_num_experts", I32),
        ("use_fp8", I32),
        ("load_ns", U64 * 3),
        ("memory_ns", U64 * 3),
        ("connect_ns", U64 * 3),
        ("launch_ns", U64 * 3),
        ("language_ns", U64),
        ("bytes", U64 * 3),
        ("page_faults", U64 * 3),
        ("first_ns", U64 * 10),
        ("later_ns", U64 * 10),
    ]


class Config(ctypes.Structure):
    # deepep_config
    __slots__ = ()
    _fields_ = [
        ("num_sms", I32),
        ("nvl_send_chunk", I32),
        ("nvl_recv_chunk", I32),
        ("rdma_send_chunk", I32),
        ("rdma_recv_chunk", I32),
    ]


class Call(ctypes.Structure):
    # deepep_call
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("is_async", I32),
        ("stream", VP),
        ("previous_event", VP),
        ("event", VP),
        ("config", VP),
    ]


class Layout(ctypes.Structure):
    # deepep_layout
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("num_tokens", I32),
        ("num_topk", I32),
        ("num_experts", I32),
        ("index_type", I32),
        ("topk_idx", VP),
        ("num_tokens_per_rank", VP),
        ("num_tokens_per_rdma_rank", VP),
        ("num_tokens_per_expert", VP),
        ("is_token_in_rank", VP),
    ]


class Handle(ctypes.Structure):
    # deepep_handle
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("magic", U32),
        ("version", U32),
        ("num_ranks", I32),
        ("num_tokens", I32),
        ("num_recv_tokens", I32),
        ("rank_prefix_matrix", VP),
        ("send_head", VP),
        ("recv_src_idx", VP),
        ("exchange", U64),
        ("routing", I32),
        ("num_topk", I32),
        ("num_experts", I32),
        ("index_type", I32),
        ("num_max_tokens", I32),
        ("expert_alignment", I32),
        ("num_expanded_tokens", I32),
        ("reserved0", I32),
        ("topk_idx", VP),
        ("dst_slot", VP),
        ("psum_recv_tokens_per_rank", VP),
        ("psum_recv_tokens_per_expert", VP),
        ("num_recv_tokens_per_expert", VP),
        ("recv_src_metadata", VP),
    ]


class Notify(ctypes.Structure):
    # deepep_notify
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("num_tokens", I32),
        ("num_topk", I32),
        ("num_experts", I32),
        ("expert_alignment", I32),
        ("num_worst_tokens", I32),
        ("x_type", I32),
        ("num_scales", I32),
        ("hidden", I64),
        ("num_tokens_per_rank", VP),
        ("num_tokens_per_expert", VP),
        ("is_token_in_rank", VP),
        ("handle", VP),
        ("routing", I32),
        ("index_type", I32),
        ("num_max_tokens", I32),
        ("num_worst_expanded", I32),
        ("topk_idx", VP),
        ("cumulative_recv_stats", VP),
        ("num_scaleup_ranks", I32),
        ("reserved0", I32),
        ("topk_idx_copy", VP),
    ]


class DispatchArgs(ctypes.Structure):
    # deepep_dispatch_args
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("cached", I32),
        ("token", U64),
        ("x_type", I32),
        ("num_scales", I32),
        ("hidden", I64),
        ("num_tokens", I32),
        ("num_topk", I32),
        ("num_experts", I32),
        ("index_type", I32),
        ("num_worst_tokens", I32),
        ("recv_segment", I32),
        ("recv_segment_offset", U64),
        ("x", VP),
        ("x_scales", VP),
        ("scale_token_stride", I64),
        ("scale_stride", I64),
        ("topk_idx", VP),
        ("topk_weights", VP),
        ("handle", VP),
        ("recv_x", VP),
        ("recv_x_scales", VP),
        ("recv_topk_idx", VP),
        ("recv_topk_weights", VP),
        ("recv_scale_token_stride", I64),
        ("recv_scale_stride", I64),
        ("do_zero_padding", I32),
        ("reserved0", I32),
    ]


class CombineArgs(ctypes.Structure):
    # deepep_combine_args
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("num_topk", I32),
        ("hidden", I64),
        ("x_segment", I32),
        ("reserved0", I32),
        ("x_segment_offset", U64),
        ("x", VP),
        ("topk_weights", VP),
        ("bias", VP * 2),
        ("handle", VP),
        ("combined_x", VP),
        ("combined_topk_weights", VP),
        ("num_x_rows", I32),
        ("unreduced", I32),
    ]


class BalanceArgs(ctypes.Structure):
    # deepep_balance_args
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("num_tensors", I32),
        ("num_slots", I32),
        ("num_local_experts", I32),
        ("mapping", VP),
        ("expert_bytes", U64 * 16),
        ("copies", VP * 16),
        ("experts", VP * 16),
        ("workspace", VP),
        ("workspace_bytes", U64),
    ]


class LlDispatchArgs(ctypes.Structure):
    # deepep_ll_dispatch_args
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("phases", I32),
        ("ticket", U32),
        ("flags", I32),
        ("num_tokens", I32),
        ("num_max_tokens", I32),
        ("hidden", I32),
        ("num_topk", I32),
        ("num_experts", I32),
        ("index_type", I32),
        ("use_fp8", I32),
        ("fp4", I32),
        ("x", VP),
        ("topk_idx", VP),
        ("topk_weights", VP),
        ("recv_x", VP),
        ("recv_x_scales", VP),
        ("recv_count", VP),
        ("src_info", VP),
        ("layout_range", VP),
        ("cumulative_recv_stats", VP),
        ("wait_recv_cost_stats", VP),
        ("x_scales", VP),
    ]


class LlCombineArgs(ctypes.Structure):
    # deepep_ll_combine_args
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("phases", I32),
        ("ticket", U32),
        ("flags", I32),
        ("num_tokens", I32),
        ("num_max_tokens", I32),
        ("hidden", I32),
        ("num_topk", I32),
        ("num_experts", I32),
        ("index_type", I32),
        ("x", VP),
        ("topk_idx", VP),
        ("topk_weights", VP),
        ("src_info", VP),
        ("layout_range", VP),
        ("combined_x", VP),
        ("wait_recv_cost_stats", VP),
    ]


class OpStats(ctypes.Structure):
    # deepep_op_stats
    __slots__ = ()
    _fields_ = [
        ("struct_size", U32),
        ("op", I32),
        ("calls", U64),
        ("errors", U64),
        ("bytes", U64),
        ("wait_ns", U64),
        ("total_ns", U64),
        ("mean_us", ctypes.c_double),
        ("p50_us", ctypes.c_double),
        ("p99_us", ctypes.c_double),
        ("p999_us", ctypes.c_double),
        ("max_us", ctypes.c_double),
    ]


# name: (result, arguments), each below its C prototype
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    # int32_t deepep_version(void)
    "deepep_version": (I32, []),
    # const char *deepep_status_name(deepep_status_t status)
    "deepep_status_name": (ctypes.c_char_p, [I32]),
    # const char *deepep_status_text(deepep_status_t status)
    "deepep_status_text": (ctypes.c_char_p, [I32]),
    # const char *deepep_last_error(void)
    "deepep_last_error": (ctypes.c_char_p, []),
    # deepep_status_t deepep_set_log_callback(deepep_log_fn fn, void *user)
    "deepep_set_log_callback": (I32, [LOG, VP]),
    # deepep_status_t deepep_engine_query(const char *name, deepep_engine_info *info)
    "deepep_engine_query": (I32, [ctypes.c_char_p, VP]),
    # deepep_status_t deepep_group_create(const deepep_group_options *options, deepep_group_t *group)
    "deepep_group_create": (I32, [VP, VP]),
    # deepep_status_t deepep_group_destroy(deepep_group_t group)
    "deepep_group_destroy": (I32, [VP]),
    # deepep_status_t deepep_buffer_create(deepep_group_t group, const deepep_buffer_options *options, deepep_buffer_t *buffer)
    "deepep_buffer_create": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_buffer_destroy(deepep_buffer_t buffer)
    "deepep_buffer_destroy": (I32, [VP]),
    # deepep_status_t deepep_buffer_info_get(deepep_buffer_t buffer, deepep_buffer_info *info)
    "deepep_buffer_info_get": (I32, [VP, VP]),
    # deepep_status_t deepep_buffer_wait_ready(deepep_buffer_t buffer, int64_t slice_ms)
    "deepep_buffer_wait_ready": (I32, [VP, I64]),
    # deepep_status_t deepep_buffer_check(deepep_buffer_t buffer)
    "deepep_buffer_check": (I32, [VP]),
    # deepep_status_t deepep_buffer_region(deepep_buffer_t buffer, int32_t rdma, void **address, uint64_t *bytes)
    "deepep_buffer_region": (I32, [VP, I32, VP, VP]),
    # deepep_status_t deepep_buffer_release(deepep_buffer_t buffer, int64_t slice_ms)
    "deepep_buffer_release": (I32, [VP, I64]),
    # deepep_status_t deepep_buffer_restore(deepep_buffer_t buffer, int64_t slice_ms)
    "deepep_buffer_restore": (I32, [VP, I64]),
    # deepep_status_t deepep_buffer_join_key(deepep_buffer_t buffer, char *key, uint64_t bytes)
    "deepep_buffer_join_key": (I32, [VP, ctypes.c_char_p, U64]),
    # deepep_status_t deepep_buffer_pending_joins(deepep_buffer_t buffer, int32_t agreed, int32_t capacity, int32_t *ranks, int32_t *num_joins)
    "deepep_buffer_pending_joins": (I32, [VP, I32, I32, VP, VP]),
    # deepep_status_t deepep_buffer_lost_ranks(deepep_buffer_t buffer, int32_t capacity, int32_t *ranks, int32_t *num_lost)
    "deepep_buffer_lost_ranks": (I32, [VP, I32, VP, VP]),
    # deepep_status_t deepep_buffer_regroup(deepep_buffer_t buffer, const deepep_regroup_options *options)
    "deepep_buffer_regroup": (I32, [VP, VP]),
    # deepep_status_t deepep_elastic_sizes(const deepep_elastic_options *options, deepep_elastic_info *info)
    "deepep_elastic_sizes": (I32, [VP, VP]),
    # deepep_status_t deepep_plan(const deepep_plan_options *options, deepep_plan_info *plan, int32_t *qp_order)
    "deepep_plan": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_buffer_warmup(deepep_buffer_t buffer, const deepep_warmup_options *options)
    "deepep_buffer_warmup": (I32, [VP, VP]),
    # deepep_status_t deepep_buffer_startup_report(deepep_buffer_t buffer, deepep_startup_report *report)
    "deepep_buffer_startup_report": (I32, [VP, VP]),
    # deepep_status_t deepep_event_create(deepep_buffer_t buffer, deepep_event_t *event)
    "deepep_event_create": (I32, [VP, VP]),
    # deepep_status_t deepep_event_destroy(deepep_event_t event)
    "deepep_event_destroy": (I32, [VP]),
    # deepep_status_t deepep_event_record(deepep_event_t event, void *stream)
    "deepep_event_record": (I32, [VP, VP]),
    # deepep_status_t deepep_event_stream_wait(deepep_event_t event, void *stream)
    "deepep_event_stream_wait": (I32, [VP, VP]),
    # deepep_status_t deepep_event_wait(deepep_event_t event, int64_t slice_ms)
    "deepep_event_wait": (I32, [VP, I64]),
    # deepep_status_t deepep_config_check(deepep_config *config)
    "deepep_config_check": (I32, [VP]),
    # deepep_status_t deepep_config_default(int32_t kind, int32_t num_ranks, deepep_config *config)
    "deepep_config_default": (I32, [I32, I32, VP]),
    # deepep_status_t deepep_config_size_hint(const deepep_config *config, int64_t hidden_bytes, int32_t num_ranks, int32_t rdma, uint64_t *bytes)
    "deepep_config_size_hint": (I32, [VP, I64, I32, I32, VP]),
    # deepep_status_t deepep_low_latency_size_hint(int32_t num_max_tokens, int32_t hidden, int32_t num_ranks, int32_t num_experts, uint64_t *bytes)
    "deepep_low_latency_size_hint": (I32, [I32, I32, I32, I32, VP]),
    # deepep_status_t deepep_get_layout(deepep_buffer_t buffer, const deepep_layout *layout, const deepep_call *call)
    "deepep_get_layout": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_notify_counts(deepep_buffer_t buffer, const deepep_notify *notify, const deepep_call *call, uint64_t *token)
    "deepep_notify_counts": (I32, [VP, VP, VP, VP]),
    # deepep_status_t deepep_wait_counts(deepep_buffer_t buffer, uint64_t token, int64_t slice_ms, int32_t *num_recv_tokens, int32_t *per_expert)
    "deepep_wait_counts": (I32, [VP, U64, I64, VP, VP]),
    # deepep_status_t deepep_dispatch(deepep_buffer_t buffer, const deepep_dispatch_args *args, const deepep_call *call)
    "deepep_dispatch": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_dispatch_at_once(deepep_buffer_t buffer, const deepep_notify *notify, const deepep_dispatch_args *args, const deepep_call *call)
    "deepep_dispatch_at_once": (I32, [VP, VP, VP, VP]),
    # deepep_status_t deepep_cancel_dispatch(deepep_buffer_t buffer, uint64_t token, deepep_status_t reason, const deepep_call *call)
    "deepep_cancel_dispatch": (I32, [VP, U64, I32, VP]),
    # deepep_status_t deepep_combine(deepep_buffer_t buffer, const deepep_combine_args *args, const deepep_call *call)
    "deepep_combine": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_balance_workspace(deepep_buffer_t buffer, const deepep_balance_args *args, int32_t reduce, uint64_t *bytes)
    "deepep_balance_workspace": (I32, [VP, VP, I32, VP]),
    # deepep_status_t deepep_prefetch_weights(deepep_buffer_t buffer, const deepep_balance_args *args, const deepep_call *call)
    "deepep_prefetch_weights": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_reduce_grads(deepep_buffer_t buffer, const deepep_balance_args *args, const deepep_call *call)
    "deepep_reduce_grads": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_low_latency_dispatch(deepep_buffer_t buffer, deepep_ll_dispatch_args *args, const deepep_call *call)
    "deepep_low_latency_dispatch": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_low_latency_combine(deepep_buffer_t buffer, deepep_ll_combine_args *args, const deepep_call *call)
    "deepep_low_latency_combine": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_next_low_latency_combine_buffer(deepep_buffer_t buffer, int32_t num_max_tokens, int32_t hidden, int32_t num_experts, void **address, uint64_t *row_stride)
    "deepep_next_low_latency_combine_buffer": (I32, [VP, I32, I32, I32, VP, VP]),
    # deepep_status_t deepep_clean_low_latency_buffer(deepep_buffer_t buffer, int32_t num_max_tokens, int32_t hidden, int32_t num_experts, const deepep_call *call)
    "deepep_clean_low_latency_buffer": (I32, [VP, I32, I32, I32, VP]),
    # deepep_status_t deepep_barrier(deepep_buffer_t buffer, const deepep_call *call)
    "deepep_barrier": (I32, [VP, VP]),
    # deepep_status_t deepep_update_mask(deepep_buffer_t buffer, int32_t rank, int32_t masked, const deepep_call *call)
    "deepep_update_mask": (I32, [VP, I32, I32, VP]),
    # deepep_status_t deepep_query_mask(deepep_buffer_t buffer, int32_t *mask_status, const deepep_call *call)
    "deepep_query_mask": (I32, [VP, VP, VP]),
    # deepep_status_t deepep_clean_mask(deepep_buffer_t buffer, const deepep_call *call)
    "deepep_clean_mask": (I32, [VP, VP]),
    # deepep_status_t deepep_segment_create(deepep_buffer_t buffer, uint64_t bytes, int32_t *segment, void **address)
    "deepep_segment_create": (I32, [VP, U64, VP, VP]),
    # deepep_status_t deepep_segment_release(void *address)
    "deepep_segment_release": (I32, [VP]),
    # deepep_status_t deepep_pool_open(void *segment)
    "deepep_pool_open": (I32, [VP]),
    # deepep_status_t deepep_pool_select(void *segment)
    "deepep_pool_select": (I32, [VP]),
    # uint64_t deepep_pool_room(void *segment)
    "deepep_pool_room": (U64, [VP]),
    # deepep_status_t deepep_pool_close(void *segment)
    "deepep_pool_close": (I32, [VP]),
    # deepep_status_t deepep_stats(deepep_buffer_t buffer, deepep_op_stats *stats, uint64_t *bytes_to_peer, uint64_t *wait_ns_per_peer)
    "deepep_stats": (I32, [VP, VP, VP, VP]),
}


def sized(cls: type[Any], **values: Any) -> Any:
    """A struct of type `cls` with struct_size and the given fields set; the others are 0."""
    struct = cls()
    struct.struct_size = ctypes.sizeof(cls)
    for name, value in values.items():
        setattr(struct, name, value)
    return struct


def declare(library: Any) -> None:
    """Sets argtypes and restype of every function on a CDLL or PyDLL."""
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
