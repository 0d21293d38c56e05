// shrink_cases.h - for tests of normal mode across nodes in teams that shrink: a group with inputs of a case, its
// calls, and what should come of them. Sums are compared bit for bit with those of nodes that add their own ranks'
// rows.
#pragma once
#include "group.h"
#include "lost_ranks.h"

#include <memory>

#include "internode/normal/shrink_combine.cuh"
#include "internode/normal/shrink_dispatch.cuh"

namespace deepep::internode {

struct Case {
  int nodes, peers, hidden, topk, local_experts, num_scales, index_bytes;
  uint64_t nvl, rdma;
  int ranks() const { return nodes * peers; }
  int experts() const { return ranks() * local_experts; }
};

struct Rank {
  std::vector<uint8_t> block;
  std::vector<uint64_t> state;
  std::unique_ptr<Scratch> scratch{new Scratch{}};
  dk_status status{};
  std::vector<uint8_t *> peers;
  TeamView team{};
  NodeView internode{};
  ShrinkView shrink{};
  int tokens = 0, grid = 1;
  // inputs and outputs of a round
  std::vector<uint8_t> x, recv_x, in_rank;
  std::vector<uint32_t> scales, recv_scales, weights, recv_weights;
  std::vector<int64_t> idx, recv_idx;
  std::vector<int32_t> per_rank, per_expert, matrix, head, src;
  std::vector<uint32_t> counts;
  std::vector<uint16_t> y, combined;
  std::vector<float> sums;
};

struct World {
  Case c;
  std::vector<Rank> ranks;
  std::vector<bool> in;  // takes part, by what the test has done
  uint64_t call = 0, control_bytes = 0, timeout_ns = 20000000;
  uint64_t combine_ahead = 0;  // 1: a launch has a dispatch and the combine after it
  int lost = -1;               // may be lost in the running call

  explicit World(const Case &one)
      : c(one), ranks(static_cast<size_t>(one.ranks())), in(static_cast<size_t>(one.ranks()), true) {
    const ControlOffsets at = control_offsets(control_layout(c.ranks()).bytes, c.ranks(), c.peers);
    const ShrinkOffsets shrink = shrink_offsets(at.end, c.ranks());
    control_bytes = shrink.end;
    lay_out(c, ranks, at, control_bytes);
    for (Rank &r : ranks) {
      r.team.flags = DK_TEAM_SHRINK;
      r.state.assign(shrink_state_bytes(c.ranks()) / 8 + 1, 0);
      r.shrink = {shrink, reinterpret_cast<ShrinkState *>(r.state.data())};
    }
    lives_on();
  }
  std::vector<uint8_t *> blocks() { return blocks_of(ranks); }
  Session session(int rank, uint32_t op) {
    return Session{ranks[rank].team, call + (op == DK_OP_COMBINE ? combine_ahead : 0), timeout_ns, op, DK_PHASE_BOTH};
  }

  void watch(std::function<emulate::Life(int)> life) { watch_puts(ranks, std::move(life)); }
  void lives_on() { watch(nullptr); }

  dk_failure refusal(int rank) { return take_refusal(ranks[rank].status); }

