// internode_test.cpp - runs the kernels of normal mode across nodes on the host (kernels/tests/emulate).
//   internode_test [SEED [CASES]]
// Random groups, shapes, routings and grids; the network delays every put and keeps only the order that kernels rely
// on.
#include "group.h"

#include <cmath>
#include <memory>

#include "internode/normal/combine.cuh"
#include "internode/normal/dispatch_kernel.cuh"
#include "internode/normal/notify.cuh"

namespace deep_ep::internode {
thread_local uint8_t shared[160 * 1024];  // dynamic shared memory of a block
}
using namespace deepep;
using namespace deepep::internode;

namespace {

struct Case {
  int nodes, peers, hidden, topk, local_experts, num_scales, index_bytes;
  uint64_t rdma, nvl;
  int ranks() const { return nodes * peers; }
};

struct Rank {
  std::vector<uint8_t> block;
  std::vector<uint64_t> state;
  std::unique_ptr<Scratch> scratch{new Scratch{}};
  dk_status status{};
  std::vector<uint8_t *> peers;
  std::vector<uint64_t> segments;
  TeamView team{};
  NodeView internode{};
  int tokens = 0, grid = 1;
  // inputs and outputs of a round
  std::vector<uint8_t> x, recv_x, in_rank;
  std::vector<uint32_t> scales, recv_scales, weights, recv_weights;
  std::vector<int64_t> idx, recv_idx;
  std::vector<int32_t> idx32, recv_idx32, per_rank, per_expert, matrix, head, src;
  std::vector<uint32_t> counts;
  std::vector<uint16_t> y, combined;
  std::vector<float> sums;
};

struct World {
  Case c;
  std::vector<Rank> ranks;
  uint64_t call = 0, control_bytes = 0, timeout_ns = 200000000;
  uint64_t room = sizeof deep_ep::internode::shared;  // of it, for bulk copies; 0: the device has none

  explicit World(const Case &one) : c(one), ranks(static_cast<size_t>(one.ranks())) {
    const ControlOffsets at = control_offsets(control_layout(c.ranks()).bytes, c.ranks(), c.peers);
    control_bytes = at.end;
    lay_out(c, ranks, at, control_bytes);
    for (Rank &r : ranks) {
      r.segments.assign(static_cast<size_t>(c.ranks()) * DK_MAX_SEGMENTS, 0);
      r.team.segments = r.segments.data();
      r.state.assign((sizeof(NormalState) + StreamListSizes(c.nodes, c.peers).bytes) / 8 + 1, 0);
    }
  }
  NormalState *state(int rank) { return reinterpret_cast<NormalState *>(ranks[rank].state.data()); }
  Session session(int rank, uint32_t op) { return Session{ranks[rank].team, call, timeout_ns, op, DK_PHASE_BOTH}; }

