// group.h - for tests of normal mode across nodes: what their groups have alike, whose ranks are of the test's own
// kind.
#pragma once
#include "checks.h"
#include "network.h"

#include "internode/layout.h"

namespace deepep::internode {

// The blocks of all ranks, and how each sees them. control_bytes: of a block's control region.
template <class Case, class Rank>
void lay_out(const Case &c, std::vector<Rank> &ranks, const ControlOffsets &at, uint64_t control_bytes) {
  const uint64_t wire = ring_flags(c.ranks()).bytes, nvl = align_up<uint64_t>(c.nvl, 4096);
  for (Rank &r : ranks) r.block.assign(control_bytes + wire + nvl + c.rdma + 8192, 0);
  for (int me = 0; me < c.ranks(); ++me) {
    Rank &r = ranks[me];
    r.peers.assign(c.ranks(), nullptr);
    for (int i = me / c.peers * c.peers; i < (me / c.peers + 1) * c.peers; ++i) r.peers[i] = aligned(ranks[i].block);
    TeamView &t = r.team;
    t.peers = r.peers.data();
    t.self = aligned(r.block);
    t.scratch = r.scratch.get();
    t.status = &r.status;
    t.wire = control_bytes;
    t.wire_bytes = wire;
    t.nvl = t.wire + wire;
    t.nvl_bytes = c.nvl;
    t.rdma = t.nvl + nvl;
    t.rdma_bytes = c.rdma;
    t.at = control_layout(c.ranks());
    t.ring = ring_flags(c.ranks());
    t.rank = me;
    t.num_ranks = c.ranks();
    t.num_nvl_peers = c.peers;
    r.status.abort_rank = -1;
    r.internode.at = at;
    r.internode.num_nodes = c.nodes;
    r.internode.num_peers = c.peers;
    r.internode.node = me / c.peers;
    r.internode.index = me % c.peers;
  }
}
template <class Rank>
std::vector<uint8_t *> blocks_of(std::vector<Rank> &ranks) {
  std::vector<uint8_t *> all;
  for (Rank &r : ranks) all.push_back(aligned(r.block));
  return all;
}
// Callers may overwrite the regions between calls.
template <class Rank>
void overwrite_regions(std::vector<Rank> &ranks) {
  for (Rank &r : ranks) memset(r.team.self + r.team.nvl, 0xa5, r.team.rdma + r.team.rdma_bytes - r.team.nvl);
}

// What a layout finds in a rank's idx: who gets its tokens, and how many rows and choices there are of each.
template <class Case, class Rank>
void count_choices(const Case &c, Rank &r) {
  r.in_rank.assign(static_cast<size_t>(r.tokens) * c.ranks(), 0);
  r.per_rank.assign(c.ranks(), 0);
  r.per_expert.assign(c.ranks() * c.local_experts, 0);
  for (int t = 0; t < r.tokens; ++t)
    for (int k = 0; k < c.topk; ++k) {
      const int64_t e = r.idx[static_cast<size_t>(t) * c.topk + k];
      if (e < 0) continue;
      ++r.per_expert[e];
      uint8_t &goes = r.in_rank[static_cast<size_t>(t) * c.ranks() + e / c.local_experts];
      r.per_rank[e / c.local_experts] += goes == 0;
      goes = 1;
    }
}

// What all tests pass to a call, of a rank's inputs and outputs; the rest is the test's.
template <class Case, class Rank>
dk_notify_params notify_arguments(const Case &c, Rank &r) {
  dk_notify_params n{};
  n.tokens_per_rank = handle_to(r.per_rank.data());
  n.tokens_per_expert = handle_to(r.per_expert.data());
  n.token_in_rank = handle_to(r.in_rank.data());
  n.num_tokens = r.tokens;
  n.num_topk = c.topk;
  n.num_experts = c.ranks() * c.local_experts;
  n.expert_alignment = 1;
  n.num_scales = c.num_scales;
  n.hidden_bytes = 2 * c.hidden;
  n.rank_prefix_matrix = handle_to(r.matrix.data());
  n.send_head = handle_to(r.head.data());
  n.counts = handle_to(r.counts.data());
  return n;
}
template <class Case, class Rank>
dk_dispatch_params dispatch_arguments(const Case &c, Rank &r, bool cached) {
  dk_dispatch_params a{};
  a.x = handle_to(r.x.data());
  a.scales = handle_to(r.scales.data());
  a.scale_token_stride = c.num_scales;
  a.scale_stride = 1;
  a.flags = cached ? DK_DISPATCH_CACHED : 0;
  a.num_topk = cached ? 0 : c.topk;
  a.index_bytes = 8;
  a.num_experts = cached ? 0 : c.ranks() * c.local_experts;
  a.topk_idx = handle_to(r.idx.data());
  a.topk_weights = handle_to(r.weights.data());
  a.rank_prefix_matrix = handle_to(r.matrix.data());
  a.send_head = handle_to(r.head.data());
  a.num_tokens = r.tokens;
  a.num_scales = c.num_scales;
  a.num_recv_tokens = -1;
  a.recv_segment = -1;
  a.recv_x = handle_to(r.recv_x.data());
  a.recv_scales = handle_to(r.recv_scales.data());
  a.recv_topk_idx = handle_to(r.recv_idx.data());
  a.recv_topk_weights = handle_to(r.recv_weights.data());
  a.recv_src_idx = cached ? 0 : handle_to(r.src.data());
  return a;
}
template <class Case, class Rank>
dk_combine_params combine_arguments(const Case &c, Rank &r) {
  dk_combine_params a{};
  a.x = handle_to(r.y.data());
  a.topk_weights = handle_to(r.recv_weights.data());
  a.rank_prefix_matrix = handle_to(r.matrix.data());
  a.send_head = handle_to(r.head.data());
  a.recv_src_idx = handle_to(r.src.data());
  a.num_tokens = r.tokens;
  a.num_recv_tokens = static_cast<int>(r.y.size() / c.hidden);
  a.hidden = c.hidden;
  a.num_topk = c.topk;
  a.combined_x = handle_to(r.combined.data());
  a.combined_topk_weights = handle_to(r.sums.data());
  return a;
}

// The test ends with a rank's failure.
[[noreturn]] inline void end_with(const dk_failure &f, const char *name, uint64_t call) {
  fprintf(stderr,
          "%s, call %llu: rank %d failed: code %u, op %u, peer %d, field %u, expected %lld, seen %lld, waited %.3f s\n",
          name, static_cast<unsigned long long>(call), f.rank, f.code, f.op, f.peer, f.field,
          static_cast<long long>(f.expected), static_cast<long long>(f.seen), static_cast<double>(f.waited_ns) * 1e-9);
  quick_exit(1);
}

// No put goes to a rank that its sender has masked, but that it has. None goes to where low latency receives rows: a
// rank that was left out may send it late.
template <class Rank>
void check_put(const Rank &r, int from, int to, const void *word, const void *bytes) {
  const uint64_t at = static_cast<uint64_t>(static_cast<const uint8_t *>(word) - r.team.self);
  if (bytes != nullptr) {
    const uint64_t goes = static_cast<uint64_t>(static_cast<const uint8_t *>(bytes) - r.team.self);
    check(goes < r.team.rdma, "put into the rdma region", from, to, static_cast<double>(goes), 0);
  }
  const bool telling =
      (at >= r.team.at.notices && at < r.team.at.stamps) || (at >= r.team.at.given_up && at < r.team.at.ballots);
  check(telling || r.scratch->masked[to] == 0, "put to a masked rank", from, to, static_cast<double>(at), 0);
}

template <class Rank>
void watch_puts(std::vector<Rank> &ranks, std::function<emulate::Life(int)> life) {
  emulate::watch(std::move(life), [&ranks](int from, int to, const void *word, const void *bytes) {
    check_put(ranks[from], from, to, word, bytes);
  });
}

// The refusal of a rank's last call, and forgets it.
inline dk_failure take_refusal(dk_status &status) {
  dk_failure first{};
  for (dk_failure &f : status.refusals) {
    if (f.code != 0 && first.code == 0) first = f;
    f.code = 0;
  }
  status.refused = 0;
  return first;
}

}  // namespace deepep::internode
