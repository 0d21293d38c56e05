// Counts of a routing: tokens for each rank, node and expert, and the ranks of each token.
#include <string.h>

#include "cpu/team/check.h"
#include "cpu/team/op.h"

namespace dk {
namespace {

struct Counts {
  int32_t *ranks, *nodes, *experts;
  uint8_t *in_rank;
  int num_ranks, num_nodes;
  bool shrinks;
};

Counts counts_of(const Team &team, const dk_layout_params &p) {
  return {at<int32_t>(p.tokens_per_rank),
          at<int32_t>(p.tokens_per_node),
          at<int32_t>(p.tokens_per_expert),
          at<uint8_t>(p.token_in_rank),
          team.num_ranks,
          (team.num_ranks + team.num_nvl_peers - 1) / team.num_nvl_peers,
          team.shrinks()};
}

void clear(const Counts &out, const dk_layout_params &p) {
  memset(out.ranks, 0, sizeof(int32_t) * static_cast<size_t>(out.num_ranks));
  if (out.nodes) memset(out.nodes, 0, sizeof(int32_t) * static_cast<size_t>(out.num_nodes));
  memset(out.experts, 0, sizeof(int32_t) * static_cast<size_t>(p.num_experts));
  if (p.num_tokens) memset(out.in_rank, 0, static_cast<size_t>(p.num_tokens) * static_cast<size_t>(out.num_ranks));
}

bool is_masked(Team &team, int rank) { return rank != team.rank && team.masked(rank); }

void count_token(Op &op, const dk_layout_params &p, const Counts &out, size_t token) {
  int local = p.num_experts / out.num_ranks;
  uint8_t *in_rank = out.in_rank + token * static_cast<size_t>(out.num_ranks);
  for (size_t k = 0; k < static_cast<size_t>(p.num_topk); k++) {
    int64_t expert = index_at(p.topk_idx, p.index_bytes, token * static_cast<size_t>(p.num_topk) + k);
    if (expert < -1 || expert >= p.num_experts)
      return op.refuse(op.team.rank, {DK_EINVAL, DK_FIELD_TOPK_IDX, p.num_experts, expert});
    if (expert < 0 || (out.shrinks && is_masked(op.team, static_cast<int>(expert / local)))) continue;
    out.experts[expert]++;
    in_rank[expert / local] = 1;
  }
  int last_node = -1;
  for (int rank = 0; rank < out.num_ranks; rank++) {
    if (!in_rank[rank]) continue;
    out.ranks[rank]++;
    int node = rank / op.team.num_nvl_peers;
    if (out.nodes && node != last_node) out.nodes[node]++;
    last_node = node;
  }
}

void run_layout(const dk_layout_params &p) {
  Op op(p, DK_OP_LAYOUT);
  Counts out = counts_of(op.team, p);
  clear(out, p);
  for (size_t token = 0; token < static_cast<size_t>(p.num_tokens) && !op.failed() && !op.refused(); token++)
    count_token(op, p, out, token);
  if (op.failed() || op.refused()) clear(out, p);
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_layout(dk_layout_params *p) {
  DK_ENTER(p);
  if (bad_head(*p) || bad_index_bytes(p->index_bytes) || p->num_tokens < 0 || p->num_topk < 1) return DK_EINVAL;
  if (bad_experts(*at<Team>(p->team), p->num_experts)) return DK_EINVAL;
  if (!p->tokens_per_rank || !p->tokens_per_expert || (p->num_tokens && (!p->topk_idx || !p->token_in_rank)))
    return DK_EINVAL;
  return enqueue<dk_layout_params, run_layout>(*p);
}
