// internode_shrink_test.cpp - runs the kernels of normal mode of teams that shrink across nodes on the host
// (kernels/tests/emulate): a rank that is masked, absent, dies or is late at any moment of any call, and comes back.
//   internode_shrink_test [SEED [CASES]]
//   internode_shrink_test told|stay SEED
//   internode_shrink_test heads SEED
//   internode_shrink_test dump FILE SEED NODES PEERS LOST
// The network delays every put.
#include "shrink_cases.h"

#include <set>

namespace deep_ep::internode {
thread_local uint8_t shared[32 * 1024];  // dynamic shared memory of a block
}
using namespace deepep;
using namespace deepep::internode;

namespace {

void round_trip(World &w) {
  make_inputs(w);
  run_notify(w);
  check_notify(w);
  run_dispatch(w, false, toss() ? pick(0, 9) : -1);
  check_dispatch(w, false);
  const bool biased = toss();
  run_combine(w, biased);
  check_combine(w, biased);
  run_dispatch(w, true);
  check_dispatch(w, true);
}

// The call in which a rank is lost. Survivors' results are whole but for the lost rank's rows.
void lose_in_call(World &w, Moment moment, Loss &loss) {
  const bool biased = toss();
  make_inputs(w);
  if (moment != kNotify) run_notify(w);
  if (moment == kCached || moment == kCombine) run_dispatch(w, false);
  lose_rank(w, loss);
  if (moment == kNotify) run_notify(w);
  if (moment == kDispatch || moment == kCached) run_dispatch(w, moment == kCached);
  if (moment == kCombine) run_combine(w, biased);
  if (moment == kBarrier) barrier(w);
  w.lives_on();
  if (moment == kDispatch || moment == kCached) check_dispatch(w, moment == kCached, loss.rank);
  if (moment == kCombine) check_combine(w, biased, loss.rank);
}

// The caller of one rank masks another: all leave it out. A handle of before has rows of zeros for it.
void masked_by_caller(World &w) {
  const int gone = pick(0, w.c.ranks() - 1), by = (gone + pick(1, w.c.ranks() - 1)) % w.c.ranks();
  make_inputs(w);
  run_notify(w);
  check_notify(w);
  run_dispatch(w, false);
  std::vector<bool> one(w.in.size(), false);
  one[by] = true;
  mask(w, DK_MASK_UPDATE, gone, one);
  w.lost = gone;
  w.in[gone] = false;
  run_dispatch(w, true);
  expect_left_out(w, gone);
  w.lost = -1;
  check_masks(w);
  check_dispatch(w, true, gone, true);
  run_combine(w, false);
  check_combine(w, false, gone, true);
  round_trip(w);
  take_back(w, gone);
  round_trip(w);
  printf("%d x %d ranks: rank %d is masked by rank %d and comes back: ok\n", w.c.nodes, w.c.peers, gone, by);
}

// While one rank is dead another one is late for a dispatch, and what block 1 tells it arrives only after all ranks
// have begun to lift their masks: it stands behind what they tell it then.
void told_late(World &w) {
  const int dead = pick(0, w.c.ranks() - 1), gone = (dead + pick(1, w.c.ranks() - 1)) % w.c.ranks();
  for (Rank &r : w.ranks) r.status.dead[dead] = 1;
  w.in[dead] = false;
  barrier(w);
  make_inputs(w);
  run_notify(w);
  uint64_t until = ~0ull;
  std::set<std::pair<int, int>> late;
  emulate::hold([&](int from, int to, int block, const void *word, uint64_t value) {
    const TeamView &team = w.ranks[to].team;
    const bool tells = value != 0 && word == team.notice(team.rank, from);
    if (!tells || block == 0 || emulate::now_ns() >= until) return false;
    late.insert({from, to});
    return true;
  });
  w.timeout_ns = 12000000;
  w.lost = gone;
  const uint64_t agreed = w.ranks[gone].scratch->agreed;
  int64_t pause = 8 * static_cast<int64_t>(w.timeout_ns / 1000);  // turns, once it is agreed who takes part
  w.watch([&w, &pause, gone, agreed](int rank) {
    if (rank != gone || w.ranks[gone].scratch->agreed == agreed || pause == 0) return emulate::Life::runs;
    --pause;
    return emulate::Life::pauses;
  });
  run_dispatch(w, false, -1, 2);
  w.lives_on();
  w.lost = -1;
  w.in[gone] = false;
  (void)w.refusal(gone);
  w.timeout_ns = 40000000;
  barrier(w);
  check_masks(w);
  until = emulate::now_ns() + 8000000;
  take_back(w, gone);
  emulate::hold(nullptr);
  round_trip(w);
  printf("%d x %d ranks: rank %d is dead, rank %d comes back, told late by %zu: ok\n", w.c.nodes, w.c.peers, dead, gone,
         late.size());
}

// A rank's puts to other nodes stay where they are from some moment of a dispatch's rows on, while its kernels run and
// its stores arrive, as if its process had been stopped. Ranks of other nodes wait for its rows; those of its node have
// them, and wait for those ranks in the combine that follows. None but the rank itself is left out.
void puts_stay(World &w) {
  const int gone = pick(0, w.c.ranks() - 1);
  make_inputs(w);
  run_notify(w);
  prepare_dispatch(w, false, -1, 1);
  prepare_combine(w);
  const uint64_t agreed = w.ranks[gone].scratch->agreed;
  int go = pick(0, 20), held = 0;
  emulate::hold([&](int from, int, int, const void *, uint64_t) {
    if (from != gone || w.ranks[gone].scratch->agreed == agreed || --go >= 0) return false;
    ++held;
    return true;
  });
  std::vector<uint64_t> before;
  std::vector<int> pauses;  // turns between a rank's two kernels
  for (const Rank &r : w.ranks) {
    before.push_back(r.scratch->epoch);
    pauses.push_back(r.internode.node == w.ranks[gone].internode.node ? 0 : pick(0, 1200));
  }
  w.watch([&](int rank) {
    if (w.ranks[rank].scratch->epoch == before[rank] || pauses[rank] == 0) return emulate::Life::runs;
    --pauses[rank];
    return emulate::Life::pauses;
  });
  w.timeout_ns = 12000000;
  w.lost = gone;
  w.combine_ahead = 1;
  static_assert(ShrinkDispatchRoles::kThreads == ShrinkCombineRoles::kThreads, "one launch has both");
  w.launch("dispatch and combine", ShrinkDispatchRoles::kThreads, [&](int me) {
    dispatch(w, me, false);
    __syncthreads();  // the combine sees all that the dispatch has written
    combine(w, me, false);
  });
  w.combine_ahead = 0;
  ++w.call;
  w.lives_on();
  check_dispatch(w, false, gone);
  check_combine(w, false, gone);
  emulate::hold(nullptr);
  for (int r = 0; r < w.c.ranks(); ++r) w.in[gone] = w.in[gone] && (r == gone || w.ranks[r].scratch->masked[gone] == 0);
  (void)w.refusal(gone);
  barrier(w);
  w.lost = -1;
  check_masks(w);
  w.timeout_ns = 40000000;
  if (!w.in[gone]) {
    expect_left_out(w, gone);
    round_trip(w);
    take_back(w, gone);
  }
  round_trip(w);
  printf("%d x %d ranks: rank %d's puts stay, %s: ok\n", w.c.nodes, w.c.peers, gone, held != 0 ? "some" : "none");
}

// The caller of one rank has taken a row from send_head, so that no sum makes room for the next ones. Both ranks end.
void changed_heads(uint64_t seed) {
  const Case c{2, 1, 64, 1, 1, 0, 8, 512, 512};  // one place for each rank
  World w(c);
  emulate::start_network({seed, toss()}, w.ranks, w.blocks());
  do make_inputs(w);
  while (w.ranks[0].per_rank[1] < 3);
  run_notify(w);
  run_dispatch(w, false);
  Rank &odd = w.ranks[0];
  for (size_t i = 1; i < odd.head.size(); i += 2)
    if (odd.head[i] == 0) odd.head[i] = -1;
  w.timeout_ns = 2000000;
  w.lost = 0;
  run_combine(w, false);
  emulate::stop_network();
  const bool failed = odd.scratch->sticky != 0;
  const dk_failure f = failed ? odd.status.failure : w.refusal(0);
  check(f.code == (failed ? DK_ETIMEOUT : DK_ESTATE) && f.peer == (failed ? 0 : 1), "end", 0, f.peer, f.code, 0);
  check(w.ranks[1].scratch->masked[0] == 1, "masked", 1, 0, w.ranks[1].scratch->masked[0], 1);
  printf("changed heads: ok\n");
}

// roomy: nodes of several ranks, and a place for each row.
Case random_case(bool told, bool roomy) {
  static const int shapes[][2] = {{2, 2}, {4, 1}, {3, 2}, {2, 3}, {3, 1}, {2, 1}},
                   several[][2] = {{2, 2}, {3, 2}, {2, 3}};
  const auto &shape = roomy ? several[pick(0, 2)] : shapes[pick(0, told ? 4 : 5)];
  const int hidden = told ? 8 * pick(1, 40) : pick_hidden();  // the tests of masks that are told late know their seeds
  Case c{shape[0], shape[1], hidden, pick(1, 4), pick(1, 3), pick(0, 3), 8, 0, 0};
  const uint64_t row = align_up<uint64_t>(2 * c.hidden + 4 * (1 + 2 * c.topk + c.num_scales), 128);
  const int rows = roomy ? 2 : pick(0, 2);  // of a ring: one; a few; as many as are sent
  c.nvl = align_up<uint64_t>(c.ranks() * row * (rows == 0 ? 1 : rows == 1 ? 5 : 128) + 8 * pick(0, 7), 128);
  c.rdma = c.ranks() * row * (rows == 0 ? pick(1, 3) : rows == 1 ? 5 : roomy ? 128 : pick(4, 128)) + 8 * pick(0, 7);
  return c;
}

int dump(char **words) {
  random_number.seed(strtoull(words[1], nullptr, 10));
  const int lost = atoi(words[4]);
  Case c{atoi(words[2]), atoi(words[3]), 16 * pick(1, 9), pick(2, 4), pick(1, 3), 0, 8, 1 << 17, 1 << 17};
  World w(c);
  emulate::start_network({random_number(), toss()}, w.ranks, w.blocks());
  make_inputs(w);
  if (lost >= 0) {
    std::vector<bool> all(w.in.size(), true);
    w.in[lost] = all[lost] = false;
    mask(w, DK_MASK_UPDATE, lost, all);
  }
  run_notify(w);
  run_dispatch(w, false);
  std::vector<std::vector<uint32_t>> recv_weights;  // combine gets others
  for (const Rank &r : w.ranks) recv_weights.push_back(r.recv_weights);
  run_combine(w, false);
  emulate::stop_network();
  FILE *file = fopen(words[0], "wb");
  if (file == nullptr) return 1;
  fprintf(file, "%d %d %d %d\n", c.hidden, c.topk, c.experts(), lost);
  for (int me = 0; me < c.ranks(); ++me) {
    const Rank &r = w.ranks[me];
    dump_array(file, "x", me, r.x);
    dump_array(file, "topk_idx", me, r.idx);
    dump_array(file, "topk_weights", me, r.weights);
    dump_array(file, "recv_x", me, r.recv_x);
    dump_array(file, "recv_topk_idx", me, r.recv_idx);
    dump_array(file, "recv_topk_weights", me, recv_weights[me]);
    dump_array(file, "src", me, r.src);
    dump_array(file, "y", me, r.y);
    dump_array(file, "y_weights", me, r.recv_weights);
    dump_array(file, "combined", me, r.combined);
    dump_array(file, "combined_weights", me, r.sums);
  }
  return fclose(file) == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc == 7 && strcmp(argv[1], "dump") == 0) return dump(argv + 2);
  if (argc == 3 && strcmp(argv[1], "heads") == 0) {
    random_number.seed(strtoull(argv[2], nullptr, 10));
    changed_heads(random_number());
    return 0;
  }
  const bool told = argc == 3 && strcmp(argv[1], "told") == 0, stay = argc == 3 && strcmp(argv[1], "stay") == 0;
  const uint64_t seed = argc > 1 ? strtoull(argv[told || stay ? 2 : 1], nullptr, 10) : 1;
  const int cases = told || stay ? 1 : argc > 2 ? atoi(argv[2]) : 4;
  for (int i = 0; i < cases; ++i) {
    random_number.seed(seed + static_cast<uint64_t>(i));
    World w(random_case(told, stay));
    w.timeout_ns = 40000000;
    const emulate::Network how{random_number(), !told && toss(), !told && !stay && pick(0, 2) == 0};
    emulate::start_network(how, w.ranks, w.blocks());
    round_trip(w);
    if (told)
      told_late(w);
    else if (stay)
      puts_stay(w);
    else if (pick(0, 2) == 0)
      masked_by_caller(w);
    else
      lost_in_a_call(w, lose_in_call, round_trip);
    w.lives_on();
    emulate::stop_network();
  }
}
