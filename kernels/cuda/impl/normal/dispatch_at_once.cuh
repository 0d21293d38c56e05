// dispatch_at_once.cuh - a dispatch of few rows whose outputs have room for any: one kernel counts, sends and receives.
// A row's place in the ring follows from its own rank's tokens alone; its final place follows from all ranks' counts,
// which cross at the same time, each word beside the number of the call.
#pragma once
#include "cuda/impl/normal/at_once_bulk.cuh"
#include "cuda/impl/normal/dispatch_kernel.cuh"
#include "cuda/impl/normal/expanded_rows.cuh"
#include "cuda/impl/normal/routed_notify.cuh"

namespace deepep {

constexpr uint32_t kAtOnceCounts = 4096, kAtOnceChoices = 4096;  // words of all ranks; choices of a rank
constexpr int kEarlyChunks = 4, kEarlyChoices = 2;               // that a thread loads before anything is known

// The two calls, both with the session of the dispatch.
struct AtOnceParams {
  RoutedNotifyParams notify;
  DispatchParams dispatch;
  uint32_t tokens_each = 0, rows_each = 0;  // of a block, at most: what it sends, what it receives
  uint32_t copiers = 0, copy_bytes = 0;     // threads that copy pieces of so many bytes of rows
  RingShape ring{};
  Divisor by_chunks{}, by_words{}, by_topk{}, by_ranks{}, by_experts{}, by_local{};  // 16 bytes, words of a row, …
};

__host__ __device__ inline bool is_routed(const DispatchParams &p) { return p.routing != DK_ROUTING_NONE; }
// Words of a row's metadata: scales, weights, experts, expanded: the place of each choice among its rank's rows for the
// expert; the token.
__host__ __device__ inline uint32_t at_once_words(const DispatchParams &p) {
  return p.num_scales + (p.routing == DK_ROUTING_EXPANDED ? 3 : 2) * p.num_topk + 1;
}
// Counts that each rank sends: rows to each rank; with a routing choices of each expert.
__host__ __device__ inline uint32_t at_once_counts(const DispatchParams &p) {
  return p.session.team.num_ranks + (is_routed(p) ? p.num_experts : 0);
}
// Never one of the counts that other kernels leave there.
__device__ inline uint64_t tagged_count(uint64_t epoch, uint32_t count) { return (epoch | 1ull << 31) << 32 | count; }

// A row that a block receives: its source, and its number among that one's rows.
struct Arrival {
  int32_t source, number;
};

// Shared memory of a block, in this order.
struct AtOnceShared {
  uint32_t dests, first, total, ranks, table, starts, arrivals, heads, places, positions, codes, masks, arrived, stages,
      bytes;
  __host__ __device__ explicit AtOnceShared(const AtOnceParams &p) {
    const DispatchParams &d = p.dispatch;
    const uint32_t num_ranks = d.session.team.num_ranks, experts = at_once_counts(d) - num_ranks, tokens = d.num_tokens;
    dests = 0;
    first = num_ranks * 16;
    total = first + experts * 4;
    ranks = total + experts * 4;
    table = ranks + num_ranks * 4;
    starts = table + num_ranks * at_once_counts(d) * 4;
    const bool expanded = d.routing == DK_ROUTING_EXPANDED;
    arrivals = starts + (expanded ? d.num_experts / num_ranks * 4 : 0);
    heads = arrivals + p.rows_each * static_cast<uint32_t>(sizeof(Arrival));
    places = heads + p.tokens_each * num_ranks * 4;
    positions = places + (expanded ? p.rows_each * d.num_topk * 4 : 0);
    codes = positions + (expanded ? p.tokens_each * d.num_topk * 2 : 0);
    masks = align_up<uint32_t>(codes + (is_routed(d) ? tokens * d.num_topk * 2 : 0), 16);
    arrived = align_up<uint32_t>(masks + tokens * 4, 8);
    stages = align_up<uint32_t>(arrived + p.copiers * 8, 128);
    bytes = stages + p.copiers * p.copy_bytes;
  }
};

// The counts of all ranks, as sum_routing takes them.
struct CountTable {
  const TeamView &team;
  uint64_t epoch;
  const uint32_t *table;
  uint32_t stride;
  __device__ const HandshakeMessage *handshake(int i) const {
    return team.handshake(team.rank, epoch % kHandshakeCopies, i);
  }
  __device__ const uint32_t *counts(int i) const { return table + i * stride; }
};

// Where this rank's rows go at a rank.
struct AtOnceDest {
  uint8_t *rows, *metas;
};

// What a thread loads before anything else: its first choices of all tokens, its first chunks of the block's rows, its
// first word of their metadata.
struct EarlyRows {
  int64_t choices[kEarlyChoices];
  uint4 chunks[kEarlyChunks];
  uint32_t word;
};

// A block's part of the call.
template <bool kBulk>
struct AtOnce {
  const AtOnceParams &p;
  uint8_t *shared;
  const AtOnceShared at{p};
  uint64_t epoch = 0;

