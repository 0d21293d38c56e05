// dispatch_meta.cuh - a row's metadata: scales, weights, indices, source. Senders write it to the ring even where the
// payload goes straight to its place, and ahead of the payload; receivers copy it to the outputs meanwhile.
#pragma once
#include "cuda/impl/normal/dispatch_job.cuh"
#include "cuda/impl/normal/routed_meta.cuh"

namespace deepep {

constexpr int kMetaChunk = kWarp;  // rows that a receiving warp awaits together, at most

// A sending warp's shared memory. The warp loads a batch of tokens, then makes the rows of one rank after the other and
// stores a rank's rows together: they are adjacent in its ring, and stores of single words would queue after payload.
struct MetaSpace {
  uint8_t *base;
  uint32_t slot;  // of kMetaSlots, used in turn
  // The batch's rows as loaded; the rows of one rank; which of the batch these are, [kMetaBatch].
  __device__ uint32_t *common() const { return reinterpret_cast<uint32_t *>(base); }
  __device__ uint32_t *rows(const DispatchParams &p) const {
    return reinterpret_cast<uint32_t *>(base +
                                        p.meta_rows * (p.meta.common_stride + slot % kMetaSlots * p.meta.stride));
  }
  __device__ int32_t *tokens(const DispatchParams &p) const {
    return reinterpret_cast<int32_t *>(base + p.meta_rows * (p.meta.common_stride + kMetaSlots * p.meta.stride));
  }
};
__host__ __device__ inline uint32_t meta_space_bytes(const DispatchParams &p) {
  return p.meta_rows * (p.meta.common_stride + kMetaSlots * p.meta.stride) + kMetaBatch * 4;
}

// kRouted, here and below: the handle keeps the routing. Whole warp: begins to load what a batch's rows have in common.
template <bool kRouted>
__device__ inline void begin_common_meta(const DispatchParams &p, const MetaSpace &space, int first, int tokens) {
  const int row_words = static_cast<int>(p.meta.common_stride / 4), lane = lane_id();
  for (int t = 0; t < tokens; ++t)
#pragma unroll 1
    for (int at = lane; at < p.num_scales; at += kWarp)
      ptx::copy_word_async(space.common() + t * row_words + at,
                           p.scales() + (first + t) * p.scale_token_stride + at * p.scale_stride);
  for (int i = lane; i < tokens * p.num_topk; i += kWarp) {
    const int t = i / p.num_topk, k = i % p.num_topk, words = p.index_words();
    const int64_t at = static_cast<int64_t>(first) * p.num_topk + i;
    uint32_t *row = space.common() + t * row_words;
    if (p.topk_weights() != nullptr)
      ptx::copy_word_async(row + p.num_scales + k, p.topk_weights() + at);
    else
      row[p.num_scales + k] = 0;
#pragma unroll 1
    for (int w = 0; w < words; ++w)
      ptx::copy_word_async(row + p.meta.numbers_at + k * words + w,
                           static_cast<const uint32_t *>(p.topk_idx()) + at * words + w);
    if (kRouted && expanded(p))
      ptx::copy_word_async(row + p.meta.slots_at + k, pointer<const int32_t>(p.dst_slot) + at);
  }
  ptx::copy_words_commit();
}
// Waits for that, and checks the indices.
template <bool kRouted>
__device__ inline void await_common_meta(const DispatchParams &p, const MetaSpace &space, int first, int tokens) {
  const int row_words = static_cast<int>(p.meta.common_stride / 4);
  ptx::copy_words_wait<0>();
  __syncwarp();
  for (int i = lane_id(); i < tokens * p.num_topk; i += kWarp) {
    const uint32_t words = p.index_words(),
                   *index = space.common() + i / p.num_topk * row_words + p.meta.numbers_at + i % p.num_topk * words;
    const int64_t expert = words == 1 ? static_cast<int32_t>(index[0])
                                      : static_cast<int64_t>(static_cast<uint64_t>(index[1]) << 32 | index[0]);
    const bool wrong = (!kRouted && expert < -1) || expert >= p.num_experts;  // it counts as -1
    if (wrong && (!kRouted || goes_somewhere(p, first + i / p.num_topk)))
      report_refusal(p.session, kNoted, DK_EINVAL, p.session.team.rank, DK_FIELD_TOPK_IDX, p.num_experts, expert);
  }
}

// The number of entry k's expert at rank r, or p.meta.none; with expanded rows its row, below `limit`.
template <bool kRouted>
__device__ inline uint32_t number_at_rank(const DispatchParams &p, const uint32_t *common_row, int k, int r,
                                          int32_t limit) {
  const uint32_t words = p.index_words(), *index = common_row + p.meta.numbers_at + k * words;
  const uint32_t mine = index[0] - r * p.meta.num_local;  // -1 becomes too large
  if (kRouted && expanded(p)) {
    if (mine >= p.meta.num_local || (words == 2 && index[1] != 0)) return p.meta.none;
    const uint32_t slot = common_row[p.meta.slots_at + k];
    if (slot >= static_cast<uint32_t>(limit)) refuse_slot(p, limit, static_cast<int>(slot));
    return slot;
  }
  return mine < p.meta.num_local && (words == 1 || index[1] == 0) ? mine : p.meta.none;
}

// Makes the rows for rank r of the `rows` tokens of the batch that space.tokens lists.
template <bool kRouted>
__device__ inline void make_meta_rows(const DispatchParams &p, const MetaSpace &space, uint32_t *out, int r, int rows,
                                      int first, int32_t limit) {
  const int row_words = static_cast<int>(p.meta.stride / 4), common_words = static_cast<int>(p.meta.common_stride / 4);
  for (int j = 0; j < rows; ++j) {
    const auto *from = reinterpret_cast<const uint4 *>(space.common() + space.tokens(p)[j] * common_words);
    auto *to = reinterpret_cast<uint4 *>(out + j * row_words);
#pragma unroll 1
    for (int c = lane_id(); c < row_words / 4; c += kWarp) to[c] = from[c];
  }
  __syncwarp();
  const int words = p.meta.source_at - p.meta.numbers_at;
  for (int i = lane_id(); i < rows * words; i += kWarp) {
    const int j = i / words, at = i % words;
    uint32_t *row = out + j * row_words, packed = 0;
    for (int h = 0; h <= p.meta.shift; ++h) {
      const int k = (at << p.meta.shift) + h;
      const uint32_t number =
          k < p.num_topk ? number_at_rank<kRouted>(p, space.common() + space.tokens(p)[j] * common_words, k, r, limit)
                         : p.meta.none;
      if (!kRouted && k < p.num_topk && number == p.meta.none) row[p.num_scales + k] = 0;
      packed |= number << (16 * h);
    }
    row[p.meta.numbers_at + at] = packed;
  }
  for (int j = lane_id(); !p.cached() && j < rows; j += kWarp)
    out[j * row_words + p.meta.source_at] = static_cast<uint32_t>(first + space.tokens(p)[j]);
}

// Whole warp: stores a multiple of 16 bytes from shared memory.
template <bool kBulk>
__device__ inline void push_shared(uint8_t *to, const void *from, uint32_t bytes) {
  if constexpr (kBulk) {
#if DEEPEP_HAS_BULK_COPY
    if (lane_id() == 0) {
      ptx::bulk_store(to, from, bytes);
      ptx::bulk_commit();
    }
#endif
  } else {
#pragma unroll 1
    for (uint32_t at = 16 * lane_id(); at < bytes; at += 16 * kWarp)
      ptx::st_stream(to + at, *reinterpret_cast<const uint4 *>(static_cast<const uint8_t *>(from) + at));
  }
}

// Stores the metadata of tokens [first, end), all of whose rows have room. loads: it begins to load them, too.
template <bool kBulk, bool kRouted>
__device__ inline void send_tokens_meta(const DispatchParams &p, const DispatchDest *dests, MetaSpace &space, int first,
                                        int end, bool loads) {
  const int num_ranks = p.session.team.num_ranks, tokens = end - first, lane = lane_id();
  // Ranks do not all begin with the same one.
  auto rank_at = [&](int i) { return (p.session.team.rank + 1 + i) % num_ranks; };
  auto head_at = [&](int i) {
    return i < num_ranks && lane < tokens && !is_absent(p, dests[rank_at(i)])
               ? p.send_head()[static_cast<int64_t>(first + lane) * num_ranks + rank_at(i)]
               : -1;
  };
  int head = head_at(0);
  if (loads) begin_common_meta<kRouted>(p, space, first, tokens);
  await_common_meta<kRouted>(p, space, first, tokens);
  for (int i = 0; i < num_ranks; ++i) {
    const int r = rank_at(i), mine = head;
    head = head_at(i + 1);
    const uint32_t chosen = __ballot_sync(kAllLanes, mine >= 0);
    if (chosen == 0) continue;
    const int rows = __popc(chosen), first_head = __shfl_sync(kAllLanes, mine, __ffs(static_cast<int>(chosen)) - 1);
    if (mine >= 0) space.tokens(p)[__popc(chosen & ((1u << lane) - 1))] = lane;
#if DEEPEP_HAS_BULK_COPY
    if (kBulk && lane == 0) ptx::bulk_wait_read<kMetaSlots - 1>();
#endif
    uint32_t *out = space.rows(p);
    __syncwarp();
    make_meta_rows<kRouted>(p, space, out, r, rows, first, dests[r].limit);
    ++space.slot;
#if DEEPEP_HAS_BULK_COPY
    if (kBulk) ptx::fence_shared_before_bulk();
#endif
    __syncwarp();
    for (int done = 0; done < rows;) {  // in two parts where the ring wraps
      const uint32_t slot = ring_place(first_head + done, dests[r].slots).slot, stride = dests[r].meta_stride;
      const int run = min(rows - done, static_cast<int>(dests[r].slots - slot));
      push_shared<kBulk>(dests[r].meta + static_cast<uint64_t>(slot) * stride,
                         reinterpret_cast<uint8_t *>(out) + done * stride, run * stride);
      done += run;
    }
    __syncwarp();
  }
}

// Publishes tokens [first, end): one fence, then a flag for each row.
template <bool kBulk>
__device__ inline void publish_meta(const DispatchParams &p, const DispatchDest *dests, uint64_t epoch, int first,
                                    int end) {
  const int num_ranks = p.session.team.num_ranks;
#if DEEPEP_HAS_BULK_COPY
  if (kBulk && lane_id() == 0) ptx::bulk_wait<0>();
#endif
  __syncwarp();
  ptx::fence_acq_rel_sys();
#pragma unroll 1
  for (int i = lane_id(); i < (end - first) * num_ranks; i += kWarp) {
    const int r = i % num_ranks, head = p.send_head()[static_cast<int64_t>(first) * num_ranks + i];
    if (head < 0 || is_absent(p, dests[r])) continue;
    const RingPlace place = ring_place(head, dests[r].slots);
    ptx::st_relaxed_sys(&dests[r].flags[kMeta][place.slot], ring_value(epoch, place.lap));
  }
  __syncwarp();
}

__device__ inline int take_metas(const DispatchParams &p, uint64_t epoch) {
  int first = 0;
  if (lane_id() == 0) first = static_cast<int>(atomicAdd(&p.session.team.scratch->metas_taken[epoch % 2], p.meta_rows));
  return __shfl_sync(kAllLanes, first, 0);
}

// By a sending warp, while the ranks' messages are on their way: takes its first batch and begins to load it. Returns
// the first token, for send_meta.
constexpr int kNoBatch = -1;
template <bool kRouted>
__device__ inline int begin_meta(const DispatchParams &p, const MetaSpace &space, uint64_t epoch) {
  if (p.meta.words == 0) return kNoBatch;
  const int first = take_metas(p, epoch);
  if (first < p.num_tokens)
    begin_common_meta<kRouted>(p, space, first, min(static_cast<int>(p.meta_rows), p.num_tokens - first));
  return first;
}

// Whether peers may wait for a part of a batch before they free slots for the rest: a ring holds little more than a
// batch and what a receiving warp takes at a time.
__device__ __noinline__ inline bool has_small_ring(const DispatchParams &p, const DispatchDest *dests) {
  bool small = false;
#pragma unroll 1
  for (int r = lane_id(); r < p.session.team.num_ranks; r += kWarp) small |= dests[r].slots < kMetaChunk + kMetaBatch;
  return __any_sync(kAllLanes, small) != 0;
}

// Waits for room for tokens [token, end), and before that publishes those from `published` on, for which peers may wait
// before they free slots. Returns the first token that is not published, -1: the team failed.
template <bool kBulk>
__device__ __noinline__ inline int make_meta_room(const DispatchParams &p, const DispatchDest *dests, uint64_t epoch,
                                                  int published, int token, int end) {
  const int32_t *heads = p.send_head() + static_cast<int64_t>(token) * p.session.team.num_ranks;
  if (__any_sync(kAllLanes, rank_without_room(p, dests, epoch, kMeta, heads, end - token) >= 0)) {
    if (published < token) publish_meta<kBulk>(p, dests, epoch, published, token);
    published = token;
    if (!await_ring_room(p, dests, epoch, kMeta, heads, end - token)) return -1;
  }
#if DEEPEP_HAS_BULK_COPY
  if (kBulk) ptx::fence_global_before_bulk();
#endif
  return published;
}

// Role of a warp. begun: of begin_meta, or kNoBatch.
template <bool kBulk, bool kRouted = false>
__device__ inline void send_meta(const DispatchParams &p, const DispatchDest *dests, MetaSpace space, uint64_t epoch,
                                 int begun = kNoBatch) {
  const int num_ranks = p.session.team.num_ranks, batch = static_cast<int>(p.meta_rows);
  if (p.meta.words == 0) return;
  for (;; begun = kNoBatch) {
    const int first = begun != kNoBatch ? begun : take_metas(p, epoch);
    if (first >= p.num_tokens) return;
    const int end = min(first + batch, p.num_tokens);
    // Lanes check all rows of the batch: mostly all have room.
    bool tight = false;
    for (int i = lane_id(); i < (end - first) * num_ranks; i += kWarp)
      tight |=
          p.send_head()[static_cast<int64_t>(first) * num_ranks + i] >= static_cast<int>(dests[i % num_ranks].slots);
    tight = __any_sync(kAllLanes, tight) != 0;
    const bool by_token = tight && has_small_ring(p, dests);
    const int step = by_token ? 1 : batch;
    const bool loads = by_token || begun == kNoBatch;
    if (loads) ptx::copy_words_wait<0>();  // of the batch as a whole
    int published = first;
    for (int token = first; token < end; token += step) {
      const int until = min(token + step, end);
      if (tight) published = make_meta_room<kBulk>(p, dests, epoch, published, token, until);
      if (published < 0) return;
      send_tokens_meta<kBulk, kRouted>(p, dests, space, token, until, loads);
    }
    publish_meta<kBulk>(p, dests, epoch, published, end);
  }
}

// Copies `rows` rows of metadata, found by at(row), to the outputs from final_row on. Output by output, since stores of
// consecutive words combine and those of one row's words do not.
template <class At>
__device__ inline void spread_meta(const DispatchParams &p, int rows, int64_t final_row, At at) {
  const int scales = p.num_scales, topk = p.num_topk;
  auto word_at = [&](int row, int word) { return reinterpret_cast<const uint32_t *>(at(row))[word]; };
  if (p.recv_scales() != nullptr && scales > 0 && scales % 4 == 0 &&
      reinterpret_cast<uint64_t>(p.recv_scales()) % 16 == 0) {
    auto *out = reinterpret_cast<uint4 *>(p.recv_scales() + final_row * scales);
    move_entries<uint4>(
        rows, scales / 4, [&](int row, int c) { return ptx::ld_stream(at(row) + 16 * c); },
        [&](int i, const uint4 &v) { out[i] = v; });
  } else if (p.recv_scales() != nullptr && scales > 0) {
    uint32_t *out = p.recv_scales() + final_row * scales;
    move_entries<uint32_t>(rows, scales, word_at, [&](int i, uint32_t v) { out[i] = v; });
  }
  if (p.recv_topk_weights() != nullptr && topk > 0) {
    uint32_t *out = p.recv_topk_weights() + final_row * topk;
    move_entries<uint32_t>(
        rows, topk, [&](int row, int k) { return word_at(row, scales + k); }, [&](int i, uint32_t v) { out[i] = v; });
  }
  if (p.recv_topk_idx() != nullptr && topk > 0) {
    const int64_t first = final_row * topk;
    auto number_at = [&](int row, int k) {
      return word_at(row, p.meta.numbers_at + (k >> p.meta.shift)) >> (16 * (k & p.meta.shift)) & p.meta.none;
    };
    move_entries<uint32_t>(rows, topk, number_at, [&](int i, uint32_t number) {
      const int64_t index = number == p.meta.none ? -1 : static_cast<int64_t>(number);
      if (p.index_bytes == 8)
        static_cast<int64_t *>(p.recv_topk_idx())[first + i] = index;
      else
        static_cast<int32_t *>(p.recv_topk_idx())[first + i] = static_cast<int32_t>(index);
    });
  }
  if (p.recv_src_idx() != nullptr && !p.cached() && lane_id() < rows)
    p.recv_src_idx()[final_row + lane_id()] = static_cast<int32_t>(word_at(lane_id(), p.meta.source_at));
}

// Rows that no source sends (worst-case mode): index -1, weight 0.
__device__ inline void pad_meta(const DispatchParams &p, int worker, int num_workers) {
  const int num_ranks = p.session.team.num_ranks;
  const int64_t arrived = p.rank_prefix_matrix()[(num_ranks - 1) * num_ranks + p.session.team.rank];
  name_nothing(p, arrived, p.num_worst_tokens, worker * kWarp + lane_id(), num_workers * kWarp);
}

// Returns a slot of the source's ring here to the source. Not inlined: it is rarely called, and inlined it would
// hold registers all the time.
__device__ __noinline__ inline void return_credit(const TeamView &team, RingPart part, int source, uint32_t slot,
                                                  uint64_t value) {
  ptx::st_release_sys(team.ring_credit(source, part, team.rank) + slot, value);
}

// The rows of a receiving warp: those of one source, every `step`-th from `first` on.
struct ReceiverShare {
  int source, first, step;
};
__device__ inline ReceiverShare receiver_share(int worker, int num_workers, int num_sources) {
  const int source = worker % num_sources;
  return {source, worker / num_sources, (num_workers - source + num_sources - 1) / num_sources};
}
// How many of a source's rows a receiving warp takes together: of few rows each warp takes some (32 of 128 rows took a
// warp 19 us, with scales by columns).
__device__ inline int rows_together(int most, const RingShape &ring, int rows, const ReceiverShare &share) {
  return min(min(most, static_cast<int>(ring.slots)), max(1, ceil_div(rows, share.step)));
}

// By one warp: rows of a rank that takes no part (any more) name no expert.
__device__ __noinline__ inline void blank_meta(const DispatchParams &p, int64_t final_row, int first, int count) {
  for (int64_t i = lane_id(); i < static_cast<int64_t>(count) * p.num_topk; i += kWarp) {
    const int64_t at = final_row * p.num_topk + i;
    for (int w = 0; p.recv_topk_idx() != nullptr && w < p.index_words(); ++w)
      static_cast<uint32_t *>(p.recv_topk_idx())[at * p.index_words() + w] = 0xffffffffu;
    if (p.recv_topk_weights() != nullptr) p.recv_topk_weights()[at] = 0;
  }
  for (int64_t i = lane_id(); p.recv_scales() != nullptr && i < static_cast<int64_t>(count) * p.num_scales; i += kWarp)
    p.recv_scales()[final_row * p.num_scales + i] = 0;
  for (int i = lane_id(); p.recv_src_idx() != nullptr && !p.cached() && i < count; i += kWarp)
    p.recv_src_idx()[final_row + i] = first + i;
  __syncwarp();
}

// Role of a warp.
template <bool kRouted = false>
__device__ inline void receive_meta(const DispatchParams &p, uint64_t epoch, bool direct, int worker, int num_workers) {
  const TeamView &team = p.session.team;
  const ReceiverShare share = receiver_share(worker, num_workers, team.num_ranks);
  const int before = rows_before(p.rank_prefix_matrix(), team.num_ranks, share.source, team.rank);
  const int rows = p.rank_prefix_matrix()[share.source * team.num_ranks + team.rank] - before;
  const RingShape ring = dispatch_ring(p, direct);
  const int chunk = rows_together(kMetaChunk, ring, rows, share);
  const uint64_t *flags = team.ring_flag(team.rank, kMeta, share.source);
  const uint8_t *rows_here = team.self + team.nvl + ring.meta(share.source, 0);
  bool gone = shrinks(team) && is_without(p.session, share.source);
  for (int first = share.first * chunk; p.meta.words != 0 && first < rows; first += share.step * chunk) {
    const int count = min(chunk, rows - first);
    const RingPlace place = ring_place(first + lane_id(), ring.slots);
    const bool mine = lane_id() < count;
    const bool good = warp_wait_or_drop<kForRows>(
        p.session, static_cast<int64_t>(epoch),
        [&] {
          const bool here = gone || !mine || ptx::ld_acquire_sys(&flags[place.slot]) == ring_value(epoch, place.lap);
          return __all_sync(kAllLanes, here) != 0;
        },
        [&] { return lane_id() == 0 ? share.source : -1; }, [&](int) { gone = true; });
    if (!good) return;
    __syncwarp();
    if (gone) {
      if constexpr (kRouted)
        blank_routed(p, share.source, static_cast<int64_t>(before) + first, first, count);
      else
        blank_meta(p, static_cast<int64_t>(before) + first, first, count);
      continue;
    }
    const uint32_t first_slot = __shfl_sync(kAllLanes, place.slot, 0);
    const auto at = [&](int row) {  // the ring wraps once at most
      const uint32_t slot = first_slot + row;
      return rows_here + static_cast<uint64_t>(slot < ring.slots ? slot : slot - ring.slots) * p.meta.stride;
    };
    if constexpr (kRouted)
      spread_routed(p, share.source, count, static_cast<int64_t>(before) + first, at);
    else
      spread_meta(p, count, static_cast<int64_t>(before) + first, at);
    __syncwarp();
    if (mine && first + lane_id() + static_cast<int>(ring.slots) < rows)
      return_credit(team, kMeta, share.source, place.slot, ring_value(epoch, place.lap));
  }
  if (p.num_worst_tokens > 0) pad_meta(p, worker, num_workers);
}

}  // namespace deepep
