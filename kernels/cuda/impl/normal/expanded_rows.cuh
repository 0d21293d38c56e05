// expanded_rows.cuh - dispatch of expanded rows: where a rank's row goes at each other rank, and the receiving warps,
// which write it to its other places as it arrives. Rows that stay at their rank go to all their places at once.
#pragma once
#include "cuda/impl/normal/dispatch_meta.cuh"

namespace deepep {

// After set_up_dests, by the same threads: a row goes straight to the place of its first choice.
template <bool kShrinks>
__device__ inline void set_up_expanded_dests(const DispatchParams &p, uint64_t epoch, DispatchDest *dests) {
  const TeamView &team = p.session.team;
  for (int r = threadIdx.x; r < team.num_ranks; r += blockDim.x) {
    DispatchDest &dest = dests[r];
    dest.limit = team.handshake(team.rank, copy_of<kShrinks>(team, epoch, r), r)->row_limit;
    if (dest.direct) dest.rows -= static_cast<uint64_t>(dest.first_row) * p.row_bytes;
  }
  __syncthreads();
}

// Words that a stage needs of a token: heads [R], then its experts and their slots, as the caller has them.
__host__ __device__ inline uint32_t expanded_head_words(const DispatchParams &p) {
  return p.session.team.num_ranks + p.num_topk * (p.index_words() + 1);
}

// Rows that stay at this rank, in turns of kOwnRows tokens: whichever warp of senders and movers is free takes the
// next. Whole warp: the next token, -1: no more. The turn is in shared memory, since registers are all in use: the
// first token above kOwnRows bits, one for each token of the turn that has rows here and has not been taken.
constexpr int kOwnRows = 4;
__device__ inline int next_own_token(const DispatchParams &p, SendQueue *queue) {
  const TeamView &team = p.session.team;
  uint32_t turn = queue->own_rows;
  while (turn % (1u << kOwnRows) == 0) {
    uint32_t first = 0;
    if (lane_id() == 0) first = atomicAdd(&team.scratch->own_rows_taken, kOwnRows);
    first = __shfl_sync(kAllLanes, first, 0);
    if (first >= static_cast<uint32_t>(p.num_tokens)) return -1;
    const int token = static_cast<int>(first) + lane_id();
    const bool here = lane_id() < kOwnRows && token < p.num_tokens &&
                      p.send_head()[static_cast<int64_t>(token) * team.num_ranks + team.rank] >= 0;
    turn = first << kOwnRows | __ballot_sync(kAllLanes, here);
  }
  const uint32_t lowest = turn & (0 - turn);
  __syncwarp();
  if (lane_id() == 0) queue->own_rows = turn - lowest;
  __syncwarp();
  return static_cast<int>(turn >> kOwnRows) + __ffs(static_cast<int>(lowest)) - 1;
}

// kShares: movers may help with rows that stay here, and do if shares_own: those come after all others, under numbers
// from num_tokens on.
template <bool kShares>
struct ExpandedJob : DispatchJob {
  static constexpr bool kByLanes = kShares;
  bool shares_own;
  SendQueue *queue;
  __device__ int next() {
    const int token = DispatchJob::next();
    if (!kShares || token >= 0 || !shares_own) return token;
    const int mine = next_own_token(p, queue);
    return mine < 0 ? -1 : p.num_tokens + mine;
  }
  __device__ bool is_own(int row) const { return kShares && row >= p.num_tokens; }
  __device__ int token_of(int row) const { return is_own(row) ? row - p.num_tokens : row; }
  __device__ const uint8_t *source(int row) const { return DispatchJob::source(token_of(row)); }