  static constexpr uint32_t kNone = 0xffff;                  // the code of a choice that names no expert
  static constexpr int kRowWarps = kBulk ? kCopyWarps : 10;  // of a receiving block; the others receive metadata

  __device__ const RoutedNotifyParams &n() const { return p.notify; }
  __device__ const DispatchParams &d() const { return p.dispatch; }
  __device__ const Session &s() const { return p.dispatch.session; }
  __device__ int num_ranks() const { return s().team.num_ranks; }
  __device__ int local() const { return static_cast<int>(d().meta.num_local); }
  __device__ bool is_expanded() const { return d().routing == DK_ROUTING_EXPANDED; }
  template <class T>
  __device__ T *part(uint32_t offset) const {
    return reinterpret_cast<T *>(shared + offset);
  }
  __device__ RoutingCounts counts() const { return {n(), shared + at.first}; }  // without those of warps
  __device__ int32_t *own_rows() const { return part<int32_t>(at.ranks); }      // to each rank
  __device__ int own_tokens() const { return num_items(d().num_tokens); }
  // The numbers of a token's rows at each rank.
  __device__ int32_t *heads_of(int i) const { return part<int32_t>(at.heads) + i * num_ranks(); }
  // The place of the row in the ring at rank r, -1: none. A rank with more rows than there is room for refuses the
  // call.
  __device__ int place_at(int i, int r) const {
    const int head = heads_of(i)[r];
    return head < static_cast<int>(p.ring.slots) ? head : -1;
  }
  __device__ const uint8_t *row_of(int token) const { return d().x() + static_cast<uint64_t>(token) * d().row_bytes; }
  __device__ const uint8_t *row_from(int source, int number) const {
    return s().team.self + s().team.nvl + p.ring.payload(source, number);
  }
  __device__ const uint32_t *meta_from(int source, int number) const {
    return reinterpret_cast<const uint32_t *>(s().team.self + s().team.nvl + p.ring.meta(source, number));
  }

  // ---- Counting, by the whole block: every block counts all tokens, which is faster than to ask the others.

