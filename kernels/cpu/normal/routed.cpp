#include "cpu/normal/routed.h"

#include <string.h>

#include "cpu/team/check.h"

namespace dk {
namespace {

// Entry [token][choice] of topk_idx; -1: nothing is selected.
template <class P>
int32_t expert_at(const P &p, int64_t token, int32_t choice) {
  int64_t expert = index_at(p.topk_idx, p.index_bytes, static_cast<size_t>(token * p.num_topk + choice));
  return expert < 0 || expert >= p.num_experts ? -1 : static_cast<int32_t>(expert);
}

template <class P>
int32_t experts_each(const Team &team, const P &p) {
  return p.num_experts / team.num_ranks;
}

const Control &control_here(const Team &team) { return team.peers[team.rank].control; }

int psum_entries(const Team &team, const dk_notify_params &p) {
  return p.num_scaleup_ranks ? p.num_scaleup_ranks : team.num_ranks;
}

int32_t *slot_of(const dk_notify_params &p, int64_t token) { return at<int32_t>(p.dst_slot) + token * p.num_topk; }

// The rows of all ranks for a rank's experts, in the expanded layout.
int64_t expanded_rows(const Team &team, const Exchange &exchange, const dk_notify_params &p, int rank) {
  int32_t local = experts_each(team, p);
  int64_t rows = 0;
  for (int32_t e = rank * local; e < (rank + 1) * local; e++) {
    int64_t count = 0;
    for (int i = 0; i < team.num_ranks; i++)
      if (!exchange.without(i)) count += control_here(team).experts_of(exchange.message(i))[e];
    rows += (count + p.expert_alignment - 1) / p.expert_alignment * p.expert_alignment;
  }
  return rows;
}

}  // namespace

// ---- Notify ---------------------------------------------------------------------------------------------------------

Refusal count_choices(const Team &team, const dk_notify_params &p, int32_t *rows, int32_t *experts) {
  int n = team.num_ranks;
  int32_t local = experts_each(team, p);
  memset(rows, 0, sizeof(int32_t) * static_cast<size_t>(n));
  memset(experts, 0, sizeof(int32_t) * static_cast<size_t>(p.num_experts));
  int32_t *head = at<int32_t>(p.send_head);
  for (int32_t token = 0; token < p.num_tokens; token++, head += n) {
    int32_t *slot = slot_of(p, token);
    memset(head, 0xff, sizeof(int32_t) * static_cast<size_t>(n));
    for (int32_t k = 0; k < p.num_topk; k++) {
      int64_t given = index_at(p.topk_idx, p.index_bytes, static_cast<size_t>(int64_t{token} * p.num_topk + k));
      if (given >= p.num_experts) return {DK_EINVAL, DK_FIELD_TOPK_IDX, p.num_experts, given};
      slot[k] = -1;
      if (given < 0) continue;
      int32_t expert = static_cast<int32_t>(given), rank = expert / local;
      if (head[rank] < 0) head[rank] = rows[rank]++;
      slot[k] = experts[expert]++;
    }
  }
  return {};
}

void place_choices(const Team &team, const Exchange &exchange, const dk_notify_params &p, const int32_t *matrix,
                   int32_t *rows) {
  int n = team.num_ranks, me = team.rank;
  int32_t local = experts_each(team, p), first[DK_MAX_ROUTED_EXPERTS];
  bool expand = expanded(p.routing);
  // Each expert's first row, and in it those of this rank.
  for (int r = 0; r < n; r++) {
    int64_t start = 0;
    for (int32_t e = r * local; e < (r + 1) * local; e++) {
      int64_t before = 0, count = 0;
      for (int i = 0; i < n; i++) {
        if (i == me) before = count;
        if (!exchange.without(i)) count += control_here(team).experts_of(exchange.message(i))[e];
      }
      first[e] = static_cast<int32_t>(start + before);
      int64_t real_end = start + count;
      start += aligned_rows(count, p.expert_alignment);
      if (r != me) continue;
      at<int32_t>(p.num_per_expert)[e - r * local] = rows[e - r * local] = static_cast<int32_t>(count);
      at<int32_t>(p.psum_per_expert)[e - r * local] = static_cast<int32_t>(expand ? real_end : start);
      if (p.cumulative_stats) at<uint32_t>(p.cumulative_stats)[e - r * local] += static_cast<uint32_t>(count);
    }
  }
  for (int u = 0, num = psum_entries(team, p); u < num; u++) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++)
      if (i % num <= u) sum += matrix[i * n + me] - (i ? matrix[(i - 1) * n + me] : 0);
    at<int32_t>(p.psum_per_rank)[u] = sum;
  }
  const int32_t *head = at<const int32_t>(p.send_head);
  for (int32_t token = 0; token < p.num_tokens; token++, head += n) {
    int32_t *slot = slot_of(p, token);
    for (int32_t k = p.num_topk - 1; k >= 0; k--) {
      int32_t expert = expert_at(p, token, k);
      if (expert < 0) continue;
      if (head[expert / local] < 0) {  // a rank that takes no part
        slot[k] = -1;
        continue;
      }
      if (expand) {
        slot[k] = plus(slot[k], first[expert]);
        continue;
      }
      bool last = true;
      for (int32_t later = k + 1; later < p.num_topk; later++) {
        int32_t other = expert_at(p, token, later);
        last &= other < 0 || other / local != expert / local;
      }
      slot[k] = last ? plus(me * p.num_max_tokens, head[expert / local]) : -1;
    }
  }
}

