// low_latency_cases.h - for tests of low latency across nodes: groups with inputs of a case, their calls as the steps
// of a stream, and what should come of them, bit for bit, in plain loops in the order of the contract.
#pragma once
#include "group.h"
#include "transport_on_host.h"

#include <cmath>
#include <map>
#include <memory>

#include "internode/low_latency/params.h"

namespace deep_ep::internode_ll {
alignas(16) inline thread_local uint64_t calls[2048];  // dynamic shared memory of a block
}

namespace deepep::internode {

// Of bits, where checks.h compares numbers.
[[noreturn]] inline void wrong_bits(const char *what, int rank, int64_t at, int64_t got, int64_t want) {
  fprintf(stderr, "rank %d: %s[%lld] is %llx instead of %llx\n", rank, what, static_cast<long long>(at),
          static_cast<long long>(got), static_cast<long long>(want));
  quick_exit(1);
}
inline void check(const char *what, int rank, int64_t at, int64_t got, int64_t want) {
  if (got != want) wrong_bits(what, rank, at, got, want);
}

struct Case {
  int nodes, peers, local_experts, hidden, topk, tokens;  // tokens: B
  bool all_remote;                                        // DK_TEAM_LL_TRANSPORT
  int ranks() const { return nodes * peers; }
  int experts() const { return ranks() * local_experts; }
};

// 16-byte aligned, as callers' memory is.
template <class T>
struct Memory {
  std::vector<T> all;
  T *data() { return reinterpret_cast<T *>((reinterpret_cast<uintptr_t>(all.data()) + 15) & ~uintptr_t{15}); }
  void resize(size_t count) { all.assign(count + 16 / sizeof(T) + 1, static_cast<T>(0xee)); }
};

// Inputs and outputs of a rank's dispatch and of its combine.
struct Exchange {
  int num_tokens, form, how;  // form: BF16, FP8, rounded, UE8M0; how: plain, zero copy, LogFMT
  size_t data;                // of the rows to combine, see row_value()
  bool second = false;        // the newest combine was the second one
  bool weighted, unreduced;   // the dispatch has weights, where a rank has tokens; this rank's combines sum nothing
  bool room = false;          // a dispatch of this shape brings weights
  int wrong = -1;             // a token with a wrong index in combine
  std::vector<int> crossed;   // puts of the newest combine to each rank: rows
  std::vector<int> messages;  // and weights
  Memory<uint16_t> x, y, sums;
  std::vector<int64_t> idx, asked;  // asked: of combine
  std::vector<float> weights;
  Memory<uint8_t> recv_x;
  Memory<uint32_t> scales;
  std::vector<int32_t> count, src_info, statistics;
  std::vector<int64_t> range;
};

struct Rank {
  std::vector<uint8_t> block;
  std::unique_ptr<Scratch> scratch{new Scratch{}};
  std::unique_ptr<LowLatencyState> state{new LowLatencyState{}};
  dk_status status{};
  std::vector<uint8_t *> peers, blocks;  // blocks: into which it stores, in low latency
  LowLatencyTeam team{};
  std::vector<Exchange> exchanges;
  std::vector<std::function<void()>> steps;           // by all lanes of its grid
  std::function<void(int to, uint64_t word)> on_put;  // of the running step; word: from the start of the block
  int grid = 1;
  uint64_t lanes_came = 0;
};

enum class Plant { none, weight, rows };
inline Plant planted = Plant::none;

constexpr uint64_t kTimeout = 100000000, kShortTimeout = 4000000;  // of emulated time

struct World {
  Case c;
  std::vector<Rank> ranks;
  int lost = -1;                // a rank that makes no calls
  size_t lost_from = 0;         // from this round on
  size_t back_from = SIZE_MAX;  // until before this one
  size_t came = 0;              // ranks at the meetings before and after it returns
  bool nvlink = false;          // between nodes, too
  bool replayed = false;        // combines always send from the same buffer, as in a graph
  bool again = false;           // each combine runs twice
  bool recycled = false;        // a dispatch has the outputs of the one before
  size_t ahead = 1;             // dispatches that are received before the first of them is combined
  std::vector<bool> halves;     // ranks whose calls are in halves; the second run of a combine never is

