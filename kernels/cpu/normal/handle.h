// Checks of a handle's contents, before anything moves by them. A caller may have changed them, or have mixed the
// tensors of two handles. While the call runs they may change too: another thread writes them, or an output of the call
// lies there. So what a row's place depends on is read once, or again compared where it is used.
#pragma once
#include "cpu/team/exchange.h"

namespace dk {

// Copies the matrix as it is now to the team; the operation goes by the copy.
const int32_t *take_matrix(Team &team, uint64_t matrix);
// Columns ascend from 0 and end at no more rows than this rank has room for; room < 0: any number.
Refusal check_matrix(const Team &team, const int32_t *matrix, int64_t room);
// Each column of send_head has the places 0, 1, ... in this order, as many as the matrix says; all else is below 0.
Refusal check_heads(const Team &team, const int32_t *head, int32_t num_tokens, const int32_t *matrix, int64_t *next);
// The tokens of each source ascend.
Refusal check_sources(const Team &team, const int32_t *sources, const int32_t *matrix);
uint64_t hash_of(const Team &team, const int32_t *matrix);  // never 0

// send_head by tokens, in their order: the places of one token's rows, read once. If they are not the next ones, or at
// the end not as many as `rows` says for each rank, the operation fails.
class Heads {
 public:
  // rows, next: numbers by rank.
  Heads(Op &op, uint64_t send_head, int32_t num_tokens, const int64_t *rows, int64_t *next)
      : op_(op), from_(at<const int32_t>(send_head)), num_tokens_(num_tokens), rows_(rows), next_(next) {
    none();
  }
  void begin();
  void load(int32_t token);  // the one after the last; num_tokens: the end
  const int32_t *now() const { return now_; }
  // The number of rows of the tokens before this one.
  int64_t before(int rank) const { return next_[rank] - (now_[rank] >= 0); }

 private:
  void none();
  void fail(int64_t expected, int64_t seen);

  Op &op_;
  const int32_t *from_;
  const int32_t num_tokens_;
  const int64_t *rows_;
  int64_t *next_;
  int32_t now_[DK_MAX_RANKS];
};

// The rows that `source` sends to `owner`.
inline int64_t rows_between(const Team &team, const int32_t *matrix, int source, int owner) {
  int n = team.num_ranks;
  return int64_t{matrix[source * n + owner]} - (source ? matrix[(source - 1) * n + owner] : 0);
}

}  // namespace dk
