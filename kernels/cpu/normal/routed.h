// Normal mode with a routing: what its calls do beyond, or otherwise than, those without one. topk_idx says where a
// token's rows go and come from; in the expanded layout a row goes to the place of each choice.
#pragma once
#include "cpu/team/exchange.h"

namespace dk {

inline bool expanded(int32_t routing) { return routing == DK_ROUTING_EXPANDED; }
inline int32_t aligned_rows(int64_t rows, int32_t alignment) {
  return static_cast<int32_t>((rows + alignment - 1) / alignment * alignment);
}

// ---- Notify ---------------------------------------------------------------------------------------------------------

// This rank's counts, and with them its rows' numbers: send_head; and in dst_slot each choice's number among this
// rank's choices of its expert. The result says what is wrong with topk_idx.
Refusal count_choices(const Team &team, const dk_notify_params &p, int32_t *rows, int32_t *experts);
// From all ranks' counts: the places in dst_slot, the sums for each rank and expert. `matrix` is complete.
// rows: of each local expert.
void place_choices(const Team &team, const Exchange &exchange, const dk_notify_params &p, const int32_t *matrix,
                   int32_t *rows);
// False, with the refusal recorded, if a rank has less room than expanded rows arrive there.
bool expanded_fit(Op &op, const Exchange &exchange, const dk_notify_params &p);
void give_up_choices(const Team &team, const dk_notify_params &p);

// ---- Dispatch -------------------------------------------------------------------------------------------------------

// Expanded: what is wrong with dst_slot; ends[r]: 1 + the last row that this rank's choices have at rank r.
Refusal check_slots(const Team &team, const dk_dispatch_params &p, int32_t *ends);
// Expanded, all messages being there: false, with the refusal recorded, if a rank has less room than another's slots.
bool slots_fit(Op &op, const Exchange &exchange);

// A token's choices, as its row carries them.
struct Choices {
  const int32_t *idx;
  const float *weights;
  const int32_t *slots;  // expanded
};
// Writes all of a row's outputs. row: its number in the plain layout.
void write_routed_row(const Team &team, const dk_dispatch_params &p, int source, int64_t row, int32_t token,
                      const void *x, const void *scales, const Choices &choices, bool stream);
// What no row is written to: padding; or all that names rows, where the call has failed.
void write_padding(const Team &team, const dk_dispatch_params &p);
// A rank takes no part any more: row `row` of the plain layout, of its rows from `first` on, does not come. Expanded,
// and all other rows being there: the places that none of `num_rows` rows has, which are those of rows that have not
// come.
void write_missing_row(const dk_dispatch_params &p, int source, int64_t row, int64_t first);
void zero_missing_rows(const Team &team, const dk_dispatch_params &p, int64_t num_rows);
void clear_routed_outputs(const dk_dispatch_params &p);

// ---- Combine --------------------------------------------------------------------------------------------------------

// Rows of a token that one rank sends.
inline int rows_together(const dk_combine_params &p) {
  return expanded(p.routing) && p.flags & DK_COMBINE_UNREDUCED ? p.num_topk : 1;
}
Refusal check_terms(const Team &team, const dk_combine_params &p, int64_t rows);
// Whether every rank's row reaches the token's rank, also from another node.
inline bool rows_apart(const dk_combine_params &p) {
  return p.routing && p.flags & (DK_COMBINE_UNREDUCED | DK_COMBINE_APART);
}
// Among nodes: what is wrong with the tokens and choices in recv_src_metadata.
Refusal check_metadata(const Team &team, const dk_combine_params &p, const int32_t *matrix);
// What row `row` of the plain layout came from: the token's number at `source`, and its last choice here.
inline int32_t token_of_row(const dk_combine_params &p, int source, int64_t row) {
  return plus(at<const int32_t>(p.recv_src_metadata)[row * (p.num_topk + 2)], -source * p.num_max_tokens);
}
inline int32_t last_choice_of_row(const dk_combine_params &p, int64_t row) {
  return at<const int32_t>(p.recv_src_metadata)[row * (p.num_topk + 2) + 1] % p.num_topk;
}
// Expanded: the row of x that row `row` of the plain layout has for a choice; -1: none. Looked at again: check_terms
// has seen it, but the metadata may have changed.
inline int32_t expanded_row(const dk_combine_params &p, int64_t row, int32_t choice) {
  int32_t there = at<const int32_t>(p.recv_src_metadata)[row * (p.num_topk + 2) + 2 + choice];
  return there < p.num_x_rows ? there : -1;
}
// Expanded: what this rank sends for row `row` of the plain layout: to `to` the sum of its expanded rows, or these
// rows; to `weights`, if not null, the weight of each choice.
void gather_terms(const RowKernels &kernels, const dk_combine_params &p, int64_t row, uint8_t *to, float *weights);

// The terms of a token's sum at its own rank, in their order.
struct Term {
  int source, which;  // the rank; which of the rows that it has sent for the token
};
int order_terms(const Team &team, const dk_combine_params &p, int32_t token, const int32_t *head, Term *terms);
// The rank whose weight is that of the choice; -1: none.
int rank_of_choice(const Team &team, const dk_combine_params &p, int32_t token, int32_t choice);

}  // namespace dk
