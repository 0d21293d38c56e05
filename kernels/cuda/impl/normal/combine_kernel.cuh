// combine_kernel.cuh - rows back to their tokens' ranks, and the sums there. Senders push rows of x in the order of
// their destination's tokens; reducing warps take tokens by tickets and sum in FP32 in the order of ranks.
#pragma once
#include "cuda/impl/normal/combine_params.cuh"
#include "cuda/impl/normal/send_rows.cuh"

namespace deepep {

// kSenders is the most; with many blocks fewer send and the others sum: 60 to 72 warps of all blocks keep the links
// full, and each one less to wait for shortens the queues. With 24 blocks 3 of 4 took 473 us and all 498, with 16 they
// took 562 and 472.
constexpr int kCombineSenders = 60;
template <bool kBulk>
struct CombineRoles {
  static constexpr int kSenders = kBulk ? 4 : 8, kPublishers = 1, kReducers = kBulk ? 15 : 11;
  static constexpr int kReducersAt = kSenders + kPublishers;
  static constexpr int kWarps = kReducersAt + kReducers, kThreads = kWarps * kWarp;
  static int senders(int blocks, int num_ranks) {  // each rank needs one, see combine_job
    return kBulk ? min(kSenders, max(ceil_div(kCombineSenders, blocks), ceil_div(num_ranks, blocks))) : kSenders;
  }
};

struct CombineDest {
  uint8_t *rows, *meta;  // slot 0 of my ring there
  uint64_t *flags;
  const uint64_t *credits;      // here
  int32_t first_row, num_rows;  // of x
};
struct CombineSource {
  const uint8_t *rows, *meta;  // slot 0 of the source's ring here
  const uint64_t *flags;
  uint64_t *credits;  // there
  int32_t num_rows, reserved;
};

__host__ __device__ inline RingShape combine_ring(const CombineParams &p) {
  return ring_shape(p.session.team.nvl_bytes, p.session.team.num_ranks, p.row_bytes, p.num_topk * 4);
}

template <bool kBulk>
struct CombineShared {
  uint32_t stages, dests, sources, queues, bytes;
  __host__ __device__ CombineShared(uint32_t num_ranks, uint32_t stage_bytes) {
    constexpr uint32_t senders = CombineRoles<kBulk>::kSenders, stages_each = kBulk ? kSendStages : 1;
    stages = 0;
    dests = kBulk ? align_up<uint32_t>(senders * stages_each * stage_bytes, 128) : 0;
    sources = dests + num_ranks * static_cast<uint32_t>(sizeof(CombineDest));
    queues = align_up<uint32_t>(sources + num_ranks * static_cast<uint32_t>(sizeof(CombineSource)), 16);
    bytes = align_up<uint32_t>(queues + senders * static_cast<uint32_t>(sizeof(SendQueue)), 128);
  }
};

// By the whole block, while the peers' messages are on their way.
__device__ inline void set_up_combine(const CombineParams &p, CombineDest *dests, CombineSource *sources) {
  const TeamView &team = p.session.team;
  const int num_ranks = team.num_ranks, me = team.rank;
  const RingShape ring = combine_ring(p);
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const int32_t *matrix = p.rank_prefix_matrix;
    uint8_t *there = team.peers[r] + team.nvl, *here = team.self + team.nvl;
    const int first = matrix_before(matrix, num_ranks, r, me);
    dests[r] = {there + ring.payload(me, 0),
                there + ring.meta(me, 0),
                team.ring_flag(r, kPayload, me),
                team.ring_credit(me, kPayload, r),
                first,
                matrix[r * num_ranks + me] - first};
    sources[r] = {here + ring.payload(r, 0),
                  here + ring.meta(r, 0),
                  team.ring_flag(me, kPayload, r),
                  team.ring_credit(r, kPayload, me),
                  matrix[me * num_ranks + r] - matrix_before(matrix, num_ranks, me, r),
                  0};
    if (blockIdx.x == 0) team.scratch->sent_bytes[r] = static_cast<uint64_t>(dests[r].num_rows) * p.row_bytes;
  }
  __syncthreads();
}

// What send_rows.cuh asks for.
struct CombineJob {
  const CombineParams &p;
  const CombineDest *dests;
  uint64_t epoch;
  RingShape ring;
  int dest;         // whose rows this warp takes; -1: everybody's, by turns
  int tickets;      // how many there are
  int ticket = -1;  // lane 0: taken one ahead

