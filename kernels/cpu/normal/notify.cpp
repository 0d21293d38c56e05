// Exchange of counts: every rank receives the number of rows from each rank to each other.
#include <string.h>

#include "cpu/normal/handle.h"
#include "cpu/normal/routed.h"
#include "cpu/team/check.h"

namespace dk {
namespace {

// send_head[t][r]: the number of token t among my rows to rank r; rows: those to each rank. The result says where
// counts that were given are wrong.
Refusal number_rows(Op &op, const dk_notify_params &p, int32_t *rows) {
  int num_ranks = op.team.num_ranks;
  memset(rows, 0, sizeof(int32_t) * static_cast<size_t>(num_ranks));
  const uint8_t *in_rank = at<const uint8_t>(p.token_in_rank);
  int32_t *head = at<int32_t>(p.send_head);
  for (int32_t token = 0; token < p.num_tokens; token++, in_rank += num_ranks, head += num_ranks)
    for (int r = 0; r < num_ranks; r++) head[r] = in_rank[r] ? rows[r]++ : -1;
  const int32_t *given = at<const int32_t>(p.tokens_per_rank);
  for (int r = 0; r < num_ranks; r++) {
    int32_t there = given[r];
    if (there != rows[r]) return {DK_EINVAL, DK_FIELD_TOKENS_PER_RANK, rows[r], there};
  }
  for (int32_t e = 0; e < p.num_experts; e++) {
    int32_t tokens = at<const int32_t>(p.tokens_per_expert)[e];
    if (tokens < 0) return {DK_EINVAL, DK_FIELD_TOKENS_PER_EXPERT, 0, tokens};
  }
  return {};
}

// False, with the refusal recorded, if a rank has less room than rows arrive there: then no rank goes on.
bool all_fit(Op &op, const Exchange &exchange, const int32_t *matrix) {
  int n = op.team.num_ranks;
  for (int step = 0; step < n && !op.refused(); step++) {
    int r = (op.team.rank + step) % n;
    if (exchange.without(r)) continue;
    int64_t limit = exchange.message(r).row_limit, arriving = matrix[(n - 1) * n + r];
    if (limit >= 0 && arriving > limit) op.refuse(r, {DK_EINVAL, DK_FIELD_WORST_TOKENS, limit, arriving});
  }
  return !op.refused();
}

// Ranks that take no part send nothing and get nothing. The team keeps what the caller gets: all that follows goes by
// it.
const int32_t *fill_matrix(Op &op, const Exchange &exchange, uint64_t out) {
  int32_t *matrix = op.team.matrix.get();
  Control &control = op.team.control();
  int n = op.team.num_ranks;
  for (int i = 0; i < n; i++) {
    const int32_t *rows = exchange.without(i) ? nullptr : control.rows_of(exchange.message(i));
    for (int j = 0; j < n; j++)
      matrix[i * n + j] = plus(rows && !exchange.without(j) ? rows[j] : 0, i ? matrix[(i - 1) * n + j] : 0);
  }
  memcpy(at<void>(out), matrix, sizeof(int32_t) * static_cast<size_t>(n) * static_cast<size_t>(n));
  return matrix;
}

void forget_heads(Op &op, const Exchange &exchange, const dk_notify_params &p) {
  int num_ranks = op.team.num_ranks;
  for (int r = 0; r < num_ranks; r++) {
    if (!exchange.without(r)) continue;
    for (int32_t token = 0; token < p.num_tokens; token++)
      at<int32_t>(p.send_head)[static_cast<int64_t>(token) * num_ranks + r] = -1;
  }
}

void fill_counts(Op &op, const Exchange &exchange, const dk_notify_params &p, const int32_t *matrix,
                 dk_counts *counts) {
  Team &team = op.team;
  int n = team.num_ranks, local = p.num_experts / n;
  counts->num_recv_tokens = matrix[(n - 1) * n + team.rank];
  int32_t from_node = 0;  // rows from ranks of this node
  int first = team.rank / team.num_nvl_peers * team.num_nvl_peers;
  for (int i = first; i < min(n, first + team.num_nvl_peers); i++)
    if (!exchange.without(i)) from_node += team.control().rows_of(exchange.message(i))[team.rank];
  counts->num_recv_nodes_tokens = counts->num_recv_tokens - from_node;
  for (int e = 0; e < local; e++) {
    int64_t tokens = 0;
    for (int i = 0; i < n; i++)
      if (!exchange.without(i)) tokens += team.control().experts_of(exchange.message(i))[e];
    counts->per_expert[e] =
        static_cast<int32_t>((tokens + p.expert_alignment - 1) / p.expert_alignment * p.expert_alignment);
  }
}

// Stores `seq` last; a host thread may sleep on it.
void announce(uint64_t counts, uint64_t call) {
  __atomic_store_n(&at<dk_counts>(counts)->seq, call, __ATOMIC_RELEASE);
  wake_all(*at<Word>(counts), Scope::process);  // its low half
}

void give_up(Op &op, const dk_notify_params &p) {
  size_t n = static_cast<size_t>(op.team.num_ranks);
  memset(at<void>(p.rank_prefix_matrix), 0, n * n * sizeof(int32_t));
  if (p.num_tokens) memset(at<void>(p.send_head), 0xff, static_cast<size_t>(p.num_tokens) * n * sizeof(int32_t));
  if (p.routing) give_up_choices(op.team, p);
  if (!p.counts) return;
  dk_counts *counts = at<dk_counts>(p.counts);
  counts->num_recv_tokens = -1;
  counts->num_recv_nodes_tokens = 0;
  memset(counts->per_expert, 0, static_cast<size_t>(p.num_experts) / n * sizeof(int32_t));
}

// The counts that a routing gives: no other rank needs a row of the layout.
void exchange_choices(Op &op, Exchange &exchange, const dk_notify_params &p) {
  int32_t rows[DK_MAX_RANKS], experts[DK_MAX_ROUTED_EXPERTS];
  exchange.refuse(count_choices(op.team, p, rows, experts));
  exchange.post_all(rows, experts, p.num_experts);
  if (p.topk_copy && p.num_tokens)
    memcpy(at<void>(p.topk_copy), at<const void>(p.topk_idx),
           static_cast<size_t>(p.num_tokens) * static_cast<size_t>(p.num_topk) * static_cast<size_t>(p.index_bytes));
  if (!exchange.wait()) return;
  const int32_t *matrix = fill_matrix(op, exchange, p.rank_prefix_matrix);
  if (exchange.shrinks()) forget_heads(op, exchange, p);
  if (!all_fit(op, exchange, matrix) || (expanded(p.routing) && !expanded_fit(op, exchange, p))) return;
  place_choices(op.team, exchange, p, matrix, experts);
  if (!p.counts) return;
  dk_counts *counts = at<dk_counts>(p.counts);
  int n = op.team.num_ranks;
  counts->num_recv_tokens = matrix[(n - 1) * n + op.team.rank];
  int32_t from_node = 0;  // rows from ranks of this node
  int first = op.team.rank / op.team.num_nvl_peers * op.team.num_nvl_peers;
  for (int i = first; i < min(n, first + op.team.num_nvl_peers); i++)
    from_node += static_cast<int32_t>(rows_between(op.team, matrix, i, op.team.rank));
  counts->num_recv_nodes_tokens = counts->num_recv_tokens - from_node;
  for (int32_t e = 0; e < p.num_experts / n; e++) counts->per_expert[e] = aligned_rows(experts[e], p.expert_alignment);
}

void exchange_counts(Op &op, Exchange &exchange, const dk_notify_params &p) {
  int32_t rows[DK_MAX_RANKS];
  exchange.refuse(number_rows(op, p, rows));
  exchange.post(rows, p.num_experts ? at<const int32_t>(p.tokens_per_expert) : nullptr,
                p.num_experts / op.team.num_ranks);
  if (!exchange.wait()) return;
  const int32_t *matrix = fill_matrix(op, exchange, p.rank_prefix_matrix);
  if (exchange.shrinks()) forget_heads(op, exchange, p);
  if (all_fit(op, exchange, matrix) && p.counts) fill_counts(op, exchange, p, matrix, at<dk_counts>(p.counts));
}

void run_notify(const dk_notify_params &p) {
  Op op(p, DK_OP_NOTIFY);
  op.may_shrink = op.team.shrinks();
  Exchange exchange(op);
  exchange.set_field(DK_FIELD_HIDDEN_BYTES, static_cast<int64_t>(p.hidden_bytes));
  exchange.set_field(DK_FIELD_NUM_EXPERTS, p.num_experts);
  exchange.set_field(DK_FIELD_NUM_TOPK, p.num_topk);
  exchange.set_field(DK_FIELD_NUM_SCALES, p.num_scales);
  exchange.set_field(DK_FIELD_X_TYPE, p.x_type);
  exchange.set_field(DK_FIELD_ROUTING, p.routing);
  if (p.routing) {
    exchange.set_field(DK_FIELD_ALIGNMENT, p.expert_alignment);
    exchange.set_field(DK_FIELD_MAX_TOKENS, p.num_max_tokens);
  }
  if (p.num_worst_tokens) exchange.set_row_limit(p.num_worst_tokens);
  if (p.num_worst_tokens && expanded(p.routing)) exchange.set_expanded_limit(p.num_worst_expanded);
  if (!op.failed()) p.routing ? exchange_choices(op, exchange, p) : exchange_counts(op, exchange, p);
  if (op.failed() || op.refused()) give_up(op, p);
  if (p.counts) announce(p.counts, p.call);
}

bool bad_routing(const Team &team, const dk_notify_params &p) {
  if (p.routing < DK_ROUTING_NONE || p.routing > DK_ROUTING_EXPANDED) return true;
  if (!p.routing)
    return !p.tokens_per_rank || (p.num_tokens && !p.token_in_rank) || (p.num_experts && !p.tokens_per_expert);
  if (p.num_topk < 1 || p.num_topk > kMaxTopk || bad_index_bytes(p.index_bytes) || bad_experts(team, p.num_experts) ||
      p.num_experts > DK_MAX_ROUTED_EXPERTS)
    return true;
  if (p.num_tokens && (!p.topk_idx || !p.dst_slot)) return true;
  if (p.num_scaleup_ranks < 0 || (p.num_scaleup_ranks && team.num_ranks % p.num_scaleup_ranks)) return true;
  return !p.psum_per_rank || !p.psum_per_expert || !p.num_per_expert || p.num_max_tokens < p.num_tokens ||
         p.num_worst_expanded < 0;
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_notify(dk_notify_params *p) {
  DK_ENTER(p);
  if (bad_head(*p) || !p->rank_prefix_matrix || p->num_tokens < 0 || p->num_topk < 0) return DK_EINVAL;
  if (p->num_tokens && !p->send_head) return DK_EINVAL;
  if (p->num_experts && bad_experts(*at<Team>(p->team), p->num_experts)) return DK_EINVAL;
  if (bad_routing(*at<Team>(p->team), *p)) return DK_EINVAL;
  if (p->expert_alignment < 1 || p->num_worst_tokens < 0 || p->num_scales < 0) return DK_EINVAL;
  if (p->hidden_bytes == 0 || p->hidden_bytes % 16) return DK_EINVAL;
  return enqueue<dk_notify_params, run_notify>(*p);
}