  __device__ void clear() const {
#pragma unroll 1
    for (int r = threadIdx.x; r < num_ranks(); r += kAtOnceThreads) {
      uint8_t *nvl = s().team.peers[r] + s().team.nvl;
      part<AtOnceDest>(at.dests)[r] = {nvl + p.ring.payload(s().team.rank, 0), nvl + p.ring.meta(s().team.rank, 0)};
    }
    for (int i = threadIdx.x; i < static_cast<int>(at.table - at.first) / 4; i += kAtOnceThreads)
      part<uint32_t>(at.first)[i] = 0;
    for (int i = threadIdx.x; i < static_cast<int>(d().num_tokens); i += kAtOnceThreads)
      part<uint32_t>(at.masks)[i] = 0;
  }
  __device__ void load_choices(int base, int64_t (&expert)[kEarlyChoices]) const {
#pragma unroll
    for (int u = 0; u < kEarlyChoices; ++u) {
      const int i = base + u * kAtOnceThreads;
      const bool named = is_routed(d()) && i < d().num_tokens * d().num_topk;
      expert[u] = named ? load_index(d().topk_idx(), i, d().index_bytes) : -1;
    }
  }
  __device__ void read_choices(const EarlyRows &early, int64_t &wrong) const {
    const int entries = d().num_tokens * d().num_topk;
    for (int base = threadIdx.x; base < entries; base += kAtOnceThreads * kEarlyChoices) {
      int64_t expert[kEarlyChoices];
#pragma unroll
      for (int u = 0; u < kEarlyChoices; ++u) expert[u] = early.choices[u];
      if (base >= kAtOnceThreads) load_choices(base, expert);
#pragma unroll
      for (int u = 0; u < kEarlyChoices; ++u) {
        const int i = base + u * kAtOnceThreads;
        if (i >= entries) break;
        if (expert[u] >= d().num_experts) wrong = expert[u];
        const bool named = expert[u] >= 0 && expert[u] < d().num_experts;
        part<uint16_t>(at.codes)[i] = static_cast<uint16_t>(named ? expert[u] : kNone);
        if (!named) continue;
        const int e = static_cast<int>(expert[u]);
        atomicAdd(part<int32_t>(at.total) + e, 1);
        atomicOr(part<uint32_t>(at.masks) + chunk_at(i, p.by_topk).item, 1u << p.by_local.quotient(e));
      }
    }
  }
  // Without a routing: which ranks a token goes to says the caller.
  __device__ void read_token_in_rank() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < d().num_tokens * num_ranks(); i += kAtOnceThreads) {
      const Chunk at_rank = chunk_at(i, p.by_ranks);
      if (n().token_in_rank()[i] != 0) atomicOr(part<uint32_t>(at.masks) + at_rank.item, 1u << at_rank.at);
    }
  }
  __device__ bool goes_to(int token, int r) const {
    if (token >= d().num_tokens) return false;
    return (part<uint32_t>(at.masks)[token] >> r & 1) != 0;
  }
  // A warp for each rank numbers the rows to it, and keeps the numbers of the block's own tokens.
  __device__ void number_rows() const {
    constexpr int kAhead = 4;
    const int blocks = row_blocks(), mine = row_block();
    for (int r = warp_id(); r < num_ranks(); r += kAtOnceWarps) {
      int rows = 0;
      for (int first = 0; first < d().num_tokens; first += kWarp * kAhead) {
        bool goes[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u) goes[u] = goes_to(first + u * kWarp + lane_id(), r);
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const int token = first + u * kWarp + lane_id();
          const uint32_t chosen = __ballot_sync(kAllLanes, goes[u]);
          if (token < d().num_tokens && token % blocks == mine)
            heads_of(token / blocks)[r] = goes[u] ? rows + lanes_before(chosen) : -1;
          rows += __popc(chosen);
        }
      }
      if (lane_id() == 0) own_rows()[r] = rows;
    }
  }
  __device__ Handshake handshake(int64_t wrong) const {
    Handshake hand = is_routed(d()) ? routed_notify_handshake(n(), epoch, wrong) : notify_handshake(n(), epoch);
    for (int r = 0; !is_routed(d()) && r < num_ranks(); ++r)
      if (n().tokens_per_rank()[r] != own_rows()[r])
        add_refusal(hand, DK_FIELD_TOKENS_PER_RANK, own_rows()[r], n().tokens_per_rank()[r]);
    hand.mine.flags |=
        kHandshakeAtOnce | (d().has_weights() ? kHandshakeWeights : 0) | (d().num_tokens == 0 ? kHandshakeSilent : 0);
    return hand;
  }
  // By block 0.
  __device__ void send_counts() const {
    const int words = at_once_counts(d());
    for (int i = threadIdx.x; i < words; i += kAtOnceThreads) {
      const int32_t count = i < num_ranks() ? own_rows()[i] : part<int32_t>(at.total)[i - num_ranks()];
#pragma unroll 1
      for (int r = 0; r < num_ranks(); ++r)
        ptx::st_relaxed_sys(counts_of(r, s().team.rank) + i, tagged_count(epoch, count));
    }
#pragma unroll 1
    for (int r = threadIdx.x; r < num_ranks(); r += kAtOnceThreads)
      s().team.scratch->sent_bytes[r] = static_cast<uint64_t>(own_rows()[r]) * (d().row_bytes + 4ull * d().num_scales);
  }
  __device__ uint64_t *counts_of(int owner, int source) const {
    return reinterpret_cast<uint64_t *>(s().team.counts(owner, epoch % kHandshakeCopies, source));
  }
  // The last warp, while the others send: waits for all ranks' messages, and takes the counts of their rows into the
  // table. False: a rank refuses the call, or the team has failed.
  __device__ bool await_row_counts(const Handshake &hand) const {
    bool good = !is_routed(d()) || await_messages(s(), hand, lane_id(), kWarp);
    for (int i = lane_id(); good && i < num_ranks() * num_ranks(); i += kWarp) {
      const Chunk count = chunk_at(i, p.by_ranks);
      good = await_count(count.item, count.at);
    }
    return good;
  }
  // All warps but the first, which is busy with the flags: the counts of experts likewise.
  __device__ bool await_expert_counts() const {
    constexpr int kAhead = 4, kStep = kAtOnceThreads - kWarp;  // loads in flight
    const int all = num_ranks() * d().num_experts;
    bool good = true;
    for (int base = static_cast<int>(threadIdx.x) - kWarp; good && base >= 0 && base < all; base += kStep * kAhead) {
      Chunk count[kAhead];
      uint64_t seen[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        count[u] = chunk_at(min(base + u * kStep, all - 1), p.by_experts);
        seen[u] = ptx::ld_relaxed_sys(count_of(count[u].item, num_ranks() + count[u].at));
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (is_count(seen[u]))
          keep_count(count[u].item, num_ranks() + count[u].at, seen[u]);
        else
          good = good && await_count(count[u].item, num_ranks() + count[u].at);
      }
    }
    return good;
  }
  __device__ const uint64_t *count_of(int source, int which) const { return counts_of(s().team.rank, source) + which; }
  __device__ bool is_count(uint64_t seen) const { return seen >> 32 == tagged_count(epoch, 0) >> 32; }
  __device__ void keep_count(int source, int which, uint64_t seen) const {
    part<uint32_t>(at.table)[source * at_once_counts(d()) + which] = static_cast<uint32_t>(seen);
  }
  __device__ bool await_count(int source, int which) const {
    uint64_t seen = 0, waited = 0;
    const bool good = wait_or_fail(s(), source, static_cast<int64_t>(epoch), waited, [&](int64_t &) {
      seen = ptx::ld_relaxed_sys(count_of(source, which));
      return is_count(seen);
    });
    keep_count(source, which, seen);
    return good;
  }
  __device__ bool sums_experts() const { return is_expanded() || (is_routed(d()) && blockIdx.x == 0); }

  // ---- Sending, by all warps but the last one

  __device__ void load_chunks(int base, uint4 (&data)[kEarlyChunks]) const {
    const int all = own_tokens() * static_cast<int>(p.by_chunks.by);
#pragma unroll
    for (int u = 0; u < kEarlyChunks; ++u) {
      const int number = base + u * kSendingThreads + static_cast<int>(threadIdx.x);
      const Chunk chunk = chunk_at(number, p.by_chunks);
      if (number < all) data[u] = ptx::ld_stream(row_of(item_at(chunk.item)) + 16 * chunk.at);
    }
  }
  __device__ EarlyRows load_early() const {
    EarlyRows early{};
    load_choices(threadIdx.x, early.choices);
    if (is_control()) return early;
    load_chunks(0, early.chunks);
    const Chunk word = chunk_at(threadIdx.x, p.by_words);
    if (word.item < own_tokens() && word.at < d().num_scales + d().num_topk)
      early.word = word_of(word.item, item_at(word.item), word.at);
    return early;
  }
  __device__ void send_rows(const EarlyRows &early) const {
    constexpr int kTogether = kSendingThreads * kEarlyChunks;
    const int all = own_tokens() * static_cast<int>(p.by_chunks.by);
    for (int base = 0; base < all; base += kTogether) {
      uint4 data[kEarlyChunks];
#pragma unroll
      for (int u = 0; u < kEarlyChunks; ++u) data[u] = early.chunks[u];
      if (base != 0) load_chunks(base, data);
#pragma unroll
      for (int u = 0; u < kEarlyChunks; ++u) {
        const int number = base + u * kSendingThreads + static_cast<int>(threadIdx.x);
        const Chunk chunk = chunk_at(number, p.by_chunks);
#pragma unroll 1
        for (int r = 0; number < all && r < num_ranks(); ++r) {
          const int place = place_at(chunk.item, r);
          if (place >= 0)
            ptx::st_stream(part<AtOnceDest>(at.dests)[r].rows + static_cast<uint64_t>(place) * p.ring.payload_stride +
                               16 * chunk.at,
                           data[u]);
        }
      }
    }
  }

  // Whole warp: how many choices of the expert of choice `entry` come before it.
  __device__ int number_of_choice(int entry) const {
    const uint16_t *codes = part<uint16_t>(at.codes);
    const uint32_t code = codes[entry];
    int before = 0;
#pragma unroll 4
    for (int j = lane_id(); j < entry; j += kWarp) before += codes[j] == code ? 1 : 0;
    for (int step = kWarp / 2; step > 0; step /= 2) before += __shfl_xor_sync(kAllLanes, before, step);
    return before;
  }
  // Of expanded rows.
  __device__ void place_choices() const {
    const int topk = d().num_topk, choices = own_tokens() * topk;
    for (int j = warp_id(); j < choices; j += kAtOnceWarps) {
      const Chunk choice = chunk_at(j, p.by_topk);
      const int entry = item_at(choice.item) * topk + choice.at;
      const int number = part<uint16_t>(at.codes)[entry] == kNone ? 0 : number_of_choice(entry);
      if (lane_id() == 0) part<uint16_t>(at.positions)[j] = static_cast<uint16_t>(number);
    }
    __syncthreads();
  }
  // The expert that a choice names; -1: none.
  __device__ int expert_of(int token, int k) const {
    if (!is_routed(d())) {
      const int64_t expert =
          load_index(d().topk_idx(), static_cast<int64_t>(token) * d().num_topk + k, d().index_bytes);
      return expert < 0 || expert >= d().num_experts ? -1 : static_cast<int>(expert);
    }
    const uint32_t code = part<uint16_t>(at.codes)[token * d().num_topk + k];
    return code == kNone ? -1 : static_cast<int>(code);
  }
  __device__ uint32_t word_of(int i, int token, int w) const {
    const int scales = d().num_scales, topk = d().num_topk;
    if (w < scales) return d().scales()[token * d().scale_token_stride + w * d().scale_stride];
    w -= scales;
    if (w < topk) return d().topk_weights() == nullptr ? 0 : d().topk_weights()[static_cast<int64_t>(token) * topk + w];
    w -= topk;
    if (w < topk) return static_cast<uint32_t>(expert_of(token, w));
    w -= topk;
    return is_expanded() && w < topk ? part<uint16_t>(at.positions)[i * topk + w] : static_cast<uint32_t>(token);
  }
  __device__ void send_metas(const EarlyRows &early) const {
    const int all = own_tokens() * static_cast<int>(p.by_words.by);
    for (int number = threadIdx.x; number < all; number += kSendingThreads) {
      const Chunk word = chunk_at(number, p.by_words);
      const bool known = number == static_cast<int>(threadIdx.x) && word.at < d().num_scales + d().num_topk;
      const uint32_t value = known ? early.word : word_of(word.item, item_at(word.item), word.at);
#pragma unroll 1
      for (int r = 0; r < num_ranks(); ++r) {
        const int place = place_at(word.item, r);
        if (place >= 0)
          reinterpret_cast<uint32_t *>(part<AtOnceDest>(at.dests)[r].metas +
                                       static_cast<uint64_t>(place) * p.ring.meta_stride)[word.at] = value;
      }
    }
  }

  // ---- What the handle keeps of the block's tokens

  // By threads from the last one on: the first warp is busy with the flags.
  __device__ static int from_the_end() { return kAtOnceThreads - 1 - static_cast<int>(threadIdx.x); }
  __device__ void write_heads() const {
    for (int j = from_the_end(); j < own_tokens() * num_ranks(); j += kAtOnceThreads) {
      const Chunk head = chunk_at(j, p.by_ranks);
      n().send_head()[static_cast<int64_t>(item_at(head.item)) * num_ranks() + head.at] = heads_of(head.item)[head.at];
    }
  }
  template <class Index>
  __device__ void copy_choices() const {
    const int topk = d().num_topk;
    for (int j = from_the_end(); j < own_tokens() * topk; j += kAtOnceThreads) {
      const Chunk choice = chunk_at(j, p.by_topk);
      const int64_t entry = static_cast<int64_t>(item_at(choice.item)) * topk + choice.at;
      static_cast<Index *>(n().topk_copy())[entry] = static_cast<const Index *>(d().topk_idx())[entry];
    }
  }
  // With expanded rows after sum_routing.
  __device__ void write_slots() const {
    const int topk = d().num_topk, me = s().team.rank;
    for (int j = from_the_end(); j < own_tokens() * topk; j += kAtOnceThreads) {
      const Chunk choice = chunk_at(j, p.by_topk);
      const int token = item_at(choice.item), expert = expert_of(token, choice.at);
      int slot = -1;
      if (expert >= 0 && is_expanded()) slot = part<int32_t>(at.first)[expert] + part<uint16_t>(at.positions)[j];
      if (expert >= 0 && !is_expanded()) {
        const int rank = p.by_local.quotient(expert);
        bool last = true;
#pragma unroll 1
        for (int later = choice.at + 1; later < topk; ++later) {
          const int other = expert_of(token, later);
          last &= other < 0 || p.by_local.quotient(other) != rank;
        }
        if (last) slot = me * d().num_max_tokens + heads_of(choice.item)[rank];
      }
      n().dst_slot()[static_cast<int64_t>(token) * topk + choice.at] = slot;
    }
  }
  // But for the slots of expanded rows.
  __device__ void write_handle() const {
    write_heads();
    if (!is_routed(d())) return;
    if (!is_expanded()) write_slots();
    if (n().topk_copy() != nullptr) d().index_bytes == 8 ? copy_choices<int64_t>() : copy_choices<int32_t>();
  }

  // ---- Receiving

  // How many rows come, which the table has.
  __device__ int rows_of(int source) const {
    return static_cast<int>(part<uint32_t>(at.table)[source * at_once_counts(d()) + s().team.rank]);
  }
  __device__ int num_rows() const {
    int rows = 0;
#pragma unroll 1
    for (int r = 0; r < num_ranks(); ++r) rows += rows_of(r);
    return rows;
  }
  // By threads `first` of `step`: what rows the block receives; for all threads after the next barrier.
  __device__ void find_arrivals(int rows, int first, int step) const {
    for (int i = first; i < num_items(rows); i += step) {
      Arrival arrival{0, item_at(i)};
      for (int of = rows_of(0); arrival.number >= of; of = rows_of(arrival.source)) {
        arrival.number -= of;
        ++arrival.source;
      }
      part<Arrival>(at.arrivals)[i] = arrival;
    }
  }
  // Whole block, after sum_routing, of expanded rows: where those of each expert of this rank begin.
  __device__ void find_starts() const {
    const int me = s().team.rank, words = at_once_counts(d());
    for (int e = threadIdx.x; e < local(); e += kAtOnceThreads) {
      const int expert = me * local() + e;
      int start = part<int32_t>(at.first)[expert];
#pragma unroll 1
      for (int i = 0; i < me; ++i)
        start -= static_cast<int>(part<uint32_t>(at.table)[i * words + num_ranks() + expert]);
      part<int32_t>(at.starts)[e] = start;
    }
    __syncthreads();
  }
  // Where an expanded row goes that a source's metadata has as its `number`-th for the expert; -1: not to this rank.
  __device__ int slot_of(int source, int expert, int number) const {
    const int mine = expert - s().team.rank * local();
    if (expert < 0 || mine < 0 || mine >= local()) return -1;
    int slot = part<int32_t>(at.starts)[mine] + number;
#pragma unroll 1
    for (int i = 0; i < source; ++i)
      slot += static_cast<int>(part<uint32_t>(at.table)[i * at_once_counts(d()) + num_ranks() + expert]);
    return slot < d().num_expanded_tokens ? slot : -1;
  }
  __device__ const uint32_t *meta_of(int i) const {
    const Arrival arrival = part<Arrival>(at.arrivals)[i];
    return meta_from(arrival.source, arrival.number);
  }
  __device__ int32_t *places_of(int i) const { return part<int32_t>(at.places) + i * d().num_topk; }
  // Whole block, once all rows are here: where the expanded ones go.
  __device__ void find_places(int rows) const {
    const int topk = d().num_topk, first = d().num_scales + topk;
    for (int j = threadIdx.x; j < num_items(rows) * topk; j += kAtOnceThreads) {
      const Chunk choice = chunk_at(j, p.by_topk);
      const uint32_t *meta = meta_of(choice.item);
      places_of(choice.item)[choice.at] =
          slot_of(part<Arrival>(at.arrivals)[choice.item].source, static_cast<int>(meta[first + choice.at]),
                  static_cast<int>(meta[first + topk + choice.at]));
    }
    __syncthreads();
  }
  // f(place) for each place of the block's row i.
  template <class F>
  __device__ void each_place(int i, F f) const {
    if (!is_expanded()) return f(item_at(i));
#pragma unroll 1
    for (int k = 0; k < d().num_topk; ++k)
      if (places_of(i)[k] >= 0) f(places_of(i)[k]);
  }
  // Which of the block's copiers this thread is, -1: none.
  __device__ int copier() const {
    const int i = warp_id() * kCopyLanes + lane_id();
    return warp_id() < kCopyWarps && lane_id() < kCopyLanes && i < static_cast<int>(p.copiers) ? i : -1;
  }
  __device__ void init_copiers() const {
#if DEEPEP_HAS_BULK_COPY
    if (!kBulk || copier() < 0) return;
    ptx::mbarrier_init(part<uint64_t>(at.arrived) + copier(), 1);
    ptx::mbarrier_init_fence();
#endif
  }
  __device__ void copy_rows([[maybe_unused]] int rows) const {
#if DEEPEP_HAS_BULK_COPY
    if (copier() >= 0) {
      CopyStage stage{part<uint8_t>(at.stages) + copier() * p.copy_bytes, part<uint64_t>(at.arrived) + copier()};
      const int each = static_cast<int>(ceil_div(d().row_bytes, p.copy_bytes));
      ptx::fence_global_before_bulk();
      for (int i = copier(); i < num_items(rows) * each; i += static_cast<int>(p.copiers)) {
        const int item = i / each;
        const uint32_t from = (i - item * each) * p.copy_bytes, size = min(p.copy_bytes, d().row_bytes - from);
        const Arrival arrival = part<Arrival>(at.arrivals)[item];
        stage.load(row_from(arrival.source, arrival.number) + from, size);
        each_place(item, [&](int place) {
          ptx::bulk_store(d().recv_x() + static_cast<uint64_t>(place) * d().row_bytes + from, stage.bytes, size);
        });
        ptx::bulk_commit();
      }
      ptx::bulk_wait<0>();
    }
    __syncwarp();
#endif
  }
  // By the first kRowWarps warps.
  __device__ void receive_rows(int rows) const {
    if constexpr (kBulk) return copy_rows(rows);
    constexpr int kUnroll = 5, kThreads = kRowWarps * kWarp;
    const int all = num_items(rows) * static_cast<int>(p.by_chunks.by);
    for (int base = threadIdx.x; base < all; base += kThreads * kUnroll) {
      uint4 data[kUnroll];
      Chunk chunk[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        chunk[u] = chunk_at(base + u * kThreads, p.by_chunks);
        if (base + u * kThreads >= all) break;
        const Arrival arrival = part<Arrival>(at.arrivals)[chunk[u].item];
        data[u] = ptx::ld_stream(row_from(arrival.source, arrival.number) + 16 * chunk[u].at);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (base + u * kThreads >= all) break;
        each_place(chunk[u].item, [&](int place) {
          ptx::st_stream(d().recv_x() + static_cast<uint64_t>(place) * d().row_bytes + 16 * chunk[u].at, data[u]);
        });
      }
    }
  }
  // The number of an expert among this rank's; -1: another rank's, or none.
  __device__ int local_number(uint32_t expert) const {
    const int mine = static_cast<int>(expert) - s().team.rank * local();
    return static_cast<int>(expert) >= 0 && mine >= 0 && mine < local() ? mine : -1;
  }
  // By the other warps.
  __device__ void receive_metas(int rows) const {
    constexpr int kFirst = kRowWarps * kWarp;
    const int all = num_items(rows) * static_cast<int>(p.by_words.by);
    for (int number = static_cast<int>(threadIdx.x) - kFirst; number < all; number += kAtOnceThreads - kFirst) {
      const Chunk word = chunk_at(number, p.by_words);
      receive_word(word.item, word.at, meta_of(word.item)[word.at]);
    }
  }
  __device__ void receive_word(int i, int which, uint32_t value) const {
    const int scales = d().num_scales, topk = d().num_topk;
    if (which < scales)
      receive_scale(i, which, value);
    else if (which < scales + topk)
      receive_weight(i, which - scales, value);
    else if (which < scales + 2 * topk)
      receive_expert(i, which - scales - topk, value);
    else if (which == static_cast<int>(p.by_words.by) - 1)
      receive_token(i, static_cast<int>(value));
  }
  __device__ void receive_scale(int i, int which, uint32_t value) const {
    if (d().recv_scales() == nullptr) return;
    each_place(i, [&](int64_t place) {
      d().recv_scales()[place * d().recv_scale_token_stride + which * d().recv_scale_stride] = value;
    });
  }
  __device__ uint32_t expert_word(int i, int k) const { return meta_of(i)[d().num_scales + d().num_topk + k]; }
  __device__ void receive_weight(int i, int k, uint32_t weight) const {
    if (d().recv_topk_weights() == nullptr) return;
    if (is_expanded()) {
      if (places_of(i)[k] >= 0) d().recv_topk_weights()[places_of(i)[k]] = weight;
      return;
    }
    if (!is_routed(d()) && local_number(expert_word(i, k)) < 0) weight = 0;
    d().recv_topk_weights()[static_cast<int64_t>(item_at(i)) * d().num_topk + k] = weight;
  }
  __device__ void receive_expert(int i, int k, uint32_t expert) const {
    if (is_expanded()) {
      if (d().recv_src_metadata != 0) src_metadata(d(), item_at(i))[2 + k] = places_of(i)[k];
      return;
    }
    const int64_t to = static_cast<int64_t>(item_at(i)) * d().num_topk + k;
    const int index = local_number(expert);
    if (d().recv_topk_idx() != nullptr && d().index_bytes == 8)
      static_cast<int64_t *>(d().recv_topk_idx())[to] = index;
    else if (d().recv_topk_idx() != nullptr)
      static_cast<int32_t *>(d().recv_topk_idx())[to] = index;
  }
  __device__ void receive_token(int i, int token) const {
    const int topk = d().num_topk, row = item_at(i);
    if (d().recv_src_idx() != nullptr) d().recv_src_idx()[row] = token;
    if (d().recv_src_metadata == 0) return;
    int last = -1;
#pragma unroll 4
    for (int k = 0; k < topk; ++k)
      if (is_expanded() ? places_of(i)[k] >= 0 : local_number(expert_word(i, k)) >= 0) last = k;
    const int source = part<Arrival>(at.arrivals)[i].source;
    int32_t *to = src_metadata(d(), row);
    to[0] = source * d().num_max_tokens + token;
    to[1] = source * topk + last;
  }
  // What no row fills, where the caller wants it filled.
  __device__ void fill(int rows) const {
    if (row_block() < 0) return;
    const int worker = warp_id() * row_blocks() + row_block(), workers = kAtOnceWarps * row_blocks();
    if (is_expanded())
      write_padding(worker, workers);
    else  // below 0: the call fails
      name_nothing(d(), max(rows, 0), d().num_worst_tokens, worker * kWarp + lane_id(), workers * kWarp);
  }
  // Likewise, where the caller wants them: zeros behind each expert's rows.
  __device__ void write_padding(int worker, int workers) const {
    if ((d().flags & DK_DISPATCH_ZERO_PADDING) == 0) return;
    for (int i = worker; i < local() * kPaddingParts; i += workers) {
      const int e = i / kPaddingParts, rows = part<int32_t>(at.total)[s().team.rank * local() + e];
      const int64_t start = part<int32_t>(at.starts)[e],
                    end = min<int64_t>(start + ceil_div<int64_t>(rows, d().expert_alignment) * d().expert_alignment,
                                       d().num_expanded_tokens);
      for (int64_t row = start + rows + i % kPaddingParts; row < end; row += kPaddingParts) zero_row(d(), row);
    }
  }

  // ---- The call

  // Whole warp: what sum_ranks finds out, a lane for each rank.
  __device__ bool all_fit() const {
    bool good = true;
    for (int r = lane_id(); r < num_ranks(); r += kWarp) {
      const HandshakeMessage *from = table().handshake(r);
      const auto alignment = static_cast<int64_t>(from->segment_offset);
      const int limit = from->row_limit;
      int rows = 0;
#pragma unroll 1
      for (int i = 0; i < num_ranks(); ++i) rows += static_cast<int>(table().counts(i)[r]);
      good &= limit < 0 || rows <= limit;
      good &= !is_routed(d()) || alignment == n().expert_alignment;
    }
    return __all_sync(kAllLanes, good) != 0;
  }
  __device__ CountTable table() const { return {s().team, epoch, part<uint32_t>(at.table), at_once_counts(d())}; }
  // The last warp, while the others send. False: the block moves no rows to their places.
  __device__ bool take_counts(const Handshake &hand) const {
    const bool here = await_row_counts(hand);
    if (__any_sync(kAllLanes, !here) != 0 || sums_experts()) return here;
    const bool fits = blockIdx.x == 0 ? sum_ranks<false>(n(), table(), 0, 1) : all_fit();
    if (fits) find_arrivals(num_rows(), lane_id(), kWarp);
    return fits;
  }
  __device__ void run(uint64_t finished) {
    int64_t wrong = -1;
    const EarlyRows early = load_early();
    init_copiers();
    clear();
    __syncthreads();
    is_routed(d()) ? read_choices(early, wrong) : read_token_in_rank();
    if (__syncthreads_or(wrong >= 0) != 0) wrong = any_of_block(wrong);
    number_rows();
    __syncthreads();
    const Handshake hand = handshake(wrong);
    if (blockIdx.x == 0) {
      post_handshake(s(), hand);
      send_counts();
      publish_newest_by_last_warp(s().team);
    }
    if (is_expanded()) place_choices();
    if (!await_room(s(), hand, finished, is_routed(d()))) return;
    bool good = true;
    if (is_control()) {
      good = take_counts(hand);
    } else {
      send_rows(early);
      send_metas(early);
      announce_rows(s(), epoch);
    }
    write_handle();
    if (sums_experts()) {
      good = good && await_expert_counts();
      if (__syncthreads_or(!good) != 0 || !sum_routing<false>(n(), counts(), table())) return;
      if (blockIdx.x == 0) add_to_stats(n(), counts());
      if (is_expanded()) find_starts();
      find_arrivals(num_rows(), threadIdx.x, kAtOnceThreads);
    }
    if (!await_rows(s(), epoch, good)) return;
    const int rows = num_rows();
    if (is_expanded()) find_places(rows);
    warp_id() < kRowWarps ? receive_rows(rows) : receive_metas(rows);
    fill(rows);
    if (is_expanded()) write_slots();
  }
  // A thread's value that is not below 0, for all; -1: there is none.
  __device__ int64_t any_of_block(int64_t value) const {
    __shared__ int64_t any;
    if (threadIdx.x == 0) any = -1;
    __syncthreads();
    if (value >= 0) any = value;
    __syncthreads();
    return any;
  }
};