bool expanded_fit(Op &op, const Exchange &exchange, const dk_notify_params &p) {
  int n = op.team.num_ranks;
  for (int step = 0; step < n && !op.refused(); step++) {
    int r = (op.team.rank + step) % n;
    if (exchange.without(r)) continue;
    int64_t limit = exchange.message(r).expanded_limit, arriving = expanded_rows(op.team, exchange, p, r);
    if (limit < 0 && arriving > INT32_MAX) limit = INT32_MAX;
    if (limit >= 0 && arriving > limit) op.refuse(r, {DK_EINVAL, DK_FIELD_WORST_EXPANDED, limit, arriving});
  }
  return !op.refused();
}

void give_up_choices(const Team &team, const dk_notify_params &p) {
  size_t local = static_cast<size_t>(experts_each(team, p));
  if (p.num_tokens)
    memset(slot_of(p, 0), 0xff, sizeof(int32_t) * static_cast<size_t>(p.num_tokens) * static_cast<size_t>(p.num_topk));
  memset(at<void>(p.psum_per_rank), 0, sizeof(int32_t) * static_cast<size_t>(psum_entries(team, p)));
  memset(at<void>(p.psum_per_expert), 0, sizeof(int32_t) * local);
  memset(at<void>(p.num_per_expert), 0, sizeof(int32_t) * local);
}

// ---- Dispatch -------------------------------------------------------------------------------------------------------

Refusal check_slots(const Team &team, const dk_dispatch_params &p, int32_t *ends) {
  memset(ends, 0, sizeof(int32_t) * static_cast<size_t>(team.num_ranks));
  const int32_t *slot = at<const int32_t>(p.dst_slot), *head = at<const int32_t>(p.send_head);
  for (int32_t token = 0; token < p.num_tokens; token++, head += team.num_ranks) {
    for (int32_t k = 0; k < p.num_topk; k++, slot++) {
      int32_t expert = expert_at(p, token, k);
      if (expert >= 0 && head[expert / experts_each(team, p)] < 0) continue;  // as after a notify that was refused
      if ((expert < 0) != (*slot < 0) || *slot == INT32_MAX)
        return {DK_EINVAL, DK_FIELD_DST_SLOT, expert < 0 ? -1 : 0, *slot};
      if (expert < 0) continue;
      int32_t &end = ends[expert / experts_each(team, p)];
      end = max(end, *slot + 1);
    }
  }
  return {};
}

