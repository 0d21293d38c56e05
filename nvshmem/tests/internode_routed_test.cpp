// internode_routed_test.cpp - runs the kernels of calls with a routing across nodes on the host
// (kernels/tests/emulate).
//   internode_routed_test [SEED [CASES]]
//   internode_routed_test dump FILE SEED NODES PEERS EXPAND FLAGS
// The latter writes inputs and outputs of one case, for a comparison with the CPU engine.
// Random groups, shapes, routings, layouts and grids; the network delays every put and keeps only the order that
// kernels rely on. What comes is compared bit for bit with plain loops in the order of the contract.
#include "network.h"

#include <cstdio>
#include <memory>
#include <random>

#include "internode/routed/combine.cuh"
#include "internode/routed/dispatch.cuh"
#include "internode/routed/notify.cuh"

namespace deep_ep::internode {
thread_local uint8_t shared[64 * 1024];  // dynamic shared memory of a block
}
using namespace deepep;
using namespace deepep::internode;

namespace {

std::mt19937_64 random_number;
int pick(int low, int high) { return low + static_cast<int>(random_number() % static_cast<uint64_t>(high - low + 1)); }
bool toss() { return pick(0, 1) == 1; }

struct Case {
  int nodes = 2, peers = 2, hidden = 64, topk = 2, local_experts = 2, num_scales = 0, index_bytes = 8;
  int alignment = 1, biases = 0, sums = 0;  // sums: entries of psum_per_rank, 0: ranks
  bool expand = false, columns = false, padding = false, weights = true, worst = false;
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
  std::vector<uint64_t> state;
  std::unique_ptr<Scratch> scratch{new Scratch{}};
  dk_status status{};
  std::vector<uint8_t *> peers;
  TeamView team{};
  NodeView internode{};
  int tokens = 0, grid = 1;
  // inputs and outputs of a round
  std::vector<uint8_t> x, recv_x;
  std::vector<uint32_t> scales, recv_scales, counts;
  std::vector<float> weights, recv_weights, y_weights, back_weights;
  std::vector<int64_t> idx, recv_idx;
  std::vector<int32_t> idx32, recv_idx32, matrix, head, slot, psum_ranks, psum_experts, num_experts, stats, meta;
  std::vector<uint16_t> y, bias[2], combined;
  // what should come
  std::vector<Arrival> arrivals;
  std::vector<int> slots, first, count;  // [rows, K] expanded rows; of each local expert
  int expanded = 0, capacity = 0, room = 0;
};

uint8_t *aligned(std::vector<uint8_t> &memory) {
  return reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(memory.data()) + 4095) & ~uintptr_t{4095});
}

struct World {
  Case c;
  std::vector<Rank> ranks;
  uint64_t call = 0, control_bytes = 0, timeout_ns = 400000000;

