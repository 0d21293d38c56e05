// internode_low_latency_test.cpp - runs the kernels of low latency across nodes on the host (kernels/tests/emulate).
//   internode_low_latency_test [SEED [CASES]]
//   internode_low_latency_test planted-weight|planted-rows SEED    a wrong table, which the checks must notice
// Random groups, shapes, routings and formats. Each rank runs its steps as far ahead of the others as the kernels let
// it; the network delays every put, reads its source at delivery, and keeps only the order that kernels rely on.
#include "network.h"
#include "transport_on_host.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "internode/low_latency/params.h"

namespace deep_ep::internode_ll {
alignas(16) thread_local uint64_t calls[2048];  // dynamic shared memory of a block
}
using namespace deepep;
using namespace deepep::internode;

namespace {

std::mt19937_64 random_number;
int pick(int low, int high) { return low + static_cast<int>(random_number() % static_cast<uint64_t>(high - low + 1)); }

[[noreturn]] void wrong(const char *what, int rank, int64_t at, int64_t got, int64_t want) {
  fprintf(stderr, "rank %d: %s[%lld] is %llx instead of %llx\n", rank, what, static_cast<long long>(at),
          static_cast<long long>(got), static_cast<long long>(want));
  quick_exit(1);
}
void check(const char *what, int rank, int64_t at, int64_t got, int64_t want) {
  if (got != want) wrong(what, rank, at, got, want);
}
uint16_t to_bf16(float v) {
  const uint32_t bits = __float_as_uint(v);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint32_t v) { return __uint_as_float(v << 16); }

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

uint8_t *aligned(std::vector<uint8_t> &memory) {
  return reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(memory.data()) + 4095) & ~uintptr_t{4095});
}

enum class Plant { none, weight, rows } planted = Plant::none;

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

bool is_first_lane() { return blockIdx.x == 0 && threadIdx.x == 0; }