bool slots_fit(Op &op, const Exchange &exchange) {
  int n = op.team.num_ranks;
  for (int i = 0; i < n && !op.refused(); i++) {
    if (exchange.without(i)) continue;
    const int32_t *ends = op.team.control().rows_of(exchange.message(i));
    for (int r = 0; r < n && !op.refused(); r++) {
      if (exchange.without(r)) continue;
      int64_t room = exchange.message(r).expanded_limit;
      if (ends[r] > room) op.refuse(i, {DK_EINVAL, DK_FIELD_DST_SLOT, room, ends[r] - 1});
    }
  }
  return !op.refused();
}

namespace {

void write_scales(const dk_dispatch_params &p, int64_t row, const void *scales) {
  uint32_t *to = at<uint32_t>(p.recv_scales) + row * p.recv_scale_token_stride;
  const uint32_t *from = static_cast<const uint32_t *>(scales);
  for (int32_t s = 0; s < p.num_scales; s++) to[s * p.recv_scale_stride] = from ? from[s] : 0;
}

void write_indices(const dk_dispatch_params &p, int64_t row, const int32_t *idx, int32_t first, int32_t local) {
  for (int32_t k = 0; k < p.num_topk; k++) {
    int32_t mine = idx[k] >= first && idx[k] < first + local ? idx[k] - first : -1;
    if (p.index_bytes == 8)
      at<int64_t>(p.recv_topk_idx)[row * p.num_topk + k] = mine;
    else
      at<int32_t>(p.recv_topk_idx)[row * p.num_topk + k] = mine;
  }
}

void zero_expanded_row(const dk_dispatch_params &p, int64_t row) {
  memset(at<uint8_t>(p.recv_x) + static_cast<uint64_t>(row) * p.hidden_bytes, 0, p.hidden_bytes);
  if (p.recv_scales) write_scales(p, row, nullptr);
  if (p.recv_topk_weights) at<float>(p.recv_topk_weights)[row] = 0;
}

}  // namespace

void write_routed_row(const Team &team, const dk_dispatch_params &p, int source, int64_t row, int32_t token,
                      const void *x, const void *scales, const Choices &choices, bool stream) {
  bool expand = expanded(p.routing);
  int32_t local = experts_each(team, p), first = local * team.rank, last = -1, slots[kMaxTopk];
  for (int32_t k = 0; k < p.num_topk; k++) {
    slots[k] = -1;
    bool here = choices.idx[k] >= first && choices.idx[k] < first + local;
    if (here) last = k;
    // The sender has compared its slots with the room here; since then its caller may have changed them.
    if (!here || !expand || choices.slots[k] < 0 || choices.slots[k] >= p.num_expanded_tokens) continue;
    int64_t slot = slots[k] = choices.slots[k];
    team.device->rows->copy(at<uint8_t>(p.recv_x) + static_cast<uint64_t>(slot) * p.hidden_bytes, x, p.hidden_bytes,
                            stream);
    if (p.recv_scales) write_scales(p, slot, scales);
    if (p.recv_topk_weights) at<float>(p.recv_topk_weights)[slot] = choices.weights[k];
  }
  if (!expand) {
    team.device->rows->copy(at<uint8_t>(p.recv_x) + static_cast<uint64_t>(row) * p.hidden_bytes, x, p.hidden_bytes,
                            stream);
    if (p.recv_scales) write_scales(p, row, scales);
    if (p.recv_topk_idx) write_indices(p, row, choices.idx, first, local);
    if (p.recv_topk_weights)
      memcpy(at<float>(p.recv_topk_weights) + row * p.num_topk, choices.weights,
             sizeof(float) * static_cast<size_t>(p.num_topk));
  }
  if (!p.recv_src_metadata || p.flags & DK_DISPATCH_CACHED) return;
  int32_t *meta = at<int32_t>(p.recv_src_metadata) + row * (p.num_topk + 2);
  meta[0] = plus(source * p.num_max_tokens, token);
  meta[1] = source * p.num_topk + last;
  if (expand) memcpy(meta + 2, slots, sizeof(int32_t) * static_cast<size_t>(p.num_topk));
}

