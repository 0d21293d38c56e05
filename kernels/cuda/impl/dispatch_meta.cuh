// dispatch_meta.cuh - what belongs to a row besides its payload: scales, weights, indices, source. Sent through the ring even
// where the payload goes straight to its place, ahead of it, and spread out at the receiver meanwhile.
#pragma once
#include "cuda/impl/dispatch_params.cuh"

namespace deepep {

constexpr int kMetaBatch = 16;       // tokens of one ticket: one system fence for all of them
constexpr int kMetaChunk = kWarp;    // rows that a receiving warp awaits together

// Where the metadata of a batch's rows goes, in shared memory: [token of the batch][R], null where the token does not go.
struct MetaRows {
  uint32_t **rows;
  int num_ranks;
  __device__ uint32_t *at(int token, int rank) const { return rows[token * num_ranks + rank]; }
};

// Words [0, count) of each of the batch's tokens: load(token, word) gives what put(token, word, value) stores. Loads of several
// tokens go side by side: alone, each would cost the latency of memory. Uniform code, for divergent branches would serialise them.
template <class Value, class Load, class Put> __device__ inline void for_words(int tokens, int count, Load load, Put put) {
  constexpr int kUnroll = 4;
  const int total = tokens * count;
  for (int base = lane_id(); base < total; base += kWarp * kUnroll) {
    Value value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = least(base + u * kWarp, total - 1);
      value[u] = load(i / count, i % count);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kWarp;
      if (i < total) put(i / count, i % count, value[u]);
    }
  }
}

struct Choice { int64_t expert; uint32_t weight; };

// Metadata of tokens [first, end), all of whose rows have room.
__device__ inline void send_tokens_meta(const DispatchParams &p, const DispatchDest *dests, const MetaRows &to, int first, int end) {
  const int num_ranks = to.num_ranks, num_local = p.num_experts / num_ranks, tokens = end - first;
  for (int i = lane_id(); i < tokens * num_ranks; i += kWarp) {
    const int r = i % num_ranks, head = p.send_head[static_cast<int64_t>(first) * num_ranks + i];
    uint8_t *row = dests[r].meta + static_cast<uint64_t>(ring_place(most(head, 0), dests[r].slots).slot) * dests[r].meta_stride;
    to.rows[i] = head < 0 ? nullptr : reinterpret_cast<uint32_t *>(row);
  }
  __syncwarp();
  auto put_to_all = [&](int token, int at, auto value_for) {
    for (int r = 0; r < num_ranks; ++r)
      if (to.at(token, r) != nullptr) to.at(token, r)[at] = value_for(r);
  };
  if (p.num_scales > 0)
    for_words<uint32_t>(
        tokens, p.num_scales,
        [&](int token, int at) { return p.scales[(first + token) * p.scale_token_stride + at * p.scale_stride]; },
        [&](int token, int at, uint32_t value) { put_to_all(token, at, [&](int) { return value; }); });
  if (p.num_topk > 0)
    for_words<Choice>(
        tokens, p.num_topk,
        [&](int token, int k) {
          const int64_t at = static_cast<int64_t>(first + token) * p.num_topk + k;
          return Choice{load_index(p.topk_idx, at, p.index_bytes), p.topk_weights != nullptr ? p.topk_weights[at] : 0};
        },
        [&](int token, int k, const Choice &choice) {
          auto local = [&](int r) {
            const int64_t mine = choice.expert - static_cast<int64_t>(r) * num_local;
            return choice.expert >= 0 && mine >= 0 && mine < num_local ? mine : -1;
          };
          put_to_all(token, p.weights_at() + k, [&](int r) { return local(r) < 0 ? 0u : choice.weight; });
          for (int word = 0; word < p.index_words(); ++word)
            put_to_all(token, p.indices_at() + k * p.index_words() + word,
                       [&](int r) { return static_cast<uint32_t>(local(r) >> (32 * word)); });
        });
  if (!p.cached)
    for (int token = lane_id(); token < tokens; token += kWarp)
      put_to_all(token, p.source_at(), [&](int) { return static_cast<uint32_t>(first + token); });
}

// Publishes tokens [first, end): one fence, then a flag for each row.
__device__ inline void publish_meta(const DispatchParams &p, const DispatchDest *dests, uint64_t epoch, int first, int end) {
  const int num_ranks = p.session.team.num_ranks;
  __syncwarp();
  ptx::fence_acq_rel_sys();
  for (int i = lane_id(); i < (end - first) * num_ranks; i += kWarp) {
    const int r = i % num_ranks, head = p.send_head[static_cast<int64_t>(first) * num_ranks + i];
    if (head < 0) continue;
    const RingPlace place = ring_place(head, dests[r].slots);
    ptx::st_relaxed_sys(&dests[r].flags[kMeta][place.slot], ring_value(epoch, place.lap));
  }
  __syncwarp();
}