  __device__ int32_t *words_of(int stage) const { return heads + stage * expanded_head_words(p); }
  __device__ void prefetch(int stage, int row) {
    const int token = token_of(row);
    const int num_ranks = p.session.team.num_ranks, indices = p.num_topk * p.index_words();
    int32_t *to = words_of(stage);
    const auto *idx = static_cast<const uint32_t *>(p.topk_idx()) + static_cast<int64_t>(token) * indices;
    const int32_t *slots = pointer<const int32_t>(p.dst_slot) + static_cast<int64_t>(token) * p.num_topk;
#pragma unroll 1
    for (int r = lane_id(); r < num_ranks; r += kWarp)
      ptx::copy_word_async(&to[r], &p.send_head()[static_cast<int64_t>(token) * num_ranks + r]);
#pragma unroll 1
    for (int i = lane_id(); i < indices; i += kWarp) ptx::copy_word_async(&to[num_ranks + i], &idx[i]);
#pragma unroll 1
    for (int k = lane_id(); k < p.num_topk; k += kWarp) ptx::copy_word_async(&to[num_ranks + indices + k], &slots[k]);
  }
  __device__ bool room(int stage, int row) const {
    return is_own(row) ||
           __all_sync(kAllLanes, rank_without_room<true>(p, dests, epoch, kPayload, words_of(stage)) < 0) != 0;
  }
  __device__ bool await_room(int stage, int) const {
    return await_ring_room<true>(p, dests, epoch, kPayload, words_of(stage));
  }
  // The rank of choice lane_id(); -1: none.
  __device__ int rank_of_choice(int stage) const {
    if (lane_id() >= p.num_topk) return -1;
    const int32_t *index = words_of(stage) + p.session.team.num_ranks + lane_id() * p.index_words();
    const bool far = p.index_words() == 2 && index[1] != 0;
    return far || index[0] < 0 || index[0] >= p.num_experts ? -1 : index[0] / static_cast<int>(p.meta.num_local);
  }
  // One lane would take as long to issue a row's stores as the stores take. Lane k has choice k, and of the choices at
  // another rank the first one has the row.
  __device__ bool by_lanes(int stage, int row, uint8_t *&to) const {
    const int num_ranks = p.session.team.num_ranks, me = p.session.team.rank, lane = lane_id();
    const int32_t *words = words_of(stage);
    if (num_ranks > kWarp) return false;
    const int head = lane < num_ranks ? words[lane] : -1;
    const bool takes = head >= 0 && (!shares_own || is_own(row) == (lane == me));
    bool wrong = takes && head >= dests[lane].num_rows;
    const uint32_t takers = __ballot_sync(kAllLanes, takes);
    const int rank = rank_of_choice(stage);
    const uint32_t same = __match_any_sync(kAllLanes, rank),
                   named = __reduce_or_sync(kAllLanes, rank < 0 ? 0 : 1u << rank);
    wrong |= (takers & ~named) != 0;
    to = nullptr;
    if (rank >= 0 && (takers >> rank & 1) != 0 && (rank == me || (same & ((1u << lane) - 1)) == 0)) {
      const DispatchDest &dest = dests[rank];
      const bool own = rank == me, placed = own || dest.direct != 0;
      const uint32_t slot = placed ? static_cast<uint32_t>(words[num_ranks + p.num_topk * p.index_words() + lane])
                                   : ring_place(words[rank], dest.slots).slot;
      wrong |= placed && slot >= static_cast<uint32_t>(dest.limit);
      to = (own ? p.recv_x() : dest.rows) + static_cast<uint64_t>(slot) * (own ? p.row_bytes : dest.row_stride);
    }
    return __any_sync(kAllLanes, wrong) == 0;
  }
  template <class F>
  __device__ void each(int stage, int row, F f) const {
    const int num_ranks = p.session.team.num_ranks;
    const int32_t *words = words_of(stage);
    const int rank = rank_of_choice(stage),
              mine = rank < 0 ? -1 : words[num_ranks + p.num_topk * p.index_words() + lane_id()];
#pragma unroll 1
    for (int r = 0; r < num_ranks; ++r) {
      if (kShares && shares_own && is_own(row) != (r == p.session.team.rank)) continue;
      const int head = words[r];
      const uint32_t choices = __ballot_sync(kAllLanes, rank == r);
      if (static_cast<uint32_t>(head) >= static_cast<uint32_t>(dests[r].num_rows)) {
        if (head >= 0 && !is_absent(p, dests[r])) refuse_head(r, head);
        continue;
      }
      const bool own = r == p.session.team.rank, placed = own || dests[r].direct != 0;
      for (uint32_t left = own ? choices : 1; left != 0; left &= left - 1) {
        uint32_t slot = ring_place(head, dests[r].slots).slot;
        if (placed) {  // own rows go to all places, others to that of their first choice
          const uint32_t of = own ? left : choices;
          const int place = of == 0 ? -1 : __shfl_sync(kAllLanes, mine, __ffs(static_cast<int>(of)) - 1);
          if (static_cast<uint32_t>(place) >= static_cast<uint32_t>(dests[r].limit)) {
            refuse_slot(p, dests[r].limit, place);
            continue;
          }
          slot = static_cast<uint32_t>(place);
        }
        f((own ? p.recv_x() : dests[r].rows) + static_cast<uint64_t>(slot) * (own ? p.row_bytes : dests[r].row_stride));
      }
    }
  }
};

// Whole warp: a row from `from` to places `to`.
__device__ inline void copy_to_places(const DispatchParams &p, const uint8_t *from, int slot, uint32_t to) {
  constexpr int kUnroll = 7;
  const int chunks = static_cast<int>(p.row_bytes / 16);
  for (int base = 0; base < chunks; base += kWarp * kUnroll) {
    uint4 data[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + u * kWarp + lane_id();
      if (at < chunks) data[u] = ptx::ld_stream(from + 16ull * at);
    }
    for (uint32_t left = to; left != 0; left &= left - 1) {
      const int64_t place = __shfl_sync(kAllLanes, slot, __ffs(static_cast<int>(left)) - 1);
      uint8_t *row = p.recv_x() + place * p.row_bytes;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = base + u * kWarp + lane_id();
        if (at < chunks) ptx::st_stream(row + 16ull * at, data[u]);
      }
    }
  }
}

