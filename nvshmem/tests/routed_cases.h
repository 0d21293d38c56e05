// routed_cases.h - for tests of calls with a routing across nodes: groups with inputs of a case, the arguments of the
// calls, and what should come of them, in plain loops in the order of the contract. In teams that shrink some ranks
// take no part, and another one may be lost in a call.
#pragma once
#include "group.h"

#include <memory>

#include "internode/routed/combine.cuh"
#include "internode/routed/dispatch_kernel.cuh"
#include "internode/routed/notify.cuh"
#include "internode/shrink_layout.h"

namespace deepep::internode {

struct Case {
  int nodes = 2, peers = 2, hidden = 64, topk = 2, local_experts = 2, num_scales = 0, index_bytes = 8;
  int alignment = 1, biases = 0, sums = 0;  // sums: entries of psum_per_rank, 0: ranks
  bool shrinks = false, expand = false, columns = false, padding = false, weights = true, worst = false;
  uint32_t combine_flags = 0;
  uint64_t rdma = 0, nvl = 0;
  int max_tokens = 100;
  int ranks() const { return nodes * peers; }
  int experts() const { return ranks() * local_experts; }
  int routing() const { return expand ? DK_ROUTING_EXPANDED : DK_ROUTING_PLAIN; }
};

struct Arrival {
  int source, token;
};
struct Rank {
  std::vector<uint8_t> block;
  std::vector<uint64_t> state, shrink_state;
  std::unique_ptr<Scratch> scratch{new Scratch{}};
  dk_status status{};
  std::vector<uint8_t *> peers;
  std::vector<uint64_t> segments;
  bool placed = false;  // its peers may write into recv_x
  TeamView team{};
  NodeView internode{};
  ShrinkView shrink{};
  int tokens = 0, grid = 1;
  // inputs and outputs of a round
  std::vector<uint8_t> x, recv_x;
  std::vector<uint32_t> scales, recv_scales, counts;
  std::vector<float> weights, recv_weights, y_weights, back_weights;
  std::vector<int64_t> idx, idx_copy, recv_idx;
  std::vector<int32_t> idx32, recv_idx32, matrix, head, slot, psum_ranks, psum_experts, num_experts, stats, meta;
  std::vector<uint16_t> y, bias[2], combined;
  // what should come
  std::vector<Arrival> arrivals;
  std::vector<int> slots, first, count;  // [rows, K] expanded rows; of each local expert
  int expanded = 0, capacity = 0, room = 0;
};

inline void expect(const char *what, int rank, int64_t at, double got, double want) {
  check(got == want, what, rank, at, got, want);
}

struct World {
  Case c;
  std::vector<Rank> ranks;
  std::vector<bool> in;       // takes part, by what the test has done
  std::vector<bool> counted;  // took part in the newest notify
  uint64_t call = 0, control_bytes = 0, timeout_ns = 400000000;
  int lost = -1;           // may be lost in the running call
  uint64_t bulk_room = 0;  // of a block's shared memory, for bulk copies; 0: the device has none

  explicit World(const Case &one)
      : c(one), ranks(static_cast<size_t>(one.ranks())), in(ranks.size(), true), counted(in) {
    const ControlOffsets at = control_offsets(control_layout(c.ranks()).bytes, c.ranks(), c.peers);
    const ShrinkOffsets shrink = shrink_offsets(at.end, c.ranks());
    control_bytes = shrink.end;
    lay_out(c, ranks, at, control_bytes);
    for (Rank &r : ranks) {
      r.team.flags = c.shrinks ? DK_TEAM_SHRINK : 0;
      r.segments.assign(static_cast<size_t>(c.ranks()) * DK_MAX_SEGMENTS, 0);
      r.team.segments = r.segments.data();
      r.state.assign((sizeof(NormalState) + StreamListSizes(c.nodes, c.peers).bytes) / 8 + 1, 0);
      r.shrink_state.assign(shrink_state_bytes(c.ranks()) / 8 + 1, 0);
      r.shrink = {shrink, reinterpret_cast<ShrinkState *>(r.shrink_state.data())};
    }
    if (c.shrinks) lives_on();
  }
  NormalState *state(int rank) { return reinterpret_cast<NormalState *>(ranks[rank].state.data()); }
  std::vector<uint8_t *> blocks() { return blocks_of(ranks); }
  Session session(int rank, uint32_t op) { return Session{ranks[rank].team, call, timeout_ns, op, DK_PHASE_BOTH}; }
  int64_t expert(int source, int token, int k) const {
    return ranks[source].idx[static_cast<size_t>(token) * c.topk + k];
  }
  // The rank of a choice, -1: none, or a row between them has no place in the handle.
  int owner(int source, int token, int k) const {
    const int64_t e = expert(source, token, k);
    const int rank = e < 0 ? -1 : static_cast<int>(e) / c.local_experts;
    return rank >= 0 && counted[source] && counted[rank] ? rank : -1;
  }
  bool goes_to(int source, int token, int rank) const {
    for (int k = 0; k < c.topk; ++k)
      if (owner(source, token, k) == rank) return true;
    return false;
  }
  // Results of the running call are whole there.
  bool is_sound(int rank) const { return in[rank] && rank != lost; }