  // Rows are named by their index in x: the destination follows from it.
  __device__ uint32_t take() const {
    return atomicAdd(&p.session.team.scratch->rows_taken[epoch % 2][max(dest, 0)], 1u);
  }
  __device__ void start() {
    if (lane_id() == 0) ticket = static_cast<int>(take());
  }
  __device__ int next() {
    const int num_ranks = p.session.team.num_ranks;
    for (;;) {
      const int n = __shfl_sync(kAllLanes, ticket, 0);
      if (n >= tickets) return -1;
      if (lane_id() == 0) ticket = static_cast<int>(take());
      const int r = dest < 0 ? (n + p.session.team.rank) % num_ranks : dest, at = dest < 0 ? n / num_ranks : n;
      if (at < dests[r].num_rows) return dests[r].first_row + at;
    }
  }
  __device__ int dest_of(int row) const {
    int r = 0;
    while (row >= dests[r].first_row + dests[r].num_rows) ++r;
    return r;
  }
  __device__ RingPlace place_of(int row, int r) const { return ring_place(row - dests[r].first_row, ring.slots); }
  __device__ void prefetch(int, int) const {}
  __device__ const uint8_t *source(int row) const { return p.x + static_cast<uint64_t>(row) * p.row_bytes; }
  __device__ bool has_room(int row) const {
    const int r = dest_of(row);
    const RingPlace place = place_of(row, r);
    return place.lap == 0 || ptx::ld_acquire_sys(&dests[r].credits[place.slot]) == ring_value(epoch, place.lap - 1);
  }
  __device__ bool room(int, int row) const { return __all_sync(kAllLanes, has_room(row)) != 0; }
  __device__ bool await_room(int, int row) const {
    const bool good = warp_wait_or_fail(
        p.session, static_cast<int64_t>(epoch), [&] { return __all_sync(kAllLanes, has_room(row)) != 0; },
        [&] { return lane_id() == 0 ? dest_of(row) : -1; });
    __syncwarp();
    return good;
  }
  __device__ void extra(int, int row) const {
    const int r = dest_of(row);
    auto *to =
        reinterpret_cast<float *>(dests[r].meta + static_cast<uint64_t>(place_of(row, r).slot) * ring.meta_stride);
    for (int k = lane_id(); k < p.num_topk; k += kWarp)
      to[k] = p.topk_weights == nullptr ? 0 : p.topk_weights[static_cast<int64_t>(row) * p.num_topk + k];
  }
  template <class F>
  __device__ void each(int, int row, F f) const {
    const int r = dest_of(row);
    f(dests[r].rows + static_cast<uint64_t>(place_of(row, r).slot) * ring.payload_stride);
  }
};

// What a reducing warp takes at a time: chunks (16 bytes) [first, end) of a token's row. Whole rows where their slots
// are used again, since a slot's credit says that all of it has been read. Else pieces of 8 KB, for with whole rows the
// warps that have the last tokens work on when the others have nothing left: 5 us less for rows of 14 KB. Each piece
// costs a look at the flags: 4 KB took 70 us more.
struct SumPiece {
  int token, first, end;
};
constexpr int kPieceChunks = 512;
constexpr int kWholeRow = 1 << 30;
__device__ inline int piece_chunks(const CombineParams &p, const CombineSource *sources, const RingShape &ring) {
  int longest = 0;
  for (int r = 0; r < p.session.team.num_ranks; ++r) longest = max(longest, sources[r].num_rows);
  return longest <= static_cast<int>(ring.slots) ? kPieceChunks : kWholeRow;
}
__device__ inline SumPiece sum_piece_at(const CombineParams &p, int each, int ticket) {
  const int chunks = static_cast<int>(p.row_bytes / 16), per_token = ceil_div(chunks, each),
            first = ticket % per_token * each;
  return {ticket / per_token, first, min(first + each, chunks)};
}