// Whole warp: zeros in all outputs of a row.
__device__ __forceinline__ void zero_expanded_row(const DispatchParams &p, int64_t row) {
  for (uint32_t at = 16 * lane_id(); at < p.row_bytes; at += 16 * kWarp)
    *reinterpret_cast<uint4 *>(p.recv_x() + row * p.row_bytes + at) = uint4{0, 0, 0, 0};
  if (p.recv_scales() != nullptr)
    for (int s = lane_id(); s < p.num_scales; s += kWarp)
      p.recv_scales()[row * p.recv_scale_token_stride + s * p.recv_scale_stride] = 0;
  if (p.recv_topk_weights() != nullptr && lane_id() == 0) p.recv_topk_weights()[row] = 0;
}

__device__ __noinline__ inline void zero_row(const DispatchParams &p, int64_t row) { zero_expanded_row(p, row); }

// Whole warp: zeros behind the rows of experts `first`, `first` + `step` / kPaddingParts, ...
constexpr int kPaddingParts = 8;  // warps that share an expert
template <bool kShrinks>
__device__ inline void write_padding(const DispatchParams &p, int worker, int num_workers) {
  const int *ends = pointer<const int>(p.psum_per_expert), parts = static_cast<int>(p.meta.num_local) * kPaddingParts;
  for (int i = worker; i < parts; i += num_workers) {
    const int64_t real_end = max(ends[i / kPaddingParts], 0);
    const int64_t end =
        min<int64_t>(ceil_div<int64_t>(real_end, p.expert_alignment) * p.expert_alignment, p.num_expanded_tokens);
    for (int64_t row = real_end + i % kPaddingParts; row < end; row += kPaddingParts) {
      if constexpr (kShrinks)
        zero_row(p, row);
      else
        zero_expanded_row(p, row);
    }
  }
}

