// expanded_sums.cuh - sending warps of an expanded combine, which add a token's expanded rows in FP32 in the order of
// its choices, round once, and send one row; or send the rows one after the other.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/impl/normal/combine_job.cuh"

namespace deepep {

constexpr uint32_t kNanPair = 0x7fc07fc0u;  // two BF16

// A row's terms: lane k has the row of choice k in x.
struct Terms {
  int slot;
  uint32_t here;  // choices that have one
  bool wrong;     // one is outside x: the row becomes NaN
};
__device__ inline int load_slot(const CombineParams &p, int row) {
  if (lane_id() >= p.num_topk) return -1;
  return pointer<const int32_t>(p.recv_src_metadata)[static_cast<int64_t>(row) * (p.num_topk + 2) + 2 + lane_id()];
}
__device__ inline Terms checked_terms(const CombineParams &p, int slot) {
  Terms terms{slot, 0, false};
  const bool wrong = terms.slot >= p.num_x_rows;
  if (wrong)
    report_refusal(p.session, kVoid, DK_EINVAL, p.session.team.rank, DK_FIELD_SRC_METADATA, p.num_x_rows, terms.slot);
  terms.wrong = __any_sync(kAllLanes, wrong) != 0;
  if (wrong) terms.slot = -1;
  terms.here = terms.wrong ? 0 : __ballot_sync(kAllLanes, terms.slot >= 0);
  return terms;
}

// Whole warp: the row's weights, which lie beside it in the ring.
__device__ inline void send_weights(const CombineJob &job, const Terms &terms, int r, uint64_t slot) {
  const CombineParams &p = job.p;
  if (p.topk_weights() == nullptr || lane_id() >= p.num_topk) return;
  reinterpret_cast<float *>(job.dests[r].meta + slot * job.p.ring.meta_stride)[lane_id()] =
      terms.slot < 0 ? 0 : p.topk_weights()[terms.slot];
}

// The rows that go to the peer for one row of the plain layout: send(choices, place) for each, the sum of those.
template <class Send>
__device__ inline void each_sum(const CombineParams &p, const Terms &terms, uint8_t *to, Send send) {
  if ((p.flags & DK_COMBINE_UNREDUCED) == 0) {
    send(terms.here, to);
    return;
  }
  const auto all = static_cast<uint32_t>((uint64_t{1} << p.num_topk) - 1);
  for (uint32_t left = terms.wrong ? all : terms.here; left != 0; left &= left - 1, to += p.row_bytes)
    send(terms.wrong ? 0 : left & (0 - left), to);
}

// A sending warp.
template <bool kBulk, class Job>
struct TermSender;

// The form for compute capability 8.0: sums in registers, loads of two rows in flight.
template <class Job>
struct TermSender<false, Job> {
  Job &job;
  SendQueue *queue;

  // Whole warp: the sum of the terms `which` to `to`.
  __device__ void send_sum(const Terms &terms, uint32_t which, uint8_t *to) const {
    constexpr int kUnroll = 4;
    const CombineParams &p = job.p;
    const int chunks = static_cast<int>(p.row_bytes / 16);
    for (int base = 0; base < chunks; base += kWarp * kUnroll) {
      float sum[kUnroll][8] = {};
      for (uint32_t left = which; left != 0;) {
        const uint8_t *rows[2] = {nullptr, nullptr};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (left == 0) continue;
          const int64_t slot = __shfl_sync(kAllLanes, terms.slot, __ffs(static_cast<int>(left)) - 1);
          rows[n] = p.x() + slot * p.row_bytes;
          left &= left - 1;
        }
        uint4 data[2][kUnroll];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const int at = base + u * kWarp + lane_id();
            if (rows[n] != nullptr && at < chunks) data[n][u] = ptx::ld_stream(rows[n] + 16ull * at);
          }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int u = 0; u < kUnroll; ++u)
            if (rows[n] != nullptr && base + u * kWarp + lane_id() < chunks) add_bf16(sum[u], data[n][u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = base + u * kWarp + lane_id();
        if (at >= chunks) continue;
        uint4 data = round_bf16(sum[u]);
        if (terms.wrong) data = {kNanPair, kNanPair, kNanPair, kNanPair};
        ptx::st_stream(to + 16ull * at, data);
      }
    }
  }
  __device__ void run() {
    uint32_t posted = 0;
    job.start();
    for (int row = job.next(); row >= 0; row = job.next()) {
      const Terms terms = checked_terms(job.p, load_slot(job.p, row));
      if (!job.room(0, row) && !job.await_room(0, row)) return;
      const int r = job.dest_of(row);
      const uint64_t slot = job.place_of(row, r).slot;
      each_sum(job.p, terms, job.dests[r].rows + slot * job.p.ring.payload_stride,
               [&](uint32_t which, uint8_t *to) { send_sum(terms, which, to); });
      send_weights(job, terms, r, slot);
      post_row(queue, posted, row);
    }
  }
};

}  // namespace deepep
