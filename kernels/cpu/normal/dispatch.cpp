// Dispatch of normal mode. A rank stages each token once, in a ring of its wire region, whatever the number of ranks it
// goes to; each receiver copies its rows from there to the output. One thread does both in turn: it stages while its
// ring has room and copies rows that peers have staged, so two ranks never wait for each other. Rows to and from other
// nodes: dispatch_remote.h.
#include <string.h>

#include "cpu/normal/dispatch_remote.h"
#include "cpu/normal/handle.h"
#include "cpu/normal/routed.h"
#include "cpu/team/check.h"

namespace dk {
namespace {

// The extras of a staged row.
struct Extra {
  int32_t token, reserved;
  // uint64_t readers[(R+63)/64], int32_t topk_idx[K], float topk_weights[K], expanded int32_t dst_slot[K] follow
};

uint64_t mask_words(const Team &team) { return (static_cast<uint64_t>(team.num_ranks) + 63) / 64; }

Record dispatch_record(const Team &team, const dk_dispatch_params &p) {
  return {p.hidden_bytes + 4u * static_cast<uint64_t>(p.num_scales),
          sizeof(Extra) + 8 * mask_words(team) + (expanded(p.routing) ? 12u : 8u) * static_cast<uint64_t>(p.num_topk)};
}

Ring dispatch_ring(const Team &team, const dk_dispatch_params &p) {
  return Ring(team, team.rank, dispatch_record(team, p), 1, p.nvl_recv_chunk);
}

constexpr int64_t kRowsAtOnce = 16;  // rows between two updates of a reader's cursor

enum { kNextRow, kEndRow, kNextSlot, kToSend, kRows, kHeads };  // arrays by peer in Team::numbers

class Dispatch {
 public:
  Dispatch(Op &op, const dk_dispatch_params &p);
  void run();

 private:
  Refusal check() const;
  void count_rows();
  void do_without(int peer);
  Poll poll();
  bool awaits(int peer, Missing &missing);
  bool awaits_rows(int peer, Missing &missing) const;
  bool stage_batch();
  int64_t free_slots();
  bool stage_token(int32_t token);
  void fill_extra(Extra *extra, int32_t token);
  Refusal check_indices() const;
  bool goes_somewhere(size_t token) const;
  void gather_scales(void *to, int32_t token);
  bool read_from(int source);
  bool read_ring(int source);
  template <class Rows>
  void read_rows(int source, const Rows &rows, int64_t head, Cursor &tail);
  void count_bytes();
  void receive_row(int source, const uint8_t *row, const Extra *extra);
  void write_row(int source, int64_t to, const void *x, const void *scales, const Extra *extra);
  void write_output_row(int64_t row, int32_t token, const void *x, const void *scales);
  void write_output_topk(int64_t row, const int32_t *idx, const float *weights);
  void mark_unused(int64_t from);
  void mark_rows_unused(int64_t from, int64_t count);

  const uint64_t *readers(const Extra *extra) const { return reinterpret_cast<const uint64_t *>(extra + 1); }
  const int32_t *topk_idx(const Extra *extra) const {
    return reinterpret_cast<const int32_t *>(readers(extra) + mask_words_);
  }
  const float *topk_weights(const Extra *extra) const {
    return reinterpret_cast<const float *>(topk_idx(extra) + p_.num_topk);
  }
  Choices choices(const Extra *extra) const {
    return {topk_idx(extra), topk_weights(extra),
            expanded(p_.routing) ? reinterpret_cast<const int32_t *>(topk_weights(extra) + p_.num_topk) : nullptr};
  }
  // Whether the peer reads my ring.
  bool sends_to(int peer) const { return peer != team_.rank && to_send_[peer] > 0 && team_.is_local(peer); }

