// Copies of experts on other ranks: the handle of the cached dispatch that moves their rows, and the sums of what came.
#include <string.h>

#include "cpu/runtime/stream.h"
#include "cpu/team/check.h"

namespace dk {
namespace {

class Balance {
 public:
  explicit Balance(const dk_balance_params &p) : p_(p), mapping_(at<const int32_t>(p.mapping)) {}
  void copies() const;
  void grads() const;
  void add() const;

 private:
  // The expert of a rank's slot; -1: none.
  int32_t expert(int rank, int32_t slot) const {
    int32_t found = mapping_[int64_t{rank} * p_.num_slots + slot];
    return found < 0 || found >= int64_t{p_.num_ranks} * p_.num_local ? -1 : found;
  }
  int owner(int rank, int32_t slot) const {
    int32_t found = expert(rank, slot);
    return found < 0 ? -1 : found / p_.num_local;
  }
  // Whether an earlier slot of the rank, in this part, has the same expert: the rows cross once for both.
  bool repeats(int rank, int32_t slot) const {
    for (int32_t other = p_.first; other < slot; other++)
      if (expert(rank, other) == expert(rank, slot)) return true;
    return false;
  }
  void clear(int64_t token, int32_t num_topk) const;
  void sum_columns() const;

  const dk_balance_params &p_;
  const int32_t *mapping_;
};

void Balance::clear(int64_t token, int32_t num_topk) const {
  memset(at<int32_t>(p_.send_head) + token * p_.num_ranks, 0xff, sizeof(int32_t) * static_cast<size_t>(p_.num_ranks));
  for (int64_t k = token * num_topk; k < (token + 1) * num_topk; k++) {
    at<int32_t>(p_.topk_idx)[k] = at<int32_t>(p_.dst_slot)[k] = -1;
    at<float>(p_.topk_weights)[k] = 1;
  }
}

// From rows of each rank to running sums.
void Balance::sum_columns() const {
  int n = p_.num_ranks;
  int32_t *matrix = at<int32_t>(p_.rank_prefix_matrix);
  for (int i = n; i < n * n; i++) matrix[i] += matrix[i - n];
}

void Balance::copies() const {
  int n = p_.num_ranks;
  int32_t num_topk = n * p_.count, *matrix = at<int32_t>(p_.rank_prefix_matrix);
  memset(matrix, 0, sizeof(int32_t) * static_cast<size_t>(n) * static_cast<size_t>(n));
  for (int64_t t = 0; t < int64_t{p_.num_local} * p_.num_rows; t++) clear(t, num_topk);
  for (int r = 0; r < n; r++) {
    for (int32_t slot = p_.first; slot < p_.first + p_.count; slot++)
      if (int from = owner(r, slot); from >= 0 && !repeats(r, slot)) matrix[from * n + r] += p_.num_rows;
    int32_t next = 0;  // this rank's rows to that one
    for (int32_t e = 0; e < p_.num_local; e++) {
      bool goes = false;
      for (int32_t i = 0; i < p_.count; i++) {
        if (expert(r, p_.first + i) != p_.rank * p_.num_local + e) continue;
        goes = true;
        for (int32_t row = 0; row < p_.num_rows; row++) {
          int64_t k = (int64_t{e} * p_.num_rows + row) * num_topk + r * p_.count + i;
          at<int32_t>(p_.topk_idx)[k] = r * p_.count + i;
          at<int32_t>(p_.dst_slot)[k] = (p_.first + i) * p_.num_rows + row;
        }
      }
      for (int32_t row = 0; goes && row < p_.num_rows; row++)
        at<int32_t>(p_.send_head)[(int64_t{e} * p_.num_rows + row) * n + r] = next++;
    }
  }
  sum_columns();
}

void Balance::grads() const {
  int n = p_.num_ranks;
  int32_t *matrix = at<int32_t>(p_.rank_prefix_matrix);
  memset(matrix, 0, sizeof(int32_t) * static_cast<size_t>(n) * static_cast<size_t>(n));
  for (int64_t t = 0; t < int64_t{p_.num_slots} * p_.num_rows; t++) clear(t, 1);
  for (int to = 0; to < n; to++) {
    int32_t place = 0, next = 0;  // copies that the rank gets, and those that it gets from this one
    for (int r = 0; r < n; r++) {
      for (int32_t slot = 0; slot < p_.num_slots; slot++) {
        if (owner(r, slot) != to) continue;
        matrix[r * n + to] += p_.count;
        for (int32_t i = 0; r == p_.rank && i < p_.count; i++) {
          int64_t token = int64_t{slot} * p_.num_rows + p_.first + i;
          at<int32_t>(p_.topk_idx)[token] = to;
          at<int32_t>(p_.dst_slot)[token] = place * p_.count + i;
          at<int32_t>(p_.send_head)[token * n + to] = next++;
        }
        place++;
      }
    }
  }
  sum_columns();
}

void Balance::add() const {
  int64_t place = 0, words = static_cast<int64_t>(p_.row_bytes / sizeof(float));
  for (int r = 0; r < p_.num_ranks; r++) {
    for (int32_t slot = 0; slot < p_.num_slots; slot++) {
      if (owner(r, slot) != p_.rank) continue;
      int64_t e = expert(r, slot) % p_.num_local;
      for (int64_t i = 0; i < p_.count; i++, place++) {
        if (at<const float>(p_.arrived)[place] != 1) continue;
        const float *from = at<const float>(p_.rows) + place * words;
        float *to = at<float>(p_.experts) + (e * p_.num_rows + p_.first + i) * words;
        for (int64_t w = 0; w < words; w++) to[w] += from[w];
      }
    }
  }
}

void run_balance(void *argument) {
  const dk_balance_params &p = *static_cast<dk_balance_params *>(argument);
  Balance work(p);
  if (p.what == DK_BALANCE_COPIES)
    work.copies();
  else if (p.what == DK_BALANCE_GRADS)
    work.grads();
  else
    work.add();
}

bool bad_balance(const dk_balance_params &p) {
  if (!p.device || !p.mapping || p.what < DK_BALANCE_COPIES || p.what > DK_BALANCE_ADD) return true;
  if (p.num_ranks < 1 || p.num_ranks > DK_MAX_RANKS || p.rank < 0 || p.rank >= p.num_ranks) return true;
  if (p.num_slots < 1 || int64_t{p.num_slots} * p.num_ranks > DK_MAX_BALANCED_SLOTS || p.num_local < 1 ||
      p.num_rows < 1)
    return true;
  int32_t end = p.what == DK_BALANCE_COPIES ? p.num_slots : p.num_rows;
  if (p.first < 0 || p.count < 1 || p.count > end || p.first > end - p.count) return true;
  if (p.what == DK_BALANCE_ADD) return !p.rows || !p.arrived || !p.experts || p.row_bytes == 0 || p.row_bytes % 16 != 0;
  return !p.rank_prefix_matrix || !p.send_head || !p.topk_idx || !p.dst_slot || !p.topk_weights;
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_balance(dk_balance_params *p) {
  DK_ENTER(p);
  if (bad_balance(*p)) return DK_EINVAL;
  if (p->stream) return push(at<Stream>(p->stream), run_balance, *p);
  run_balance(p);
  return DK_OK;
}