  bool misses(int rank, size_t round) const { return rank == lost && round >= lost_from && round < back_from; }
  uint64_t timeout() const { return lost < 0 ? kTimeout : kShortTimeout; }

  explicit World(const Case &one) : c(one), ranks(static_cast<size_t>(one.ranks())) {
    const uint64_t control = align_up<uint64_t>(control_layout(c.ranks()).bytes, 4096);
    const LowLatencyLayout layout = low_latency_layout(c.ranks(), c.tokens, c.hidden, c.experts());
    const RingFlags ring = ring_flags(c.ranks());
    const uint64_t wire = ring.bytes + layout.wire_bytes, rdma = layout.rdma_bytes + (pick(0, 1) != 0 ? 8192 : 0);
    for (Rank &r : ranks) r.block.assign(control + kLowLatencyOutboxBytes + wire + rdma + 8192, 0);
    for (int me = 0; me < c.ranks(); ++me) {
      Rank &r = ranks[me];
      for (int i = 0; i < c.ranks(); ++i)
        r.peers.push_back(i / c.peers == me / c.peers ? aligned(ranks[i].block) : nullptr);
      TeamView &t = r.team.view;
      t.peers = r.peers.data();
      t.self = aligned(r.block);
      t.scratch = r.scratch.get();
      t.status = &r.status;
      t.wire = control + kLowLatencyOutboxBytes;
      t.wire_bytes = wire;
      t.rdma = t.wire + wire;
      t.rdma_bytes = rdma;
      t.at = control_layout(c.ranks());
      t.ring = ring;
      t.rank = me;
      t.num_ranks = c.ranks();
      t.num_nvl_peers = c.peers;
      t.flags = c.all_remote ? DK_TEAM_LL_TRANSPORT : 0;
      r.status.abort_rank = -1;
      r.team.outbox = control;
      r.team.state = r.state.get();
      r.grid = pick(1, 2);
    }
  }
};

// ---- Steps ----

inline bool is_first_lane() { return blockIdx.x == 0 && threadIdx.x == 0; }

// Runs a rank's steps one after the other, as a stream does.
inline void run_steps(Rank &r) {
  const uint64_t lanes = static_cast<uint64_t>(r.grid) * kLlThreads;
  uint64_t came = 0;
  for (const auto &step : r.steps) {
    step();
    ++r.lanes_came;
    came += lanes;
    while (r.lanes_came < came) emulate::step();
    if (r.scratch->sticky == 0) continue;
    const dk_failure &f = r.status.failure;
    fprintf(stderr, "rank %d failed: code %u, op %u, phase %u, peer %d, field %u, expected %lld, seen %lld\n", f.rank,
            f.code, f.op, f.phase, f.peer, f.field, static_cast<long long>(f.expected), static_cast<long long>(f.seen));
    quick_exit(1);
  }
}

inline void host_step(Rank &r, std::function<void()> act) {
  r.steps.push_back([act] {
    if (is_first_lane()) act();
  });
}

inline dk_ll_dispatch_params dispatch_params(const World &w, Exchange &e, uint32_t phases, uint32_t ticket) {
  dk_ll_dispatch_params p{};
  p.timeout_ns = w.timeout();
  p.phases = phases;
  p.ticket = ticket;
  p.index_bytes = 8;
  p.flags = e.form == 2 ? DK_LL_ROUND_SCALE : e.form == 3 ? DK_LL_ROUND_SCALE | DK_LL_UE8M0 : 0;
  p.x = emulate::bits(e.x.data());
  p.topk_idx = emulate::bits(e.idx.data());
  if (e.weighted && e.num_tokens > 0) p.topk_weights = emulate::bits(e.weights.data());
  p.num_tokens = e.num_tokens;
  p.num_topk = w.c.topk;
  p.format = e.form != 0 ? DK_FORMAT_FP8 : DK_FORMAT_BF16;
  p.num_max_tokens = w.c.tokens;
  p.hidden = w.c.hidden;
  p.num_experts = w.c.experts();
  p.recv_x = emulate::bits(e.recv_x.data());
  p.recv_scales = emulate::bits(e.scales.data());
  p.recv_count = emulate::bits(e.count.data());
  p.src_info = emulate::bits(e.src_info.data());
  p.layout_range = emulate::bits(e.range.data());
  p.cumulative_stats = emulate::bits(e.statistics.data());
  return p;
}

inline void add_dispatch(World &w, int me, size_t which, uint32_t phases, uint32_t ticket) {
  Rank &r = w.ranks[me];
  r.steps.push_back([&w, &r, which, phases, ticket] {
    const dk_ll_dispatch_params p = dispatch_params(w, r.exchanges[which], phases, ticket);
    InternodeLlDispatchParams d{};
    if (fill_dispatch(&p, r.team, &d) != DK_OK) wrong_bits("dispatch is refused", r.team.view.rank, 0, 0, 0);
    r.exchanges[which].room = d.call.at.weights_at < d.call.at.row_bytes;
    deep_ep::internode_ll::dispatch(d);
  });
}

inline uint16_t *rows_to_combine(const World &w, Rank &r, Exchange &e) {
  if (e.how != 1) return e.y.data();
  const LowLatencyLayout layout = low_latency_layout(w.c.ranks(), w.c.tokens, w.c.hidden, w.c.experts());
  return reinterpret_cast<uint16_t *>(r.team.view.self + r.team.view.rdma + layout.zero_copy(r.team.next_stage));
}

// A receiver acknowledges a call: nothing of it may still be on its way.
inline void check_messages(const World &w, const InternodeLlParams &p, uint64_t epoch) {
  for (int source = 0; source < w.c.ranks() && w.lost < 0; ++source) {
    if (mine_at<HandshakeMessage>(p, handshake_at(p.session.team, epoch, source))->segment == 0) continue;
    const uint64_t word = *mine_at<uint64_t>(p, message_word_at(p, epoch, source));
    check("message with weights that is here", p.session.team.rank, source, is_from(word, epoch, source), 1);
  }
}

inline void add_combine(World &w, int me, size_t which, uint32_t phases, uint32_t ticket) {
  Rank &r = w.ranks[me];
  auto epoch = std::make_shared<uint64_t>(0);
  auto params = std::make_shared<InternodeLlCombineParams>();
  host_step(r, [&w, &r, which, phases, ticket, params, epoch] {
    Exchange &e = r.exchanges[which];
    dk_ll_combine_params p{};
    p.timeout_ns = w.timeout();
    p.phases = phases;
    p.ticket = ticket;
    p.flags = (e.how == 1 ? DK_LL_ZERO_COPY : e.how == 2 ? DK_LL_LOGFMT : 0) | (e.unreduced ? DK_LL_UNREDUCED : 0);
    p.x = emulate::bits(rows_to_combine(w, r, e));
    p.x_row_stride = 2ull * w.c.hidden;
    p.topk_idx = emulate::bits(e.asked.data());
    p.topk_weights = emulate::bits(e.weights.data());
    p.src_info = emulate::bits(e.src_info.data());
    p.layout_range = emulate::bits(e.range.data());
    p.num_tokens = e.num_tokens;
    p.num_topk = w.c.topk;
    p.index_bytes = 8;
    p.num_max_tokens = w.c.tokens;
    p.hidden = w.c.hidden;
    p.num_experts = w.c.experts();
    p.combined_x = emulate::bits(e.sums.data());
    if (fill_combine(&p, r.team, params.get()) != DK_OK) wrong_bits("combine is refused", r.team.view.rank, 0, 0, 0);
    if ((phases & DK_PHASE_SEND) != 0 && !w.replayed) r.team.next_stage = 1 - params->call.stage;
    *epoch = epoch_of_call(params->call);
    if ((phases & DK_PHASE_SEND) == 0) return;
    e.crossed.assign(w.ranks.size(), 0);
    e.messages.assign(w.ranks.size(), 0);
    r.on_put = [&e, params](int to, uint64_t word) {
      const InternodeLlParams &call = params->call;
      const uint64_t rows = static_cast<uint64_t>(call.num_experts) * call.max_tokens * 8,
                     at = word - call.at.words[slot_of(epoch_of_call(call))];
      if (at < rows)
        ++e.crossed[static_cast<size_t>(to)];
      else if (at < rows + 8ull * call.session.team.num_ranks)
        ++e.messages[static_cast<size_t>(to)];
    };
  });
  r.steps.push_back([params] { deep_ep::internode_ll::combine(*params); });
  host_step(r, [&w, &r, phases, params, epoch] {
    r.on_put = nullptr;
    if ((phases & DK_PHASE_RECV) != 0) check_messages(w, params->call, *epoch);
  });
}

// ---- Expected outputs ----

inline bool names(const Exchange &e, int topk, int token, int64_t expert) {
  for (int k = 0; k < topk; ++k)
    if (e.idx[static_cast<size_t>(token) * topk + k] == expert) return true;
  return false;
}

inline void check_row(const World &w, int me, Exchange &e, int expert, int64_t row, const uint16_t *x) {
  const int hidden = w.c.hidden;
  const int64_t rows = static_cast<int64_t>(w.c.ranks()) * w.c.tokens, at = expert * rows + row;
  if (e.form == 0) return check("row", me, at, memcmp(e.recv_x.data() + at * hidden * 2, x, 2 * hidden), 0);
  for (int b = 0; b < hidden / kScaleChannels; ++b) {
    float amax = 0;
    for (int i = 0; i < kScaleChannels; ++i) amax = fmaxf(amax, fabsf(from_bf16(x[b * kScaleChannels + i])));
    const Fp8Scale scale = fp8_scale(amax, e.form >= 2);
    for (int i = 0; i < kScaleChannels; i += 16) {
      uint4 low, high;
      memcpy(&low, x + b * kScaleChannels + i, 16);
      memcpy(&high, x + b * kScaleChannels + i + 8, 16);
      const uint4 cast = cast_sixteen(low, high, scale.inverse);
      check("row of FP8", me, at, memcmp(e.recv_x.data() + at * hidden + b * kScaleChannels + i, &cast, 16), 0);
    }
    const uint32_t bits = __float_as_uint(scale.scale), *stored = e.scales.data();
    if (e.form < 3)
      check("scale", me, at, stored[(expert * (hidden / 128) + b) * rows + row], bits);
    else
      check("exponent", me, at, stored[(expert * (hidden / 512) + b / 4) * rows + row] >> (8 * (b % 4)) & 0xff,
            bits >> 23 & 0xff);
  }
}

inline void check_dispatch(World &w, int me, size_t which) {
  const Case &c = w.c;
  Exchange &e = w.ranks[me].exchanges[which];
  for (int l = 0; l < c.local_experts; ++l) {
    int64_t row = 0;
    for (int s = 0; s < c.ranks(); ++s) {
      Exchange &theirs = w.ranks[s].exchanges[which];
      const int64_t first = row;
      for (int t = 0; t < theirs.num_tokens && !w.misses(s, which); ++t) {
        if (!names(theirs, c.topk, t, me * c.local_experts + l)) continue;
        check("src_info", me, row, e.src_info[static_cast<size_t>(l) * c.ranks() * c.tokens + row], t);
        check_row(w, me, e, l, row, theirs.x.data() + static_cast<int64_t>(t) * c.hidden);
        ++row;
      }
      check("layout_range", me, l * c.ranks() + s, e.range[l * c.ranks() + s], first << 32 | (row - first));
    }
    check("recv_count", me, l, e.count[l], row);
    check("statistics", me, l, e.statistics[l], row);
  }
}

// Any function of the source, its token and the expert. Some blocks of 128 are small, so that LogFMT codes them.
inline uint16_t row_value(int source, int token, int expert, size_t data, int channel) {
  const uint32_t mixed =
      (static_cast<uint32_t>(data) * 977 + source * 131 + token * 17 + expert * 5 + channel + 1) * 2654435761u;
  const float small = static_cast<float>(mixed >> 16) / 131072.0f - 0.25f;
  return to_bf16((channel / kScaleChannels + expert) % 3 == 0 ? 64 * small : small);
}

inline void make_rows(World &w, int me, size_t which) {
  const Case &c = w.c;
  Rank &r = w.ranks[me];
  Exchange &e = r.exchanges[which];
  uint16_t *y = rows_to_combine(w, r, e);
  const int64_t rows = static_cast<int64_t>(c.ranks()) * c.tokens;
  for (int l = 0; l < c.local_experts; ++l)
    for (int s = 0; s < c.ranks(); ++s) {
      const int64_t first = e.range[l * c.ranks() + s] >> 32, count = e.range[l * c.ranks() + s] & 0xffffffff;
      for (int64_t i = l * rows + first; i < l * rows + first + count; ++i)
        for (int h = 0; h < c.hidden; ++h)
          y[i * c.hidden + h] = row_value(s, e.src_info[i], me * c.local_experts + l, e.data, h);
    }
}

// What a row or a sum of BF16 is at its receiver.
inline std::vector<float> as_received(const std::vector<uint16_t> &row, int how) {
  std::vector<float> values(row.size());
  for (size_t first = 0; first < row.size(); first += kScaleChannels) {
    BlockRange range{0x7fff, 0};
    for (size_t h = first; h < first + kScaleChannels; ++h) {
      range.low = min<uint32_t>(range.low, row[h] & 0x7fff);
      range.high = max<uint32_t>(range.high, row[h] & 0x7fff);
    }
    const bool coded = how == 2 && is_log_coded(range);
    const LogRange log = log_range(range);
    for (size_t h = first; h < first + kScaleChannels; ++h)
      values[h] = coded ? log_decode(log, log_encode(log_encoder(log), row[h])) : from_bf16(row[h]);
  }
  return values;
}
inline std::vector<uint16_t> expert_row(const World &w, int me, size_t data, int token, int64_t expert) {
  std::vector<uint16_t> row(static_cast<size_t>(w.c.hidden));
  for (int h = 0; h < w.c.hidden; ++h) row[h] = row_value(me, token, static_cast<int>(expert), data, h);
  return row;
}
inline void add(std::vector<float> &sum, const std::vector<float> &row, float weight) {
  for (size_t h = 0; h < sum.size(); ++h) sum[h] = fmaf(row[h], weight, sum[h]);
}

// Ranks keep the tables of the two newest dispatches.
inline bool has_table(const World &w, size_t which) { return which % w.ahead + 2 >= w.ahead; }

inline bool reached_by_stores(const World &w, int from, int to) {
  return w.nvlink || from == to || (!w.c.all_remote && from / w.c.peers == to / w.c.peers);
}
// Whether the experts' rank sums the rows of a rank's tokens.
inline bool is_summed(const World &w, int at, int me, size_t which, bool second) {
  const Exchange &there = w.ranks[at].exchanges[which], &e = w.ranks[me].exchanges[which];
  if (there.unreduced || there.how == 1 || !has_table(w, which)) return false;
  return (e.weighted && e.room) || ((second || !w.halves[at]) && w.lost < 0);
}

// Of a token: the entries that count, in their order, and their weights.
struct Part {
  int64_t expert;
  int rank;
  float weight;
};
inline std::vector<Part> parts_of(const World &w, int me, size_t which, int token) {
  const Exchange &e = w.ranks[me].exchanges[which];
  const int topk = w.c.topk;
  const int64_t *idx = &e.idx[static_cast<size_t>(token) * topk];
  std::vector<Part> parts;
  for (int k = 0; k < topk; ++k) {
    if (idx[k] < 0 || std::find(idx, idx + k, idx[k]) != idx + k) continue;
    const int rank = static_cast<int>(idx[k]) / w.c.local_experts;
    float weight = 0;
    for (int j = 0; j < topk; ++j) weight += idx[j] == idx[k] ? e.weights[static_cast<size_t>(token) * topk + j] : 0;
    if (!w.misses(rank, which)) parts.push_back({idx[k], rank, weight});
  }
  return parts;
}

inline std::vector<float> expected_sum(const World &w, int me, size_t which, int token) {
  const Exchange &e = w.ranks[me].exchanges[which];
  std::vector<float> sum(static_cast<size_t>(w.c.hidden));
  const std::vector<Part> parts = parts_of(w, me, which, token);
  for (const Part &part : parts) {
    if (!is_summed(w, part.rank, me, which, e.second)) {
      add(sum, as_received(expert_row(w, me, e.data, token, part.expert), e.how), part.weight);
      continue;
    }
    // The lowest of the rank's experts stands for all of them.
    if (std::any_of(parts.begin(), parts.end(),
                    [&](const Part &other) { return other.rank == part.rank && other.expert < part.expert; }))
      continue;
    std::vector<float> there(sum.size());
    for (const Part &other : parts)
      if (other.rank == part.rank)
        add(there, as_received(expert_row(w, me, e.data, token, other.expert), 0), other.weight);
    std::vector<uint16_t> rounded(sum.size());
    for (size_t h = 0; h < sum.size(); ++h) rounded[h] = to_bf16(there[h]);
    add(sum, as_received(rounded, e.how), 1);
  }
  return sum;
}

inline void check_combine(World &w, int me, size_t which) {
  Exchange &e = w.ranks[me].exchanges[which];
  for (int t = 0; t < e.num_tokens; ++t) {
    const std::vector<float> sum = expected_sum(w, me, which, t);
    for (int h = 0; h < w.c.hidden; ++h)
      check("combined_x", me, static_cast<int64_t>(t) * w.c.hidden + h,
            e.sums.data()[static_cast<int64_t>(t) * w.c.hidden + h], t == e.wrong ? 0x7fff : to_bf16(sum[h]));
  }
}

// A row crosses once for each token and rank where it is a sum, else once for each token and expert; weights cross in
// one message for each pair of ranks, and not at all where every dispatch has brought them.
inline void check_puts(const World &w, int me, size_t which) {
  const Exchange &mine = w.ranks[me].exchanges[which];
  bool brought = has_table(w, which);
  for (const Exchange &e : w.ranks[me].exchanges) brought &= e.num_tokens == 0 || (e.weighted && e.room);
  for (int to = 0; to < w.c.ranks(); ++to) {
    int rows = 0;
    for (int t = 0; t < w.ranks[to].exchanges[which].num_tokens && !w.misses(to, which); ++t) {
      int64_t parts = 0;
      for (const Part &part : parts_of(w, to, which, t)) parts += part.rank == me;
      rows += static_cast<int>(is_summed(w, me, to, which, mine.second) ? std::min<int64_t>(parts, 1) : parts);
    }
    const bool remote = !reached_by_stores(w, me, to);
    check("rows that crossed", me, to, mine.crossed[to], remote ? rows : 0);
    const bool weights_known = mine.num_tokens == 0 || (mine.weighted && mine.room);
    if (w.lost >= 0 || !remote || brought)
      check("messages with weights", me, to, mine.messages[to], 0);
    else if (!weights_known || !has_table(w, which))
      check("messages with weights", me, to, mine.messages[to], 1);
  }
}

}  // namespace deepep::internode
