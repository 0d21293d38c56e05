// low_latency.cu - launches of the low-latency mode.
#include "cuda/launch/host.h"
#include "cuda/layout/low_latency.cuh"

using namespace deepep;

DK_EXPORT int32_t dk_ll_layout(dk_ll_layout_params *p) {
  DK_ENTER(p);
  if (p->num_ranks < 1 || p->num_ranks > DK_MAX_RANKS || p->num_max_tokens <= 0 || p->num_max_tokens > 65535) return DK_EINVAL;
  if (p->hidden <= 0 || p->hidden % kScaleChannels != 0 || p->num_experts <= 0 || p->num_experts % p->num_ranks != 0) return DK_EINVAL;
  const LowLatencyLayout at = low_latency_layout(p->num_ranks, p->num_max_tokens, p->hidden, p->num_experts);
  p->rdma_bytes = at.rdma_bytes, p->wire_bytes = ring_flags(p->num_ranks).bytes + at.wire_bytes;
  p->zero_copy_offset[0] = at.zero_copy(0), p->zero_copy_offset[1] = at.zero_copy(1);
  p->zero_copy_row_stride = 2ull * p->hidden;
  return DK_OK;
}