void write_padding(const Team &team, const dk_dispatch_params &p) {
  if (!expanded(p.routing) || !(p.flags & DK_DISPATCH_ZERO_PADDING)) return;
  const int32_t *ends = at<const int32_t>(p.psum_per_expert);
  for (int32_t e = 0; e < experts_each(team, p); e++) {
    int64_t row = max(ends[e], 0), end = min<int64_t>(aligned_rows(row, p.expert_alignment), p.num_expanded_tokens);
    for (; row < end; row++) zero_expanded_row(p, row);
  }
}

void write_missing_row(const dk_dispatch_params &p, int source, int64_t row, int64_t first) {
  bool expand = expanded(p.routing), cached = p.flags & DK_DISPATCH_CACHED;
  int32_t *meta = p.recv_src_metadata ? at<int32_t>(p.recv_src_metadata) + row * (p.num_topk + 2) : nullptr;
  if (!expand) {
    memset(at<uint8_t>(p.recv_x) + static_cast<uint64_t>(row) * p.hidden_bytes, 0, p.hidden_bytes);
    if (p.recv_scales) write_scales(p, row, nullptr);
  }
  for (int32_t k = 0; expand && cached && meta && k < p.num_topk; k++)
    if (int32_t slot = meta[2 + k]; slot >= 0 && slot < p.num_expanded_tokens) zero_expanded_row(p, slot);
  if (!meta || cached) return;
  meta[0] = row > first ? plus(meta[-p.num_topk - 2], 1) : source * p.num_max_tokens;
  meta[1] = source * p.num_topk;
  if (expand) memset(meta + 2, 0xff, sizeof(int32_t) * static_cast<size_t>(p.num_topk));
}

void zero_missing_rows(const Team &team, const dk_dispatch_params &p, int64_t num_rows) {
  if (!expanded(p.routing) || !p.psum_per_expert || !p.recv_src_metadata) return;
  const int32_t *ends = at<const int32_t>(p.psum_per_expert);
  int32_t local = experts_each(team, p), starts[DK_MAX_ROUTED_EXPERTS], next[DK_MAX_ROUTED_EXPERTS];
  for (int32_t e = 0; e < local; e++)  // what the handle says may have changed: a row is never below 0
    next[e] = starts[e] = e ? max(aligned_rows(max(ends[e - 1], 0), p.expert_alignment), 0) : 0;
  auto zero_until = [&](int32_t e, int64_t end) {
    for (end = min<int64_t>(end, p.num_expanded_tokens); next[e] < end; next[e]++) zero_expanded_row(p, next[e]);
  };
  const int32_t *meta = at<const int32_t>(p.recv_src_metadata);
  for (int64_t row = 0; row < num_rows; row++, meta += p.num_topk + 2)
    for (int32_t k = 0; k < p.num_topk; k++) {
      int32_t slot = meta[2 + k], e = local - 1;
      if (slot < 0 || slot >= p.num_expanded_tokens) continue;
      while (e > 0 && starts[e] > slot) e--;
      zero_until(e, slot);
      next[e] = max(next[e], slot + 1);
    }
  for (int32_t e = 0; e < local; e++) zero_until(e, ends[e]);
}

void clear_routed_outputs(const dk_dispatch_params &p) {
  if (!expanded(p.routing)) return;
  if (p.recv_topk_weights)
    memset(at<void>(p.recv_topk_weights), 0, sizeof(float) * static_cast<size_t>(p.num_expanded_tokens));
  if (p.recv_src_metadata && !(p.flags & DK_DISPATCH_CACHED))
    memset(at<void>(p.recv_src_metadata), 0xff,
           sizeof(int32_t) * static_cast<size_t>(max(p.num_recv_tokens, 0)) * static_cast<size_t>(p.num_topk + 2));
}

// ---- Combine --------------------------------------------------------------------------------------------------------

