// lost_ranks.h - for tests of kernels of teams that shrink across nodes: a rank that is masked, dies or is late, and
// comes back. A World has the ranks, and says who takes part.
#pragma once
#include "checks.h"
#include "transport_on_host.h"

#include "internode/normal/shrink_notify.cuh"

using namespace deepep;
using namespace deepep::internode;

template <class World>
void barrier(World &w) {
  for (auto &r : w.ranks) r.grid = 1;
  w.launch("barrier", 256, [&](int me) {
    const auto &r = w.ranks[me];
    ShrinkBarrierParams p{w.session(me, DK_OP_BARRIER), r.internode, r.shrink, 1};
    internode_shrinking_barrier_kernel(p);
  });
}

template <class World>
void mask(World &w, int32_t what, int rank, const std::vector<bool> &by) {
  const std::vector<bool> before = w.in;
  w.in = by;
  for (auto &r : w.ranks) r.grid = 1;
  w.launch("mask", 128, [&](int me) {
    MaskParams m{};
    m.session = w.session(me, DK_OP_MASK);
    m.what = what;
    m.rank = rank;
    m.value = 1;
    ShrinkMaskParams p{m, w.ranks[me].internode, w.ranks[me].shrink};
    internode_shrinking_mask_kernel(p);
  });
  w.in = before;
}

// All that take part have masked those that do not, and none else.
template <class World>
void check_masks(const World &w) {
  for (int me = 0; me < w.c.ranks(); ++me)
    for (int r = 0; w.in[me] && r < w.c.ranks(); ++r)
      check((w.ranks[me].scratch->masked[r] != 0) == !w.in[r], "masked", me, r, w.ranks[me].scratch->masked[r],
            !w.in[r]);
}

// Every rank lifts its masks, in any order, and they meet in a barrier.
template <class World>
void take_back(World &w, int gone) {
  w.lost = -1;
  w.in[gone] = true;
  w.ranks[gone].scratch->sticky = w.ranks[gone].scratch->failed = 0;
  for (int i = 0, first = pick(0, w.c.ranks() - 1); i < w.c.ranks(); ++i) {
    std::vector<bool> one(static_cast<size_t>(w.c.ranks()), false);
    const int by = (first + i) % w.c.ranks();
    if (w.ranks[gone].status.dead[by] != 0) continue;
    one[by] = true;
    mask(w, DK_MASK_CLEAN, 0, one);
  }
  (void)w.refusal(gone);
  barrier(w);
  check_masks(w);
}

template <class World>
void expect_left_out(World &w, int gone) {
  const dk_failure f = w.refusal(gone);
  check(w.ranks[gone].scratch->sticky == 0, "failure of a rank that is left out", gone, w.ranks[gone].status.failure.op,
        w.ranks[gone].scratch->sticky, 0);
  check(f.code == DK_ESTATE && f.field == DK_FIELD_MASKED && f.peer >= 0 && w.in[f.peer], "refusal of a rank left out",
        gone, f.op, f.code, DK_ESTATE);
}

// How a rank is lost: from so many looks at it on; late: only for a while; known: the host tells that it is dead, after
// as many looks again.
struct Loss {
  int rank;
  int64_t after, looks = 0;
  bool late, known;
};
template <class World>
void lose_rank(World &w, Loss &loss) {
  w.lost = loss.rank;
  const int64_t pause = static_cast<int64_t>(w.timeout_ns / 1000);  // turns of all blocks: more than every limit
  w.watch([&w, &loss, pause](int rank) {
    if (rank != loss.rank) {
      if (loss.known && loss.looks > loss.after)
        for (auto &r : w.ranks) r.status.dead[loss.rank] = 1;
      return emulate::Life::runs;
    }
    const int64_t looks = ++loss.looks;
    if (looks <= loss.after) return emulate::Life::runs;
    if (!loss.late) return emulate::Life::is_dead;
    return looks < loss.after + 8 * pause ? emulate::Life::pauses : emulate::Life::runs;
  });
}

enum Moment { kNotify, kDispatch, kCached, kCombine, kBarrier, kNumMoments };

// lose_in_call(w, moment, loss) makes the call; round_trip(w) one of each.
template <class World, class LoseInCall, class RoundTrip>
void lost_in_a_call(World &w, LoseInCall lose_in_call, RoundTrip round_trip) {
  const Moment moment = static_cast<Moment>(pick(0, kNumMoments - 1));
  Loss loss{pick(0, w.c.ranks() - 1), pick(0, 3) == 0 ? 0 : pick(1, toss() ? 12 : 120), 0, toss(), toss()};
  if (loss.late) loss.known = false;
  w.timeout_ns = 12000000;
  lose_in_call(w, moment, loss);
  const bool was_lost = loss.looks > loss.after;  // else the call had ended before
  if (was_lost && !loss.late) {
    w.in[loss.rank] = false;
    w.lost = -1;
  }
  // The next call finds out who is lost, if that one has not. A late rank may have come in time.
  if (was_lost && loss.late) {
    bool masked = false;
    for (int r = 0; r < w.c.ranks(); ++r) masked |= r != loss.rank && w.ranks[r].scratch->masked[loss.rank] != 0;
    if (masked) {
      w.in[loss.rank] = false;
      (void)w.refusal(loss.rank);
      barrier(w);  // the late rank takes part in no call any more
      expect_left_out(w, loss.rank);
    }
  }
  w.lost = -1;
  w.timeout_ns = 40000000;
  if (!w.in[loss.rank]) barrier(w);
  check_masks(w);
  round_trip(w);
  if (loss.late && !w.in[loss.rank]) {
    take_back(w, loss.rank);
    round_trip(w);
  }
  const char *const names[] = {"notify", "dispatch", "cached dispatch", "combine", "barrier"};
  printf("%d x %d ranks: rank %d %s in %s after %lld turns%s: ok\n", w.c.nodes, w.c.peers, loss.rank,
         !was_lost   ? "is there"
         : loss.late ? "late"
                     : "dies",
         names[moment], static_cast<long long>(loss.after), loss.known ? ", which the host tells" : "");
}
