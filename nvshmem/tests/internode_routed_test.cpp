// internode_routed_test.cpp - runs the kernels of calls with a routing across nodes on the host
// (kernels/tests/emulate).
//   internode_routed_test [SEED [CASES]]
//   internode_routed_test dump FILE SEED NODES PEERS EXPAND FLAGS
// The latter writes inputs and outputs of one case, for a comparison with the CPU engine.
// Random groups, shapes, routings, layouts and grids; the network delays every put and keeps only the order that
// kernels rely on. What comes is compared bit for bit with plain loops in the order of the contract.
#include "routed_cases.h"

namespace deep_ep::internode {
alignas(128) thread_local uint8_t shared[192 * 1024];  // dynamic shared memory of a block
}
using namespace deepep;
using namespace deepep::internode;

namespace {

// ---- The kernels ----------------------------------------------------------------------------------------------------

RoutedNodesNotifyParams routed_notify_params(World &w, int me) {
  Rank &r = w.ranks[me];
  RoutedNodesNotifyParams p{{{notify_params(w, r), w.session(me, DK_OP_NOTIFY)}}, r.internode};
  p.n.warps = kNotifyThreads / kWarp;
  p.n.share = ceil_div(r.tokens, r.grid);
  return p;
}

void notify(World &w) {
  notify(w, [&](int me) { deep_ep::internode::notify_routed(routed_notify_params(w, me)); });
}

template <bool kExpand>
void run_dispatch(World &w, int me, bool cached) {
  DispatchParams d{dispatch_args(w, me, cached), w.session(me, DK_OP_DISPATCH)};
  d.row_bytes = 2 * w.c.hidden;
  d.meta = meta_shape(d);
  RoutedDispatchParams<kExpand> p{{d, w.ranks[me].internode, {}, {}, w.state(me)}};
  p.lists = stream_lists(p.state, p.internode);
  deep_ep::internode::dispatch_routed<kExpand>(dispatch_choice(p, w.ranks[me].grid));
}

void dispatch(World &w, bool cached) {
  dispatch(w, cached, DispatchRoles::kThreads,
           [&](int me) { w.c.expand ? run_dispatch<true>(w, me, cached) : run_dispatch<false>(w, me, cached); });
}

RoutedCombineParams combine_params(World &w, int me) {
  const Case &c = w.c;
  CombineParams k{combine_args(w, me), w.session(me, DK_OP_COMBINE), 2u * static_cast<uint32_t>(c.hidden)};
  const bool unreduced = c.expand && (c.combine_flags & DK_COMBINE_UNREDUCED) != 0;
  k.slot_bytes = k.row_bytes * (unreduced ? c.topk : 1);
  RoutedCombineParams p{{k, w.ranks[me].internode, {}, {}, {}, {}}, 0, 0};
  shape_records(p, w.bulk_room);
  p.lists = stream_lists(w.state(me), p.internode);
  return p;
}

void combine(World &w) {
  combine(w, CombineRoles::kThreads, [&](int me) {
    const RoutedCombineParams p = combine_params(w, me);
    w.c.expand ? deep_ep::internode::combine_routed<true>(p) : deep_ep::internode::combine_routed<false>(p);
  });
}

// ---- Cases ----------------------------------------------------------------------------------------------------------

Case random_case() {
  static const int shapes[][2] = {{2, 2}, {2, 4}, {4, 1}, {3, 2}, {2, 1}};
  const auto &shape = shapes[pick(0, 4)];
  Case c;
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
    emulate::start_network({7, false}, w.ranks, w.blocks());
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
  emulate::start_network({9, true}, w.ranks, w.blocks());
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
  emulate::start_network({13, false}, w.ranks, w.blocks());
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
    emulate::start_network({19, false}, w.ranks, w.blocks());
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
  c.nvl = c.ranks() * 2 * record;  // for a row of dispatch with its words
  World w(c);
  emulate::start_network({17, false}, w.ranks, w.blocks());
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

// More ranks of a node than a warp has lanes.
void wide_nodes() {
  Case c;
  c.peers = 34;
  c.hidden = 16;
  c.topk = 3;
  c.local_experts = 1;
  c.expand = true;
  c.rdma = 1 << 19;
  c.nvl = 1 << 21;
  c.max_tokens = 20;
  World w(c);
  emulate::start_network({29, false}, w.ranks, w.blocks());
  make_inputs(w);
  notify(w);
  dispatch(w, false);
  combine(w);
  emulate::stop_network();
  printf("wide nodes: ok\n");
}

int dump(char **words) {
  World w(dumped_case(words));
  emulate::start_network({random_number(), toss()}, w.ranks, w.blocks());
  make_inputs(w);
  notify(w);
  dispatch(w, false);
  combine(w);
  emulate::stop_network();
  return dump_world(words[0], w, -1) ? 0 : 1;
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
  wide_nodes();
  for (int i = 0; i < cases; ++i) {
    random_number.seed(seed + static_cast<uint64_t>(i));
    World w(random_case());
    const emulate::Network how{random_number(), toss(), pick(0, 2) == 0};
    w.bulk_room = pick(0, 3) == 0 ? 0 : sizeof deep_ep::internode::shared / pick(1, 2);
    emulate::start_network(how, w.ranks, w.blocks());
    emulate::puts_since(0);
    for (int round = 0; round < 2; ++round) {
      make_inputs(w);
      notify(w);
      dispatch(w, false);
      combine(w);
      fill_payload(w);
      dispatch(w, true);
    }
    const size_t puts = emulate::puts_since(0);
    check(how.stores == (puts == 0), "puts where NVLink reaches all ranks, or none", -1, 0, static_cast<double>(puts),
          0);
    emulate::stop_network();
    printf("seed %llu: %d x %d ranks, hidden %d, top-%d, %s, flags %u, %s: ok\n",
           static_cast<unsigned long long>(seed) + i, w.c.nodes, w.c.peers, w.c.hidden, w.c.topk,
           w.c.expand ? "expanded" : "plain", w.c.combine_flags, how.keeps());
  }
}
