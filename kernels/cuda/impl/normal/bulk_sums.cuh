// bulk_sums.cuh - the Hopper form of an expanded combine's warps: bulk copies bring pieces of the terms into shared
// memory, ahead of the sums and across the ends of rows, and take sums to peers.
#pragma once
#include "cuda/impl/normal/expanded_sums.cuh"
#include "cuda/impl/normal/routed_sums.cuh"

namespace deepep {

// Per warp: pieces of terms in shared memory, besides, per sending warp, the pieces of sums on their way to peers. A
// lane's sums of a piece stay in registers. Each piece of a term costs a warp 360 ns whatever its length, so that they
// are long: pieces of 2 KB took 954 us where 3.5 KB took 748.
constexpr int kTermsAhead = 3, kSumStages = 2, kTermUnroll = 7;
constexpr uint32_t kTermPiece = 16 * kWarp * kTermUnroll;

#if DEEPEP_HAS_BULK_COPY
// A warp's pieces of terms, which are used in the order in which they are loaded.
struct TermPieces {
  uint8_t *pieces;                              // [kTermsAhead][kTermPiece]
  uint64_t *arrived;                            // [kTermsAhead]
  int next_load = 0, next_use = 0, loaded = 0;  // how many are loaded or on the way
  uint32_t phase = 0;