  // Kernels of ranks in `in`, and of `lost`; the latter may be refused.
  template <class Kernel>
  void launch(const char *name, int threads, Kernel kernel) {
    ++call;
    for (Rank &r : ranks) r.grid = r.grid == 0 ? 1 : r.grid;
    emulate::run(c.ranks(), [&](int rank) { return in[rank] || rank == lost ? ranks[rank].grid : 0; }, threads, kernel);
    for (int me = 0; me < c.ranks(); ++me) {
      if (!in[me] || me == lost) continue;
      const dk_failure f = ranks[me].scratch->sticky != 0 ? ranks[me].status.failure : refusal(me);
      if (f.code != 0) end_with(f, name, call);
    }
    overwrite_regions(ranks);
  }
};

inline void make_inputs(World &w) {
  const Case &c = w.c;
  const int max_tokens = pick(0, 3) == 0 ? 90 : 24;
  for (int me = 0; me < c.ranks(); ++me) {
    Rank &r = w.ranks[me];
    r.tokens = pick(0, 4) == 0 ? 0 : pick(1, max_tokens);
    const int style = pick(0, 3);  // any expert; the last two; a quarter of the entries; any
    r.x.resize(static_cast<size_t>(r.tokens) * c.hidden * 2);
    for (size_t i = 0; i < r.x.size() / 2; ++i) {
      const uint16_t v = to_bf16(static_cast<float>(pick(-3000, 3000)) / 512);
      memcpy(&r.x[2 * i], &v, 2);
    }
    r.scales.resize(static_cast<size_t>(r.tokens) * c.num_scales);
    r.weights.resize(static_cast<size_t>(r.tokens) * c.topk);
    for (uint32_t &v : r.scales) v = static_cast<uint32_t>(random_number());
    for (uint32_t &v : r.weights) v = static_cast<uint32_t>(emulate::bits(static_cast<float>(pick(1, 999)) / 7));
    r.idx.resize(static_cast<size_t>(r.tokens) * c.topk);
    for (int64_t &e : r.idx)
      e = style == 2 && pick(0, 3) != 0 ? -1
          : style == 1                  ? pick(c.experts() - 2, c.experts() - 1)
                                        : pick(-1, c.experts() - 1);
    count_choices(c, r);
    r.matrix.assign(c.ranks() * c.ranks(), -7);
    r.head.assign(static_cast<size_t>(r.tokens) * c.ranks(), -7);
    r.counts.assign(4 + c.local_experts + 4, 0);
  }
}

inline void run_notify(World &w) {
  const Case &c = w.c;
  for (Rank &r : w.ranks) r.grid = 2;
  w.launch("notify", kNotifyThreads, [&](int me) {
    Rank &r = w.ranks[me];
    ShrinkNotifyParams p{{notify_arguments(c, r), w.session(me, DK_OP_NOTIFY)}, r.internode, r.shrink};
    deep_ep::internode::notify_dispatch_shrinking(p);
  });
}

// Rows between ranks that take part, and none else.
inline void check_notify(World &w) {
  const Case &c = w.c;
  for (int me = 0; me < c.ranks(); ++me) {
    const Rank &r = w.ranks[me];
    if (!w.in[me]) continue;
    for (int j = 0, sum = 0; j < c.ranks(); ++j, sum = 0)
      for (int i = 0; i < c.ranks(); ++i) {
        const int got = r.matrix[i * c.ranks() + j];
        sum += w.in[i] && w.in[j] ? w.ranks[i].per_rank[j] : 0;
        check(got == sum, "matrix", me, i * c.ranks() + j, got, sum);
      }
    for (int t = 0; t < r.tokens; ++t)
      for (int j = 0; j < c.ranks(); ++j) {
        const int head = r.head[static_cast<size_t>(t) * c.ranks() + j];
        const bool goes = w.in[j] && r.in_rank[static_cast<size_t>(t) * c.ranks() + j] != 0;
        check((head >= 0) == goes, "send_head", me, t, head, goes);
      }
    const auto *counts = reinterpret_cast<const dk_counts *>(r.counts.data());
    const int rows = r.matrix[(c.ranks() - 1) * c.ranks() + me];
    check(counts->seq == w.call && counts->num_recv_tokens == rows, "counts", me, 0, counts->num_recv_tokens, rows);
    for (int e = 0, sum = 0; e < c.local_experts; ++e, sum = 0) {
      for (int i = 0; i < c.ranks(); ++i) sum += w.in[i] ? w.ranks[i].per_expert[me * c.local_experts + e] : 0;
      check(counts->per_expert[e] == sum, "per_expert", me, e, counts->per_expert[e], sum);
    }
  }
}

// worst: rows of the output beyond those that come; below 0: none.
inline void prepare_dispatch(World &w, bool cached, int worst = -1, int blocks = 0) {
  const Case &c = w.c;
  for (int me = 0; me < c.ranks(); ++me) {
    Rank &r = w.ranks[me];
    r.grid = blocks > 0 ? blocks : pick(1, 2);
    if (!w.in[me] && me != w.lost) continue;
    const size_t rows = static_cast<size_t>(r.matrix[(c.ranks() - 1) * c.ranks() + me] + max(worst, 0));
    r.recv_x.assign(rows * c.hidden * 2, 0xee);
    r.recv_scales.assign(rows * c.num_scales, 0xee);
    r.recv_weights.assign(rows * c.topk, 0xee);
    r.recv_idx.assign(rows * c.topk, 0xee);
    if (!cached) r.src.assign(rows, -9);
  }
}
inline void dispatch(World &w, int me, bool cached, int worst = -1) {
  const Case &c = w.c;
  Rank &r = w.ranks[me];
  dk_dispatch_params a = dispatch_arguments(c, r, cached);
  if (worst >= 0) a.num_worst_tokens = a.num_recv_tokens = static_cast<int>(r.recv_x.size() / (2 * c.hidden));
  DispatchParams d{a, w.session(me, DK_OP_DISPATCH)};
  d.row_bytes = 2 * c.hidden;
  ShrinkDispatchParams p{d, r.internode, r.shrink, pair_rings(r.team, d.row_bytes + 4ull * pair_words(d).end)};
  deep_ep::internode::dispatch_with_notify_shrinking(p);
}
inline void run_dispatch(World &w, bool cached, int worst = -1, int blocks = 0) {
  prepare_dispatch(w, cached, worst, blocks);
  w.launch("dispatch", ShrinkDispatchRoles::kThreads, [&](int me) { dispatch(w, me, cached, worst); });
}

// A row that has not come is zeros and names no expert.
inline bool is_blank(const World &w, const Rank &r, int64_t row, bool cached) {
  const Case &c = w.c;
  bool blank = true;
  for (int64_t i = 0; i < 2 * c.hidden; ++i) blank &= r.recv_x[row * c.hidden * 2 + i] == 0;
  for (int i = 0; i < c.num_scales; ++i) blank &= r.recv_scales[row * c.num_scales + i] == 0;
  for (int k = 0; !cached && k < c.topk; ++k)
    blank &= r.recv_idx[row * c.topk + k] == -1 && r.recv_weights[row * c.topk + k] == 0;
  return blank;
}

// gone: the rank whose rows may be blank (sure: all are).
inline void check_dispatch(World &w, bool cached, int gone = -1, bool sure = false) {
  const Case &c = w.c;
  for (int me = 0; me < c.ranks(); ++me) {
    const Rank &r = w.ranks[me];
    if (!w.in[me] || me == w.lost) continue;
    const int64_t end = r.matrix[(c.ranks() - 1) * c.ranks() + me];
    for (int s = 0; s < c.ranks(); ++s) {
      const Rank &from = w.ranks[s];
      int64_t row = s == 0 ? 0 : r.matrix[(s - 1) * c.ranks() + me];
      const int64_t last = r.matrix[s * c.ranks() + me];
      for (int t = 0; t < from.tokens && row < last; ++t) {
        if (from.in_rank[static_cast<size_t>(t) * c.ranks() + me] == 0) continue;
        if (s == gone && is_blank(w, r, row, cached)) {
          ++row;
          continue;
        }
        check(s != gone || !sure, "row of a lost rank", me, row, s, t);
        check(memcmp(&r.recv_x[row * c.hidden * 2], &from.x[static_cast<size_t>(t) * c.hidden * 2], c.hidden * 2) == 0,
              "recv_x", me, row, s, t);
        for (int i = 0; i < c.num_scales; ++i)
          check(r.recv_scales[row * c.num_scales + i] == from.scales[t * c.num_scales + i], "recv_scales", me, row, s,
                t);
        for (int k = 0; !cached && k < c.topk; ++k) {
          const int64_t e = from.idx[t * c.topk + k],
                        mine = e >= 0 && e / c.local_experts == me ? e % c.local_experts : -1;
          check(r.recv_idx[row * c.topk + k] == mine, "recv_topk_idx", me, row * c.topk + k,
                static_cast<double>(r.recv_idx[row * c.topk + k]), static_cast<double>(mine));
          check(r.recv_weights[row * c.topk + k] == (mine < 0 ? 0 : from.weights[t * c.topk + k]), "recv_topk_weights",
                me, row * c.topk + k, s, t);
        }
        if (!cached) check(r.src[row] == t, "recv_src_idx", me, row, r.src[row], t);
        ++row;
      }
      check(row == last, "rows of a rank", me, s, static_cast<double>(row), static_cast<double>(last));
    }
    for (int64_t i = end * c.topk; !cached && i < static_cast<int64_t>(r.recv_idx.size()); ++i)
      check(r.recv_idx[i] == -1 && r.recv_weights[i] == 0, "rows past the end", me, i, 0, 0);
  }
}

inline void prepare_combine(World &w) {
  const Case &c = w.c;
  for (int me = 0; me < c.ranks(); ++me) {
    Rank &r = w.ranks[me];
    if (!w.in[me] && me != w.lost) continue;
    r.y.resize(static_cast<size_t>(r.matrix[(c.ranks() - 1) * c.ranks() + me]) * c.hidden);
    for (uint16_t &v : r.y) v = to_bf16(static_cast<float>(pick(-30000, 30000)) / 777);
    r.combined.assign(static_cast<size_t>(r.tokens) * c.hidden, 0x1234);
    r.sums.assign(static_cast<size_t>(r.tokens) * c.topk, -1);
  }
}
inline void combine(World &w, int me, bool biased) {
  const Case &c = w.c;
  Rank &r = w.ranks[me];
  dk_combine_params a = combine_arguments(c, r);
  if (biased) a.bias[1] = handle_to(r.x.data());
  const CombineParams k{a, w.session(me, DK_OP_COMBINE), 2u * c.hidden};
  ShrinkCombineParams p{k, r.internode, r.shrink, pair_rings(r.team, k.row_bytes + 4ull * k.num_topk)};
  deep_ep::internode::combine_with_notify_shrinking(p);
}
inline void run_combine(World &w, bool biased) {
  const Case &c = w.c;
  prepare_combine(w);
  for (int me = 0; me < c.ranks(); ++me) {
    Rank &r = w.ranks[me];
    r.grid = pick(1, 2);
    if (!w.in[me] && me != w.lost) continue;
    r.recv_weights.resize(r.y.size() / c.hidden * c.topk);
    for (uint32_t &v : r.recv_weights) v = static_cast<uint32_t>(emulate::bits(static_cast<float>(pick(1, 999)) / 7));
  }
  w.launch("combine", ShrinkCombineRoles::kThreads, [&](int me) { combine(w, me, biased); });
}

// A sum as nodes form it: terms(rank): a row's value; FP32, a node's sum rounded by round(), this node's rows one by
// one.
template <class Has, class Term, class Round>
inline float node_sums(const Case &c, int me, Has has, Term term, Round round) {
  float sum = 0;
  for (int node = 0; node < c.nodes; ++node) {
    float part = 0;
    for (int i = 0; i < c.peers; ++i) {
      const int r = node * c.peers + i;
      if (!has(r)) continue;
      (node == me / c.peers ? sum : part) += term(r);
    }
    sum += round(part);
  }
  return sum;
}

// gone: the rank whose rows may lack in any sum (sure: they lack in all).
inline void check_combine(World &w, bool biased, int gone = -1, bool sure = false) {
  const Case &c = w.c;
  for (int me = 0; me < c.ranks(); ++me) {
    const Rank &r = w.ranks[me];
    if (!w.in[me] || me == w.lost) continue;
    for (int t = 0; t < r.tokens; ++t) {
      const int32_t *head = &r.head[static_cast<size_t>(t) * c.ranks()];
      auto row_of = [&](int h) {
        return static_cast<size_t>((me == 0 ? 0 : w.ranks[h].matrix[(me - 1) * c.ranks() + h]) + head[h]);
      };
      bool fits = false;
      int64_t at = 0;
      double got = 0, want = 0;
      for (int without = 0; without < 2 && !fits; ++without) {
        if (without == 0 && sure) continue;
        auto has = [&](int h) { return head[h] >= 0 && !(h == gone && without == 1) && (w.in[h] || h == gone); };
        fits = true;
        for (int h = 0; h < c.hidden && fits; ++h) {
          float sum = node_sums(
              c, me, has, [&](int o) { return from_bf16(w.ranks[o].y[row_of(o) * c.hidden + h]); },
              [](float part) { return from_bf16(to_bf16(part)); });
          if (biased) sum += from_bf16(reinterpret_cast<const uint16_t *>(r.x.data())[t * c.hidden + h]);
          at = static_cast<int64_t>(t) * c.hidden + h;
          got = from_bf16(r.combined[at]);
          want = from_bf16(to_bf16(sum));
          fits = r.combined[at] == to_bf16(sum) || (got == 0 && want == 0);
        }
        for (int k = 0; k < c.topk && fits; ++k) {
          const float sum = node_sums(
              c, me, has,
              [&](int o) { return emulate::from_bits<float>(w.ranks[o].recv_weights[row_of(o) * c.topk + k]); },
              [](float part) { return part; });
          at = static_cast<int64_t>(t) * c.topk + k;
          got = r.sums[at];
          want = sum;
          fits = r.sums[at] == sum;
        }
        if (gone < 0) break;
      }
      check(fits, "combined", me, at, got, want);
    }
  }
}

}  // namespace deepep::internode
