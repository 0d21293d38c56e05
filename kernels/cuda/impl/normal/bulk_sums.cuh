// bulk_sums.cuh - the Hopper form of a sending warp of an expanded combine: bulk copies bring pieces of the terms into
// shared memory, ahead of the sums and across the ends of rows, and take the sums to the peer.
#pragma once
#include "cuda/impl/normal/expanded_sums.cuh"

namespace deepep {

// Per sending warp: pieces of terms in shared memory, besides the piece of a sum. A lane's sums of a piece stay in
// registers. Each piece of a term costs a warp 360 ns whatever its length: pieces of 2 KB took 954 us where 3.5 KB took
// 748.
constexpr int kTermsAhead = 4, kTermUnroll = 7;
constexpr uint32_t kTermPiece = 16 * kWarp * kTermUnroll;

#if DEEPEP_HAS_BULK_COPY
template <class Job>
struct TermSender<true, Job> {
  Job &job;
  SendQueue *queue;
  uint8_t *pieces;    // [kTermsAhead + 1][kTermPiece]
  uint64_t *arrived;  // [kTermsAhead]
  // This row and the next: numbers, -1: none; terms, once loading has begun, before which `slot` is on its way.
  int number[2] = {-1, -1};
  int slot[2] = {-1, -1};
  Terms terms[2] = {};
  // What is loaded next: of so many of the two rows loading has begun. `sums`: choices whose sums are still to be
  // loaded (without a reduction one after the other); `left`: terms of this piece; `at`: its offset.
  int begun = 0;
  uint32_t sums = 0, left = 0, at = 0;
  int next_load = 0, next_use = 0, loaded = 0;  // of the pieces for terms; how many are loaded or on the way
  uint32_t phase = 0;
  int sent = 0;  // pieces of sums

  __device__ const CombineParams &p() const { return job.p; }
  __device__ uint32_t next_sum() const { return (p().flags & DK_COMBINE_UNREDUCED) == 0 ? sums : sums & (0 - sums); }

  __device__ void take_row(int which) {
    number[which] = job.next();
    slot[which] = number[which] < 0 ? -1 : load_slot(p(), number[which]);
  }
  // Goes on to the next piece; false: both rows have been loaded.
  __device__ bool seek() {
    while (left == 0) {
      at += kTermPiece;
      if (sums == 0 || at >= p().row_bytes) {
        at = 0;
        sums &= ~next_sum();
        if (sums == 0) {
          if (begun == 2 || (begun == 0 ? number[0] : number[1]) < 0) return false;
          const Terms next = checked_terms(p(), begun == 0 ? slot[0] : slot[1]);
          (begun == 0 ? terms[0] : terms[1]) = next;
          sums = next.here;
          ++begun;
        }
      }
      left = next_sum();
    }
    return true;
  }
  __device__ void load_ahead() {
    while (loaded < kTermsAhead && seek()) {
      const int64_t row =
          __shfl_sync(kAllLanes, begun == 1 ? terms[0].slot : terms[1].slot, __ffs(static_cast<int>(left)) - 1);
      left &= left - 1;
      if (lane_id() == 0) {
        const uint32_t bytes = min(kTermPiece, p().row_bytes - at);
        ptx::mbarrier_expect(&arrived[next_load], bytes);
        ptx::bulk_load(pieces + next_load * kTermPiece, p().x() + row * p().row_bytes + at, bytes, &arrived[next_load]);
      }
      next_load = next_load + 1 == kTermsAhead ? 0 : next_load + 1;
      ++loaded;
    }
  }
  __device__ void await_piece() {
    spin_in_block([&] { return ptx::mbarrier_try_wait(&arrived[next_use], phase); });
  }
  __device__ void free_piece() {
    if (++next_use == kTermsAhead) {
      next_use = 0;
      phase ^= 1;
    }
    --loaded;
  }
  // Sends the sum of the terms `which` of this row to `to`.
  __device__ void send_sum(uint32_t which, uint8_t *to) {
    for (uint32_t from = 0; from < p().row_bytes; from += kTermPiece) {
      float sum[kTermUnroll][8] = {};
      for (uint32_t terms_left = which; terms_left != 0; terms_left &= terms_left - 1) {
        await_piece();
        // Beyond the row's end lies what was there before; its sums are not sent.
        const auto *piece = reinterpret_cast<const uint4 *>(pieces + next_use * kTermPiece) + lane_id();
        uint4 data[kTermUnroll];
#pragma unroll
        for (int u = 0; u < kTermUnroll; ++u) data[u] = piece[u * kWarp];
#pragma unroll
        for (int u = 0; u < kTermUnroll; ++u) add_bf16(sum[u], data[u]);
        __syncwarp();  // all lanes have read the piece before it is filled again
        free_piece();
        load_ahead();
      }
      uint8_t *stage = pieces + kTermsAhead * kTermPiece;
      if (lane_id() == 0) ptx::bulk_wait_read<0>();
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kTermUnroll; ++u) {
        uint4 data = round_bf16(sum[u]);
        if (terms[0].wrong) data = {kNanPair, kNanPair, kNanPair, kNanPair};
        reinterpret_cast<uint4 *>(stage)[u * kWarp + lane_id()] = data;
      }
      ++sent;
      ptx::fence_before_bulk();
      __syncwarp();
      if (lane_id() == 0) {
        ptx::bulk_store(to + from, stage, min(kTermPiece, p().row_bytes - from));
        ptx::bulk_commit();
      }
    }
  }
  // Posts a row whose stores are complete once no more than `newer` pieces are in flight; -1: there is none.
  __device__ void post(uint32_t &posted, int row, int newer) {
    if (lane_id() == 0) {
      if (newer >= 4)
        ptx::bulk_wait<4>();
      else if (newer >= 2)
        ptx::bulk_wait<2>();
      else if (newer == 1)
        ptx::bulk_wait<1>();
      else
        ptx::bulk_wait<0>();
    }
    __syncwarp();
    if (row >= 0) post_row(queue, posted, row);
  }
  __device__ void init_pieces() {
    if (lane_id() == 0)
      for (int i = 0; i < kTermsAhead; ++i) ptx::mbarrier_init(&arrived[i], 1);
    ptx::mbarrier_init_fence();
    __syncwarp();
  }
  __device__ void run() {
    uint32_t posted = 0;
    int unposted = -1;  // the row before, whose stores may be in flight
    init_pieces();
    job.start();
    take_row(0);
    take_row(1);
    while (number[0] >= 0) {
      load_ahead();
      const int row = number[0];
      if (!job.room(0, row)) {
        post(posted, unposted, 0);  // peers may wait for rows that are still in flight before they free a slot
        unposted = -1;
        if (!job.await_room(0, row)) break;
      }
      const int r = job.dest_of(row), before = sent;
      const uint64_t place = job.place_of(row, r).slot;
      each_sum(p(), terms[0], job.dests[r].rows + place * job.ring.payload_stride,
               [&](uint32_t which, uint8_t *to) { send_sum(which, to); });
      send_weights(job, terms[0], r, place);
      post(posted, unposted, sent - before);
      unposted = row;
      if (begun == 1) sums = 0;  // this row has been loaded
      --begun;
      number[0] = number[1];
      slot[0] = slot[1];
      terms[0] = terms[1];
      take_row(1);
    }
    for (; loaded > 0; free_piece()) await_piece();  // loads into shared memory end before the block does
    post(posted, unposted, 0);
  }
};
#endif

}  // namespace deepep
