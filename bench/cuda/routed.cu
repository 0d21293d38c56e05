// routed.cu - times of normal mode's calls with a routing: expanded and plain layout, each a row for every number of
// SMs; the worst case, as a decoding step has it, also in a graph. The kernel suite (kernels/tests/case_expand.c) has
// the checks.
#include "modes.h"

namespace {

constexpr int kAlignment = 128;  // as GEMMs over groups of rows want it

struct Calls {
  Rank &rank;
  const Routing &routing;
  int hidden, scales, rows, expanded, most, room, sms = 0;
  int64_t *idx;
  float *weights, *recv_weights, *combined_weights;
  int32_t *matrix, *heads, *slots, *psum_ranks, *psum_experts, *num_experts, *meta;
  uint8_t *x, *recv_x;
  uint32_t *x_scales, *recv_scales;
  int64_t *recv_idx;
  uint16_t *y, *combined;
  dk_counts *counts;
  uint64_t counts_address;

  Calls(Rank &of, const Routing &r) : rank(of), routing(r) {
    const Shape &s = rank.world->shape;
    hidden = s.hidden;
    scales = hidden / 128;
    const int local = routing.local();
    std::vector<int> counts_of(local, 0);
    rows = 0;
    for (int from = 0; from < s.ranks; ++from)
      for (int t = 0; t < routing.tokens; ++t) {
        rows += routing.goes(from, t, rank.rank);
        for (int k = 0; k < s.topk; ++k) {
          const int64_t e = routing.idx[from][t * s.topk + k];
          if (e >= 0 && e / local == rank.rank) ++counts_of[e % local];
        }
      }
    expanded = 0;
    for (int count : counts_of) expanded += (count + kAlignment - 1) / kAlignment * kAlignment;
    most = s.ranks * routing.tokens;
    room = most * std::min(s.topk, local) + (kAlignment - 1) * local;
    room = (room + kAlignment - 1) / kAlignment * kAlignment;
    const size_t tokens = routing.tokens, choices = tokens * s.topk;
    idx = to_device(routing.idx[rank.rank]);
    weights = to_device(routing.weights[rank.rank]);
    matrix = device_array<int32_t>(s.ranks * s.ranks);
    heads = device_array<int32_t>(tokens * s.ranks);
    slots = device_array<int32_t>(choices);
    psum_ranks = device_array<int32_t>(s.ranks);
    psum_experts = device_array<int32_t>(local);
    num_experts = device_array<int32_t>(local);
    meta = device_array<int32_t>(static_cast<size_t>(most) * (s.topk + 2));
    x = device_array<uint8_t>(2 * tokens * hidden);
    x_scales = device_array<uint32_t>(tokens * scales);
    recv_x = device_array<uint8_t>(2ull * room * hidden);
    recv_scales = device_array<uint32_t>(static_cast<size_t>(room) * scales);
    recv_weights = device_array<float>(std::max<size_t>(room, static_cast<size_t>(most) * s.topk));
    recv_idx = device_array<int64_t>(static_cast<size_t>(most) * s.topk);
    y = device_array<uint16_t>(static_cast<size_t>(room) * hidden);
    combined = device_array<uint16_t>(tokens * hidden);
    combined_weights = device_array<float>(choices);
    CHECK_CUDA(cudaMemset(y, 0, 2ull * room * hidden));
    void *host = aligned_alloc(4096, 1 << 16);
    memset(host, 0, 1 << 16);
    dk_host_register_params h{};
    h.device = rank.device;
    h.host = as_address(host);
    h.bytes = 1 << 16;
    DK(host_register, h);
    counts = static_cast<dk_counts *>(host);
    counts_address = h.address;
  }

  void notify(int routing_kind, uint64_t row_bytes, int num_scales, bool worst) const {
    dk_notify_params p = notify_params(routing_kind, row_bytes, num_scales, worst);
    DK(notify, p);
  }
  dk_notify_params notify_params(int routing_kind, uint64_t row_bytes, int num_scales, bool worst) const {
    dk_notify_params p{};
    rank.header(p);
    p.num_tokens = routing.tokens;
    p.num_topk = routing.topk;
    p.num_experts = routing.experts;
    p.expert_alignment = kAlignment;
    p.num_worst_tokens = worst ? most : 0;
    p.num_worst_expanded = worst && routing_kind == DK_ROUTING_EXPANDED ? room : 0;
    p.num_scales = num_scales;
    p.hidden_bytes = row_bytes;
    p.rank_prefix_matrix = as_address(matrix);
    p.send_head = as_address(heads);
    p.host_counts = worst ? 0 : as_address(counts);
    p.counts = worst ? 0 : counts_address;
    p.routing = routing_kind;
    p.index_bytes = 8;
    p.num_max_tokens = routing.tokens;
    p.topk_idx = as_address(idx);
    p.dst_slot = as_address(slots);
    p.psum_per_rank = as_address(psum_ranks);
    p.psum_per_expert = as_address(psum_experts);
    p.num_per_expert = as_address(num_experts);
    return p;
  }