  __device__ void init() {
    if (lane_id() == 0)
      for (int i = 0; i < kTermsAhead; ++i) ptx::mbarrier_init(&arrived[i], 1);
    ptx::mbarrier_init_fence();
    __syncwarp();
  }
  __device__ bool full() const { return loaded == kTermsAhead; }
  __device__ void load(const uint8_t *from, uint32_t bytes) {
    if (lane_id() == 0) {
      ptx::mbarrier_expect(&arrived[next_load], bytes);
      ptx::bulk_load(pieces + next_load * kTermPiece, from, bytes, &arrived[next_load]);
    }
    next_load = next_load + 1 == kTermsAhead ? 0 : next_load + 1;
    ++loaded;
  }
  __device__ void await() {
    spin_in_block([&] { return ptx::mbarrier_try_wait(&arrived[next_use], phase); });
  }
  __device__ void free() {
    if (++next_use == kTermsAhead) {
      next_use = 0;
      phase ^= 1;
    }
    --loaded;
  }
  // Beyond the row's end lies what was there before; such sums are not stored.
  __device__ void add_to(float (&sum)[kTermUnroll][8]) {
    await();
    const auto *piece = reinterpret_cast<const uint4 *>(pieces + next_use * kTermPiece) + lane_id();
    uint4 data[kTermUnroll];
#pragma unroll
    for (int u = 0; u < kTermUnroll; ++u) data[u] = piece[u * kWarp];
#pragma unroll
    for (int u = 0; u < kTermUnroll; ++u) add_bf16(sum[u], data[u]);
    __syncwarp();  // all lanes have read the piece before it is filled again
    free();
  }
};

template <class Job>
struct TermSender<true, Job> {
  Job &job;
  SendQueue *queue;
  TermPieces &pieces;
  uint8_t *stages;  // [kSumStages][kTermPiece]
  // This row and the next: numbers, -1: none; terms, once loading has begun, before which `slot` is on its way.
  int number[2] = {-1, -1};
  int slot[2] = {-1, -1};
  Terms terms[2] = {};
  // What is loaded next: of so many of the two rows loading has begun. `sums`: choices whose sums are still to be
  // loaded (without a reduction one after the other); `left`: terms of this piece; `at`: its offset.
  int begun = 0;
  uint32_t sums = 0, left = 0, at = 0;
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
    while (!pieces.full() && seek()) {
      const int64_t row =
          __shfl_sync(kAllLanes, begun == 1 ? terms[0].slot : terms[1].slot, __ffs(static_cast<int>(left)) - 1);
      left &= left - 1;
      pieces.load(p().x() + row * p().row_bytes + at, min(kTermPiece, p().row_bytes - at));
    }
  }
  // Sends the sum of the terms `which` of this row to `to`.
  __device__ void send_sum(uint32_t which, uint8_t *to) {
    for (uint32_t from = 0; from < p().row_bytes; from += kTermPiece) {
      float sum[kTermUnroll][8] = {};
      for (uint32_t terms_left = which; terms_left != 0; terms_left &= terms_left - 1) {
        pieces.add_to(sum);
        load_ahead();
      }
      uint8_t *stage = stages + sent % kSumStages * kTermPiece;
      if (lane_id() == 0) ptx::bulk_wait_read<kSumStages - 1>();
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kTermUnroll; ++u) {
        uint4 data = round_bf16(sum[u]);
        if (terms[0].wrong) data = {kNanPair, kNanPair, kNanPair, kNanPair};
        reinterpret_cast<uint4 *>(stage)[u * kWarp + lane_id()] = data;
      }
      ++sent;
      ptx::fence_shared_before_bulk();
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
  __device__ void run() {
    uint32_t posted = 0;
    int unposted = -1;  // the row before, whose stores may be in flight
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
      const auto [place, lap] = job.place_of(row, r);
      if (lap > 0) ptx::fence_global_before_bulk();  // the peer has read the row that was there
      each_sum(p(), terms[0], job.dests[r].rows + static_cast<uint64_t>(place) * p().ring.payload_stride,
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
    for (; pieces.loaded > 0; pieces.free()) pieces.await();  // loads into shared memory end before the block does
    post(posted, unposted, 0);
  }
};

// A reducing warp, as reduce_routed. It looks for the rows of the next piece between sums: they have the registers.
template <bool kShrinks>
struct TermReducer {
  const CombineParams &p;
  uint64_t epoch;
  const CombineSource *sources;
  TermPieces &pieces;
  int32_t *shared;  // twice reducer_words
  int each;
  // The piece whose rows are not here yet, as far as is known: its number, and what is loaded of it. `ticket`, in lane
  // 0: of the one after.
  int ticket = 0, taken = 0;
  int head = -1;
  int64_t choice = -1;
  // The piece after that which is summed, once its rows are here.
  bool ready = false;
  int next = 0, next_terms = 0;
  uint32_t copy = 0;  // its terms, in `shared`
  // What is loaded next. `ahead`: of `next`.
  bool ahead = false;
  const uint8_t **terms = nullptr;
  int num_terms = 0, term = 0, at = 0, end = 0;

  __device__ const uint8_t **next_rows() const {
    return reinterpret_cast<const uint8_t **>(shared + copy * reducer_words(p));
  }
  __device__ int take() const {
    return lane_id() == 0 ? static_cast<int>(atomicAdd(&p.session.team.scratch->tokens_taken[epoch % 2], 1u)) : 0;
  }
  __device__ void take_piece() {
    taken = __shfl_sync(kAllLanes, ticket, 0);
    const int token = sum_piece_at(p, each, taken).token, num_ranks = p.session.team.num_ranks;
    if (token >= p.num_tokens) return;
    ticket = take();
    if (lane_id() < num_ranks) head = p.send_head()[static_cast<int64_t>(token) * num_ranks + lane_id()];
    choice = load_choice(p, token);
  }
  // Makes the piece that was taken the next. False: its rows are not here (`waits`: the team failed), or there is none.
  __device__ bool find_next(bool waits) {
    const SumPiece piece = sum_piece_at(p, each, taken);
    if (piece.token >= p.num_tokens) return false;
    int32_t *slots = shared + 2 * (kMaxBiases + p.num_topk);
    const int32_t *heads = p.send_head() + static_cast<int64_t>(piece.token) * p.session.team.num_ranks;
    put_heads<kShrinks>(p, epoch, sources, slots, [&](int r) { return r < kWarp ? head : heads[r]; });
    if (waits ? !await_rows<kShrinks>(p, epoch, sources, slots)
              : !__all_sync(kAllLanes, missing_row(p, epoch, sources, slots) < 0))
      return false;
    find_slots(p, slots);
    ptx::fence_global_before_bulk();
    copy ^= 1;
    next_terms = 0;
    for (int b = 0; b < kMaxBiases; ++b)
      if (p.bias(b) != nullptr)
        next_rows()[next_terms++] = p.bias(b) + static_cast<uint64_t>(piece.token) * p.row_bytes;
    int num_rows;
    const int rank = order_terms(p, sources, choice, slots, next_rows() + next_terms, num_rows);
    next_terms += num_rows;
    if (piece.first == 0) take_weights(p, sources, slots, piece.token, rank);
    next = taken;
    take_piece();
    return true;
  }
  __device__ void begin_next() {
    terms = next_rows();
    num_terms = next_terms;
    term = 0;
    const SumPiece piece = sum_piece_at(p, each, next);
    end = piece.end;
    at = num_terms == 0 ? end : piece.first;
  }
  __device__ void load_ahead() {
    while (!pieces.full()) {
      if (at >= end) {
        if (ahead || !ready) return;
        ahead = true;
        begin_next();
        continue;
      }
      pieces.load(terms[term] + 16ull * at, min(kTermPiece, 16u * (end - at)));
      if (++term < num_terms) continue;
      term = 0;
      at += kWarp * kTermUnroll;
    }
  }
  // All that was loaded is summed in the end, since it is loaded once it is here.
  __device__ void run() {
    ticket = take();
    take_piece();
    while (ready || find_next(true)) {
      if (!ahead) begin_next();
      ready = ahead = false;
      const SumPiece piece = sum_piece_at(p, each, next);
      const int last = piece.end, count = next_terms;
      uint8_t *row = p.combined_x() + static_cast<uint64_t>(piece.token) * p.row_bytes;
      for (int base = piece.first; base < last; base += kWarp * kTermUnroll) {
        load_ahead();
        if (!ready) ready = find_next(false);
        float sum[kTermUnroll][8] = {};
        for (int t = 0; t < count; ++t) {
          load_ahead();
          pieces.add_to(sum);
        }
#pragma unroll
        for (int u = 0; u < kTermUnroll; ++u) {
          const int chunk = base + u * kWarp + lane_id();
          if (chunk < last) ptx::st_stream(row + 16ull * chunk, round_bf16(sum[u]));
        }
      }
      if (each == kWholeRow) give_credits(p, epoch, sources, piece.token);
    }
  }
};
#endif

}  // namespace deepep
