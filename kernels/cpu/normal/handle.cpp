#include "cpu/normal/handle.h"

#include <string.h>

namespace dk {

const int32_t *take_matrix(Team &team, uint64_t matrix) {
  size_t n = static_cast<size_t>(team.num_ranks);
  memcpy(team.matrix.get(), at<const void>(matrix), n * n * sizeof(int32_t));
  return team.matrix.get();
}

Refusal check_matrix(const Team &team, const int32_t *matrix, int64_t room) {
  int n = team.num_ranks;
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < n; j++) {
      int32_t before = i ? matrix[(i - 1) * n + j] : 0, rows = matrix[i * n + j];
      if (rows < before) return {DK_EINVAL, DK_FIELD_PREFIX_MATRIX, before, rows};
    }
  }
  int64_t arriving = matrix[(n - 1) * n + team.rank];
  if (room >= 0 && arriving > room) return {DK_EINVAL, DK_FIELD_HANDLE_ROWS, room, arriving};
  return {};
}

Refusal check_heads(const Team &team, const int32_t *head, int32_t num_tokens, const int32_t *matrix, int64_t *next) {
  int n = team.num_ranks;
  memset(next, 0, sizeof(int64_t) * static_cast<size_t>(n));
  for (int32_t token = 0; token < num_tokens; token++, head += n) {
    for (int r = 0; r < n; r++) {
      if (head[r] < 0) continue;
      if (head[r] != next[r]) return {DK_EINVAL, DK_FIELD_SEND_HEAD, next[r], head[r]};
      next[r]++;
    }
  }
  for (int r = 0; r < n; r++) {
    int64_t rows = rows_between(team, matrix, team.rank, r);
    if (next[r] != rows) return {DK_EINVAL, DK_FIELD_SEND_HEAD, rows, next[r]};
  }
  return {};
}

Refusal check_sources(const Team &team, const int32_t *sources, const int32_t *matrix) {
  int64_t row = 0;
  for (int source = 0; source < team.num_ranks; source++) {
    int64_t end = row + rows_between(team, matrix, source, team.rank);
    for (int64_t before = -1; row < end; before = sources[row++])
      if (sources[row] <= before) return {DK_EINVAL, DK_FIELD_SRC_IDX, before + 1, sources[row]};
  }
  return {};
}

// ---- Heads ----

void Heads::none() { memset(now_, 0xff, sizeof(int32_t) * static_cast<size_t>(op_.team.num_ranks)); }

void Heads::fail(int64_t expected, int64_t seen) {
  none();
  op_.fail(DK_EINVAL, op_.team.rank, DK_FIELD_SEND_HEAD, expected, seen);
}

void Heads::begin() {
  memset(next_, 0, sizeof(int64_t) * static_cast<size_t>(op_.team.num_ranks));
  load(0);
}

void Heads::load(int32_t token) {
  int n = op_.team.num_ranks;
  if (token == num_tokens_) {
    none();
    for (int r = 0; r < n; r++)
      if (next_[r] != rows_[r]) return fail(rows_[r], next_[r]);
    return;
  }
  const int32_t *from = from_ + int64_t{token} * n;
  for (int r = 0; r < n; r++) {
    int32_t place = now_[r] = from[r];
    if (place >= 0 && (place != next_[r] || place >= rows_[r])) return fail(next_[r], place);
  }
  for (int r = 0; r < n; r++) next_[r] += now_[r] >= 0;
}

// FNV-1a by words.
uint64_t hash_of(const Team &team, const int32_t *matrix) {
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t i = 0, n = int64_t{team.num_ranks} * team.num_ranks; i < n; i++)
    hash = (hash ^ static_cast<uint32_t>(matrix[i])) * 0x100000001b3;
  return hash ? hash : 1;
}

}  // namespace dk