  void dispatch(int routing_kind, uint64_t row_bytes, int num_scales, bool worst, bool direct, bool padding) const {
    dk_dispatch_params p = dispatch_params(routing_kind, row_bytes, num_scales, worst, direct, padding);
    DK(dispatch, p);
  }
  // Both in one kernel. False: there is none for so many rows.
  bool dispatch_at_once(int routing_kind, uint64_t row_bytes, int num_scales) const {
    dk_notify_params n = notify_params(routing_kind, row_bytes, num_scales, true);
    dk_dispatch_params p = dispatch_params(routing_kind, row_bytes, num_scales, true, true, false);
    n.size = sizeof n;
    p.notify = as_address(&n);
    return call_library("dk_dispatch", p) == DK_OK;
  }
  dk_dispatch_params dispatch_params(int routing_kind, uint64_t row_bytes, int num_scales, bool worst, bool direct,
                                     bool padding) const {
    const bool expand = routing_kind == DK_ROUTING_EXPANDED;
    const int outputs = expand ? (worst ? room : expanded) : worst ? most : rows;
    dk_dispatch_params p{};
    rank.header(p, sms);
    p.flags = padding ? DK_DISPATCH_ZERO_PADDING : 0;
    p.x = as_address(x);
    p.scales = num_scales > 0 ? as_address(x_scales) : 0;
    p.scale_token_stride = num_scales;
    p.scale_stride = 1;
    p.topk_idx = as_address(idx);
    p.topk_weights = as_address(weights);
    p.rank_prefix_matrix = as_address(matrix);
    p.send_head = as_address(heads);
    p.hidden_bytes = row_bytes;
    p.num_tokens = routing.tokens;
    p.num_scales = num_scales;
    p.num_topk = routing.topk;
    p.index_bytes = 8;
    p.num_experts = routing.experts;
    p.num_recv_tokens = worst ? most : rows;
    p.num_worst_tokens = worst ? most : 0;
    p.recv_segment = direct ? 0 : -1;
    p.recv_x = direct ? rank.segment : as_address(recv_x);
    p.recv_scales = num_scales > 0 ? as_address(recv_scales) : 0;
    p.recv_topk_idx = expand ? 0 : as_address(recv_idx);
    p.recv_topk_weights = as_address(recv_weights);
    p.routing = routing_kind;
    p.num_max_tokens = routing.tokens;
    p.num_expanded_tokens = expand ? outputs : 0;
    p.expert_alignment = kAlignment;
    p.recv_scale_token_stride = 1;  // by columns
    p.recv_scale_stride = (outputs + 3) / 4 * 4;
    p.dst_slot = as_address(slots);
    p.psum_per_expert = as_address(psum_experts);
    p.recv_src_metadata = as_address(meta);
    return p;
  }

  void combine(int routing_kind, bool worst, uint32_t flags) const {
    const bool expand = routing_kind == DK_ROUTING_EXPANDED;
    dk_combine_params p{};
    rank.header(p, sms);
    p.flags = flags;
    p.x = as_address(y);
    p.rank_prefix_matrix = as_address(matrix);
    p.send_head = as_address(heads);
    p.num_tokens = routing.tokens;
    p.num_recv_tokens = worst ? most : rows;
    p.hidden = hidden;
    p.num_topk = routing.topk;
    p.x_segment = -1;
    p.combined_x = as_address(combined);
    p.routing = routing_kind;
    p.num_x_rows = expand ? (worst ? room : expanded) : 0;
    p.num_experts = routing.experts;
    p.index_bytes = 8;
    p.topk_idx = as_address(idx);
    p.recv_src_metadata = as_address(meta);
    p.num_max_tokens = routing.tokens;
    DK(combine, p);
  }
};

// One of 20 calls of a graph, in microseconds.
template <class F>
double time_graph(Rank &rank, int replays, F call) {
  constexpr int kCalls = 20;
  cudaStream_t stream = reinterpret_cast<cudaStream_t>(rank.stream);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  rank.meet();
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kCalls; ++i) call();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  const Timing t = measure(rank, replays, false, [&] { CHECK_CUDA(cudaGraphLaunch(exec, stream)); });
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  return t.median / kCalls;
}

}  // namespace