  void watch(std::function<emulate::Life(int)> life) { watch_puts(ranks, std::move(life)); }
  void lives_on() { watch(nullptr); }

  dk_failure refusal(int rank) { return take_refusal(ranks[rank].status); }

  // Kernels of ranks in `in`, and of `lost`; the latter may be refused.
  template <class Kernel>
  void launch(const char *name, int threads, Kernel kernel) {
    ++call;
    emulate::run(c.ranks(), [&](int rank) { return in[rank] || rank == lost ? ranks[rank].grid : 0; }, threads, kernel);
    for (int me = 0; me < c.ranks(); ++me) {
      if (!is_sound(me)) continue;
      const dk_failure f = ranks[me].scratch->sticky != 0 ? ranks[me].status.failure : refusal(me);
      if (f.code != 0) end_with(f, name, call);
    }
    if (!c.shrinks && emulate::rows_under_way() != 0) {
      fprintf(stderr, "%s: the kernel ended while rows were in flight\n", name);
      quick_exit(1);
    }
    overwrite_regions(ranks);
  }
};

// Every fourth is large, so that another order of a sum gives other bits.
inline uint16_t random_bf16() {
  static const uint16_t swallow[3] = {0x4c00, 0x3fc0, 0xcc00};  // 2^25, 1.5, -2^25
  return pick(0, 3) == 0 ? swallow[pick(0, 2)] : to_bf16(static_cast<float>(pick(-4000, 4000)) / 3.0f);
}

// ---- Inputs and what should come of them ----------------------------------------------------------------------------

inline void make_choices(const Case &c, Rank &r, int max_tokens) {
  r.tokens = pick(0, 4) == 0 ? 0 : pick(1, max_tokens);
  const int style = pick(0, 4);  // any expert; the last two; a quarter of the entries; none; different ones
  r.idx.resize(static_cast<size_t>(r.tokens) * c.topk);
  for (size_t i = 0; i < r.idx.size(); ++i) {
    const int k = static_cast<int>(i) % c.topk;
    r.idx[i] = style == 3                      ? -1
               : style == 2 && pick(0, 3) != 0 ? -5
               : style == 1                    ? pick(c.experts() - 2, c.experts() - 1)
               : style == 4                    ? (pick(0, 1) + 2 * k) % c.experts()
                                               : pick(-1, c.experts() - 1);
  }
  r.idx32.assign(r.idx.begin(), r.idx.end());
}

inline void fill_payload(World &w) {
  const Case &c = w.c;
  for (Rank &r : w.ranks) {
    r.x.resize(static_cast<size_t>(r.tokens) * c.hidden * 2);
    for (uint8_t &b : r.x) b = static_cast<uint8_t>(random_number());
    r.scales.resize(static_cast<size_t>(r.tokens) * c.num_scales);
    for (uint32_t &v : r.scales) v = static_cast<uint32_t>(random_number());
    r.weights.resize(static_cast<size_t>(r.tokens) * c.topk);
    for (float &v : r.weights) v = static_cast<float>(pick(1, 64)) / 8;
  }
}

inline void list_arrivals(World &w, int me) {
  const Case &c = w.c;
  Rank &r = w.ranks[me];
  r.arrivals.clear();
  r.slots.clear();
  r.first.assign(c.local_experts, 0);
  r.count.assign(c.local_experts, 0);
  std::vector<int> next(c.local_experts);
  for (int s = 0; s < c.ranks(); ++s)
    for (int i = 0; i < w.ranks[s].tokens * c.topk; ++i)
      if (w.owner(s, i / c.topk, i % c.topk) == me) ++r.count[w.ranks[s].idx[i] % c.local_experts];
  r.expanded = 0;
  for (int e = 0; e < c.local_experts; ++e) {
    next[e] = r.first[e] = r.expanded;
    r.expanded += align_up(r.count[e], c.alignment);
  }
  for (int s = 0; s < c.ranks(); ++s)
    for (int t = 0; t < w.ranks[s].tokens; ++t) {
      if (!w.goes_to(s, t, me)) continue;
      r.arrivals.push_back({s, t});
      for (int k = 0; k < c.topk; ++k)
        r.slots.push_back(w.owner(s, t, k) == me ? next[w.expert(s, t, k) % c.local_experts]++ : -1);
    }
  const int most = c.max_tokens * c.ranks();
  r.capacity = c.worst ? most : static_cast<int>(r.arrivals.size());
  r.room = !c.expand ? r.capacity : c.worst ? most * c.topk + c.alignment * c.local_experts : r.expanded;
}

// The choices are there.
inline void complete_inputs(World &w) {
  const Case &c = w.c;
  fill_payload(w);
  w.counted = w.in;
  for (int me = 0; me < c.ranks(); ++me) {
    Rank &r = w.ranks[me];
    list_arrivals(w, me);
    const size_t entries = static_cast<size_t>(r.tokens) * c.topk;
    r.matrix.assign(c.ranks() * c.ranks(), -7);
    r.head.assign(static_cast<size_t>(r.tokens) * c.ranks(), -7);
    r.slot.assign(entries, -7);
    r.psum_ranks.assign((c.sums == 0 ? c.ranks() : c.sums) + 1, -7);
    r.psum_experts.assign(c.local_experts, -7);
    r.num_experts.assign(c.local_experts, -7);
    r.stats.assign(c.local_experts, 100);
    r.counts.assign(4 + c.local_experts + 4, 0);
    r.meta.assign(static_cast<size_t>(r.capacity) * (c.topk + 2), -9);
  }
}

inline void make_inputs(World &w) {
  const int max_tokens = pick(0, 3) == 0 ? 60 : 20;
  for (Rank &r : w.ranks) make_choices(w.c, r, max_tokens);
  complete_inputs(w);
}

// ---- Notify ---------------------------------------------------------------------------------------------------------

inline dk_notify_params notify_params(const World &w, Rank &r) {
  const Case &c = w.c;
  dk_notify_params n{};
  n.num_tokens = r.tokens;
  n.num_topk = c.topk;
  n.num_experts = c.experts();
  n.expert_alignment = c.alignment;
  n.num_worst_tokens = c.worst ? r.capacity : 0;
  n.num_worst_expanded = c.worst && c.expand ? r.room : 0;
  n.num_scales = c.num_scales;
  n.hidden_bytes = 2 * c.hidden;
  n.num_scaleup_ranks = c.sums;
  n.rank_prefix_matrix = handle_to(r.matrix.data());
  n.send_head = handle_to(r.head.data());
  n.counts = c.worst ? 0 : handle_to(r.counts.data());
  n.routing = c.routing();
  n.index_bytes = c.index_bytes;
  n.num_max_tokens = c.max_tokens;
  n.topk_idx = c.index_bytes == 8 ? handle_to(r.idx.data()) : handle_to(r.idx32.data());
  n.dst_slot = handle_to(r.slot.data());
  n.psum_per_rank = handle_to(r.psum_ranks.data());
  n.psum_per_expert = handle_to(r.psum_experts.data());
  n.num_per_expert = handle_to(r.num_experts.data());
  n.cumulative_stats = handle_to(r.stats.data());
  r.idx_copy.assign(r.idx.size() + 1, -7);
  n.topk_copy = handle_to(r.idx_copy.data());
  return n;
}
inline void check_places(const World &w, int me) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  std::vector<int> rows(c.ranks());
  for (int t = 0; t < r.tokens; ++t) {
    for (int j = 0; j < c.ranks(); ++j) {
      const int64_t at = static_cast<int64_t>(t) * c.ranks() + j;
      expect("send_head", me, at, r.head[at], w.goes_to(me, t, j) ? rows[j]++ : -1);
    }
    for (int k = 0; k < c.topk; ++k) {
      const int64_t at = static_cast<int64_t>(t) * c.topk + k;
      const int to = w.owner(me, t, k);
      int want = -1;
      bool last = to >= 0;
      for (int later = k + 1; later < c.topk; ++later) last &= w.owner(me, t, later) != to;
      if (!c.expand && last) want = me * c.max_tokens + rows[to] - 1;
      for (size_t i = 0; c.expand && to >= 0 && i < w.ranks[to].arrivals.size(); ++i)
        if (w.ranks[to].arrivals[i].source == me && w.ranks[to].arrivals[i].token == t)
          want = w.ranks[to].slots[i * c.topk + k];
      expect("dst_slot", me, at, r.slot[at], want);
    }
  }
}