// By the last block.
__device__ inline void end_at_once(const AtOnceParams &p, bool failed) {
  const DispatchParams &d = p.dispatch;
  if (failed && d.routing == DK_ROUTING_EXPANDED) clear_expanded_outputs(d);
  if (failed && d.routing != DK_ROUTING_EXPANDED) clear_dispatch_outputs(d);
  if (failed && is_routed(d)) void_routing(p.notify);
  if (failed) void_notify(p.notify);
  if (threadIdx.x == 0) end_epoch_of(d.session.team, d.session.team.scratch->epoch + 1);
}

}  // namespace deepep

namespace deep_ep::intranode {
using namespace deepep;

template <bool kBulk>
__global__ void __launch_bounds__(kAtOnceThreads, 1) dispatch_at_once(const __grid_constant__ AtOnceParams p) {
#if !DEEPEP_HAS_BULK_COPY
  if constexpr (kBulk) return;  // the launcher does not choose this form below 9.0
#endif
  extern __shared__ __align__(128) uint8_t shared[];
  const Session &s = p.dispatch.session;
  AtOnce<kBulk> call{p, shared};
  call.epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) call.run(load_finished(s.team, is_routed(p.dispatch)));
  finish_at_once(s, [&](bool failed) { end_at_once(p, failed); });
}

}  // namespace deep_ep::intranode
