// combine_beside.cuh - combine by copy engines, the kernel between the halves: sums of this rank's experts, with
// weights that come with the combine (see combine_outbox.cuh). It runs on a stream of the team, beside whatever the
// caller's stream and other kernels of the team do meanwhile, the send half of another call included. So it reads of
// the scratch only what its own call has left there, and counts there alone.
//
// What it reads is there until the receive half of its call, which follows it. The headers: a dispatch writes them into
// a slot that is empty, so peers are at most one dispatch ahead of the newest that this rank has sent before the
// combine, and kHeaderCopies hold two more. The weights: a peer's combine after the next one overwrites them, and
// follows a send of the peer that has waited for the receive half of this call.
#pragma once
#include "cuda/impl/low_latency/combine.cuh"

namespace deepep {

constexpr int kSumSms = 24;                    // blocks of this kernel, where the caller gives no num_sms
constexpr int kSumLists = kLlThreads / kWarp;  // of a block: each warp reads one, so that their latencies overlap

// Whole block: the sums of some items, a group for each in turn.
__device__ inline void sum_beside(const SumsBesideParams &p, const LowLatencyCall &call, const SummedDispatch &summed,
                                  int first, const int32_t *bases, SumList *lists) {
  const int group = static_cast<int>(threadIdx.x) / kLlGroupThreads,
            thread = static_cast<int>(threadIdx.x) % kLlGroupThreads, items = num_items(p);
  if (first + warp_id() < items) {
    const SumItem item = sum_item(p, first + warp_id());
    read_sum(p, call, summed, load_headers(p, item.dest, item.token), item.dest, item.token, bases, lists + warp_id());
  }
  __syncthreads();
#pragma unroll 1
  for (int i = group; i < kSumLists && first + i < items; i += kLlGroups) {
    const SumItem item = sum_item(p, first + i);
    if (lists[i].count > 0) {
      send_sum(p, call, lists + i, p.session.team.peers[item.dest], item.dest, item.token, thread);
      if (thread == 0)
        add_to(&p.session.team.scratch->beside[p.ticket].sent_bytes[item.dest], static_cast<uint64_t>(2 * p.hidden));
    } else if (goes_by_copy(p, item.dest)) {
      empty_outbox_row(p, item.dest, item.token, thread);
    }
  }
  __syncthreads();  // the lists have been read
}

}  // namespace deepep

namespace deep_ep::internode_ll {
using namespace deepep;

__global__ void __launch_bounds__(kLlThreads, 1) sums_beside(const __grid_constant__ SumsBesideParams p) {
  extern __shared__ __align__(16) uint8_t memory[];  // first rows [L][R]
  __shared__ SumList lists[kSumLists];
  auto *bases = reinterpret_cast<int32_t *>(memory);
  const Scratch *scratch = p.session.team.scratch;
  const LowLatencyTicket ticket = scratch->tickets[p.ticket];
  const LowLatencyCall call{ticket.epoch, ticket.dispatch, p.second_slot};
  const SummedDispatch summed{scratch->beside[p.ticket].dispatch, true};
  for (int i = threadIdx.x; i < p.num_experts; i += kLlThreads) bases[i] = first_row_of(p, p.layout_range()[i]);
  const bool failed = threadIdx.x == 0 && (ptx::ld_relaxed_gpu(&scratch->failed) != 0 || has_failed(p.session));
  if (__syncthreads_or(failed) != 0 || summed.number == 0) return;
#pragma unroll 1
  for (int first = static_cast<int>(blockIdx.x) * kSumLists; first < num_items(p);
       first += static_cast<int>(gridDim.x) * kSumLists)
    sum_beside(p, call, summed, first, bases, lists);
}

}  // namespace deep_ep::internode_ll