void time_routed(Rank &rank, const std::vector<int> &sms) {
  const Shape &s = rank.world->shape;
  const Routing routing(s, s.tokens, 1, false);
  Calls calls(rank, routing);
  if (rank.segment == 0) rank.register_segment(2ull * calls.room * s.hidden);
  const uint64_t fp8 = s.hidden, bf16 = 2ull * s.hidden;
  constexpr int kPlain = DK_ROUTING_PLAIN, kExpanded = DK_ROUTING_EXPANDED;
  auto show = [&](const char *what, double bytes, int op, auto call) {
    const OwnTime before = own_time(rank, op);
    const Timing t = measure(rank, s.iterations, true, call);
    const double own = mean_us(before, own_time(rank, op));
    if (rank.rank != 0) return;
    printf("%-34s sms %3d  median %8.1f us  p99 %8.1f us  in-kernel mean %8.1f us  logical %6.1f GB/s\n", what,
           calls.sms, t.median, t.p99, own, bytes / t.median / 1e3);
    fflush(stdout);
  };
  auto begin = [&](int kind) {
    calls.notify(kind, fp8, calls.scales, false);
    rank.sync();
    rank.meet();
  };
  show("notify plain", 0, DK_OP_NOTIFY, [&] { calls.notify(kPlain, fp8, calls.scales, false); });
  show("notify expanded", 0, DK_OP_NOTIFY, [&] { calls.notify(kExpanded, fp8, calls.scales, false); });
  const double rows8 = static_cast<double>(calls.rows) * (fp8 + 4 * calls.scales),
               rows16 = static_cast<double>(calls.rows) * bf16;
  for (int n : sms) {
    calls.sms = n;
    for (int kind : {kPlain, kExpanded}) {
      const bool expand = kind == kExpanded;
      begin(kind);
      auto rows = [&](const char *what, const char *of_expanded, uint64_t bytes, int scales, bool direct,
                      bool padding) {
        show(expand ? of_expanded : what, scales > 0 ? rows8 : rows16, DK_OP_DISPATCH,
             [&] { calls.dispatch(kind, bytes, scales, false, direct, padding); });
      };
      rows("plain FP8 by columns, direct", "expanded FP8 by columns, direct", fp8, calls.scales, true, false);
      if (expand) rows("", "expanded FP8, zero padding, direct", fp8, calls.scales, true, true);
      rows("plain FP8 by columns, staged", "expanded FP8 by columns, staged", fp8, calls.scales, false, false);
      rows("plain BF16, direct", "expanded BF16, direct", bf16, 0, true, false);
      rows("plain BF16, staged", "expanded BF16, staged", bf16, 0, false, false);
      show(expand ? "combine expanded" : "combine plain", rows16, DK_OP_COMBINE,
           [&] { calls.combine(kind, false, 0); });
      if (expand)
        show("combine expanded, unreduced", rows16, DK_OP_COMBINE,
             [&] { calls.combine(kind, false, DK_COMBINE_UNREDUCED); });
    }
    for (int kind : {kPlain, kExpanded})
      for (bool at_once : {false, true}) {
        if (at_once && !calls.dispatch_at_once(kind, fp8, calls.scales)) continue;
        const char *name = kind == kPlain ? "plain" : "expanded";
        if (at_once && kind == kPlain)
          show("plain FP8 by columns, at once", rows8, DK_OP_DISPATCH,
               [&] { calls.dispatch_at_once(kPlain, fp8, calls.scales); });
        else if (at_once)
          show("expanded FP8 by columns, at once", rows8, DK_OP_DISPATCH,
               [&] { calls.dispatch_at_once(kExpanded, fp8, calls.scales); });
        const double round = time_graph(rank, 20, [&] {
          if (at_once) {
            calls.dispatch_at_once(kind, fp8, calls.scales);
          } else {
            calls.notify(kind, fp8, calls.scales, true);
            calls.dispatch(kind, fp8, calls.scales, true, true, false);
          }
          calls.combine(kind, true, 0);
        });
        if (rank.rank == 0)
          printf("graph, worst case, %-15s sms %3d  %8.1f us a round of notify, FP8 dispatch, BF16 combine%s\n", name,
                 n, round, at_once ? ", in two kernels" : "");
      }
  }
}