inline void check_notify(const World &w, int me) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  const int sums = c.sums == 0 ? c.ranks() : c.sums;
  std::vector<int> psum(sums);
  int remote = 0, padded = 0;
  for (int j = 0; j < c.ranks(); ++j)
    for (int i = 0, sum = 0; i < c.ranks(); ++i) {
      for (int t = 0; t < w.ranks[i].tokens; ++t) sum += w.goes_to(i, t, j);
      expect("matrix", me, i * c.ranks() + j, r.matrix[i * c.ranks() + j], sum);
    }
  for (const Arrival &a : r.arrivals) {
    for (int u = a.source % sums; u < sums; ++u) ++psum[u];
    remote += a.source / c.peers != me / c.peers;
  }
  for (int u = 0; u < sums; ++u) expect("psum_per_rank", me, u, r.psum_ranks[u], psum[u]);
  const void *idx = c.index_bytes == 8 ? static_cast<const void *>(r.idx.data()) : r.idx32.data();
  expect("topk_copy", me, 0, memcmp(r.idx_copy.data(), idx, r.idx.size() * c.index_bytes), 0);
  expect("what follows topk_copy", me, 0, r.idx_copy.back(), -7);
  expect("what follows psum_per_rank", me, sums, r.psum_ranks[sums], -7);
  const auto *counts = reinterpret_cast<const dk_counts *>(r.counts.data());
  for (int e = 0; e < c.local_experts; ++e) {
    padded += align_up(r.count[e], c.alignment);
    expect("num_per_expert", me, e, r.num_experts[e], r.count[e]);
    expect("cumulative_stats", me, e, r.stats[e], 100 + r.count[e]);
    expect("psum_per_expert", me, e, r.psum_experts[e], c.expand ? r.first[e] + r.count[e] : padded);
    if (!c.worst) expect("counts of experts", me, e, counts->per_expert[e], align_up(r.count[e], c.alignment));
  }
  check_places(w, me);
  if (c.worst) return;
  expect("counts", me, 0, counts->num_recv_tokens, static_cast<double>(r.arrivals.size()));
  check(counts->seq == w.call, "seq", me, 0, static_cast<double>(counts->seq), static_cast<double>(w.call));
  expect("rows of other nodes", me, 0, counts->num_recv_nodes_tokens, remote);
}