// Rows of a rank that takes no part (any more), in a team that shrinks. Whole warp: the places of one are zeros; lane k
// has that of choice k, -1: none.
__device__ __noinline__ inline void zero_places(const DispatchParams &p, int slot) {
  for (uint32_t left = __ballot_sync(kAllLanes, slot >= 0); left != 0; left &= left - 1)
    zero_row(p, __shfl_sync(kAllLanes, slot, __ffs(static_cast<int>(left)) - 1));
}
// By one warp: rows that nothing has come of, `chunk` of the source's rows from `first` on, `first` + `step` on, ...
// Where they belong only a handle of before knows.
__device__ __noinline__ inline void blank_expanded(const DispatchParams &p, int source, int first, int step,
                                                   int chunk) {
  const int32_t *matrix = p.rank_prefix_matrix();
  const int num_ranks = p.session.team.num_ranks, me = p.session.team.rank;
  const int before = rows_before(matrix, num_ranks, source, me), rows = matrix[source * num_ranks + me] - before;
  for (int i = 0; p.recv_src_metadata != 0; ++i) {
    const int row = first + i / chunk * step + i % chunk;
    if (row >= rows) break;
    int32_t *to = src_metadata(p, static_cast<int64_t>(before) + row);
    if (p.cached()) {
      const int slot = lane_id() < p.num_topk ? to[2 + lane_id()] : -1;
      zero_places(p, slot < p.num_expanded_tokens ? slot : -1);
      continue;
    }
    if (lane_id() < p.num_topk) to[2 + lane_id()] = -1;
    if (lane_id() != 0) continue;
    to[0] = source * p.num_max_tokens + row;
    to[1] = source * p.num_topk;
  }
  __syncwarp();
}
__device__ inline bool lacks_rows(const DispatchParams &p) {
  const int num_ranks = p.session.team.num_ranks, me = p.session.team.rank;
  const int32_t *matrix = p.rank_prefix_matrix();
  bool lacks = false;
  for (int r = 0; r < num_ranks; ++r)
    lacks |= is_without(p.session, r) && matrix[r * num_ranks + me] > rows_before(matrix, num_ranks, r, me);
  return lacks;
}
// By the last block, once all rows are here: of each expert's rows those that no metadata names become zeros. `bits`:
// `words` words of shared memory, a bit for each of so many rows at a time.
__device__ __noinline__ inline void zero_unnamed_rows(const DispatchParams &p, uint32_t *bits, int words) {
  if (!lacks_rows(p) || p.psum_per_expert == 0 || p.recv_src_metadata == 0) return;
  const int num_ranks = p.session.team.num_ranks, num_topk = p.num_topk;
  const int32_t *ends = pointer<const int32_t>(p.psum_per_expert);
  const int64_t entries =
      static_cast<int64_t>(num_topk) *
      min(p.rank_prefix_matrix()[(num_ranks - 1) * num_ranks + p.session.team.rank], p.num_recv_tokens);
  const int64_t together = static_cast<int64_t>(words) * 32;
  for (int64_t base = 0; base < p.num_expanded_tokens; base += together) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) bits[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < entries; i += blockDim.x) {
      const int64_t at = src_metadata(p, i / num_topk)[2 + i % num_topk] - base;
      if (at >= 0 && at < together) atomicOr(&bits[at / 32], 1u << (at % 32));
    }
    __syncthreads();
    int64_t start = 0;  // of the expert's rows
    for (int e = 0; e < static_cast<int>(p.meta.num_local); ++e) {
      const int64_t real_end = max(ends[e], 0),
                    end = min(min<int64_t>(real_end, p.num_expanded_tokens), base + together);
      for (int64_t row = max(start, base) + warp_id(); row < end; row += blockDim.x / kWarp)
        if ((bits[(row - base) / 32] >> ((row - base) % 32) & 1) == 0) zero_row(p, row);
      start = ceil_div<int64_t>(real_end, p.expert_alignment) * p.expert_alignment;
    }
    __syncthreads();
  }
}

// Whole warp: waits for the flag of the first of `lanes`, lane i looking at flag number i. Returns those lanes whose
// flags have been set by then, with kGone if the source takes no part any more; 0: the team has failed.
constexpr uint32_t kGone = 1u << 31;
template <bool kShrinks>
__device__ inline uint32_t await_flags(const DispatchParams &p, uint64_t epoch, int source, const uint64_t *flags,
                                       const RingPlace &place, uint32_t lanes, bool all) {
  uint32_t here = 0;
  bool gone = false;
  const bool good = warp_await<kShrinks, kForRows>(
      p.session, static_cast<int64_t>(epoch),
      [&] {
        here = __ballot_sync(kAllLanes, (lanes >> lane_id() & 1) != 0 &&
                                            ptx::ld_acquire_sys(&flags[place.slot]) == ring_value(epoch, place.lap));
        return gone || (all ? here == lanes : (here & lanes & (0 - lanes)) != 0);
      },
      [&] { return lane_id() == 0 ? source : -1; }, [&](int) { gone = true; });
  __syncwarp();
  return !good ? 0 : gone ? here | kGone : here;
}

