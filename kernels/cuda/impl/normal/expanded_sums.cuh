// expanded_sums.cuh - sending warps of an expanded combine, which add a token's expanded rows in FP32 in the order of
// its choices, round once, and send one row; or send the rows one after the other.
#pragma once
#include "cuda/common/bf16.cuh"
#include "cuda/impl/normal/combine_job.cuh"

namespace deepep {

constexpr int kTermStages = 2;              // pieces of a row in shared memory per sending warp
constexpr uint32_t kMaxTermPiece = 8192;    // bytes
constexpr uint32_t kNanPair = 0x7fc07fc0u;  // two BF16

// A row's terms: lane k has the row of choice k in x.
struct Terms {
  int slot;
  uint32_t here;  // choices that have one
  bool wrong;     // one is outside x: the row becomes NaN
};

template <bool kBulk>
struct TermSender {
  CombineJob &job;
  SendQueue *queue;
  uint8_t *stages;
  uint32_t posted = 0;
  int pieces = 0, unposted = -1;  // pieces stored; the row whose stores may be in flight

  __device__ const CombineParams &p() const { return job.p; }
  __device__ Terms terms_of(int row) const {
    Terms terms{-1, 0, false};
    if (lane_id() < p().num_topk)
      terms.slot =
          pointer<const int32_t>(p().recv_src_metadata)[static_cast<int64_t>(row) * (p().num_topk + 2) + 2 + lane_id()];
    const bool wrong = terms.slot >= p().num_x_rows;
    if (wrong)
      report_refusal(p().session, kVoid, DK_EINVAL, p().session.team.rank, DK_FIELD_SRC_METADATA, p().num_x_rows,
                     terms.slot);
    terms.wrong = __any_sync(kAllLanes, wrong) != 0;
    if (wrong) terms.slot = -1;
    terms.here = __ballot_sync(kAllLanes, terms.slot >= 0);
    return terms;
  }

  // Whole warp: bytes [from, from + bytes) of the sum of the terms `which`, given to store(offset, data).
  template <class Store>
  __device__ void add_terms(const Terms &terms, uint32_t which, uint32_t from, uint32_t bytes, Store store) const {
    constexpr int kUnroll = 4;
    const int chunks = static_cast<int>(bytes / 16);
    for (int base = 0; base < chunks; base += kWarp * kUnroll) {
      float sum[kUnroll][8] = {};
      for (uint32_t left = which; left != 0;) {
        const uint8_t *rows[2] = {nullptr, nullptr};  // two rows' loads are in flight
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (left == 0) continue;
          const int64_t slot = __shfl_sync(kAllLanes, terms.slot, __ffs(static_cast<int>(left)) - 1);
          rows[n] = p().x() + slot * p().row_bytes + from;
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
        store(16u * static_cast<uint32_t>(at), data);
      }
    }
  }

  // Sends the sum of the terms `which` as one row to `to`.
  __device__ void send_sum(const Terms &terms, uint32_t which, uint8_t *to) {
    if constexpr (kBulk) {
#if DEEPEP_HAS_BULK_COPY
      for (uint32_t from = 0; from < p().row_bytes; from += p().stage_bytes) {
        const uint32_t bytes = min(p().stage_bytes, p().row_bytes - from);
        uint8_t *stage = stages + static_cast<uint32_t>(pieces++ % kTermStages) * p().stage_bytes;
        if (lane_id() == 0) ptx::bulk_wait_read<kTermStages - 1>();
        __syncwarp();
        add_terms(terms, which, from, bytes,
                  [&](uint32_t at, const uint4 &data) { *reinterpret_cast<uint4 *>(stage + at) = data; });
        ptx::fence_before_bulk();
        __syncwarp();
        if (lane_id() == 0) {
          ptx::bulk_store(to + from, stage, bytes);
          ptx::bulk_commit();
        }
      }
#endif
    } else {
      add_terms(terms, which, 0, p().row_bytes, [&](uint32_t at, const uint4 &data) { ptx::st_stream(to + at, data); });
    }
  }

  // Posts the row before, whose stores are complete once no more than `newer` pieces are in flight.
  __device__ void post_before(int newer) {
#if DEEPEP_HAS_BULK_COPY
    if (kBulk && lane_id() == 0) {
      if (newer == 1)
        ptx::bulk_wait<1>();
      else if (newer == 2)
        ptx::bulk_wait<2>();
      else
        ptx::bulk_wait<0>();
    }
#endif
    __syncwarp();
    if (unposted >= 0) post_row(queue, posted, unposted);
    unposted = -1;
  }

  __device__ void run() {
    job.start();
    for (int row = job.next(); row >= 0; row = job.next()) {
      const Terms terms = terms_of(row);
      if (!job.room(0, row)) {
        post_before(0);  // peers may wait for rows that are still in flight before they free a slot
        if (!job.await_room(0, row)) return;
      }
      const int r = job.dest_of(row), before = pieces;
      const uint64_t slot = job.place_of(row, r).slot;
      uint8_t *to = job.dests[r].rows + slot * job.ring.payload_stride;
      if ((p().flags & DK_COMBINE_UNREDUCED) == 0) {
        send_sum(terms, terms.here, to);
      } else {
        const uint32_t all = static_cast<uint32_t>((uint64_t{1} << p().num_topk) - 1);
        for (uint32_t left = terms.wrong ? all : terms.here; left != 0; left &= left - 1, to += p().row_bytes)
          send_sum(terms, terms.wrong ? 0 : left & (0 - left), to);
      }
      if (p().topk_weights() != nullptr && lane_id() < p().num_topk)
        reinterpret_cast<float *>(job.dests[r].meta + slot * job.ring.meta_stride)[lane_id()] =
            terms.slot < 0 ? 0 : p().topk_weights()[terms.slot];
      post_before(pieces - before);
      unposted = row;
      if (!kBulk) post_before(0);
    }
    post_before(0);
  }
};

}  // namespace deepep
