// Checks of a handle's contents, before anything moves by them. A caller may have changed them, or have mixed the
// tensors of two handles.
#pragma once
#include "cpu/team/exchange.h"

namespace dk {

// Columns ascend from 0 and end at no more rows than this rank has room for; room < 0: any number.
Refusal check_matrix(const Team &team, const int32_t *matrix, int64_t room);
// Each column of send_head has the places 0, 1, ... in this order, as many as the matrix says; all else is below 0.
Refusal check_heads(const Team &team, const int32_t *head, int32_t num_tokens, const int32_t *matrix, int64_t *next);
// The tokens of each source ascend.
Refusal check_sources(const Team &team, const int32_t *sources, const int32_t *matrix);
uint64_t hash_of(const Team &team, const int32_t *matrix);  // never 0

// The rows that `source` sends to `owner`.
inline int64_t rows_between(const Team &team, const int32_t *matrix, int source, int owner) {
  int n = team.num_ranks;
  return int64_t{matrix[source * n + owner]} - (source ? matrix[(source - 1) * n + owner] : 0);
}

}  // namespace dk