  template <class Kernel>
  void launch(const char *name, int threads, Kernel kernel) {
    ++call;
    emulate::run(c.ranks(), [&](int rank) { return ranks[rank].grid; }, threads, kernel);
    for (const Rank &r : ranks)
      if (r.scratch->sticky != 0) end_with(r.status.failure, name, call);
    if (emulate::rows_under_way() != 0) {
      fprintf(stderr, "%s: the kernel ended while rows were in flight\n", name);
      quick_exit(1);
    }
    overwrite_regions(ranks);
  }
};

// tokens: of each rank, which all go to every rank; 0: at random.
void make_inputs(World &w, int tokens = 0) {
  const Case &c = w.c;
  const int experts = c.ranks() * c.local_experts, max_tokens = pick(0, 3) == 0 ? 90 : 24;
  for (int me = 0; me < c.ranks(); ++me) {
    Rank &r = w.ranks[me];
    r.tokens = tokens != 0 ? tokens : pick(0, 4) == 0 ? 0 : pick(1, max_tokens);
    const int style = pick(0, 3);  // any expert; the last two; a quarter of the entries; none
    r.x.resize(static_cast<size_t>(r.tokens) * c.hidden * 2);
    for (uint8_t &b : r.x) b = static_cast<uint8_t>(random_number());
    r.scales.resize(static_cast<size_t>(r.tokens) * c.num_scales);
    r.weights.resize(static_cast<size_t>(r.tokens) * c.topk);
    for (uint32_t &v : r.scales) v = static_cast<uint32_t>(random_number());
    for (uint32_t &v : r.weights) v = static_cast<uint32_t>(emulate::bits(static_cast<float>(pick(1, 64)) / 8));
    r.idx.resize(static_cast<size_t>(r.tokens) * c.topk);
    for (int64_t &e : r.idx)
      e = style == 3                      ? -1
          : style == 2 && pick(0, 3) != 0 ? -1
          : style == 1                    ? pick(experts - 2, experts - 1)
                                          : pick(-1, experts - 1);
    for (size_t i = 0; tokens != 0 && i < r.idx.size(); ++i)
      r.idx[i] = static_cast<int64_t>(i) % c.topk * c.local_experts;
    r.idx32.assign(r.idx.begin(), r.idx.end());
    count_choices(c, r);
    r.matrix.assign(c.ranks() * c.ranks(), -7);
    r.head.assign(static_cast<size_t>(r.tokens) * c.ranks(), -7);
    r.counts.assign(4 + c.local_experts + 4, 0);
  }
}

void notify(World &w) {
  const Case &c = w.c;
  for (Rank &r : w.ranks) r.grid = 2;
  w.launch("notify", kNotifyThreads, [&](int me) {
    Rank &r = w.ranks[me];
    InternodeNotifyParams p{{notify_arguments(c, r), w.session(me, DK_OP_NOTIFY)}, r.internode};
    deep_ep::internode::notify_dispatch(p);
  });
  for (int me = 0; me < c.ranks(); ++me) {
    const Rank &r = w.ranks[me];
    for (int j = 0, sum = 0; j < c.ranks(); ++j, sum = 0)
      for (int i = 0; i < c.ranks(); ++i) {
        const int got = r.matrix[i * c.ranks() + j];
        sum += w.ranks[i].per_rank[j];
        check(got == sum, "matrix", me, i * c.ranks() + j, got, sum);
      }
    const auto *counts = reinterpret_cast<const dk_counts *>(r.counts.data());
    const int rows = r.matrix[(c.ranks() - 1) * c.ranks() + me];
    int remote = 0;
    for (int i = 0; i < c.ranks(); ++i) remote += i / c.peers != me / c.peers ? w.ranks[i].per_rank[me] : 0;
    check(counts->seq == w.call && counts->num_recv_tokens == rows, "counts", me, 0, counts->num_recv_tokens, rows);
    check(counts->num_recv_nodes_tokens == remote, "rows of other nodes", me, 0, counts->num_recv_nodes_tokens, remote);
  }
}

constexpr int kSegment = 5, kOffset = 96;  // outputs, at their places in segments
void make_outputs(World &w, bool cached) {
  const Case &c = w.c;
  for (int me = 0; me < c.ranks(); ++me) {
    Rank &r = w.ranks[me];
    const size_t rows = static_cast<size_t>(r.matrix[(c.ranks() - 1) * c.ranks() + me]);
    r.recv_x.assign(rows * c.hidden * 2, 0xee);
    r.recv_scales.assign(rows * c.num_scales, 0xee);
    r.recv_weights.assign(rows * c.topk, 0xee);
    r.recv_idx.assign(rows * c.topk, 0xee);
    r.recv_idx32.assign(rows * c.topk, 0xee);
    if (!cached) r.src.assign(rows, -9);
    for (int i = me / c.peers * c.peers; i < (me / c.peers + 1) * c.peers; ++i)
      w.ranks[i].segments[me * DK_MAX_SEGMENTS + kSegment] = handle_to(r.recv_x.data()) - kOffset;
  }
}

// By every lane of a rank's kernel.
void run_dispatch(World &w, int me, bool cached, bool placed) {
  const Case &c = w.c;
  Rank &r = w.ranks[me];
  dk_dispatch_params a = dispatch_arguments(c, r, cached);
  a.index_bytes = c.index_bytes;
  if (c.index_bytes != 8) {
    a.topk_idx = handle_to(r.idx32.data());
    a.recv_topk_idx = handle_to(r.recv_idx32.data());
  }
  a.recv_segment = placed && !r.recv_x.empty() ? kSegment : -1;
  a.recv_segment_offset = kOffset;
  DispatchParams d{a, w.session(me, DK_OP_DISPATCH)};
  d.row_bytes = 2 * c.hidden;
  InternodeDispatchParams p{d, r.internode, {}, {}, w.state(me)};
  p.lists = stream_lists(p.state, r.internode);
  deep_ep::internode::dispatch_with_notify(dispatch_choice(p, r.grid));
}

enum Places { kStaged, kPlaced, kPlacedBut };  // the last: but for one rank of the team

void dispatch(World &w, bool cached, Places places) {
  const Case &c = w.c;
  const int staged = places == kPlacedBut ? pick(0, c.ranks() - 1) : -1;
  make_outputs(w, cached);
  w.launch("dispatch", DispatchRoles::kThreads,
           [&](int me) { run_dispatch(w, me, cached, places != kStaged && me != staged); });
  for (int me = 0; me < c.ranks(); ++me) {
    const Rank &r = w.ranks[me];
    int64_t row = 0;
    for (int s = 0; s < c.ranks(); ++s)
      for (int t = 0; t < w.ranks[s].tokens; ++t) {
        const Rank &from = w.ranks[s];
        if (from.in_rank[static_cast<size_t>(t) * c.ranks() + me] == 0) continue;
        check(memcmp(&r.recv_x[row * c.hidden * 2], &from.x[static_cast<size_t>(t) * c.hidden * 2], c.hidden * 2) == 0,
              "recv_x", me, row, s, t);
        for (int i = 0; i < c.num_scales; ++i)
          check(r.recv_scales[row * c.num_scales + i] == from.scales[t * c.num_scales + i], "recv_scales", me, row, s,
                t);
        for (int k = 0; !cached && k < c.topk; ++k) {
          const int64_t e = from.idx[t * c.topk + k],
                        mine = e >= 0 && e / c.local_experts == me ? e % c.local_experts : -1;
          const int64_t got = c.index_bytes == 8 ? r.recv_idx[row * c.topk + k] : r.recv_idx32[row * c.topk + k];
          check(got == mine, "recv_topk_idx", me, row * c.topk + k, got, mine);
          check(r.recv_weights[row * c.topk + k] == (mine < 0 ? 0 : from.weights[t * c.topk + k]), "recv_topk_weights",
                me, row * c.topk + k, s, t);
        }
        check(r.src[row] == t, "recv_src_idx", me, row, r.src[row], t);
        ++row;
      }
  }
}

void combine(World &w) {
  const Case &c = w.c;
  for (Rank &r : w.ranks) {
    r.y.resize(r.src.size() * c.hidden);
    for (uint16_t &v : r.y) v = to_bf16(static_cast<float>(pick(-16, 16)) / 4);  // sums are exact
    r.combined.assign(static_cast<size_t>(r.tokens) * c.hidden, 0x1234);
    r.sums.assign(static_cast<size_t>(r.tokens) * c.topk, -1);
  }
  const bool biased = pick(0, 1) == 1;
  w.launch("combine", CombineRoles::kThreads, [&](int me) {
    Rank &r = w.ranks[me];
    dk_combine_params a = combine_arguments(c, r);
    if (biased) a.bias[1] = handle_to(r.x.data());
    const CombineParams k{a, w.session(me, DK_OP_COMBINE), 2u * c.hidden};
    InternodeCombineParams p{k, r.internode, {}, {}, {}, {}};
    shape_combine(p, r.grid, w.room);
    p.lists = stream_lists(w.state(me), r.internode);
    deep_ep::internode::combine_with_notify(combine_choice(p));
  });
  std::vector<std::vector<double>> want;
  std::vector<std::vector<float>> weights;
  for (const Rank &r : w.ranks) {
    want.emplace_back(static_cast<size_t>(r.tokens) * c.hidden, 0.0);
    weights.emplace_back(static_cast<size_t>(r.tokens) * c.topk, 0.0f);
  }
  for (int me = 0; me < c.ranks(); ++me) {
    const Rank &r = w.ranks[me];
    for (int s = 0; s < c.ranks(); ++s)
      for (int row = s == 0 ? 0 : r.matrix[(s - 1) * c.ranks() + me]; row < r.matrix[s * c.ranks() + me]; ++row) {
        for (int h = 0; h < c.hidden; ++h)
          want[s][static_cast<size_t>(r.src[row]) * c.hidden + h] +=
              from_bf16(r.y[static_cast<size_t>(row) * c.hidden + h]);
        for (int k = 0; k < c.topk; ++k)
          weights[s][static_cast<size_t>(r.src[row]) * c.topk + k] +=
              emulate::from_bits<float>(r.recv_weights[static_cast<size_t>(row) * c.topk + k]);
      }
  }
  for (int s = 0; s < c.ranks(); ++s) {
    const Rank &r = w.ranks[s];
    const auto *bias = reinterpret_cast<const uint16_t *>(r.x.data());
    for (size_t i = 0; !biased && i < r.combined.size(); ++i)
      check(r.combined[i] == to_bf16(static_cast<float>(want[s][i])), "combined_x", s, static_cast<int64_t>(i),
            from_bf16(r.combined[i]), want[s][i]);
    for (size_t i = 0; biased && i < r.combined.size(); ++i) {
      const float sum = static_cast<float>(want[s][i]) + from_bf16(bias[i]), got = from_bf16(r.combined[i]);
      check(got == from_bf16(to_bf16(sum)) || (std::isnan(sum) && std::isnan(got)), "combined_x with bias", s,
            static_cast<int64_t>(i), got, sum);
    }
    for (size_t i = 0; i < r.sums.size(); ++i)
      check(r.sums[i] == weights[s][i], "combined_topk_weights", s, static_cast<int64_t>(i), r.sums[i], weights[s][i]);
  }
}

void barrier(World &w) {
  for (Rank &r : w.ranks) r.grid = 1;
  w.launch("barrier", 256, [&](int me) {
    InternodeBarrierParams p{w.session(me, DK_OP_BARRIER), w.ranks[me].internode, 1};
    internode_barrier_kernel(p);
  });
}

// A rank that is absent, or has rows of another size, is named in the failure of every other rank.
void failures() {
  for (const bool absent : {true, false}) {
    World w(Case{2, 2, 64, 2, 2, 0, 8, 1 << 16, 1 << 16});
    emulate::start_network({7, false}, w.ranks, blocks_of(w.ranks));
    make_inputs(w);
    w.timeout_ns = 2000000;
    ++w.call;
    const int odd = 2;
    emulate::run(
        4, [&](int rank) { return absent && rank == odd ? 0 : 1; }, kNotifyThreads,
        [&](int me) {
          Rank &r = w.ranks[me];
          dk_notify_params n{};
          n.tokens_per_rank = handle_to(r.per_rank.data());
          n.tokens_per_expert = handle_to(r.per_expert.data());
          n.num_experts = 8;
          n.expert_alignment = 1;
          n.hidden_bytes = me == odd ? 256 : 128;
          n.rank_prefix_matrix = handle_to(r.matrix.data());
          n.send_head = handle_to(r.head.data());
          n.counts = handle_to(r.counts.data());
          InternodeNotifyParams p{{n, w.session(me, DK_OP_NOTIFY)}, r.internode};
          deep_ep::internode::notify_dispatch(p);
        });
    emulate::stop_network();
    for (int me = 0; me < 4; ++me) {
      const dk_failure &f = w.ranks[me].status.failure;
      if (me == odd) continue;
      check(f.code == (absent ? DK_ETIMEOUT : DK_EMISMATCH), "code of a failure", me, absent, f.code, 0);
      check(f.peer == odd && f.op == DK_OP_NOTIFY, "rank that the failure names", me, absent, f.peer, odd);
      if (!absent)
        check(f.field == DK_FIELD_HIDDEN_BYTES && f.expected == 128 && f.seen == 256, "field", me, 0, f.field,
              DK_FIELD_HIDDEN_BYTES);
      check(reinterpret_cast<const dk_counts *>(w.ranks[me].counts.data())->num_recv_tokens == -1,
            "counts of a failure", me, 0, 0, -1);
    }
  }
  printf("failures: ok\n");
}

// A row's number is out of range: the rank that it is for says so and names the row's rank, and nothing is written.
void wrong_numbers() {
  for (const bool placed : {false, true})
    for (const int wrong : {0, 1, 2, 3}) {  // the rank with the row is 0
      World w(Case{2, 2, 64, 4, 2, 0, 8, 1 << 16, 1 << 16});
      emulate::start_network({7, false}, w.ranks, blocks_of(w.ranks));
      make_inputs(w, 3);
      notify(w);
      w.ranks[0].head[4 + wrong] = 1 << 20;
      w.timeout_ns = 2000000;
      ++w.call;
      make_outputs(w, false);
      emulate::run(
          4, [](int) { return 1; }, DispatchRoles::kThreads, [&](int me) { run_dispatch(w, me, false, placed); });
      emulate::stop_network();
      const dk_failure &f = w.ranks[wrong].status.failure;
      check(f.code == DK_EINVAL && f.peer == 0 && f.field == DK_FIELD_SEND_HEAD, "failure of a wrong number", wrong,
            placed, f.code, f.peer);
      check(f.expected == 2 && f.seen == 1 << 20, "a wrong number", wrong, placed, f.expected, f.seen);
    }
  printf("wrong numbers: ok\n");
}

// Rows of neighbouring places of a ring cross in one put, and so do sums on the way back.
void pieces() {
  const uint64_t row = align_up<uint64_t>(2 * 256 + 4 * (1 + 1 + 2 * 2), 128);
  World w(Case{2, 1, 256, 2, 2, 0, 8, 2 * 2 * row * 64, 2 * row * 64});  // 4 channels of 16 places, pieces of 8 rows
  emulate::start_network({11, false}, w.ranks, blocks_of(w.ranks));
  make_inputs(w, 64);
  notify(w);
  emulate::puts_since(0);
  dispatch(w, false, kStaged);
  const size_t sent = emulate::puts_since(2 * 256);
  combine(w);
  const size_t returned = emulate::puts_since(2 * 256);
  emulate::stop_network();
  check(sent == 2 * 64 / 8, "puts of dispatch", -1, 0, static_cast<double>(sent), 2 * 64 / 8);
  check(returned == 2 * 64 / 8, "puts of combine", -1, 0, static_cast<double>(returned), 2 * 64 / 8);
  printf("pieces: ok\n");
}

Case random_case() {
  static const int shapes[][2] = {{2, 2}, {4, 1}, {3, 2}, {2, 3}, {2, 1}};
  const auto &shape = shapes[pick(0, 4)];
  Case c{shape[0], shape[1], pick_hidden(), pick(1, 4), pick(1, 3), pick(0, 3), pick(0, 1) == 0 ? 4 : 8, 0, 0};
  const uint64_t row = align_up<uint64_t>(2 * c.hidden + 4 * (1 + c.peers + 2 * c.topk + c.num_scales), 128),
                 ranks = c.ranks();
  const int rows = pick(0, 2);  // of a ring: one, the minimum; a few; as many as are sent
  c.rdma = 2 * c.nodes * row * (rows == 0 ? 1 : rows == 1 ? 9 : 128) + 8 * pick(0, 7);
  c.nvl = ranks * row * (rows == 0 ? 1 : rows == 1 ? 6 : 128);
  return c;
}

}  // namespace