// As receiver_share: of this rank's own rows there is only the metadata to receive, which fewer warps do.
__device__ inline ReceiverShare expanded_share(int worker, int num_workers, const TeamView &team) {
  const int own = team.num_ranks == 1 ? num_workers : max(1, num_workers / (2 * team.num_ranks));
  if (worker < own) return {team.rank, worker, own};
  ReceiverShare share = receiver_share(worker - own, num_workers - own, team.num_ranks - 1);
  if (share.source >= team.rank) ++share.source;
  return share;
}

// Role of a warp: the metadata of rows of one source, and kRows: the rows, unless the sender has written them to their
// places itself. kGather: without scales. False: the team has failed.
template <bool kRows, bool kShrinks, bool kGather = false>
__device__ inline bool receive_expanded(const DispatchParams &p, uint64_t epoch, int worker, int num_workers) {
  const TeamView &team = p.session.team;
  const bool direct = !kShrinks && p.recv_segment >= 0;  // in a team that shrinks rows are staged
  const ReceiverShare share =
      kRows ? expanded_share(worker, num_workers, team) : receiver_share(worker, num_workers, team.num_ranks);
  const int before = rows_before(p.rank_prefix_matrix(), team.num_ranks, share.source, team.rank);
  const int rows = p.rank_prefix_matrix()[share.source * team.num_ranks + team.rank] - before;
  const RingShape ring = dispatch_ring(p, direct);
  const int chunk = rows_together(kExpandChunk, ring, rows, share);
  const uint64_t *meta_flags = team.ring_flag(team.rank, kMeta, share.source),
                 *row_flags = team.ring_flag(team.rank, kPayload, share.source);
  const uint8_t *metas = team.self + team.nvl + ring.meta(share.source, 0),
                *staged = team.self + team.nvl + ring.payload(share.source, 0);
  if ((p.flags & DK_DISPATCH_ZERO_PADDING) != 0) write_padding<kShrinks>(p, worker, num_workers);
  if (is_out<kShrinks>(p.session, share.source)) {
    blank_expanded(p, share.source, share.first * chunk, share.step * chunk, chunk);
    return true;
  }
  for (int first = share.first * chunk; first < rows; first += share.step * chunk) {
    const int count = min(chunk, rows - first);
    const RingPlace place = ring_place(first + lane_id(), ring.slots);
    const uint32_t all = (1u << count) - 1;
    const uint32_t came = await_flags<kShrinks>(p, epoch, share.source, meta_flags, place, all, true);
    if (came != all) {
      if (kShrinks && came != 0) blank_expanded(p, share.source, first, share.step * chunk, chunk);
      return false;
    }
    int slots[kExpandChunk];
    spread_expanded<kGather>(
        p, share.source, before + first, count,
        [&](int j) { return metas + static_cast<uint64_t>(ring_place(first + j, ring.slots).slot) * p.meta.stride; },
        slots);
    uint32_t here = 0;  // rows that have arrived
    const int rows_here = kRows && share.source != team.rank ? count : 0;
    for (int j = 0; j < rows_here; ++j) {
      if ((here & (kGone | 1u << j)) == 0) {
        const uint32_t news =
            await_flags<kShrinks>(p, epoch, share.source, row_flags, place, (1u << count) - (1u << j), false);
        if (news == 0) return false;
        here |= news;
      }
      int slot = slots[0];
#pragma unroll
      for (int i = 1; i < kExpandChunk; ++i)
        if (i == j) slot = slots[i];
      if (kShrinks && (here >> j & 1) == 0) continue;
      const uint32_t places = __ballot_sync(kAllLanes, slot >= 0);
      const int own = __shfl_sync(kAllLanes, slot, places == 0 ? 0 : __ffs(static_cast<int>(places)) - 1);
      const uint8_t *from = direct
                                ? p.recv_x() + static_cast<int64_t>(max(own, 0)) * p.row_bytes
                                : staged + static_cast<uint64_t>(__shfl_sync(kAllLanes, place.slot, j)) * p.row_bytes;
      copy_to_places(p, from, slot, direct ? places & (places - 1) : places);
    }
    if (kShrinks && (here & kGone) != 0) {
#pragma unroll
      for (int i = 0; i < kExpandChunk; ++i)
        if ((here >> i & 1) == 0) zero_places(p, slots[i]);
      blank_expanded(p, share.source, first + share.step * chunk, share.step * chunk, chunk);
      return true;
    }
    __syncwarp();
    if (lane_id() < count && first + lane_id() + static_cast<int>(ring.slots) < rows) {
      return_credit(team, kMeta, share.source, place.slot, ring_value(epoch, place.lap));
      if (share.source != team.rank)
        return_credit(team, kPayload, share.source, place.slot, ring_value(epoch, place.lap));
    }
    __syncwarp();
  }
  return true;
}