// run(me): the kernel.
template <class Run>
void notify(World &w, Run run) {
  for (Rank &r : w.ranks) r.grid = pick(1, 2);
  w.launch("notify", kNotifyThreads, run);
  for (int me = 0; me < w.c.ranks(); ++me)
    if (w.is_sound(me)) check_notify(w, me);
}

// ---- Dispatch -------------------------------------------------------------------------------------------------------

constexpr int kSegment = 5, kOffset = 96;  // outputs, at their places in segments
inline dk_dispatch_params dispatch_args(const World &w, int me, bool cached) {
  const Case &c = w.c;
  auto &r = const_cast<Rank &>(w.ranks[me]);
  dk_dispatch_params a{};
  a.x = handle_to(r.x.data());
  a.scales = handle_to(r.scales.data());
  a.scale_token_stride = c.num_scales;
  a.scale_stride = 1;
  a.flags = (cached ? DK_DISPATCH_CACHED : 0) | (c.padding ? DK_DISPATCH_ZERO_PADDING : 0);
  a.num_topk = c.topk;
  a.index_bytes = c.index_bytes;
  a.num_experts = c.experts();
  a.topk_idx = c.index_bytes == 8 ? handle_to(r.idx.data()) : handle_to(r.idx32.data());
  a.topk_weights = c.weights ? handle_to(r.weights.data()) : 0;
  a.rank_prefix_matrix = handle_to(r.matrix.data());
  a.send_head = handle_to(r.head.data());
  a.num_tokens = r.tokens;
  a.num_scales = c.num_scales;
  a.num_recv_tokens = r.capacity;
  a.num_worst_tokens = c.worst && !cached ? r.capacity : 0;
  a.recv_segment = r.placed ? kSegment : -1;
  a.recv_segment_offset = kOffset;
  a.recv_x = handle_to(r.recv_x.data());
  a.recv_scales = handle_to(r.recv_scales.data());
  a.recv_topk_idx = c.expand ? 0 : c.index_bytes == 8 ? handle_to(r.recv_idx.data()) : handle_to(r.recv_idx32.data());
  a.recv_topk_weights = c.weights ? handle_to(r.recv_weights.data()) : 0;
  a.routing = c.routing();
  a.num_max_tokens = c.max_tokens;
  a.num_expanded_tokens = c.expand ? r.room : 0;
  a.expert_alignment = c.alignment;
  a.recv_scale_token_stride = c.columns ? 1 : c.num_scales;
  a.recv_scale_stride = c.columns ? align_up(r.room, 4) : 1;
  a.dst_slot = handle_to(r.slot.data());
  a.psum_per_expert = handle_to(r.psum_experts.data());
  // Copies of experts travel by a cached dispatch without metadata.
  a.recv_src_metadata = cached && w.call % 2 == 1 ? 0 : handle_to(r.meta.data());
  return a;
}