Refusal check_terms(const Team &team, const dk_combine_params &p, int64_t rows) {
  (void)team;
  for (int64_t token = 0; token < p.num_tokens; token++)
    for (int32_t k = 0; k < p.num_topk; k++) {
      int64_t given = index_at(p.topk_idx, p.index_bytes, static_cast<size_t>(token * p.num_topk + k));
      if (given >= p.num_experts) return {DK_EINVAL, DK_FIELD_TOPK_IDX, p.num_experts, given};
    }
  if (!expanded(p.routing)) return {};
  const int32_t *meta = at<const int32_t>(p.recv_src_metadata);
  for (int64_t row = 0; row < rows; row++, meta += p.num_topk + 2)
    for (int32_t k = 0; k < p.num_topk; k++)
      if (meta[2 + k] >= p.num_x_rows) return {DK_EINVAL, DK_FIELD_SRC_METADATA, p.num_x_rows, meta[2 + k]};
  return {};
}

Refusal check_metadata(const Team &team, const dk_combine_params &p, const int32_t *matrix) {
  int64_t row = 0;
  for (int source = 0, n = team.num_ranks; source < n; source++) {
    int64_t before = -1, end = matrix[source * n + team.rank], first = int64_t{source} * p.num_max_tokens;
    for (; row < end; row++) {
      const int32_t *meta = at<const int32_t>(p.recv_src_metadata) + row * (p.num_topk + 2);
      int64_t token = meta[0] - first;
      if (token <= before || token >= p.num_max_tokens || meta[1] < 0)
        return {DK_EINVAL, DK_FIELD_SRC_METADATA, first + before + 1, meta[1] < 0 ? meta[1] : meta[0]};
      before = token;
    }
  }
  return {};
}

void gather_terms(const RowKernels &kernels, const dk_combine_params &p, int64_t row, uint8_t *to, float *weights) {
  const uint16_t *terms[kMaxTopk];
  int count = 0;
  uint64_t hidden = static_cast<uint64_t>(p.hidden);
  for (int32_t k = 0; k < p.num_topk; k++) {
    int32_t from = expanded_row(p, row, k);
    if (weights) weights[k] = from < 0 ? 0 : at<const float>(p.topk_weights)[from];
    if (from >= 0) terms[count++] = at<const uint16_t>(p.x) + static_cast<uint64_t>(from) * hidden;
  }
  if (rows_together(p) > 1) {
    for (int i = 0; i < count; i++)
      kernels.copy(to + 2 * hidden * static_cast<uint64_t>(i), terms[i], 2 * hidden, false);
  } else if (count == 1) {
    kernels.copy(to, terms[0], 2 * hidden, false);
  } else if (count > 1) {
    kernels.sum(reinterpret_cast<uint16_t *>(to), terms, count, hidden, false);
  } else {
    memset(to, 0, 2 * hidden);
  }
}

int order_terms(const Team &team, const dk_combine_params &p, int32_t token, const int32_t *head, Term *terms) {
  int32_t local = experts_each(team, p);
  int count = 0;
  bool apart = rows_together(p) > 1;
  for (int32_t k = 0; k < p.num_topk; k++) {
    int32_t expert = expert_at(p, token, k);
    int rank = expert < 0 ? -1 : expert / local;
    if (rank < 0 || head[rank] < 0) continue;
    int before = 0;
    for (int i = 0; i < count; i++) before += terms[i].source == rank;
    if (apart) {
      terms[count++] = {rank, before};
      continue;
    }
    if (before) {  // a rank's place is that of its last choice
      int i = 0;
      while (terms[i].source != rank) i++;
      for (; i + 1 < count; i++) terms[i] = terms[i + 1];
      count--;
    }
    terms[count++] = {rank, 0};
  }
  return count;
}

int rank_of_choice(const Team &team, const dk_combine_params &p, int32_t token, int32_t choice) {
  int32_t expert = expert_at(p, token, choice);
  return expert < 0 ? -1 : expert / experts_each(team, p);
}

}  // namespace dk