// A piece of the sum of a token's rows. `slots` is shared, [R]: the slot of the row from each rank, or -1. Two rows are
// on their way at a time: a warp that waited for each in turn would be bound by latency.
__device__ inline void sum_piece(const CombineParams &p, const CombineSource *sources, const RingShape &ring,
                                 const int32_t *slots, const SumPiece &piece) {
  constexpr int kUnroll = 4;
  const int num_ranks = p.session.team.num_ranks, token = piece.token, chunks = piece.end;
  const uint64_t row = static_cast<uint64_t>(token) * p.row_bytes;
  for (int base = piece.first + lane_id(); base < chunks; base += kWarp * kUnroll) {
    float sum[kUnroll][8] = {};
    for (int r = 0; r < num_ranks;) {
      const uint8_t *from[2] = {nullptr, nullptr};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        while (r < num_ranks && slots[r] < 0) ++r;
        if (r < num_ranks) {
          from[n] = sources[r].rows + static_cast<uint64_t>(slots[r]) * p.row_bytes + 16ull * base;
          ++r;
        }
      }
      uint4 data[2][kUnroll];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (from[n] != nullptr && base + u * kWarp < chunks) data[n][u] = ptx::ld_stream(from[n] + 16 * kWarp * u);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (from[n] != nullptr && base + u * kWarp < chunks) add_bf16(sum[u], data[n][u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + u * kWarp;
      if (at >= chunks) continue;
#pragma unroll 1
      for (int b = 0; b < 2; ++b)
        if (p.bias[b] != nullptr)
          add_bf16(sum[u], ptx::ld_stream(reinterpret_cast<const uint8_t *>(p.bias[b]) + row + 16ull * at));
      ptx::st_stream(reinterpret_cast<uint8_t *>(p.combined_x) + row + 16ull * at, round_bf16(sum[u]));
    }
  }
  if (piece.first != 0 || p.combined_weights == nullptr) return;
  for (int k = lane_id(); k < p.num_topk; k += kWarp) {
    float sum = 0;
    for (int r = 0; r < num_ranks; ++r)
      if (slots[r] >= 0)
        sum += reinterpret_cast<const float *>(sources[r].meta + static_cast<uint64_t>(slots[r]) * ring.meta_stride)[k];
    p.combined_weights[static_cast<int64_t>(token) * p.num_topk + k] = sum;
  }
}

// Role of a warp. `slots`: its own shared [R].
__device__ inline void reduce_tokens(const CombineParams &p, uint64_t epoch, const CombineSource *sources,
                                     int32_t *slots) {
  const int num_ranks = p.session.team.num_ranks;
  const RingShape ring = combine_ring(p);
  const int each = piece_chunks(p, sources, ring);
  const auto take = [&] {
    return lane_id() == 0 ? static_cast<int>(atomicAdd(&p.session.team.scratch->tokens_taken[epoch % 2], 1u)) : 0;
  };
  int ticket = take();
  for (;;) {
    const SumPiece piece = sum_piece_at(p, each, __shfl_sync(kAllLanes, ticket, 0));
    if (piece.token >= p.num_tokens) return;
    ticket = take();
    for (int r = lane_id(); r < num_ranks; r += kWarp)
      slots[r] = p.send_head[static_cast<int64_t>(piece.token) * num_ranks + r];
    __syncwarp();
    int missing = -1;
    const bool good = warp_wait_or_fail(
        p.session, static_cast<int64_t>(epoch),
        [&] {
          missing = -1;
          for (int r = lane_id(); r < num_ranks && missing < 0; r += kWarp) {
            const int head = slots[r];  // the row's number, until all are there
            if (head < 0) continue;
            const RingPlace place = ring_place(head, ring.slots);
            if (ptx::ld_acquire_sys(&sources[r].flags[place.slot]) != ring_value(epoch, place.lap)) missing = r;
          }
          return __all_sync(kAllLanes, missing < 0) != 0;
        },
        [&] { return missing; });
    if (!good) return;
    __syncwarp();
    for (int r = lane_id(); r < num_ranks; r += kWarp)
      if (slots[r] >= 0) slots[r] = static_cast<int>(ring_place(slots[r], ring.slots).slot);
    __syncwarp();
    sum_piece(p, sources, ring, slots, piece);
    __syncwarp();
    for (int r = lane_id(); each == kWholeRow && r < num_ranks; r += kWarp) {
      const int head = p.send_head[static_cast<int64_t>(piece.token) * num_ranks + r];
      if (head < 0 || head + static_cast<int>(ring.slots) >= sources[r].num_rows) continue;
      const RingPlace place = ring_place(head, ring.slots);
      ptx::st_release_sys(&sources[r].credits[place.slot], ring_value(epoch, place.lap));
    }
    __syncwarp();
  }
}

// Rows go to all destinations by turns, so that tokens' rows from all ranks arrive together, unless some ring is too
// small for all its rows: a row that waits for room must not hold back rows to others, so each destination then has its
// own warps.
__device__ inline CombineJob combine_job(const CombineParams &p, const CombineDest *dests, uint64_t epoch) {
  const int num_ranks = p.session.team.num_ranks, worker = warp_id() * gridDim.x + blockIdx.x;
  const RingShape ring = combine_ring(p);
  int longest = 0;
  for (int r = 0; r < num_ranks; ++r) longest = max(longest, dests[r].num_rows);
  const bool roomy = longest <= static_cast<int>(ring.slots);
  const int dest = (worker + p.session.team.rank) % num_ranks;
  return {p, dests, epoch, ring, roomy ? -1 : dest, roomy ? longest * num_ranks : dests[dest].num_rows};
}

template <bool kBulk>
__device__ inline void run_combine_roles(const CombineParams &p, uint64_t epoch, uint8_t *shared, int32_t *slots,
                                         RowSender<kBulk, CombineJob> &rows) {
  using Roles = CombineRoles<kBulk>;
  const CombineShared<kBulk> at(p.session.team.num_ranks, p.stage_bytes);
  const auto *dests = reinterpret_cast<const CombineDest *>(shared + at.dests);
  const auto *sources = reinterpret_cast<const CombineSource *>(shared + at.sources);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  const int warp = warp_id(), num_ranks = p.session.team.num_ranks;
  if (warp < p.senders) {
    rows.run(true);
    __syncwarp();
    if (lane_id() == 0) ptx::st_release_cta(&queues[warp].finished, 1);
  } else if (warp == Roles::kSenders) {
    const CombineJob job{p, dests, epoch, combine_ring(p), -1, 0};
    publish_rows(queues, p.senders, 1, [&](int row, int) {
      const int r = job.dest_of(row);
      const RingPlace place = job.place_of(row, r);
      ptx::st_relaxed_sys(&dests[r].flags[place.slot], ring_value(epoch, place.lap));
    });
  } else {
    reduce_tokens(p, epoch, sources,
                  slots + (warp > Roles::kSenders ? warp - Roles::kReducersAt : Roles::kReducers + warp) * num_ranks);
  }
}

template <bool kBulk>
__global__ void __launch_bounds__(CombineRoles<kBulk>::kThreads, 1)
    combine_kernel(const __grid_constant__ CombineParams p) {
#if !DEEPEP_HAS_BULK_COPY
  if constexpr (kBulk) return;  // the launcher does not choose this form below 9.0
#endif
  extern __shared__ __align__(128) uint8_t shared[];
  const Session &s = p.session;
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  const CombineShared<kBulk> at(s.team.num_ranks, p.stage_bytes);
  auto *queues = reinterpret_cast<SendQueue *>(shared + at.queues);
  init_queues(queues, p.senders, kBulk);
  if (begin(s)) {
    const Handshake hand = combine_handshake(p, epoch);
    if (blockIdx.x == 0) post_enter(s, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    auto *dests = reinterpret_cast<CombineDest *>(shared + at.dests);
    set_up_combine(p, dests, reinterpret_cast<CombineSource *>(shared + at.sources));
    CombineJob job = combine_job(p, dests, epoch);
    auto rows = row_sender<kBulk>(job, queues, shared + at.stages, p.row_bytes, p.stage_bytes);
    const bool sends = warp_id() < p.senders;
    if (sends) rows.start();
    if (await_enter(s, hand))
      run_combine_roles<kBulk>(p, epoch, shared, reinterpret_cast<int32_t *>(shared + at.bytes), rows);
    else if (sends)
      rows.abandon();
  }
  finish(s, [&](bool failed) {
    if (failed) clear_combine_outputs(p);
    for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) s.team.scratch->rows_taken[epoch % 2][r] = 0;
    if (threadIdx.x == 0) {
      s.team.scratch->tokens_taken[epoch % 2] = 0;
      s.team.scratch->epoch = epoch;
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deepep
