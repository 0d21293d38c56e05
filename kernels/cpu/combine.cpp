// Combine of normal mode. Rows go back through a ring for each pair of ranks, in the order in which they came, so that the
// token's own rank finds the rows that it needs next at the heads of its rings. It adds them in FP32 by ascending rank.
#include <string.h>

#include "cpu/check.h"
#include "cpu/exchange.h"
#include "cpu/ring.h"

namespace dk {
namespace {

enum { kFirstRow, kNumRows, kPushed, kExpected, kHead };  // numbers kept for each peer

constexpr int32_t kTokensAtOnce = 16;  // between two updates of the cursors

bool has_weights(const dk_combine_params &p) { return p.topk_weights || p.combined_topk_weights; }
uint64_t weight_bytes(const dk_combine_params &p) { return has_weights(p) ? 4u * static_cast<uint64_t>(p.num_topk) : 0; }
uint64_t row_bytes(const dk_combine_params &p) { return 2 * static_cast<uint64_t>(p.hidden); }

Ring combine_ring(const Team &team, const dk_combine_params &p, int reader) {
  return Ring(team, team.rank, row_bytes(p), weight_bytes(p), team.num_ranks, p.nvl_recv_chunk, reader);
}

class Combine {
 public:
  Combine(Op &op, const dk_combine_params &p);
  void run();

 private:
  void count_rows();
  Poll poll();
  bool awaits(int peer, Missing &missing);
  bool push(int reader);
  bool add_tokens();
  bool row_is_here(int source, int32_t index);
  void add_token(int32_t token);
  void add_weights(int32_t token, const float *const *rows, int count);
  void fail_outputs();

  const int32_t *head_of(int32_t token) const { return at<const int32_t>(p_.send_head) + static_cast<int64_t>(token) * team_.num_ranks; }
  Ring ring_of(int source) const {
    CallMessage &message = exchange_.message(source);
    return Ring(team_, source, message.ring_slots, message.ring_stride, mine_, team_.rank);
  }

