// internode_routed_shrink_test.cpp - runs the kernels of calls with a routing of teams that shrink across nodes on the
// host (kernels/tests/emulate): a rank that is masked, absent, dies or is late at any moment of any call, and comes
// back.
//   internode_routed_shrink_test [SEED [CASES]]
//   internode_routed_shrink_test dump FILE SEED NODES PEERS EXPAND FLAGS LOST
// The latter writes inputs and outputs of one case, where all ranks have masked LOST (-1: none), for a comparison with
// the CPU engine. The network delays every put. Sums are compared bit for bit with those of nodes that add their own
// ranks' rows.
#include "routed_cases.h"

#include "internode/normal/shrink_notify.cuh"
#include "internode/routed/shrink_combine.cuh"
#include "internode/routed/shrink_dispatch.cuh"
#include "internode/routed/shrink_notify.cuh"
#include "lost_ranks.h"

namespace deep_ep::internode {
thread_local uint8_t shared[64 * 1024];  // dynamic shared memory of a block
}
using namespace deepep;
using namespace deepep::internode;

namespace {

// ---- The kernels ----------------------------------------------------------------------------------------------------

void run_notify(World &w, int me) {
  Rank &r = w.ranks[me];
  RoutedShrinkNotifyParams p{{{{notify_params(w, r), w.session(me, DK_OP_NOTIFY)}}, r.internode}, r.shrink};
  p.n.warps = kNotifyThreads / kWarp;
  p.n.share = ceil_div(r.tokens, r.grid);
  deep_ep::internode::notify_routed_shrinking(p);
}
void notify(World &w) {
  notify(w, [&](int me) { run_notify(w, me); });
}

template <bool kExpand>
void run_dispatch(World &w, int me, bool cached) {
  const Rank &r = w.ranks[me];
  dk_dispatch_params a = dispatch_args(w, me, cached);
  a.recv_src_metadata = handle_to(r.meta.data());  // copies of experts do not go with masks
  DispatchParams d{a, w.session(me, DK_OP_DISPATCH)};
  d.row_bytes = 2 * w.c.hidden;
  d.meta = meta_shape(d);
  RoutedShrinkDispatchParams<kExpand> p{{d, r.internode, r.shrink, {}}};
  p.rings = pair_rings(r.team, pair_bytes(p));
  deep_ep::internode::dispatch_routed_shrinking<kExpand>(p);
}
void dispatch(World &w, bool cached, int gone = -1, bool sure = false) {
  dispatch(
      w, cached, ShrinkDispatchRoles::kThreads,
      [&](int me) { w.c.expand ? run_dispatch<true>(w, me, cached) : run_dispatch<false>(w, me, cached); }, gone, sure);
}

void run_combine(World &w, int me) {
  const Case &c = w.c;
  const Rank &r = w.ranks[me];
  CombineParams k{combine_args(w, me), w.session(me, DK_OP_COMBINE), 2u * static_cast<uint32_t>(c.hidden)};
  k.slot_bytes = k.row_bytes * (sends_choices(k) ? c.topk : 1);
  const RoutedShrinkCombineParams p{{k, r.internode, r.shrink, pair_rings(r.team, record_bytes_of(k))}};
  c.expand ? deep_ep::internode::combine_routed_shrinking<true>(p)
           : deep_ep::internode::combine_routed_shrinking<false>(p);
}
void combine(World &w, int gone = -1, bool sure = false) {
  combine(w, ShrinkCombineRoles::kThreads, [&](int me) { run_combine(w, me); }, gone, sure);
}

void round_trip(World &w) {
  make_inputs(w);
  notify(w);
  dispatch(w, false);
  combine(w);
  fill_payload(w);
  dispatch(w, true);
}

// The call in which a rank is lost. Survivors' results are whole but for the lost rank's rows.
void lose_in_call(World &w, Moment moment, Loss &loss) {
  make_inputs(w);
  if (moment != kNotify) notify(w);
  if (moment == kCached || moment == kCombine) dispatch(w, false);
  lose_rank(w, loss);
  if (moment == kNotify) {
    for (Rank &r : w.ranks) r.grid = 2;
    w.launch("notify", kNotifyThreads, [&](int me) { run_notify(w, me); });
  }
  if (moment == kDispatch || moment == kCached) dispatch(w, moment == kCached, loss.rank);
  if (moment == kCombine) combine(w, loss.rank);
  if (moment == kBarrier) barrier(w);
  w.lives_on();
}

// The caller of one rank masks another: all leave it out. In a handle of before its rows are zeros.
void masked_by_caller(World &w) {
  const int gone = pick(0, w.c.ranks() - 1), by = (gone + pick(1, w.c.ranks() - 1)) % w.c.ranks();
  make_inputs(w);
  notify(w);
  dispatch(w, false);
  std::vector<bool> one(w.in.size(), false);
  one[by] = true;
  mask(w, DK_MASK_UPDATE, gone, one);
  w.lost = gone;
  w.in[gone] = false;
  dispatch(w, true, gone, true);
  expect_left_out(w, gone);
  w.lost = -1;
  check_masks(w);
  combine(w, gone, true);
  round_trip(w);
  take_back(w, gone);
  round_trip(w);
  printf("%d x %d ranks: rank %d is masked by rank %d and comes back: ok\n", w.c.nodes, w.c.peers, gone, by);
}

// What a caller has changed in a handle before combine: its rank refuses the call, the others' sums have what it sends,
// and nobody is masked.
void changed_handle(World &w) {
  const int odd = pick(0, w.c.ranks() - 1);
  const bool slot = w.c.expand && toss();
  Rank &r = w.ranks[odd];
  do make_inputs(w);
  while (r.tokens == 0 || r.arrivals.empty());
  notify(w);
  dispatch(w, false);
  if (slot)
    r.meta[2] = r.room;
  else
    r.idx32[0] = static_cast<int32_t>(r.idx[0] = w.c.experts());
  w.lost = odd;
  make_terms(w);
  w.launch("combine", ShrinkCombineRoles::kThreads, [&](int me) { run_combine(w, me); });
  for (int me = 0; !slot && me < w.c.ranks(); ++me)
    if (me != odd) check_combine(w, me);
  const dk_failure f = w.refusal(odd);
  expect("code of a refusal", odd, slot, f.code, DK_EINVAL);
  expect("rank that it names", odd, slot, f.peer, odd);
  expect("field", odd, slot, f.field, slot ? DK_FIELD_SRC_METADATA : DK_FIELD_TOPK_IDX);
  for (const uint16_t v : r.combined) expect("a refused sum", odd, slot, v, 0x7fc0);
  w.lost = -1;
  check_masks(w);
  round_trip(w);
  printf("%d x %d ranks: rank %d has changed its %s: ok\n", w.c.nodes, w.c.peers, odd, slot ? "metadata" : "choices");
}

Case random_case() {
  static const int shapes[][2] = {{2, 2}, {4, 1}, {3, 2}, {2, 3}, {3, 1}, {2, 1}};
  const auto &shape = shapes[pick(0, 5)];
  Case c;
  c.shrinks = true;
  c.nodes = shape[0];
  c.peers = shape[1];
  c.hidden = pick_hidden();
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
  const uint64_t together = c.expand && (c.combine_flags & DK_COMBINE_UNREDUCED) != 0 ? c.topk : 1,
                 row = align_up<uint64_t>(2 * c.hidden * together + 4 * (4 + 3 * c.topk + c.num_scales), 128);
  const int rows = pick(0, 2);  // of a ring: one; a few; as many as are sent
  c.nvl = align_up<uint64_t>(c.ranks() * row * (rows == 0 ? 1 : rows == 1 ? 5 : 128) + 8 * pick(0, 7), 128);
  c.rdma = c.ranks() * row * (rows == 0 ? pick(1, 3) : rows == 1 ? 5 : pick(4, 128)) + 8 * pick(0, 7);
  return c;
}

int dump(char **words) {
  Case c = dumped_case(words);
  c.shrinks = true;
  World w(c);
  const int lost = atoi(words[6]);
  w.timeout_ns = 40000000;
  emulate::start_network({random_number(), toss()}, w.ranks, w.blocks());
  if (lost >= 0) {
    std::vector<bool> all(w.in.size(), true);
    w.in[lost] = all[lost] = false;
    mask(w, DK_MASK_UPDATE, lost, all);
  }
  make_inputs(w);
  notify(w);
  dispatch(w, false);
  combine(w);
  emulate::stop_network();
  return dump_world(words[0], w, lost) ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc == 9 && strcmp(argv[1], "dump") == 0) return dump(argv + 2);
  const uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1;
  const int cases = argc > 2 ? atoi(argv[2]) : 4;
  for (int i = 0; i < cases; ++i) {
    random_number.seed(seed + static_cast<uint64_t>(i));
    World w(random_case());
    w.timeout_ns = 40000000;
    const emulate::Network how{random_number(), toss(), pick(0, 2) == 0};
    emulate::start_network(how, w.ranks, w.blocks());
    round_trip(w);
    const int scene = pick(0, 7);
    if (scene < 2)
      masked_by_caller(w);
    else if (scene == 2)
      changed_handle(w);
    else
      lost_in_a_call(w, lose_in_call, round_trip);
    w.lives_on();
    emulate::stop_network();
  }
}