// Row `at` of the outputs has the token's payload, scales and `weight`s.
inline void check_row(const World &w, int me, int64_t at, const Arrival &from) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me], &source = w.ranks[from.source];
  check(memcmp(&r.recv_x[at * c.hidden * 2], &source.x[static_cast<size_t>(from.token) * c.hidden * 2], c.hidden * 2) ==
            0,
        "recv_x", me, at, from.source, from.token);
  const dk_dispatch_params a = dispatch_args(w, me, false);
  for (int i = 0; i < c.num_scales; ++i)
    check(r.recv_scales[at * a.recv_scale_token_stride + i * a.recv_scale_stride] ==
              source.scales[static_cast<size_t>(from.token) * c.num_scales + i],
          "recv_scales", me, at, from.source, from.token);
}

inline void check_padding(const World &w, int me) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  const dk_dispatch_params a = dispatch_args(w, me, false);
  for (int e = 0; e < c.local_experts; ++e)
    for (int64_t row = r.first[e] + r.count[e]; row < r.first[e] + align_up(r.count[e], c.alignment); ++row) {
      for (int i = 0; i < 2 * c.hidden; ++i) expect("padding", me, row, r.recv_x[row * c.hidden * 2 + i], 0);
      for (int i = 0; i < c.num_scales; ++i)
        expect("scales of padding", me, row, r.recv_scales[row * a.recv_scale_token_stride + i * a.recv_scale_stride],
               0);
      if (c.weights) expect("weight of padding", me, row, r.recv_weights[row], 0);
    }
}

// Row `at` of the outputs is zeros.
inline bool is_zero(const World &w, int me, int64_t at) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  const dk_dispatch_params a = dispatch_args(w, me, false);
  bool zero = true;
  for (int i = 0; i < 2 * c.hidden; ++i) zero &= r.recv_x[at * c.hidden * 2 + i] == 0;
  for (int i = 0; i < c.num_scales; ++i)
    zero &= r.recv_scales[at * a.recv_scale_token_stride + i * a.recv_scale_stride] == 0;
  if (c.expand && c.weights) zero &= r.recv_weights[at] == 0;
  return zero;
}
// A row of the plain layout that has not come names no expert; nor, in a handle of now, places.
inline bool is_blank(const World &w, int me, size_t row, bool cached) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  bool blank = c.expand || is_zero(w, me, static_cast<int64_t>(row));
  for (int k = 0; k < c.topk; ++k) {
    const size_t at = row * c.topk + k;
    const int slot = r.slots[at];
    if (c.expand) {
      blank &= slot < 0 || is_zero(w, me, slot);
      blank &= cached || r.meta[row * (c.topk + 2) + 2 + k] == -1;
    } else {
      blank &= (c.index_bytes == 8 ? r.recv_idx[at] : r.recv_idx32[at]) == -1;
      blank &= !c.weights || r.recv_weights[at] == 0;
    }
  }
  return blank;
}