  Op &op_;
  Team &team_;
  const dk_combine_params &p_;
  const RowKernels &rows_;
  Exchange exchange_;
  Ring mine_;  // the shape of all pair rings
  int64_t *first_row_, *num_rows_, *pushed_, *expected_, *head_;
  int64_t to_push_ = 0;
  int32_t next_token_ = 0;
  bool stream_ = false;
};

Combine::Combine(Op &op, const dk_combine_params &p)
    : op_(op), team_(op.team), p_(p), rows_(*team_.device->rows), exchange_(op), mine_(combine_ring(team_, p, 0)),
      first_row_(team_.numbers(kFirstRow)), num_rows_(team_.numbers(kNumRows)), pushed_(team_.numbers(kPushed)),
      expected_(team_.numbers(kExpected)), head_(team_.numbers(kHead)) {
  exchange_.set_field(DK_FIELD_HIDDEN_BYTES, static_cast<int64_t>(row_bytes(p)));
  bool nothing = p.num_tokens == 0 && p.num_recv_tokens == 0;
  exchange_.set_field(DK_FIELD_NUM_TOPK, has_weights(p) ? p.num_topk : nothing ? kAnyValue : 0);
  exchange_.set_ring(mine_.slots(), mine_.stride());
}

void Combine::count_rows() {
  const int32_t *matrix = at<const int32_t>(p_.rank_prefix_matrix);
  int n = team_.num_ranks, me = team_.rank;
  for (int i = 0; i < n; i++) {
    first_row_[i] = i ? matrix[(i - 1) * n + me] : 0;
    num_rows_[i] = matrix[i * n + me] - first_row_[i];
    expected_[i] = matrix[me * n + i] - (me ? matrix[(me - 1) * n + i] : 0);
    pushed_[i] = head_[i] = 0;
    if (i != me) to_push_ += num_rows_[i];
  }
  int64_t rows = matrix[(n - 1) * n + me];
  if (rows > p_.num_recv_tokens) op_.fail(DK_EMISMATCH, -1, DK_FIELD_WORST_TOKENS, p_.num_recv_tokens, rows);
  stream_ = row_bytes(p_) * static_cast<uint64_t>(p_.num_tokens) * static_cast<uint64_t>(n) > team_.device->cached_bytes;
}

void Combine::run() {
  if (!op_.failed()) count_rows();
  if (!op_.failed()) {
    exchange_.post(nullptr, nullptr, 0);
    wait_until(op_, [this] { return poll(); }, [this](int peer, Missing &missing) { return awaits(peer, missing); });
    rows_.finish_stream();
  }
  if (op_.failed()) return fail_outputs();
  for (int i = 0; i < team_.num_ranks; i++)
    op_.sent(i, static_cast<uint64_t>(num_rows_[i]) * (row_bytes(p_) + (p_.topk_weights ? weight_bytes(p_) : 0)));
}

Poll Combine::poll() {
  bool progress = exchange_.look();
  if (op_.failed()) return Poll::done;
  if (exchange_.complete()) {
    for (int step = 1; step < team_.num_ranks; step++) progress |= push((team_.rank + step) % team_.num_ranks);
    progress |= add_tokens();
    if (to_push_ == 0 && next_token_ == p_.num_tokens) return Poll::done;
  }
  return progress ? Poll::progress : Poll::idle;
}

bool Combine::awaits(int peer, Missing &missing) {
  if (exchange_.awaits(peer, missing)) return true;
  if (!exchange_.complete()) return false;
  if (next_token_ < p_.num_tokens && head_of(next_token_)[peer] >= head_[peer]) {
    missing = {head_of(next_token_)[peer] + 1, head_[peer]};
    return true;
  }
  if (pushed_[peer] == num_rows_[peer]) return false;
  missing = {pushed_[peer] - static_cast<int64_t>(mine_.slots()) + 1,
             static_cast<int64_t>(team_.control().combine_tail(peer).rows(exchange_.number()))};
  return missing.seen < missing.expected;
}

// Rows of one rank lie together in x, in the order of its tokens.
bool Combine::push(int reader) {
  if (pushed_[reader] == num_rows_[reader]) return false;
  int64_t slots = static_cast<int64_t>(mine_.slots());
  int64_t read = static_cast<int64_t>(team_.control().combine_tail(reader).rows(exchange_.number()));
  int64_t count = min_of(min_of(slots - (pushed_[reader] - read), num_rows_[reader] - pushed_[reader]), mine_.batch(p_.nvl_send_chunk));
  if (count <= 0) return false;
  Ring ring = combine_ring(team_, p_, reader);
  uint64_t bytes = row_bytes(p_), weights = p_.topk_weights ? weight_bytes(p_) : 0;
  for (int64_t end = pushed_[reader] + count; pushed_[reader] < end; pushed_[reader]++) {
    uint64_t row = static_cast<uint64_t>(first_row_[reader] + pushed_[reader]), slot = static_cast<uint64_t>(pushed_[reader] % slots);
    rows_.copy(ring.row(slot), at<const uint8_t>(p_.x) + row * bytes, bytes, false);
    if (weights) memcpy(ring.extra<float>(slot), at<const uint8_t>(p_.topk_weights) + row * weights, weights);
  }
  to_push_ -= count;
  team_.control().combine_head(reader).set(exchange_.number(), static_cast<uint64_t>(pushed_[reader]));
  op_.ring(reader);
  return true;
}

bool Combine::row_is_here(int source, int32_t index) {
  if (index < head_[source]) return true;
  if (index >= expected_[source]) op_.fail(DK_EINVAL, team_.rank, DK_FIELD_NONE, expected_[source], index);  // not this handle's
  head_[source] = static_cast<int64_t>(team_.peers[source].control.combine_head(team_.rank).rows(exchange_.number()));
  return index < head_[source];
}

// Adds up tokens while all their rows are here.
bool Combine::add_tokens() {
  int32_t first = next_token_, end = min_of(p_.num_tokens, first + kTokensAtOnce);
  for (bool here = true; next_token_ < end; next_token_++) {
    const int32_t *head = head_of(next_token_);
    for (int source = 0; source < team_.num_ranks && here; source++)
      here = head[source] < 0 || source == team_.rank || row_is_here(source, head[source]);
    if (!here || op_.failed()) break;
    add_token(next_token_);
  }
  if (next_token_ == first) return false;
  for (int source = 0; source < team_.num_ranks; source++) {
    if (source == team_.rank) continue;
    int64_t read = -1;
    for (int32_t token = next_token_ - 1; token >= first && read < 0; token--) read = head_of(token)[source];
    if (read < 0) continue;
    team_.peers[source].control.combine_tail(team_.rank).set(exchange_.number(), static_cast<uint64_t>(read + 1));
    op_.ring(source);
  }
  return true;
}

void Combine::add_token(int32_t token) {
  const int32_t *head = head_of(token);
  const uint16_t *rows[DK_MAX_RANKS + 2];
  const float *weights[DK_MAX_RANKS];
  int count = 0, num_weights = 0;
  uint64_t hidden = static_cast<uint64_t>(p_.hidden);
  for (uint64_t bias : p_.bias)
    if (bias) rows[count++] = at<const uint16_t>(bias) + static_cast<uint64_t>(token) * hidden;
  for (int source = 0; source < team_.num_ranks; source++) {
    if (head[source] < 0) continue;
    if (source == team_.rank) {
      uint64_t row = static_cast<uint64_t>(first_row_[source] + head[source]);
      rows[count++] = at<const uint16_t>(p_.x) + row * hidden;
      if (p_.topk_weights) weights[num_weights++] = at<const float>(p_.topk_weights) + row * static_cast<uint64_t>(p_.num_topk);
      continue;
    }
    Ring ring = ring_of(source);
    uint64_t slot = static_cast<uint64_t>(head[source]) % ring.slots();
    rows[count++] = reinterpret_cast<const uint16_t *>(ring.row(slot));
    if (weight_bytes(p_)) weights[num_weights++] = ring.extra<const float>(slot);
  }
  uint16_t *to = at<uint16_t>(p_.combined_x) + static_cast<uint64_t>(token) * hidden;
#if DK_MUTANT == 8  // another order of the sum
  if (count > 2) rows[DK_MAX_RANKS + 1] = rows[1], rows[1] = rows[count - 1], rows[count - 1] = rows[DK_MAX_RANKS + 1];
#endif
  if (count) rows_.sum(to, rows, count, hidden, stream_);
  else memset(to, 0, row_bytes(p_));
  if (p_.combined_topk_weights) add_weights(token, weights, num_weights);
}

void Combine::add_weights(int32_t token, const float *const *rows, int count) {
  float *to = at<float>(p_.combined_topk_weights) + static_cast<int64_t>(token) * p_.num_topk;
  for (int32_t k = 0; k < p_.num_topk; k++) {
    float total = 0;
    for (int r = 0; r < count; r++) total += rows[r][k];
    to[k] = total;
  }
}

// NaN, so that nothing goes on with half a sum.
void Combine::fail_outputs() {
  uint16_t *x = at<uint16_t>(p_.combined_x);
  for (int64_t i = 0, n = int64_t{p_.num_tokens} * p_.hidden; i < n; i++) x[i] = 0x7fc0;
  if (p_.combined_topk_weights) memset(at<void>(p_.combined_topk_weights), 0xff, static_cast<size_t>(p_.num_tokens) * weight_bytes(p_));
}

void run_combine(const dk_combine_params &p) {
  Op op(p, DK_OP_COMBINE);
  Combine(op, p).run();
}

bool bad_combine(const dk_combine_params &p) {
  if (!p.rank_prefix_matrix || p.num_tokens < 0 || p.num_recv_tokens < 0 || p.num_topk < 0) return true;
  if (p.num_tokens && (!p.send_head || !p.combined_x)) return true;
  if (p.num_recv_tokens && !p.x) return true;
  if (has_weights(p) && p.num_topk == 0) return true;
  if (p.num_recv_tokens && p.combined_topk_weights && !p.topk_weights) return true;
  return p.hidden <= 0 || p.hidden % 8 != 0;
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_combine(dk_combine_params *p) {
  DK_ENTER(p);
  if (bad_head(*p)) return DK_EINVAL;
  if (p->x_segment >= 0) return DK_EUNSUPPORTED;
  if (bad_combine(*p) || combine_ring(*at<Team>(p->team), *p, 0).slots() == 0) return DK_EINVAL;
  return enqueue<dk_combine_params, run_combine>(*p);
}