// Ranks with one block and with two, which would have different numbers of channels, and room for both.
void different_blocks() {
  World w(Case{2, 2, 64, 2, 2, 0, 8, 1 << 22, 1 << 23});
  const int few = channels_for(w.ranks[0].internode, 1, kPuttingDispatch.senders),
            many = channels_for(w.ranks[0].internode, 2, kPuttingDispatch.senders);
  check(few != many && few > 1 && many <= kMaxChannels, "channels of one block and of two", -1, 0, few, many);
  emulate::start_network({5, false}, w.ranks, blocks_of(w.ranks));
  for (const int alike : {0, 1, 2}) {
    make_inputs(w, 40);
    notify(w);
    for (size_t r = 0; r < w.ranks.size(); ++r) w.ranks[r].grid = alike != 0 ? alike : 1 + static_cast<int>(r % 2);
    dispatch(w, false, kPlaced);
    combine(w);
    dispatch(w, true, kPlaced);
  }
  emulate::stop_network();
  printf("different blocks: ok\n");
}

// More ranks of a node than a warp has lanes.
void wide_nodes() {
  Case c{2, 34, 16, 3, 1, 0, 8, 1 << 18, 1 << 20};
  World w(c);
  emulate::start_network({11, false}, w.ranks, blocks_of(w.ranks));
  for (const Places places : {kStaged, kPlaced}) {
    make_inputs(w);
    notify(w);
    for (Rank &r : w.ranks) r.grid = 1;
    dispatch(w, false, places);
    combine(w);
  }
  emulate::stop_network();
  printf("wide nodes: ok\n");
}