  explicit World(const Case &one) : c(one), ranks(static_cast<size_t>(one.ranks())) {
    const ControlOffsets at = control_offsets(control_layout(c.ranks()).bytes, c.ranks(), c.peers);
    control_bytes = at.end;
    const uint64_t wire = ring_flags(c.ranks()).bytes,
                   bytes = control_bytes + wire + align_up<uint64_t>(c.nvl, 4096) + c.rdma;
    for (Rank &r : ranks) r.block.assign(bytes + 8192, 0);
    for (int me = 0; me < c.ranks(); ++me) {
      Rank &r = ranks[me];
      r.peers.assign(c.ranks(), nullptr);
      for (int i = me / c.peers * c.peers; i < (me / c.peers + 1) * c.peers; ++i) r.peers[i] = aligned(ranks[i].block);
      TeamView &t = r.team;
      t.peers = r.peers.data();
      t.self = aligned(r.block);
      t.scratch = r.scratch.get();
      t.status = &r.status;
      t.wire = control_bytes;
      t.wire_bytes = wire;
      t.nvl = t.wire + wire;
      t.nvl_bytes = c.nvl;
      t.rdma = t.nvl + align_up<uint64_t>(c.nvl, 4096);
      t.rdma_bytes = c.rdma;
      t.at = control_layout(c.ranks());
      t.ring = ring_flags(c.ranks());
      t.rank = me;
      t.num_ranks = c.ranks();
      t.num_nvl_peers = c.peers;
      r.status.abort_rank = -1;
      r.internode.at = at;
      r.internode.num_nodes = c.nodes;
      r.internode.num_peers = c.peers;
      r.internode.node = me / c.peers;
      r.internode.index = me % c.peers;
      r.state.assign((sizeof(NormalState) + StreamListSizes(c.nodes, c.peers).bytes) / 8 + 1, 0);
    }
  }
  NormalState *state(int rank) { return reinterpret_cast<NormalState *>(ranks[rank].state.data()); }
  Session session(int rank, uint32_t op) { return Session{ranks[rank].team, call, timeout_ns, op, DK_PHASE_BOTH}; }
  std::vector<uint8_t *> blocks() {
    std::vector<uint8_t *> all;
    for (Rank &r : ranks) all.push_back(aligned(r.block));
    return all;
  }
  int64_t expert(int source, int token, int k) const {
    return ranks[source].idx[static_cast<size_t>(token) * c.topk + k];
  }
  int owner(int source, int token, int k) const {
    const int64_t e = expert(source, token, k);
    return e < 0 ? -1 : static_cast<int>(e) / c.local_experts;
  }
  bool goes_to(int source, int token, int rank) const {
    for (int k = 0; k < c.topk; ++k)
      if (owner(source, token, k) == rank) return true;
    return false;
  }

  template <class Kernel>
  void launch(const char *name, int threads, Kernel kernel) {
    ++call;
    emulate::run(c.ranks(), [&](int rank) { return ranks[rank].grid; }, threads, kernel);
    for (const Rank &r : ranks) {
      if (r.scratch->sticky == 0 && r.status.refusals[0].code == 0) continue;
      const dk_failure &f = r.scratch->sticky != 0 ? r.status.failure : r.status.refusals[0];
      fprintf(stderr,
              "%s: rank %d failed: code %u, op %u, peer %d, field %u, expected %lld, seen %lld, waited %.3f s\n", name,
              f.rank, f.code, f.op, f.peer, f.field, static_cast<long long>(f.expected), static_cast<long long>(f.seen),
              static_cast<double>(f.waited_ns) * 1e-9);
      quick_exit(1);
    }
    if (emulate::rows_under_way() != 0) {
      fprintf(stderr, "%s: the kernel ended while rows were in flight\n", name);
      quick_exit(1);
    }
    for (Rank &r : ranks)
      memset(r.team.self + r.team.nvl, 0xa5,
             r.team.rdma + c.rdma - r.team.nvl);  // callers may overwrite it between calls
  }
};