// Role of a warp.
__device__ inline void send_meta(const DispatchParams &p, const DispatchDest *dests, const MetaRows &to, uint64_t epoch) {
  const int num_ranks = p.session.team.num_ranks;
  if (p.meta_words() == 0) return;
  for (;;) {
    int first = 0;
    if (lane_id() == 0) first = static_cast<int>(atomicAdd(&p.session.team.scratch->metas_taken[epoch % 2], kMetaBatch));
    first = __shfl_sync(kAllLanes, first, 0);
    if (first >= p.num_tokens) return;
    const int end = least(first + kMetaBatch, p.num_tokens);
    // Lanes look at all rows of the batch: mostly all have room.
    bool tight = false;
    for (int i = lane_id(); i < (end - first) * num_ranks; i += kWarp)
      tight |= p.send_head[static_cast<int64_t>(first) * num_ranks + i] >= static_cast<int>(dests[i % num_ranks].slots);
    if (!__any_sync(kAllLanes, tight)) {
      send_tokens_meta(p, dests, to, first, end);
      publish_meta(p, dests, epoch, first, end);
      continue;
    }
    int published = first;
    for (int token = first; token < end; ++token) {
      const int32_t *heads = p.send_head + static_cast<int64_t>(token) * num_ranks;
      if (__any_sync(kAllLanes, rank_without_room(p, dests, epoch, kMeta, heads) >= 0)) {
        publish_meta(p, dests, epoch, published, token); // what others may wait for
        published = token;
        if (!await_ring_room(p, dests, epoch, kMeta, heads)) return;
      }
      send_tokens_meta(p, dests, to, token, token + 1);
    }
    publish_meta(p, dests, epoch, published, end);
  }
}

__device__ inline void store_meta_word(const DispatchParams &p, int64_t row, int at, uint32_t bits) {
  if (at < p.num_scales) {
    if (p.recv_scales != nullptr) p.recv_scales[row * p.num_scales + at] = bits;
  } else if (at < p.indices_at()) {
    if (p.recv_topk_weights != nullptr) p.recv_topk_weights[row * p.num_topk + at - p.weights_at()] = bits;
  } else if (at < p.source_at()) {
    const int64_t words = static_cast<int64_t>(p.num_topk) * p.index_words();
    if (p.recv_topk_idx != nullptr) static_cast<uint32_t *>(p.recv_topk_idx)[row * words + at - p.indices_at()] = bits;
  } else if (p.recv_src_idx != nullptr) {
    p.recv_src_idx[row] = static_cast<int32_t>(bits);
  }
}

// Rows [first, first + rows) of a source, all there, to their places from final_row on.
__device__ inline void spread_meta(const DispatchParams &p, const RingShape &ring, int source, int first, int rows, int64_t final_row) {
  constexpr int kUnroll = 8;
  const uint8_t *nvl = p.session.team.self + p.session.team.nvl;
  const int words = p.meta_words(), total = rows * words;
  for (int base = lane_id(); base < total; base += kWarp * kUnroll) {
    uint32_t bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kWarp;
      if (i >= total) continue;
      const uint8_t *row = nvl + ring.meta(source, ring_place(first + i / words, ring.slots).slot);
      bits[u] = reinterpret_cast<const uint32_t *>(row)[i % words];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kWarp;
      if (i < total) store_meta_word(p, final_row + i / words, i % words, bits[u]);
    }
  }
}

// Rows that no source sends (worst-case mode): index -1, weight 0.
__device__ inline void pad_meta(const DispatchParams &p, int worker, int num_workers) {
  const int num_ranks = p.session.team.num_ranks;
  const int64_t arrived = p.rank_prefix_matrix[(num_ranks - 1) * num_ranks + p.session.team.rank];
  const int64_t end = static_cast<int64_t>(p.num_worst_tokens) * p.num_topk;
  for (int64_t i = arrived * p.num_topk + worker * kWarp + lane_id(); i < end; i += static_cast<int64_t>(num_workers) * kWarp) {
    if (p.recv_topk_idx != nullptr)
      for (int w = 0; w < p.index_words(); ++w) static_cast<uint32_t *>(p.recv_topk_idx)[i * p.index_words() + w] = 0xffffffffu;
    if (p.recv_topk_weights != nullptr) p.recv_topk_weights[i] = 0;
  }
}

// Which rows a receiving warp looks after: those of one source, every `step`-th from `first` on.
struct ReceiverShare { int source, first, step; };
__device__ inline ReceiverShare receiver_share(int worker, int num_workers, int num_ranks) {
  const int source = worker % num_ranks;
  return {source, worker / num_ranks, (num_workers - source + num_ranks - 1) / num_ranks};
}

// Role of a warp.
__device__ inline void receive_meta(const DispatchParams &p, uint64_t epoch, bool direct, int worker, int num_workers) {
  const TeamView &team = p.session.team;
  const ReceiverShare share = receiver_share(worker, num_workers, team.num_ranks);
  const int before = rows_before(p.rank_prefix_matrix, team.num_ranks, share.source, team.rank);
  const int rows = p.rank_prefix_matrix[share.source * team.num_ranks + team.rank] - before;
  const RingShape ring = dispatch_ring(p, direct);
  const int chunk = static_cast<int>(least<uint32_t>(kMetaChunk, ring.slots));
  const uint64_t *flags = team.ring_flag(team.rank, kMeta, share.source);
  uint64_t *credits = team.ring_credit(share.source, kMeta, team.rank);
  for (int first = share.first * chunk; p.meta_words() != 0 && first < rows; first += share.step * chunk) {
    const int count = least(chunk, rows - first);
    const RingPlace place = ring_place(first + lane_id(), ring.slots);
    const bool mine = lane_id() < count;
    const bool good = warp_wait_or_fail(
        p.session, static_cast<int64_t>(epoch),
        [&] {
          const bool here = !mine || ptx::ld_acquire_sys(&flags[place.slot]) == ring_value(epoch, place.lap);
          return __all_sync(kAllLanes, here) != 0;
        },
        [&] { return lane_id() == 0 ? share.source : -1; });
    if (!good) return;
    __syncwarp();
    spread_meta(p, ring, share.source, first, count, static_cast<int64_t>(before) + first);
    __syncwarp();
    if (mine && first + lane_id() + static_cast<int>(ring.slots) < rows)
      ptx::st_release_sys(&credits[place.slot], ring_value(epoch, place.lap));
  }
  if (p.num_worst_tokens > 0) pad_meta(p, worker, num_workers);
}

}  // namespace deepep