int main(int argc, char **argv) {
  const uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1;
  const int cases = argc > 2 ? atoi(argv[2]) : 4;
  failures();
  wrong_numbers();
  pieces();
  different_blocks();
  wide_nodes();
  for (int i = 0; i < cases; ++i) {
    random_number.seed(seed + static_cast<uint64_t>(i));
    World w(random_case());
    const emulate::Network how{random_number(), pick(0, 1) == 1, pick(0, 2) == 0};
    const int room = pick(0, 3);  // for all, for some, or none
    w.room = room == 0 ? 0 : room == 1 ? 64 * 1024 : w.room;
    emulate::start_network(how, w.ranks, blocks_of(w.ranks));
    emulate::puts_since(0);
    for (int round = 0; round < 2; ++round) {
      make_inputs(w);
      notify(w);
      const auto places = static_cast<Places>(pick(0, 2));
      const int alike = pick(0, 2);  // 0: ranks may have different numbers of blocks
      for (Rank &r : w.ranks) r.grid = alike != 0 ? alike : pick(1, 2);
      dispatch(w, false, places);
      combine(w);
      dispatch(w, true, places);
      barrier(w);
    }
    const size_t puts = emulate::puts_since(0);
    check(how.stores == (puts == 0), "puts where NVLink reaches all ranks, or none", -1, 0, static_cast<double>(puts),
          0);
    emulate::stop_network();
    printf("seed %llu: %d x %d ranks, hidden %d, top-%d, %s: ok\n", static_cast<unsigned long long>(seed) + i,
           w.c.nodes, w.c.peers, w.c.hidden, w.c.topk, how.keeps());
  }
}