void check(bool good, const char *what, int rank, int64_t at, double got, double want) {
  if (good) return;
  fprintf(stderr, "rank %d: %s[%lld] is %g instead of %g\n", rank, what, static_cast<long long>(at), got, want);
  quick_exit(1);
}
void expect(const char *what, int rank, int64_t at, double got, double want) {
  check(got == want, what, rank, at, got, want);
}
uint16_t to_bf16(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
// Every fourth is large, so that another order of a sum gives other bits.
uint16_t random_bf16() {
  static const uint16_t swallow[3] = {0x4c00, 0x3fc0, 0xcc00};  // 2^25, 1.5, -2^25
  return pick(0, 3) == 0 ? swallow[pick(0, 2)] : to_bf16(static_cast<float>(pick(-4000, 4000)) / 3.0f);
}

// ---- Inputs and what should come of them ----------------------------------------------------------------------------

void make_choices(const Case &c, Rank &r, int max_tokens) {
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

void fill_payload(World &w) {
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

void list_arrivals(World &w, int me) {
  const Case &c = w.c;
  Rank &r = w.ranks[me];
  r.arrivals.clear();
  r.slots.clear();
  r.first.assign(c.local_experts, 0);
  r.count.assign(c.local_experts, 0);
  std::vector<int> next(c.local_experts);
  for (int s = 0; s < c.ranks(); ++s)
    for (const int64_t e : w.ranks[s].idx)
      if (e >= 0 && e / c.local_experts == me) ++r.count[e % c.local_experts];
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
void complete_inputs(World &w) {
  const Case &c = w.c;
  fill_payload(w);
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

void make_inputs(World &w) {
  const int max_tokens = pick(0, 3) == 0 ? 60 : 20;
  for (Rank &r : w.ranks) make_choices(w.c, r, max_tokens);
  complete_inputs(w);
}

// ---- Notify ---------------------------------------------------------------------------------------------------------

dk_notify_params notify_params(const World &w, Rank &r) {
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
  return n;
}
RoutedNodesNotifyParams routed_notify_params(World &w, int me) {
  Rank &r = w.ranks[me];
  RoutedNodesNotifyParams p{{{notify_params(w, r), w.session(me, DK_OP_NOTIFY)}}, r.internode};
  p.n.warps = kNotifyThreads / kWarp;
  p.n.share = ceil_div(r.tokens, r.grid);
  return p;
}

void check_places(const World &w, int me) {
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

void notify(World &w) {
  const Case &c = w.c;
  for (Rank &r : w.ranks) r.grid = pick(1, 2);
  w.launch("notify", kNotifyThreads, [&](int me) { deep_ep::internode::notify_routed(routed_notify_params(w, me)); });
  for (int me = 0; me < c.ranks(); ++me) {
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
    if (c.worst) continue;
    expect("counts", me, 0, counts->num_recv_tokens, static_cast<double>(r.arrivals.size()));
    check(counts->seq == w.call, "seq", me, 0, static_cast<double>(counts->seq), static_cast<double>(w.call));
    expect("rows of other nodes", me, 0, counts->num_recv_nodes_tokens, remote);
  }
}

// ---- Dispatch -------------------------------------------------------------------------------------------------------

dk_dispatch_params dispatch_args(const World &w, int me, bool cached) {
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
  a.recv_segment = -1;
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

template <bool kExpand>
void run_dispatch(World &w, int me, bool cached) {
  DispatchParams d{dispatch_args(w, me, cached), w.session(me, DK_OP_DISPATCH)};
  d.row_bytes = 2 * w.c.hidden;
  d.meta = meta_shape(d);
  RoutedDispatchParams<kExpand> p{{d, w.ranks[me].internode, {}, {}, w.state(me)}};
  p.rings = row_rings(w.ranks[me].team, p.internode, d.row_bytes + words_bytes(p), false);
  p.lists = stream_lists(p.state, p.internode);
  deep_ep::internode::dispatch_routed<kExpand>(p);
}

// Row `at` of the outputs has the token's payload, scales and `weight`s.
void check_row(const World &w, int me, int64_t at, const Arrival &from) {
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

void check_padding(const World &w, int me) {
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

void check_dispatch(const World &w, int me) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  for (size_t row = 0; row < r.arrivals.size(); ++row) {
    const Arrival from = r.arrivals[row];
    const Rank &source = w.ranks[from.source];
    const int32_t *meta = &r.meta[row * (c.topk + 2)];
    int last = -1;
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

void dispatch(World &w, bool cached) {
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
  w.launch("dispatch", DispatchRoles::kThreads,
           [&](int me) { c.expand ? run_dispatch<true>(w, me, cached) : run_dispatch<false>(w, me, cached); });
  for (int me = 0; me < c.ranks(); ++me) check_dispatch(w, me);
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
float level_1(const World &w, int rank, size_t row, int h) {
  const Case &c = w.c;
  const Rank &r = w.ranks[rank];
  if (!c.expand) return from_bf16(r.y[row * c.hidden + h]);
  Sum sum;
  for (int k = 0; k < c.topk; ++k)
    if (const int slot = r.slots[row * c.topk + k]; slot >= 0) sum.add(from_bf16(r.y[int64_t{slot} * c.hidden + h]));
  return from_bf16(to_bf16(sum.value));
}

// rows[k]: the token's row at the rank of choice k.
float wanted_sum(const World &w, int me, int token, int h, const std::vector<size_t> &rows) {
  const Case &c = w.c;
  const bool unreduced = c.expand && (c.combine_flags & DK_COMBINE_UNREDUCED) != 0;
  Sum total;
  for (int b = 0; b < c.biases; ++b)
    total.add(from_bf16(w.ranks[me].bias[b][static_cast<size_t>(token) * c.hidden + h]));
  const auto is_last = [&](int k, auto group) {
    for (int later = k + 1; later < c.topk; ++later)
      if (w.owner(me, token, later) >= 0 && group(w.owner(me, token, later)) == group(w.owner(me, token, k)))
        return false;
    return true;
  };
  const auto by_rank = [](int rank) { return rank; };
  const auto by_node = [&](int rank) { return rank / c.peers; };
  for (int k = 0; k < c.topk; ++k) {
    const int rank = w.owner(me, token, k);
    if (rank < 0) continue;
    if (unreduced) {
      const Rank &r = w.ranks[rank];
      total.add(from_bf16(r.y[int64_t{r.slots[rows[k] * c.topk + k]} * c.hidden + h]));
    } else if (are_apart(dk_combine_params{.flags = c.combine_flags})) {
      if (is_last(k, by_rank)) total.add(level_1(w, rank, rows[k], h));
    } else if (is_last(k, by_node)) {
      Sum node;
      for (int j = 0; j <= k; ++j) {
        const int other = w.owner(me, token, j);
        if (other >= 0 && by_node(other) == by_node(rank) && is_last(j, by_rank))
          node.add(level_1(w, other, rows[j], h));
      }
      total.add(from_bf16(to_bf16(node.value)));
    }
  }
  return from_bf16(to_bf16(total.value));
}

void check_combine(const World &w, int me) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  for (int t = 0; t < r.tokens; ++t) {
    std::vector<size_t> rows(c.topk);
    for (int k = 0; k < c.topk; ++k) {
      const int rank = w.owner(me, t, k);
      if (rank < 0) continue;
      const Rank &at = w.ranks[rank];
      while (at.arrivals[rows[k]].source != me || at.arrivals[rows[k]].token != t) ++rows[k];
    }
    for (int h = 0; h < c.hidden; ++h) {
      const int64_t at = static_cast<int64_t>(t) * c.hidden + h;
      expect("combined_x", me, at, from_bf16(r.combined[at]), wanted_sum(w, me, t, h, rows));
    }
    for (int k = 0; c.weights && k < c.topk; ++k) {
      const int rank = w.owner(me, t, k);
      const int64_t at = static_cast<int64_t>(t) * c.topk + k;
      float want = 0;
      if (rank >= 0) {
        const Rank &there = w.ranks[rank];
        want = c.expand ? there.y_weights[there.slots[rows[k] * c.topk + k]] : there.y_weights[rows[k] * c.topk + k];
      }
      expect("combined_topk_weights", me, at, r.back_weights[at], want);
    }
  }
}

dk_combine_params combine_args(const World &w, int me) {
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

RoutedCombineParams combine_params(World &w, int me) {
  const Case &c = w.c;
  CombineParams k{combine_args(w, me), w.session(me, DK_OP_COMBINE), 2u * static_cast<uint32_t>(c.hidden)};
  const bool unreduced = c.expand && (c.combine_flags & DK_COMBINE_UNREDUCED) != 0;
  k.slot_bytes = k.row_bytes * (unreduced ? c.topk : 1);
  RoutedCombineParams p{{k, w.ranks[me].internode, {}, {}}, record_header_bytes(k, c.peers), most_records(k, c.peers)};
  p.rings =
      record_rings(w.ranks[me].team, p.internode, p.header_bytes + k.slot_bytes, static_cast<uint32_t>(p.most_records));
  p.lists = stream_lists(w.state(me), p.internode);
  return p;
}

void combine(World &w) {
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
  w.launch("combine", CombineRoles::kThreads, [&](int me) {
    const RoutedCombineParams p = combine_params(w, me);
    c.expand ? deep_ep::internode::combine_routed<true>(p) : deep_ep::internode::combine_routed<false>(p);
  });
  for (int me = 0; me < c.ranks(); ++me) check_combine(w, me);
}

Case random_case() {
  static const int shapes[][2] = {{2, 2}, {2, 4}, {4, 1}, {3, 2}, {2, 1}};
  const auto &shape = shapes[pick(0, 4)];
  Case c;
  c.nodes = shape[0];
  c.peers = shape[1];
  c.hidden = 8 * pick(1, 40);
  c.topk = pick(0, 4) == 0 ? 9 : pick(1, 6);
  c.local_experts = pick(1, 4);
  c.num_scales = pick(0, 2) * pick(0, 20);
  c.index_bytes = toss() ? 4 : 8;
  c.expand = toss();
  c.alignment = toss() ? 1 : 1 << pick(1, 4);
  c.padding = c.expand && toss();
  c.columns = toss();
  c.weights = pick(0, 3) != 0;
  c.worst = pick(0, 3) == 0;
  c.biases = pick(0, 2);
  c.sums = toss() ? 0 : c.peers;
  static const uint32_t flags[] = {0, 0, DK_COMBINE_APART, DK_COMBINE_UNREDUCED};
  c.combine_flags = flags[pick(0, 3)];
  const uint64_t ranks = c.ranks(), together = c.expand && (c.combine_flags & DK_COMBINE_UNREDUCED) != 0 ? c.topk : 1,
                 row = align_up<uint64_t>(
                     2 * c.hidden * together + 4 * (4 + c.peers * (c.topk + 1) + 3 * c.topk + c.num_scales), 128);
  const int rows = pick(0, 2);  // of a ring: as few as can be; a few; as many as are sent
  const int least = c.combine_flags == 0 ? 1 : min(c.peers, c.topk);
  c.rdma = 2 * c.nodes * row * (rows == 0 ? least : rows == 1 ? 9 : 128) + 8 * pick(0, 7);
  c.nvl = ranks * row * (rows == 0 ? 1 : rows == 1 ? 6 : 128);
  return c;
}

// A rank that is absent, or has another alignment, is named in the failure of every other rank.
void failures() {
  for (const bool absent : {true, false}) {
    Case c;
    c.rdma = c.nvl = 1 << 16;
    World w(c);
    emulate::start_network({7, false}, w.blocks());
    make_inputs(w);
    w.timeout_ns = 2000000;
    ++w.call;
    const int odd = 2;
    emulate::run(
        4, [&](int rank) { return absent && rank == odd ? 0 : 1; }, kNotifyThreads,
        [&](int me) {
          RoutedNodesNotifyParams p = routed_notify_params(w, me);
          if (me == odd) p.n.expert_alignment = 64;
          deep_ep::internode::notify_routed(p);
        });
    emulate::stop_network();
    for (int me = 0; me < 4; ++me) {
      const dk_failure &f = w.ranks[me].status.failure;
      if (me == odd) continue;
      expect("code of a failure", me, absent, f.code, absent ? DK_ETIMEOUT : DK_EMISMATCH);
      expect("rank that the failure names", me, absent, f.peer, odd);
      if (!absent) expect("field", me, 0, f.field, DK_FIELD_ALIGNMENT);
      const auto *counts = reinterpret_cast<const dk_counts *>(w.ranks[me].counts.data());
      expect("counts of a failure", me, 0, counts->num_recv_tokens, -1);
    }
  }
  printf("failures: ok\n");
}

// An index that is no expert's: every rank refuses the call, names its owner and works on.
void wrong_index() {
  Case c;
  c.rdma = c.nvl = 1 << 16;
  World w(c);
  emulate::start_network({9, true}, w.blocks());
  make_inputs(w);
  Rank &odd = w.ranks[3];
  odd.tokens = max(odd.tokens, 1);
  odd.idx.resize(static_cast<size_t>(odd.tokens) * c.topk, 0);
  odd.head.resize(static_cast<size_t>(odd.tokens) * c.ranks());
  odd.slot.resize(odd.idx.size());
  odd.idx[0] = c.experts();
  ++w.call;
  emulate::run(
      4, [](int) { return 1; }, kNotifyThreads,
      [&](int me) { deep_ep::internode::notify_routed(routed_notify_params(w, me)); });
  emulate::stop_network();
  for (int me = 0; me < 4; ++me) {
    const dk_failure &f = w.ranks[me].status.refusals[0];
    expect("sticky", me, 0, w.ranks[me].scratch->sticky, 0);
    expect("code of a refusal", me, 0, f.code, DK_EINVAL);
    expect("rank that it names", me, 0, f.peer, 3);
    expect("field", me, 0, f.field, DK_FIELD_TOPK_IDX);
    expect("index", me, 0, static_cast<double>(f.seen), c.experts());
  }
  printf("wrong index: ok\n");
}

// A rank that goes away before its rows: the others' dispatch and combine end at the deadline, and name it.
template <class Kernel>
void lose(World &w, const char *what, int threads, int odd, uint32_t op, Kernel kernel) {
  w.timeout_ns = 2000000;
  ++w.call;
  emulate::run(4, [&](int rank) { return rank == odd ? 0 : 1; }, threads, kernel);
  emulate::stop_network();
  for (int me = 0; me < 4; ++me) {
    const dk_failure &f = w.ranks[me].status.failure;
    if (me == odd) continue;
    expect(what, me, 0, f.code, DK_ETIMEOUT);
    expect("rank that it names", me, 0, f.peer, odd);
    expect("operation", me, 0, f.op, op);
  }
  printf("%s: ok\n", what);
}
void lost_rank(bool in_combine) {
  Case c;
  c.expand = true;
  c.rdma = c.nvl = 1 << 16;
  World w(c);
  emulate::start_network({13, false}, w.blocks());
  make_inputs(w);
  notify(w);
  if (in_combine) {
    dispatch(w, false);
    combine(w);
    lose(w, "lost in combine", CombineRoles::kThreads, 1, DK_OP_COMBINE,
         [&](int me) { deep_ep::internode::combine_routed<true>(combine_params(w, me)); });
    for (int me : {0, 2, 3})
      for (const uint16_t v : w.ranks[me].combined) expect("a failed sum", me, 0, v, 0x7fc0);
    return;
  }
  for (Rank &r : w.ranks) {
    r.recv_x.assign(static_cast<size_t>(r.room) * c.hidden * 2, 0xee);
    r.recv_weights.assign(r.room, -3);
  }
  lose(w, "lost in dispatch", DispatchRoles::kThreads, 1, DK_OP_DISPATCH,
       [&](int me) { run_dispatch<true>(w, me, false); });
  for (int me : {0, 2, 3})
    for (const int32_t v : w.ranks[me].meta) expect("metadata of a failed dispatch", me, 0, v, -1);
}

// What a caller has changed in a handle: the rank that sees it fails by name.
void changed_handles() {
  for (const int what : {0, 1, 2}) {
    Case c;
    c.expand = true;
    c.rdma = c.nvl = 1 << 16;
    World w(c);
    emulate::start_network({19, false}, w.blocks());
    do make_inputs(w);
    while (w.ranks[0].arrivals.empty() || w.ranks[0].arrivals[0].source != 0);
    notify(w);
    if (what > 0) {
      dispatch(w, false);
      combine(w);
      w.ranks[0].meta[what - 1] = -1;
    } else {
      Rank &r = w.ranks[0];
      for (size_t i = 0; i < r.slot.size(); ++i)
        if (r.idx[i] >= 0 && r.idx[i] < c.local_experts) r.slot[i] = r.room;
      for (Rank &any : w.ranks) {
        any.recv_x.assign(static_cast<size_t>(any.room) * c.hidden * 2, 0xee);
        any.recv_weights.assign(any.room, -3);
      }
    }
    w.timeout_ns = 2000000;
    ++w.call;
    emulate::run(
        4, [](int) { return 1; }, what > 0 ? CombineRoles::kThreads : DispatchRoles::kThreads,
        [&](int me) {
          what > 0 ? deep_ep::internode::combine_routed<true>(combine_params(w, me)) : run_dispatch<true>(w, me, false);
        });
    emulate::stop_network();
    const dk_failure &f = w.ranks[0].status.failure;
    expect("code of a changed handle", 0, what, f.code, DK_EINVAL);
    expect("rank that it names", 0, what, f.peer, 0);
    expect("field", 0, what, f.field, what > 0 ? DK_FIELD_SRC_METADATA : DK_FIELD_DST_SLOT);
  }
  printf("changed handles: ok\n");
}

// Rings with room for the records of one token and no more: credits come in time. Tokens go to one rank of the other
// node and to all of them, in turn.
void crowded() {
  Case c;
  c.peers = c.topk = 4;
  c.combine_flags = DK_COMBINE_APART;
  c.hidden = 48;
  const uint64_t record = align_up<uint64_t>(sizeof(RecordHeader) + 4 * c.topk + 2 * c.hidden, 128);
  c.rdma = 2 * c.nodes * record * c.peers;
  c.nvl = c.ranks() * record;
  World w(c);
  emulate::start_network({17, false}, w.blocks());
  for (int round = 0; round < 2; ++round) {
    for (int me = 0; me < c.ranks(); ++me) {
      Rank &r = w.ranks[me];
      r.tokens = 9;
      r.idx.assign(static_cast<size_t>(r.tokens) * c.topk, -1);
      for (int i = 0; i < r.tokens * c.topk; ++i)
        if (i / c.topk % 2 == 1 || i % c.topk == 0)
          r.idx[i] = ((1 - me / c.peers) * c.peers + i % c.topk) * c.local_experts;
      r.idx32.assign(r.idx.begin(), r.idx.end());
    }
    complete_inputs(w);
    for (int me = 0; me < c.ranks(); ++me) expect("slots", me, 0, combine_params(w, me).rings.slots, c.peers);
    notify(w);
    dispatch(w, false);
    combine(w);
  }
  emulate::stop_network();
  printf("crowded: ok\n");
}

// ---- For the CPU engine's comparison --------------------------------------------------------------------------------

template <class T>
void dump_array(FILE *file, const char *name, int rank, const std::vector<T> &array) {
  fprintf(file, "%s %d %zu\n", name, rank, array.size() * sizeof(T));
  fwrite(array.data(), sizeof(T), array.size(), file);
}
int dump(char **words) {
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
  World w(c);
  emulate::start_network({random_number(), toss()}, w.blocks());
  make_inputs(w);
  notify(w);
  dispatch(w, false);
  combine(w);
  emulate::stop_network();
  FILE *file = fopen(words[0], "wb");
  if (file == nullptr) return 1;
  fprintf(file, "%d %d %d %d %d %d\n", c.hidden, c.topk, c.experts(), c.num_scales, c.alignment, c.max_tokens);
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
  return fclose(file) == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc == 8 && strcmp(argv[1], "dump") == 0) return dump(argv + 2);
  const uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1;
  const int cases = argc > 2 ? atoi(argv[2]) : 4;
  failures();
  wrong_index();
  lost_rank(false);
  lost_rank(true);
  random_number.seed(23);
  crowded();
  changed_handles();
  for (int i = 0; i < cases; ++i) {
    random_number.seed(seed + static_cast<uint64_t>(i));
    World w(random_case());
    const emulate::Network how{random_number(), toss()};
    emulate::start_network(how, w.blocks());
    for (int round = 0; round < 2; ++round) {
      make_inputs(w);
      notify(w);
      dispatch(w, false);
      combine(w);
      fill_payload(w);
      dispatch(w, true);
    }
    emulate::stop_network();
    printf("seed %llu: %d x %d ranks, hidden %d, top-%d, %s, flags %u, order of %s: ok\n",
           static_cast<unsigned long long>(seed) + i, w.c.nodes, w.c.peers, w.c.hidden, w.c.topk,
           w.c.expand ? "expanded" : "plain", w.c.combine_flags, how.fences_alone ? "fences" : "queue pairs");
  }
}