// Runs a rank's steps one after the other, as a stream does.
void run_steps(Rank &r) {
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

void host_step(Rank &r, std::function<void()> act) {
  r.steps.push_back([act] {
    if (is_first_lane()) act();
  });
}

dk_ll_dispatch_params dispatch_params(const World &w, Exchange &e, uint32_t phases, uint32_t ticket) {
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

void add_dispatch(World &w, int me, size_t which, uint32_t phases, uint32_t ticket) {
  Rank &r = w.ranks[me];
  r.steps.push_back([&w, &r, which, phases, ticket] {
    const dk_ll_dispatch_params p = dispatch_params(w, r.exchanges[which], phases, ticket);
    InternodeLlDispatchParams d{};
    if (fill_dispatch(&p, r.team, &d) != DK_OK) wrong("dispatch is refused", r.team.view.rank, 0, 0, 0);
    r.exchanges[which].room = d.call.at.weights_at < d.call.at.row_bytes;
    deep_ep::internode_ll::dispatch(d);
  });
}

uint16_t *rows_to_combine(const World &w, Rank &r, Exchange &e) {
  if (e.how != 1) return e.y.data();
  const LowLatencyLayout layout = low_latency_layout(w.c.ranks(), w.c.tokens, w.c.hidden, w.c.experts());
  return reinterpret_cast<uint16_t *>(r.team.view.self + r.team.view.rdma + layout.zero_copy(r.team.next_stage));
}

// A receiver acknowledges a call: nothing of it may still be on its way.
void check_messages(const World &w, const InternodeLlParams &p, uint64_t epoch) {
  for (int source = 0; source < w.c.ranks() && w.lost < 0; ++source) {
    if (mine_at<HandshakeMessage>(p, handshake_at(p.session.team, epoch, source))->segment == 0) continue;
    const uint64_t word = *mine_at<uint64_t>(p, message_word_at(p, epoch, source));
    check("message with weights that is here", p.session.team.rank, source, is_from(word, epoch, source), 1);
  }
}

void add_combine(World &w, int me, size_t which, uint32_t phases, uint32_t ticket) {
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
    if (fill_combine(&p, r.team, params.get()) != DK_OK) wrong("combine is refused", r.team.view.rank, 0, 0, 0);
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

bool names(const Exchange &e, int topk, int token, int64_t expert) {
  for (int k = 0; k < topk; ++k)
    if (e.idx[static_cast<size_t>(token) * topk + k] == expert) return true;
  return false;
}

void check_row(const World &w, int me, Exchange &e, int expert, int64_t row, const uint16_t *x) {
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

void check_dispatch(World &w, int me, size_t which) {
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
uint16_t row_value(int source, int token, int expert, size_t data, int channel) {
  const uint32_t mixed =
      (static_cast<uint32_t>(data) * 977 + source * 131 + token * 17 + expert * 5 + channel + 1) * 2654435761u;
  const float small = static_cast<float>(mixed >> 16) / 131072.0f - 0.25f;
  return to_bf16((channel / kScaleChannels + expert) % 3 == 0 ? 64 * small : small);
}

void make_rows(World &w, int me, size_t which) {
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
std::vector<float> as_received(const std::vector<uint16_t> &row, int how) {
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
std::vector<uint16_t> expert_row(const World &w, int me, size_t data, int token, int64_t expert) {
  std::vector<uint16_t> row(static_cast<size_t>(w.c.hidden));
  for (int h = 0; h < w.c.hidden; ++h) row[h] = row_value(me, token, static_cast<int>(expert), data, h);
  return row;
}
void add(std::vector<float> &sum, const std::vector<float> &row, float weight) {
  for (size_t h = 0; h < sum.size(); ++h) sum[h] = fmaf(row[h], weight, sum[h]);
}

// Ranks keep the tables of the two newest dispatches.
bool has_table(const World &w, size_t which) { return which % w.ahead + 2 >= w.ahead; }

bool reached_by_stores(const World &w, int from, int to) {
  return w.nvlink || from == to || (!w.c.all_remote && from / w.c.peers == to / w.c.peers);
}
// Whether the experts' rank sums the rows of a rank's tokens.
bool is_summed(const World &w, int at, int me, size_t which, bool second) {
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
std::vector<Part> parts_of(const World &w, int me, size_t which, int token) {
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

std::vector<float> expected_sum(const World &w, int me, size_t which, int token) {
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

void check_combine(World &w, int me, size_t which) {
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
void check_puts(const World &w, int me, size_t which) {
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

// ---- Cases ----

void make_exchange(World &w, int form, int how, bool weighted) {
  const Case &c = w.c;
  const size_t rows = static_cast<size_t>(c.experts()) * c.tokens;
  for (Rank &r : w.ranks) {
    Exchange e{};
    e.num_tokens = pick(0, 3) == 0 ? pick(0, 1) * c.tokens : pick(1, c.tokens);
    e.form = form;
    e.how = how;
    e.data = r.exchanges.size();
    e.weighted = weighted;
    e.unreduced = pick(0, 7) == 0;
    const int style = pick(0, 3);  // any expert; mostly one expert; few entries; none
    const size_t named = static_cast<size_t>(e.num_tokens) * c.topk;
    for (size_t i = 0; i < named; ++i) {
      const bool none = style == 3 || (style == 2 && pick(0, 3) != 0);
      e.idx.push_back(none ? -1 : style == 1 && pick(0, 2) != 0 ? 1 : pick(-1, c.experts() - 1));
      e.weights.push_back(static_cast<float>(pick(-64, 64)) / 8);
    }
    e.idx.push_back(-1);
    e.weights.push_back(0);  // never empty
    e.asked = e.idx;
    e.x.resize(static_cast<size_t>(e.num_tokens) * c.hidden);
    for (int64_t i = 0; i < static_cast<int64_t>(e.num_tokens) * c.hidden; ++i)
      e.x.data()[i] = to_bf16(static_cast<float>(pick(-4096, 4096)) / 512);
    e.y.resize(rows * c.hidden);
    e.sums.resize(static_cast<size_t>(e.num_tokens) * c.hidden);
    e.recv_x.resize(rows * c.hidden * 2);
    e.scales.resize(rows * c.hidden / kScaleChannels);
    e.count.assign(c.local_experts, 0xee);
    e.statistics.assign(c.local_experts, 0);
    e.src_info.assign(rows, 0xee);
    e.range.assign(c.experts(), 0xee);
    r.exchanges.push_back(std::move(e));
  }
}

void add_meeting(World &w, int me) {
  Rank &r = w.ranks[me];
  auto until = std::make_shared<size_t>(0);
  host_step(r, [&w, until] {
    *until = (w.came / w.ranks.size() + 1) * w.ranks.size();
    ++w.came;
  });
  r.steps.push_back([&w, until] {
    while (w.came < *until) emulate::step();
  });
}

// Every rank lifts its masks, between two meetings of all ranks.
void add_return(World &w, int me) {
  Rank &r = w.ranks[me];
  add_meeting(w, me);
  r.steps.push_back([&w, &r] {
    MaskParams p{};
    p.session = {r.team.view, 1, w.timeout(), DK_OP_MASK, DK_PHASE_BOTH};
    p.what = DK_MASK_CLEAN;
    p.rank = -1;
    internode_mask_kernel(p);  // by the whole grid, which is harmless
  });
  add_meeting(w, me);
}

// A token's combine has a wrong index: its sum is NaN, the others are right.
void name_no_expert(World &w, int me, size_t which) {
  Exchange &e = w.ranks[me].exchanges[which];
  e.wrong = pick(0, e.num_tokens - 1);
  e.asked[static_cast<size_t>(e.wrong) * w.c.topk + pick(0, w.c.topk - 1)] = pick(0, 1) != 0 ? w.c.experts() : -2;
}

// Makes a table of a received dispatch wrong: a weight, or all of it, so that rows go by themselves.
void plant(const World &w, Rank &r) {
  for (ReceivedDispatch &received : r.state->received) {
    if (planted == Plant::rows) received.src_info = 0;
    if (received.src_info == 0 || planted == Plant::rows) continue;
    InternodeLlCombineParams c{};
    c.call.session.team = r.team.view;
    c.call.max_tokens = w.c.tokens;
    c.call.num_experts = w.c.experts();
    const dk_ll_dispatch_params p = dispatch_params(w, r.exchanges[0], DK_PHASE_BOTH, 0);
    (void)find_offsets(&p, r.team, 0, &c.call.at);
    for (int source = 0; source < w.c.ranks(); ++source)
      for (int n = 0; n < num_tokens_of(table_counts(c.call, static_cast<int>(received.number % kTables))[source]); ++n)
        table_token(c.call, static_cast<int>(received.number % kTables), source, n)[1] ^= 1ull << 62;
  }
}

void take_outputs(Exchange &e, Exchange &before) {
  e.src_info.swap(before.src_info);
  e.range.swap(before.range);
  std::fill(e.src_info.begin(), e.src_info.end(), 0xee);
  std::fill(e.range.begin(), e.range.end(), 0xee);
}

// Words that the network holds back for long, and what their queue pairs have after them.
void hold_words() {
  constexpr int kAsked = 300;
  std::map<std::pair<const void *, uint64_t>, int> asked;
  emulate::hold([asked](int from, int to, int, const void *word, uint64_t value) mutable {
    const uint64_t where = reinterpret_cast<uint64_t>(word) % 4096 / 8;
    if ((where + value * 7 + static_cast<uint64_t>(from) * 3 + static_cast<uint64_t>(to)) % 5 != 0) return false;
    return ++asked[{word, value}] < kAsked;
  });
}

// Calls one after the other, whole or in halves; with overlap a dispatch is sent before the previous combine is
// received, as with two batches.
void add_steps(World &w, int me, int rounds, bool halves, bool overlap, bool wrong) {
  Rank &r = w.ranks[me];
  const uint32_t send = halves ? DK_PHASE_SEND : DK_PHASE_BOTH;
  const auto dispatch = [&](size_t which) {
    add_dispatch(w, me, which, send, which % 2);
    if (halves) add_dispatch(w, me, which, DK_PHASE_RECV, which % 2);
    host_step(r, [&w, me, which] { check_dispatch(w, me, which); });
  };
  const auto combine = [&](size_t which) {
    host_step(r, [&w, me, which] { make_rows(w, me, which); });
    add_combine(w, me, which, send, 2 + which % 2);
    host_step(r, [&w, me, which] { check_puts(w, me, which); });
    if (halves) add_combine(w, me, which, DK_PHASE_RECV, 2 + which % 2);
    host_step(r, [&w, me, which] { check_combine(w, me, which); });
  };
  for (size_t first = 0; w.ahead > 1 && first < static_cast<size_t>(rounds); first += w.ahead) {
    for (size_t i = 0; i < w.ahead; ++i) dispatch(first + i);
    for (size_t i = 0; i < w.ahead; ++i) combine(first + i);
  }
  for (int i = 0; w.ahead == 1 && i < rounds; ++i) {
    const size_t which = static_cast<size_t>(i);
    if (which == w.back_from) add_return(w, me);
    if (w.misses(me, which)) continue;
    const auto finish_before = [&, before = which - 1] {
      add_combine(w, me, before, DK_PHASE_RECV, 2 + before % 2);
      host_step(r, [&w, me, before] { check_combine(w, me, before); });
    };
    if (w.recycled && i > 0) host_step(r, [&r, which] { take_outputs(r.exchanges[which], r.exchanges[which - 1]); });
    add_dispatch(w, me, which, send, which % 2);
    if (overlap && i > 0) finish_before();
    if (halves) add_dispatch(w, me, which, DK_PHASE_RECV, which % 2);
    host_step(r, [&w, me, which] {
      check_dispatch(w, me, which);
      make_rows(w, me, which);
    });
    if (which + 1 == static_cast<size_t>(rounds) && wrong && w.ranks[me].exchanges[which].num_tokens > 0)
      name_no_expert(w, me, which);
    if (planted != Plant::none) host_step(r, [&w, &r] { plant(w, r); });
    add_combine(w, me, which, send, 2 + which % 2);
    host_step(r, [&w, me, which] { check_puts(w, me, which); });
    if (overlap && i + 1 < rounds) continue;
    if (halves) add_combine(w, me, which, DK_PHASE_RECV, 2 + which % 2);
    host_step(r, [&w, me, which] { check_combine(w, me, which); });
    if (!w.again) continue;
    host_step(r, [&w, &r, me, which] {
      Exchange &e = r.exchanges[which];
      e.data += 100;
      e.second = true;
      make_rows(w, me, which);
      for (float &weight : e.weights) weight += e.weighted && e.room ? 0 : 1;  // each combine may have other weights
    });
    add_combine(w, me, which, DK_PHASE_BOTH, 2);
    host_step(r, [&w, me, which] { check_puts(w, me, which); });
    host_step(r, [&w, me, which] { check_combine(w, me, which); });
  }
}

void run_case(uint64_t seed) {
  random_number.seed(seed);
  Case c{pick(2, 3), pick(1, 2), pick(1, 3), kScaleChannels * pick(1, 5), pick(1, 9), pick(1, 9), pick(0, 3) == 0};
  if (pick(0, 3) == 0) {
    c.nodes = 1;
    c.peers = 3;
    c.all_remote = true;
  }
  if (pick(0, 15) == 0) {  // more pieces of a sum than a thread keeps
    c.hidden = kScaleChannels * pick(63, 70);
    c.peers = c.nodes > 1 ? 1 : 2;
    c.tokens = min(c.tokens, 2);
  }
  if (seed % 144 == 7) c = {2, 1, 2, kScaleChannels, 2, kLlThreads + 9, false};  // more tokens than a block has threads
  World w(c);
  const bool halves = pick(0, 2) != 0, overlap = halves && pick(0, 1) != 0, fences_alone = pick(0, 1) != 0;
  w.recycled = seed % 8 >= 5 && !overlap;
  const int mixed = pick(0, 1);  // every second rank makes whole calls
  const int rounds = 4;
  w.replayed = pick(0, 3) == 0;
  w.again = !overlap && pick(0, 2) == 0;
  if (!overlap && !w.again && planted == Plant::none && pick(0, 2) == 0) w.ahead = pick(0, 2) == 0 ? 4 : 2;
  for (int me = 0; me < c.ranks(); ++me) w.halves.push_back(halves && (overlap || mixed == 0 || me % 2 == 0));
  const int style = planted != Plant::none ? 0 : pick(0, 2);  // all dispatches have weights, some, none
  for (int i = 0; i < rounds; ++i)
    make_exchange(w, pick(0, c.hidden % 512 == 0 ? 3 : 2), w.replayed ? 2 * pick(0, 1) : pick(0, 2),
                  style == 0 || (style == 1 && pick(0, 1) != 0));
  std::vector<uint8_t *> blocks;
  for (Rank &r : w.ranks) blocks.push_back(aligned(r.block));
  w.nvlink = seed % 4 >= 2;
  emulate::start_network({seed, fences_alone}, blocks);
  emulate::puts_since(0);
  const bool held = seed % 3 == 0;
  if (held) hold_words();
  const bool keeps = seed / 4 % 2 == 1;
  for (Rank &r : w.ranks) {
    for (int to = 0; to < c.ranks(); ++to)
      r.blocks.push_back(reached_by_stores(w, r.team.view.rank, to) ? blocks[static_cast<size_t>(to)] : nullptr);
    r.team.blocks = r.blocks.data();
    r.team.max_shared = keeps ? sizeof deep_ep::internode_ll::calls : 0;
  }
  // A rank that pauses while the others go on, for less than the time limit.
  int late = pick(0, 2) == 0 ? pick(0, c.ranks() - 1) : -1;
  int64_t looks = 0;
  const int64_t pause = pick(0, 200), resume = pause + pick(1, 1000);
  const auto life = [&late, &looks, pause, resume](int rank) {
    if (rank != late) return emulate::Life::runs;
    return ++looks < pause || looks >= resume ? emulate::Life::runs : emulate::Life::pauses;
  };
  emulate::watch(life, [&w](int from, int to, const void *word, const void *) {
    const Rank &r = w.ranks[from];
    if (r.on_put) r.on_put(to, static_cast<uint64_t>(static_cast<const uint8_t *>(word) - r.team.view.self));
  });
  if (pick(0, 3) == 0 && !overlap &&
      w.ahead == 1) {  // with overlap, a combine of the last round would never be received
    w.lost = pick(0, c.ranks() - 1);
    late = -1;  // it would be masked
    w.lost_from = static_cast<size_t>(pick(1, rounds - 1));
    if (pick(0, 1) != 0) w.back_from = w.lost_from + 1;
    for (Rank &r : w.ranks) r.team.view.flags |= DK_TEAM_SHRINK;
  }
  const bool wrong = pick(0, 3) == 0;
  for (int me = 0; me < c.ranks(); ++me) add_steps(w, me, rounds, w.halves[me], overlap, wrong && pick(0, 1) != 0);
  emulate::run(
      c.ranks(), [&](int rank) { return w.ranks[rank].grid; }, kLlThreads, [&](int rank) { run_steps(w.ranks[rank]); });
  emulate::hold(nullptr);
  // A mask that is lifted is a put.
  if (w.nvlink && w.lost < 0) check("puts over NVLink", -1, -1, static_cast<int64_t>(emulate::puts_since(0)), 0);
  emulate::stop_network();
  for (int me = 0; me < c.ranks(); ++me)
    for (int r = 0; r < c.ranks(); ++r)
      check("mask", me, r, w.ranks[me].scratch->masked[r],
            r == w.lost && me != r && w.back_from >= static_cast<size_t>(rounds));
  emulate::watch(nullptr, nullptr);
  printf("case %llu: %d nodes of %d%s%s, %d local experts, hidden %d, top-%d, B %d%s%s%s%s%s%s: ok\n",
         static_cast<unsigned long long>(seed), c.nodes, c.peers, c.all_remote ? ", all remote" : "",
         w.nvlink ? ", over NVLink" : "", c.local_experts, c.hidden, c.topk, c.tokens,
         overlap       ? ", overlapping"
         : w.ahead > 1 ? ", dispatches ahead"
         : halves      ? ", halves"
                       : "",
         w.lost < 0                                  ? ""
         : w.back_from < static_cast<size_t>(rounds) ? ", a rank is lost and comes back"
                                                     : ", a rank is lost",
         late >= 0 && w.lost < 0 && looks >= resume ? ", a rank is late" : "",
         style == 0   ? ", with weights"
         : style == 1 ? ", some with weights"
                      : "",
         w.recycled ? ", recycled outputs" : "", held ? ", held words" : "");
  fflush(stdout);
}

}  // namespace

int main(int argc, char **argv) {
  const std::string what = argc > 2 ? argv[1] : "";
  if (what == "planted-weight" || what == "planted-rows") {
    planted = what == "planted-weight" ? Plant::weight : Plant::rows;
    run_case(strtoull(argv[2], nullptr, 10));
    return 0;
  }
  const uint64_t first = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1;
  const int cases = argc > 2 ? atoi(argv[2]) : 3;
  for (int i = 0; i < cases; ++i) run_case(first + static_cast<uint64_t>(i));
  return 0;
}