// gone: the rank whose rows may be blank (sure: all are).
inline void check_dispatch(const World &w, int me, bool cached = false, int gone = -1, bool sure = false) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  for (size_t row = 0; row < r.arrivals.size(); ++row) {
    const Arrival from = r.arrivals[row];
    const Rank &source = w.ranks[from.source];
    const int32_t *meta = &r.meta[row * (c.topk + 2)];
    int last = -1;
    if (from.source == gone && is_blank(w, me, row, cached)) continue;
    check(from.source != gone || !sure, "row of a lost rank", me, static_cast<int64_t>(row), from.source, from.token);
    if (!c.expand) check_row(w, me, static_cast<int64_t>(row), from);
    for (int k = 0; k < c.topk; ++k) {
      const int slot = r.slots[row * c.topk + k];
      const int64_t at = static_cast<int64_t>(row) * c.topk + k;
      const float weight = source.weights[static_cast<size_t>(from.token) * c.topk + k];
      if (slot >= 0) last = k;
      if (c.expand) {
        expect("recv_src_metadata", me, at, meta[2 + k], slot);
        if (slot >= 0) check_row(w, me, slot, from);
        if (slot >= 0 && c.weights) expect("recv_topk_weights", me, slot, r.recv_weights[slot], weight);
        continue;
      }
      const int64_t got = c.index_bytes == 8 ? r.recv_idx[at] : r.recv_idx32[at];
      const double want = slot < 0 ? -1 : static_cast<double>(w.expert(from.source, from.token, k) % c.local_experts);
      expect("recv_topk_idx", me, at, static_cast<double>(got), want);
      if (c.weights) expect("recv_topk_weights", me, at, r.recv_weights[at], weight);
    }
    expect("recv_src_metadata", me, static_cast<int64_t>(row), meta[0], from.source * c.max_tokens + from.token);
    expect("last choice", me, static_cast<int64_t>(row), meta[1], from.source * c.topk + last);
  }
  if (c.padding) check_padding(w, me);
}

// Peers find recv_x in a segment, at none of the ranks, all or some.
inline void place_outputs(World &w) {
  const Case &c = w.c;
  const int placed = pick(0, 2);
  for (int me = 0; me < c.ranks(); ++me) {
    Rank &r = w.ranks[me];
    r.placed = !r.recv_x.empty() && (placed == 1 || (placed == 2 && toss()));
    for (int i = me / c.peers * c.peers; i < (me / c.peers + 1) * c.peers; ++i)
      w.ranks[i].segments[me * DK_MAX_SEGMENTS + kSegment] = handle_to(r.recv_x.data()) - kOffset;
  }
}

// run(me): the kernel.
template <class Run>
void dispatch(World &w, bool cached, int threads, Run run, int gone = -1, bool sure = false) {
  const Case &c = w.c;
  for (Rank &r : w.ranks) {
    r.grid = pick(1, 2);
    const auto rows = static_cast<size_t>(r.room);
    r.recv_x.assign(rows * c.hidden * 2, 0xee);
    r.recv_scales.assign(align_up<size_t>(rows, 4) * c.num_scales, 0xee);
    r.recv_weights.assign(rows * (c.expand ? 1 : c.topk), -3);
    r.recv_idx.assign(rows * c.topk, 0xee);
    r.recv_idx32.assign(rows * c.topk, 0xee);
  }
  place_outputs(w);
  w.launch("dispatch", threads, run);
  for (int me = 0; me < c.ranks(); ++me)
    if (w.is_sound(me)) check_dispatch(w, me, cached, gone, sure);
}

// ---- Combine --------------------------------------------------------------------------------------------------------

struct Sum {
  float value = 0;
  bool any = false;
  void add(float v) {
    value = any ? value + v : v;
    any = true;
  }
};

// Of one channel: what rank `rank` gives for a token of `me`, its row `row` there.
inline float level_1(const World &w, int rank, size_t row, int h) {
  const Case &c = w.c;
  const Rank &r = w.ranks[rank];
  if (!c.expand) return from_bf16(r.y[row * c.hidden + h]);
  Sum sum;
  for (int k = 0; k < c.topk; ++k)
    if (const int slot = r.slots[row * c.topk + k]; slot >= 0) sum.add(from_bf16(r.y[int64_t{slot} * c.hidden + h]));
  return from_bf16(to_bf16(sum.value));
}