// Scales by columns are 4 bytes in as many lines as a row has scales: stored as rows come they took 77 of 376 us (FP8,
// 2 GPUs, 24 SMs). An expert's rows are next to each other, so warps gather the scales of 32 of them from where
// metadata has arrived, and store whole lines. Not of few rows, of which a line would have few.
constexpr int kLeastGathered = 1024;
__device__ inline bool gathers_scales(const DispatchParams &p) {
  const int num_ranks = p.session.team.num_ranks;
  return p.recv_scales() != nullptr && p.recv_scale_token_stride == 1 && p.num_scales > 0 && p.psum_per_expert != 0 &&
         p.rank_prefix_matrix()[(num_ranks - 1) * num_ranks + p.session.team.rank] >= kLeastGathered;
}
// Role of a warp, where each row of a source has a slot of its own, once it has received its metadata.
__device__ __noinline__ inline void gather_scales(const DispatchParams &p, int worker, int num_workers) {
  constexpr int kUnroll = 2;
  const TeamView &team = p.session.team;
  Scratch *scratch = team.scratch;
  __syncwarp();
  if (lane_id() == 0) {
    ptx::atomic_add_acq_rel_gpu(&scratch->metas_spread, 1);
    // The others' own waits have a limit.
    spin_in_block([&] {
      return ptx::ld_acquire_gpu(&scratch->metas_spread) == static_cast<uint32_t>(num_workers) || has_failed(p.session);
    });
  }
  __syncwarp();
  if (has_failed(p.session)) return;
  const int *ends = pointer<const int>(p.psum_per_expert);
  const int experts = static_cast<int>(p.meta.num_local), parts = ceil_div(num_workers, experts),
            whole = p.num_scales / 4;
  const uint8_t *nvl = team.self + team.nvl;
  for (int i = worker; i < experts * parts; i += num_workers) {
    const int expert = i / parts;
    const int64_t before = expert == 0 ? 0 : max(ends[expert - 1], 0),
                  start = ceil_div<int64_t>(before, p.expert_alignment) * p.expert_alignment,
                  end = min<int64_t>(ends[expert], p.num_expanded_tokens);
    for (int64_t row = start + i % parts * kWarp + lane_id(); row - lane_id() < end; row += parts * kWarp) {
      uint32_t *to = p.recv_scales() + row;
      const uint64_t at = row < end ? 16ull * *to : 0;
      const bool named = row < end && at + p.meta.stride <= team.nvl_bytes;  // but by a handle that is wrong
      const uint8_t *from = nvl + (named ? at : 0);
      if (row >= end) continue;
      for (int first = 0; first < whole; first += kUnroll) {
        uint4 scales[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (first + u < whole) scales[u] = named ? ptx::ld_stream(from + 16 * (first + u)) : uint4{0, 0, 0, 0};
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (first + u >= whole) continue;
          const uint32_t words[4] = {scales[u].x, scales[u].y, scales[u].z, scales[u].w};
#pragma unroll
          for (int w = 0; w < 4; ++w) to[(4 * (first + u) + w) * p.recv_scale_stride] = words[w];
        }
      }
      for (int s = 4 * whole; s < p.num_scales; ++s)
        to[s * p.recv_scale_stride] = named ? reinterpret_cast<const uint32_t *>(from)[s] : 0;
    }
  }
}

// A failed dispatch leaves rows that name nothing.
__device__ inline void clear_expanded_outputs(const DispatchParams &p) {
  for (int64_t i = threadIdx.x; p.recv_topk_weights() != nullptr && i < p.num_expanded_tokens; i += blockDim.x)
    p.recv_topk_weights()[i] = 0;
  const int64_t words = static_cast<int64_t>(max(p.num_recv_tokens, 0)) * (p.num_topk + 2);
  for (int64_t i = threadIdx.x; !p.cached() && p.recv_src_metadata != 0 && i < words; i += blockDim.x)
    src_metadata(p, 0)[i] = -1;
}

}  // namespace deepep
