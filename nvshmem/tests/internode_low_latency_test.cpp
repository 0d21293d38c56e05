// internode_low_latency_test.cpp - runs the kernels of low latency across nodes on the host (kernels/tests/emulate).
//   internode_low_latency_test [SEED [CASES]]
//   internode_low_latency_test planted-weight|planted-rows SEED    a wrong table, which the checks must notice
// Random groups, shapes, routings and formats. Each rank runs its steps as far ahead of the others as the kernels let
// it; the network delays every put, reads its source at delivery, and keeps only the order that kernels rely on.
#include "low_latency_cases.h"

#include <algorithm>
#include <string>

using namespace deepep;
using namespace deepep::internode;

namespace {

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
  const std::vector<uint8_t *> blocks = blocks_of(w.ranks);
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