// rows[k]: the token's row at the rank of choice k; has(rank): whether that rank's row is in the sum.
template <class Has>
float wanted_sum(const World &w, int me, int token, int h, const std::vector<size_t> &rows, Has has) {
  const Case &c = w.c;
  const bool unreduced = c.expand && (c.combine_flags & DK_COMBINE_UNREDUCED) != 0;
  Sum total;
  for (int b = 0; b < c.biases; ++b)
    total.add(from_bf16(w.ranks[me].bias[b][static_cast<size_t>(token) * c.hidden + h]));
  const auto rank_of = [&](int k) {
    const int rank = w.owner(me, token, k);
    return rank >= 0 && has(rank) ? rank : -1;
  };
  const auto is_last = [&](int k, auto group) {
    for (int later = k + 1; later < c.topk; ++later)
      if (rank_of(later) >= 0 && group(rank_of(later)) == group(rank_of(k))) return false;
    return true;
  };
  const auto by_rank = [](int rank) { return rank; };
  const auto by_node = [&](int rank) { return rank / c.peers; };
  for (int k = 0; k < c.topk; ++k) {
    const int rank = rank_of(k);
    if (rank < 0) continue;
    if (unreduced) {
      const Rank &r = w.ranks[rank];
      total.add(from_bf16(r.y[int64_t{r.slots[rows[k] * c.topk + k]} * c.hidden + h]));
    } else if (are_apart(dk_combine_params{.flags = c.combine_flags})) {
      if (is_last(k, by_rank)) total.add(level_1(w, rank, rows[k], h));
    } else if (is_last(k, by_node)) {
      Sum node;
      for (int j = 0; j <= k; ++j) {
        const int other = rank_of(j);
        if (other >= 0 && by_node(other) == by_node(rank) && is_last(j, by_rank))
          node.add(level_1(w, other, rows[j], h));
      }
      total.add(from_bf16(to_bf16(node.value)));
    }
  }
  return from_bf16(to_bf16(total.value));
}

// What differs first in a token's sum and weights.
struct Different {
  const char *what = nullptr;
  int64_t at = 0;
  double got = 0, want = 0;
};
template <class Has>
Different compare_token(const World &w, int me, int t, Has has) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  std::vector<size_t> rows(c.topk);
  for (int k = 0; k < c.topk; ++k) {
    const int rank = w.owner(me, t, k);
    if (rank < 0) continue;
    const Rank &at = w.ranks[rank];
    while (at.arrivals[rows[k]].source != me || at.arrivals[rows[k]].token != t) ++rows[k];
  }
  for (int h = 0; h < c.hidden; ++h) {
    const int64_t at = static_cast<int64_t>(t) * c.hidden + h;
    const float got = from_bf16(r.combined[at]), want = wanted_sum(w, me, t, h, rows, has);
    if (got != want) return {"combined_x", at, got, want};
  }
  for (int k = 0; c.weights && k < c.topk; ++k) {
    const int rank = w.owner(me, t, k);
    const int64_t at = static_cast<int64_t>(t) * c.topk + k;
    float want = 0;
    if (rank >= 0 && has(rank)) {
      const Rank &there = w.ranks[rank];
      want = c.expand ? there.y_weights[there.slots[rows[k] * c.topk + k]] : there.y_weights[rows[k] * c.topk + k];
    }
    if (r.back_weights[at] != want) return {"combined_topk_weights", at, r.back_weights[at], want};
  }
  return {};
}

// gone: the rank whose rows may lack in any sum (sure: they lack in all).
inline void check_combine(const World &w, int me, int gone = -1, bool sure = false) {
  for (int t = 0; t < w.ranks[me].tokens; ++t) {
    const auto has = [&](int rank) { return w.in[rank] || rank == gone; };
    Different found{"nothing", 0, 0, 0};
    if (!sure) found = compare_token(w, me, t, has);
    if (gone >= 0 && found.what != nullptr)
      found = compare_token(w, me, t, [&](int rank) { return rank != gone && has(rank); });
    if (found.what != nullptr) wrong(found.what, me, found.at, found.got, found.want);
  }
}

inline dk_combine_params combine_args(const World &w, int me) {
  const Case &c = w.c;
  auto &r = const_cast<Rank &>(w.ranks[me]);
  dk_combine_params a{};
  a.flags = c.combine_flags;
  a.x = handle_to(r.y.data());
  a.topk_weights = c.weights ? handle_to(r.y_weights.data()) : 0;
  for (int b = 0; b < c.biases; ++b) a.bias[b] = handle_to(r.bias[b].data());
  a.rank_prefix_matrix = handle_to(r.matrix.data());
  a.send_head = handle_to(r.head.data());
  a.num_tokens = r.tokens;
  a.num_recv_tokens = r.capacity;
  a.hidden = c.hidden;
  a.num_topk = c.topk;
  a.x_segment = -1;
  a.num_max_tokens = c.max_tokens;
  a.combined_x = handle_to(r.combined.data());
  a.combined_topk_weights = c.weights ? handle_to(r.back_weights.data()) : 0;
  a.routing = c.routing();
  a.num_x_rows = c.expand ? r.room : 0;
  a.num_experts = c.experts();
  a.index_bytes = c.index_bytes;
  a.topk_idx = c.index_bytes == 8 ? handle_to(r.idx.data()) : handle_to(r.idx32.data());
  a.recv_src_metadata = handle_to(r.meta.data());
  return a;
}