  Op &op_;
  Team &team_;
  const dk_dispatch_params &p_;
  const RowKernels &rows_;
  const int32_t *const matrix_;
  Exchange exchange_;
  const uint64_t mask_words_;
  const Record record_;
  Ring ring_;
  const LinkPlan plan_;
  NodeSender node_sender_;
  Forwarder forwarder_;
  int64_t *next_row_, *end_row_, *next_slot_, *to_send_;
  Heads heads_;  // of next_token_
  int32_t next_token_ = 0;
  int64_t staged_ = 0, announced_ = 0, free_ = 0, num_received_ = 0, outstanding_ = 0;
  bool stream_ = false, accepted_ = false, missing_ = false;  // missing_: rows that do not come
};

Dispatch::Dispatch(Op &op, const dk_dispatch_params &p)
    : op_(op),
      team_(op.team),
      p_(p),
      rows_(*team_.device->rows),
      matrix_(take_matrix(team_, p.rank_prefix_matrix)),
      exchange_(op),
      mask_words_(mask_words(team_)),
      record_(dispatch_record(team_, p)),
      ring_(dispatch_ring(team_, p)),
      plan_(plan_link(team_, record_, p)),
      node_sender_(team_, exchange_, record_, plan_, ring_),
      forwarder_(op, exchange_, record_, matrix_),
      next_row_(team_.numbers(kNextRow)),
      end_row_(team_.numbers(kEndRow)),
      next_slot_(team_.numbers(kNextSlot)),
      to_send_(team_.numbers(kToSend)),
      heads_(op, p.send_head, p.num_tokens, team_.numbers(kRows), team_.numbers(kHeads)) {
  exchange_.set_field(DK_FIELD_HIDDEN_BYTES, static_cast<int64_t>(p.hidden_bytes));
  exchange_.set_field(DK_FIELD_NUM_EXPERTS, p.num_experts);
  exchange_.set_field(DK_FIELD_NUM_TOPK, p.num_topk);
  exchange_.set_field(DK_FIELD_NUM_SCALES, p.num_scales);
  exchange_.set_field(DK_FIELD_X_TYPE, p.x_type);
  exchange_.set_field(DK_FIELD_FORMAT,
                      p.num_tokens ? p.topk_weights != 0 : kAnyValue);  // a rank without tokens passes no weights
  exchange_.set_field(DK_FIELD_OPERATION, DK_OP_DISPATCH + (p.flags & DK_DISPATCH_CACHED ? 256 : 0));
  exchange_.set_field(DK_FIELD_ROUTING, p.routing);
  if (p.routing) exchange_.set_field(DK_FIELD_MAX_TOKENS, p.num_max_tokens);
  if (expanded(p.routing)) exchange_.set_expanded_limit(p.num_expanded_tokens);
  if (p.flags & DK_DISPATCH_CANCELLED)  // it fits any dispatch
    for (int field = DK_FIELD_NONE; field < kNumFields; field++)
      if (field != DK_FIELD_OPERATION) exchange_.set_field(field, kAnyValue);
  exchange_.set_ring(ring_.slots(), ring_.stride());
  exchange_.set_link(plan_.slots, plan_.queues);
  begin_links(team_);
}

// Everything that the call goes by, before a row moves.
Refusal Dispatch::check() const {
  if (p_.flags & DK_DISPATCH_CANCELLED) return {DK_EINVAL, DK_FIELD_CANCELLED, 0, p_.reason};
  int64_t room = p_.num_worst_tokens > 0 ? p_.num_worst_tokens : p_.num_recv_tokens;
  if (!p_.recv_x) room = 0;
  Refusal wrong = check_matrix(team_, matrix_, room);
  if (!wrong.code) wrong = check_heads(team_, at<const int32_t>(p_.send_head), p_.num_tokens, matrix_, next_slot_);
  return wrong.code || !p_.topk_idx ? wrong : check_indices();
}

// Nothing goes after a notify that was refused, with what is wrong in topk_idx.
bool Dispatch::goes_somewhere(size_t token) const {
  const int32_t *head = at<const int32_t>(p_.send_head) + token * static_cast<size_t>(team_.num_ranks);
  for (int r = 0; r < team_.num_ranks; r++)
    if (head[r] >= 0) return true;
  return false;
}

Refusal Dispatch::check_indices() const {
  for (size_t i = 0, n = static_cast<size_t>(p_.num_tokens) * static_cast<size_t>(p_.num_topk); i < n; i++) {
    int64_t expert = index_at(p_.topk_idx, p_.index_bytes, i);
    bool wrong = (expert < -1 && !p_.routing) || expert >= p_.num_experts;
    if (wrong && (!p_.routing || goes_somewhere(i / static_cast<size_t>(p_.num_topk))))
      return {DK_EINVAL, DK_FIELD_TOPK_IDX, p_.num_experts, expert};
  }
  return {};
}

// Each column of the matrix holds running sums, over the source ranks, of the rows to one rank.
void Dispatch::count_rows() {
  int n = team_.num_ranks, me = team_.rank;
  int64_t *rows = team_.numbers(kRows);
  for (int i = 0; i < n; i++) {
    next_row_[i] = i ? matrix_[(i - 1) * n + me] : 0;
    end_row_[i] = matrix_[i * n + me];
    next_slot_[i] = 0;
    to_send_[i] = rows[i] = rows_between(team_, matrix_, me, i);
    if (i != me) outstanding_ += end_row_[i] - next_row_[i];
  }
  num_received_ = end_row_[n - 1];
  uint64_t bytes = static_cast<uint64_t>(num_received_) * p_.hidden_bytes;
  stream_ = bytes * static_cast<uint64_t>(n) > team_.device->cached_bytes;
}

void Dispatch::run() {
  if (!op_.failed()) {
    exchange_.refuse(check());
    exchange_.set_handle(p_.exchange, hash_of(team_, matrix_));
    count_rows();
    int32_t ends[DK_MAX_RANKS];
    if (expanded(p_.routing)) exchange_.refuse(check_slots(team_, p_, ends));
    if (!exchange_.refused()) heads_.begin();
    exchange_.post(expanded(p_.routing) ? ends : nullptr, nullptr, 0);
    wait_until(op_, [this] { return poll(); }, [this](int peer, Missing &missing) { return awaits(peer, missing); });
    rows_.finish_stream();
    op_.look_for_obituaries();
    exchange_.confirmed();
  }
  if (op_.failed() || op_.refused()) num_received_ = 0;
  if (!expanded(p_.routing)) mark_unused(num_received_);
  if (!op_.failed() && !op_.refused()) {
    if (missing_) zero_missing_rows(team_, p_, num_received_);
    if (p_.routing) write_padding(team_, p_);
    count_bytes();
  } else {
    clear_routed_outputs(p_);
  }
}

// The peer's rows that have not come are rows of zeros that name no expert; this rank's rows for it are not sent.
void Dispatch::do_without(int peer) {
  uint64_t first = peer ? static_cast<uint64_t>(matrix_[(peer - 1) * team_.num_ranks + team_.rank]) : 0;
  outstanding_ -= end_row_[peer] - next_row_[peer];
  to_send_[peer] = 0;
  int32_t *tokens = p_.flags & DK_DISPATCH_CACHED ? nullptr : at<int32_t>(p_.recv_src_idx);
  for (; next_row_[peer] < end_row_[peer]; next_row_[peer]++) {
    uint64_t row = static_cast<uint64_t>(next_row_[peer]);
    missing_ = true;
    if (p_.routing) {
      write_missing_row(p_, peer, next_row_[peer], static_cast<int64_t>(first));
      if (!expanded(p_.routing)) mark_rows_unused(next_row_[peer], 1);
      continue;
    }
    memset(at<uint8_t>(p_.recv_x) + row * p_.hidden_bytes, 0, p_.hidden_bytes);
    if (p_.recv_scales)
      memset(at<uint32_t>(p_.recv_scales) + row * static_cast<uint64_t>(p_.num_scales), 0,
             4 * static_cast<size_t>(p_.num_scales));
    if (tokens) tokens[row] = row > first ? plus(tokens[row - 1], 1) : 0;
    mark_rows_unused(next_row_[peer], 1);
  }
}

// Counts rows for each rank that read them here, also those that this rank forwarded from another node.
void Dispatch::count_bytes() {
  for (int i = 0; i < team_.num_ranks; i++) {
    int64_t rows = team_.is_local(i)                   ? to_send_[i] + forwarder_.rows_for(i)
                   : i == team_.partner(team_.node(i)) ? node_sender_.rows_to(team_.node(i))
                                                       : 0;
    op_.sent(i, static_cast<uint64_t>(rows) * record_.row_bytes);
  }
}

Poll Dispatch::poll() {
  bool progress = exchange_.poll();
  if (op_.failed() || exchange_.left_out()) return Poll::done;
  if (exchange_.complete() && !accepted_)
    accepted_ = exchange_.accepted() && (!expanded(p_.routing) || slots_fit(op_, exchange_));
  if (exchange_.refused() || op_.refused())  // no rank stages rows before it has all messages
    return exchange_.complete() && exchange_.delivered() ? Poll::done : progress ? Poll::progress : Poll::idle;
  for (int peer = 0; exchange_.shrinks() && exchange_.complete() && peer < team_.num_ranks; peer++)
    if (exchange_.without(peer)) do_without(peer);
  if (exchange_.complete()) progress |= stage_batch();
  for (int step = 1; step < team_.num_ranks; step++) {
    int source = (team_.rank + step) % team_.num_ranks;
    if (exchange_.arrived(source) && next_row_[source] < end_row_[source]) progress |= read_from(source);
  }
  progress |= forwarder_.relay();
  bool done = exchange_.complete() && next_token_ == p_.num_tokens && outstanding_ == 0 && node_sender_.done(staged_) &&
              forwarder_.done() && exchange_.delivered();
  return done ? Poll::done : progress ? Poll::progress : Poll::idle;
}

bool Dispatch::awaits(int peer, Missing &missing) {
  if (exchange_.awaits(peer, missing)) return true;
  if (exchange_.refused() || op_.refused() || exchange_.without(peer)) return false;
  if (awaits_rows(peer, missing)) return true;
  if (exchange_.complete() && (node_sender_.awaits(peer, staged_, missing) || forwarder_.awaits(peer, missing)))
    return true;
  if (!exchange_.complete() || next_token_ == p_.num_tokens || !sends_to(peer)) return false;
  missing = {staged_ - static_cast<int64_t>(ring_.slots()) + 1,
             static_cast<int64_t>(team_.control().dispatch_tail(peer).rows(exchange_.number()))};
  return missing.seen < missing.expected;
}

// Rows of that rank; or of a rank of another node, if the peer forwards them.
bool Dispatch::awaits_rows(int peer, Missing &missing) const {
  if (!team_.is_local(peer)) return false;
  int step = team_.spans_nodes() && team_.node_size > 1 ? team_.node_size : team_.num_ranks;
  for (int source = peer % step; source < team_.num_ranks; source += step) {
    missing = {end_row_[source], next_row_[source]};
    if (missing.seen < missing.expected && exchange_.arrived(source)) return true;
  }
  return false;
}

// The slowest reader determines the room in the ring.
int64_t Dispatch::free_slots() {
  if (free_ > 0) return free_;
  int64_t slowest = staged_;
  for (int peer = 0; peer < team_.num_ranks; peer++)
    if (sends_to(peer))
      slowest = min(slowest, static_cast<int64_t>(team_.control().dispatch_tail(peer).rows(exchange_.number())));
  free_ = static_cast<int64_t>(ring_.slots()) - (staged_ - min(slowest, node_sender_.oldest_needed(staged_)));
  return free_;
}

// Stages a batch of tokens while there is room.
bool Dispatch::stage_batch() {
  int32_t before = next_token_;
  int64_t limit = staged_ + ring_.batch(p_.nvl_send_chunk);
  while (next_token_ < p_.num_tokens && staged_ < limit && stage_token(next_token_)) heads_.load(++next_token_);
  if (staged_ > announced_) {
    announced_ = staged_;
    team_.control().dispatch_head().set(exchange_.number(), static_cast<uint64_t>(staged_));
    for (int peer = 0; peer < team_.num_ranks; peer++)
      if (sends_to(peer)) op_.ring(peer);
    if (ring_.worth_a_wake(staged_) || next_token_ == p_.num_tokens) op_.ring_now();
  }
  bool crossed = node_sender_.send(staged_, [this](uint64_t slot) { return readers(ring_.extra<Extra>(slot)); });
  return crossed || next_token_ != before;
}

// False: no room yet.
bool Dispatch::stage_token(int32_t token) {
  const int32_t *head = heads_.now();
  const uint8_t *x = at<const uint8_t>(p_.x) + static_cast<uint64_t>(token) * p_.hidden_bytes;
  bool leaves = false;
  for (int peer = 0; peer < team_.num_ranks; peer++)
    leaves |= peer != team_.rank && head[peer] >= 0 && !exchange_.without(peer);
  if (!leaves && head[team_.rank] < 0) return true;
  if (free_slots() <= 0) return false;  // also for a row to this rank alone: its scales pass through the slot
  uint64_t slot = static_cast<uint64_t>(staged_) % ring_.slots();
  uint8_t *row = ring_.row(slot);
  Extra *extra = ring_.extra<Extra>(slot);
  fill_extra(extra, token);
  if (p_.num_scales) gather_scales(row + p_.hidden_bytes, token);
  if (head[team_.rank] >= 0 && next_row_[team_.rank] < end_row_[team_.rank]) {
    write_row(team_.rank, next_row_[team_.rank]++, x, row + p_.hidden_bytes, extra);
  }
  if (!leaves) return true;
  rows_.copy(row, x, p_.hidden_bytes, false);
  staged_++;
  free_--;
  return true;
}

void Dispatch::fill_extra(Extra *extra, int32_t token) {
  const int32_t *head = heads_.now();
  extra->token = token;
  uint64_t *mask = reinterpret_cast<uint64_t *>(extra + 1);
  memset(mask, 0, 8 * mask_words_);
  for (int peer = 0; peer < team_.num_ranks; peer++)
    if (head[peer] >= 0) mask[peer / 64] |= uint64_t{1} << (peer % 64);
  if (!p_.topk_idx) return;
  size_t k = static_cast<size_t>(p_.num_topk), first = static_cast<size_t>(token) * k;
  int32_t *idx = reinterpret_cast<int32_t *>(mask + mask_words_);
  for (size_t i = 0; i < k; i++)
    idx[i] = static_cast<int32_t>(max<int64_t>(index_at(p_.topk_idx, p_.index_bytes, first + i), -1));
  if (p_.topk_weights) memcpy(idx + k, at<const float>(p_.topk_weights) + first, k * sizeof(float));
  if (expanded(p_.routing)) memcpy(idx + 2 * k, at<const int32_t>(p_.dst_slot) + first, k * sizeof(int32_t));
}

void Dispatch::gather_scales(void *to, int32_t token) {
  const uint32_t *from = at<const uint32_t>(p_.scales) + static_cast<int64_t>(token) * p_.scale_token_stride;
  if (p_.scale_stride == 1) {
    memcpy(to, from, 4 * static_cast<size_t>(p_.num_scales));
    return;
  }
  uint32_t *out = static_cast<uint32_t *>(to);
  for (int32_t s = 0; s < p_.num_scales; s++) out[s] = from[s * p_.scale_stride];
}

// Reads the rows for this rank that have arrived from `source`.
bool Dispatch::read_from(int source) {
  if (team_.is_local(source)) return read_ring(source);
  LinkIn in(team_, exchange_, record_, source);
  int64_t head = in.arrived();
  if (head == next_slot_[source]) return false;
  read_rows(source, in, head, in.tail(team_.index(team_.rank)));
  return true;
}

bool Dispatch::read_ring(int source) {
  const CallMessage &message = exchange_.message(source);
  int64_t head = static_cast<int64_t>(team_.peers[source].control.dispatch_head().rows(exchange_.number()));
  if (head == next_slot_[source]) return false;
  Ring theirs(team_, source, message.ring_slots, message.ring_stride, ring_);
  read_rows(source, theirs, head, team_.peers[source].control.dispatch_tail(team_.rank));
  return true;
}

template <class Rows>
void Dispatch::read_rows(int source, const Rows &rows, int64_t head, Cursor &tail) {
  uint64_t number = exchange_.number(), word = static_cast<uint64_t>(team_.rank) / 64,
           bit = uint64_t{1} << (team_.rank % 64);
  for (int64_t &s = next_slot_[source]; s < head && next_row_[source] < end_row_[source]; s++) {
    uint64_t slot = static_cast<uint64_t>(s) % rows.slots();
    const Extra *extra = rows.template extra<Extra>(slot);
    if (readers(extra)[word] & bit) receive_row(source, rows.row(slot), extra);
    if (s % kRowsAtOnce == kRowsAtOnce - 1)
      tail.set(number, static_cast<uint64_t>(s + 1));  // a source that polls can reuse the slots
  }
  bool last = next_row_[source] == end_row_[source];
  tail.set(number, last ? kAllRows : static_cast<uint64_t>(head));
  op_.ring(team_.forwarder(source));
}

// read_rows has looked whether a row is still expected.
void Dispatch::receive_row(int source, const uint8_t *row, const Extra *extra) {
  int64_t to = next_row_[source]++;
  outstanding_--;
  write_row(source, to, row, row + p_.hidden_bytes, extra);
}

void Dispatch::write_row(int source, int64_t to, const void *x, const void *scales, const Extra *extra) {
  if (p_.routing) return write_routed_row(team_, p_, source, to, extra->token, x, scales, choices(extra), stream_);
  write_output_row(to, extra->token, x, scales);
  if (p_.recv_topk_idx) write_output_topk(to, topk_idx(extra), topk_weights(extra));
}

void Dispatch::write_output_row(int64_t row, int32_t token, const void *x, const void *scales) {
  uint64_t r = static_cast<uint64_t>(row), scale_bytes = 4u * static_cast<uint64_t>(p_.num_scales);
  rows_.copy(at<uint8_t>(p_.recv_x) + r * p_.hidden_bytes, x, p_.hidden_bytes, stream_);
  if (p_.recv_scales) memcpy(at<uint8_t>(p_.recv_scales) + r * scale_bytes, scales, scale_bytes);
  if (p_.recv_src_idx) at<int32_t>(p_.recv_src_idx)[row] = token;
}

// Experts of other ranks become -1 with weight 0; this rank's get their local number.
void Dispatch::write_output_topk(int64_t row, const int32_t *idx, const float *weights) {
  int32_t local = p_.num_experts / team_.num_ranks, first = local * team_.rank;
  for (int32_t k = 0; k < p_.num_topk; k++) {
    int64_t i = row * p_.num_topk + k;
    int32_t mine = idx[k] >= first && idx[k] < first + local ? idx[k] - first : -1;
    if (p_.index_bytes == 8)
      at<int64_t>(p_.recv_topk_idx)[i] = mine;
    else
      at<int32_t>(p_.recv_topk_idx)[i] = mine;
    if (p_.recv_topk_weights) at<float>(p_.recv_topk_weights)[i] = mine < 0 ? 0 : weights[k];
  }
}

// Output rows beyond the received ones: index -1, weight 0, so that the caller computes nothing with them.
void Dispatch::mark_unused(int64_t from) {
  int64_t rows = p_.num_worst_tokens > 0 ? p_.num_worst_tokens : p_.num_recv_tokens;
  if (rows > from) mark_rows_unused(from, rows - from);
}

void Dispatch::mark_rows_unused(int64_t from, int64_t rows) {
  size_t count = static_cast<size_t>(rows * p_.num_topk), start = static_cast<size_t>(from * p_.num_topk);
  size_t index_bytes = static_cast<size_t>(p_.index_bytes);
  if (p_.recv_topk_idx) memset(at<uint8_t>(p_.recv_topk_idx) + start * index_bytes, 0xff, count * index_bytes);
  if (p_.recv_topk_weights) memset(at<float>(p_.recv_topk_weights) + start, 0, count * sizeof(float));
}

void run_dispatch(const dk_dispatch_params &p) {
  Op op(p, DK_OP_DISPATCH);
  op.may_shrink = op.team.shrinks();
  Dispatch(op, p).run();
}

bool bad_routing(const Team &team, const dk_dispatch_params &p) {
  int64_t rows = expanded(p.routing) ? p.num_expanded_tokens : max(p.num_recv_tokens, p.num_worst_tokens);
  if (p.routing < DK_ROUTING_NONE || p.routing > DK_ROUTING_EXPANDED || p.num_topk < 1 || p.num_topk > kMaxTopk)
    return true;
  if (rows < 0 || (rows > 0 && (!p.recv_x || (p.num_scales && !p.recv_scales)))) return true;
  if (bad_experts(team, p.num_experts) || p.num_experts > DK_MAX_ROUTED_EXPERTS) return true;
  if (p.num_max_tokens < p.num_tokens || p.recv_src_idx) return true;
  if (!expanded(p.routing)) return p.flags & DK_DISPATCH_ZERO_PADDING;
  if (p.flags & DK_DISPATCH_ZERO_PADDING && (!p.psum_per_expert || p.expert_alignment < 1)) return true;
  return p.recv_topk_idx || (p.num_tokens && !p.dst_slot) || (p.num_recv_tokens > 0 && !p.recv_src_metadata);
}

bool bad_dispatch(const Team &team, const dk_dispatch_params &p) {
  if (!p.rank_prefix_matrix || p.num_tokens < 0 || p.num_scales < 0 || p.num_topk < 0) return true;
  if (p.num_tokens && (!p.x || !p.send_head || (p.num_scales && !p.scales))) return true;
  if (p.num_recv_tokens < -1 || p.num_worst_tokens < 0) return true;
  if (p.routing && bad_routing(team, p)) return true;
  if (!p.routing && (p.num_recv_tokens > 0 || p.num_worst_tokens > 0) &&
      (!p.recv_x || (p.num_scales && !p.recv_scales)))
    return true;
  if ((p.recv_topk_idx || p.recv_topk_weights) && p.num_topk == 0) return true;
  if (p.num_topk && (bad_index_bytes(p.index_bytes) || bad_experts(team, p.num_experts))) return true;
  if (p.num_topk && p.num_tokens && !p.topk_idx) return true;
  if (p.recv_topk_weights && !p.topk_weights && p.num_tokens) return true;
  return p.hidden_bytes == 0 || p.hidden_bytes % 16 != 0;
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_dispatch(dk_dispatch_params *p) {
  DK_ENTER(p);
  if (bad_head(*p)) return DK_EINVAL;
  Team &team = *at<Team>(p->team);
  if (p->recv_segment >= 0) return DK_EUNSUPPORTED;
  if (bad_dispatch(team, *p) || dispatch_ring(team, *p).slots() == 0) return DK_EINVAL;
  if (team.spans_nodes() && link_room(team, dispatch_record(team, *p)) == 0) return DK_EINVAL;
  return enqueue<dk_dispatch_params, run_dispatch>(*p);
}