inline void make_terms(World &w) {
  const Case &c = w.c;
  for (Rank &r : w.ranks) {
    r.grid = pick(1, 2);
    r.y.assign(static_cast<size_t>(r.room) * c.hidden, 0x7fc0);  // what no row names must not be read
    r.y_weights.assign(static_cast<size_t>(r.room) * (c.expand ? 1 : c.topk), -3);
    for (size_t row = 0; row < r.arrivals.size(); ++row)
      for (int k = 0; k < c.topk; ++k) {
        const int64_t slot = c.expand ? r.slots[row * c.topk + k] : static_cast<int64_t>(row);
        if (slot < 0) continue;
        r.y_weights[c.expand ? slot : slot * c.topk + k] = static_cast<float>(pick(1, 4096)) / 64;
        for (int h = 0; h < c.hidden && (c.expand || k == 0); ++h) r.y[slot * c.hidden + h] = random_bf16();
      }
    for (auto &bias : r.bias) {
      bias.resize(static_cast<size_t>(r.tokens) * c.hidden);
      for (uint16_t &v : bias) v = random_bf16();
    }
    r.combined.assign(static_cast<size_t>(r.tokens) * c.hidden, 0x1234);
    r.back_weights.assign(static_cast<size_t>(r.tokens) * c.topk, -1);
  }
}

// run(me): the kernel.
template <class Run>
void combine(World &w, int threads, Run run, int gone = -1, bool sure = false) {
  make_terms(w);
  w.launch("combine", threads, run);
  for (int me = 0; me < w.c.ranks(); ++me)
    if (w.is_sound(me)) check_combine(w, me, gone, sure);
}

// ---- For the CPU engine's comparison --------------------------------------------------------------------------------

// After its shape and `lost`, the inputs and outputs of a case whose calls have been made.
inline bool dump_world(const char *path, const World &w, int lost) {
  const Case &c = w.c;
  FILE *file = fopen(path, "wb");
  if (file == nullptr) return false;
  fprintf(file, "%d %d %d %d %d %d %d\n", c.hidden, c.topk, c.experts(), c.num_scales, c.alignment, c.max_tokens, lost);
  for (int me = 0; me < c.ranks(); ++me) {
    const Rank &r = w.ranks[me];
    dump_array(file, "x", me, r.x);
    dump_array(file, "scales", me, r.scales);
    dump_array(file, "topk_idx", me, r.idx);
    dump_array(file, "topk_weights", me, r.weights);
    dump_array(file, "recv_x", me, r.recv_x);
    dump_array(file, "recv_scales", me, r.recv_scales);
    dump_array(file, "recv_topk_idx", me, r.recv_idx);
    dump_array(file, "recv_topk_weights", me, r.recv_weights);
    dump_array(file, "metadata", me, r.meta);
    dump_array(file, "slots", me, r.slot);
    dump_array(file, "psum_experts", me, r.psum_experts);
    dump_array(file, "y", me, r.y);
    dump_array(file, "y_weights", me, r.y_weights);
    dump_array(file, "bias0", me, r.bias[0]);
    dump_array(file, "bias1", me, r.bias[1]);
    dump_array(file, "combined", me, r.combined);
    dump_array(file, "combined_weights", me, r.back_weights);
  }
  return fclose(file) == 0;
}
// What is drawn for it first.
inline Case dumped_case(char **words) {
  random_number.seed(strtoull(words[1], nullptr, 10));
  Case c;
  c.nodes = atoi(words[2]);
  c.peers = atoi(words[3]);
  c.expand = atoi(words[4]) != 0;
  c.combine_flags = static_cast<uint32_t>(atoi(words[5]));
  c.hidden = 16 * pick(1, 9);
  c.topk = pick(3, 6);
  c.local_experts = pick(1, 4);
  c.num_scales = pick(1, 7);
  c.alignment = toss() ? 1 : 8;
  c.padding = c.expand;
  c.biases = 2;
  c.rdma = c.nvl = 1 << 18;
  return c;
}

}  // namespace deepep::internode
