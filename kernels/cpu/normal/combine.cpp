// Combine of normal mode. Rows return through one ring per pair of ranks, in the order in which dispatch delivered
// them, so the source rank of a token finds the rows that it needs next at the heads of its rings. It adds them in FP32
// by ascending rank. Rows for a rank of another node go to the forwarder, the rank of the same index on this node,
// which adds them first (combine_remote.h).
#include <string.h>

#include "cpu/normal/combine_remote.h"
#include "cpu/normal/handle.h"
#include "cpu/normal/routed.h"
#include "cpu/team/check.h"

namespace dk {
namespace {

enum { kFirstRow, kNumRows, kSent, kExpected, kHead, kHeads = 7, kPublished };  // arrays by peer in Team::numbers

bool has_weights(const dk_combine_params &p) { return p.topk_weights || p.combined_topk_weights; }
uint64_t weight_bytes(const dk_combine_params &p) {
  return has_weights(p) ? 4u * static_cast<uint64_t>(p.num_topk) : 0;
}
uint64_t row_bytes(const dk_combine_params &p) { return 2 * static_cast<uint64_t>(p.hidden); }
Record pair_record(const Team &team, const dk_combine_params &p) {
  return combine_record(team, p.hidden * rows_together(p), has_weights(p) ? p.num_topk : 0);
}

// My ring of rows for the tokens of rank `source`.
Ring combine_ring(const Team &team, const dk_combine_params &p, int source) {
  return Ring(team, team.rank, pair_record(team, p), team.num_ranks, p.nvl_recv_chunk, source);
}

LinkPlan at_least(LinkPlan plan, uint64_t slots) {
  plan.slots = max(plan.slots, slots);
  return plan;
}

class Combine {
 public:
  Combine(Op &op, const dk_combine_params &p);
  void run();

 private:
  Refusal check() const;
  void count_rows();
  void do_without(int peer);
  Poll poll();
  void agree_on_topk();
  bool awaits(int peer, Missing &missing);
  bool awaits_rows(int peer, Missing &missing);
  bool awaits_room(int source, Missing &missing) const;
  bool send_rows(int source);
  bool add_tokens();
  bool is_complete(int32_t token);
  bool row_arrived(int source, int32_t index);
  bool sum_arrived(int node, int32_t token);
  int64_t records_of(int node) const;
  const uint8_t *record_of(int source) const;
  void publish_tails();
  bool give_credits();
  void add_token(int32_t token);
  struct Terms;
  void take_row(int source, Terms &terms);
  void add_last(int rows, int source, Terms &terms);
  void add_routed_token(int32_t token);
  const uint8_t *routed_row(int source) const;
  const float *routed_weights(int source) const;
  const uint16_t *add_node(int node, const uint16_t **rows, int count) const;
  int gather_routed(const Term *terms, int num_terms, const uint16_t **rows) const;
  void count_bytes();
  void fail_outputs();

  struct Terms {  // of a token's sum
    const uint16_t *rows[DK_MAX_RANKS + 2];
    const float *weights[DK_MAX_RANKS];
    int count = 0, num_weights = 0;
  };
  // The sources of a token's rows: each rank of my node, and each other node, named by its first rank.
  int after(int source) const { return source + (team_.is_local(source) ? 1 : team_.node_size); }
  bool node_has(int first) const {
    for (int i = 0; i < team_.node_size; i++)
      if (heads_.now()[first + i] >= 0) return true;
    return false;
  }
  bool has(int source) const {
    if (exchange_.without(source)) return false;
    return team_.is_local(source) ? heads_.now()[source] >= 0 : node_has(source);
  }

  Ring ring_of(int source) const {
    CallMessage &message = exchange_.message(source);
    return Ring(team_, source, message.ring_slots, message.ring_stride, mine_, team_.rank);
  }

  Op &op_;
  Team &team_;
  const dk_combine_params &p_;
  const RowKernels &rows_;
  const int32_t *const matrix_;
  Exchange exchange_;
  Ring mine_;  // gives the shape of all pair rings
  const LinkPlan plan_;
  NodeSum sum_;
  int64_t *first_row_, *num_rows_, *sent_, *expected_, *head_, *published_;
  Heads heads_;  // of next_token_
  int64_t to_send_ = 0;
  int32_t next_token_ = 0;
  bool stream_ = false, accepted_ = false, agreed_ = false;
};

Combine::Combine(Op &op, const dk_combine_params &p)
    : op_(op),
      team_(op.team),
      p_(p),
      rows_(*team_.device->rows),
      matrix_(take_matrix(team_, p.rank_prefix_matrix)),
      exchange_(op),
      mine_(combine_ring(team_, p, 0)),
      plan_(at_least(plan_link(team_, pair_record(team_, p), p), least_link_slots(team_, p))),
      sum_(op, exchange_, p, mine_, plan_),
      first_row_(team_.numbers(kFirstRow)),
      num_rows_(team_.numbers(kNumRows)),
      sent_(team_.numbers(kSent)),
      expected_(team_.numbers(kExpected)),
      head_(team_.numbers(kHead)),
      published_(team_.numbers(kPublished)),
      heads_(op, p.send_head, p.num_tokens, expected_, team_.numbers(kHeads)) {
  exchange_.set_field(DK_FIELD_HIDDEN_BYTES, static_cast<int64_t>(row_bytes(p)));
  bool nothing = p.num_tokens == 0 && p.num_recv_tokens == 0;
  exchange_.set_field(DK_FIELD_NUM_TOPK, has_weights(p) ? p.num_topk : nothing ? kAnyValue : 0);
  exchange_.set_field(DK_FIELD_ROUTING, p.routing | (p.flags & (DK_COMBINE_UNREDUCED | DK_COMBINE_APART)) << 8);
  exchange_.set_ring(mine_.slots(), mine_.stride());
  exchange_.set_link(plan_.slots, plan_.queues);
  begin_links(team_);
}

// Everything that the call goes by, before a row moves.
Refusal Combine::check() const {
  Refusal wrong = check_matrix(team_, matrix_, p_.num_recv_tokens);
  if (!wrong.code) wrong = check_heads(team_, at<const int32_t>(p_.send_head), p_.num_tokens, matrix_, expected_);
  if (!wrong.code && p_.routing)
    wrong = check_terms(team_, p_, matrix_[team_.num_ranks * team_.num_ranks - team_.num_ranks + team_.rank]);
  if (!wrong.code && team_.spans_nodes() && !team_.shrinks())
    wrong = p_.routing ? check_metadata(team_, p_, matrix_)
                       : check_sources(team_, at<const int32_t>(p_.recv_src_idx), matrix_);
  return wrong;
}

void Combine::count_rows() {
  int n = team_.num_ranks, me = team_.rank;
  for (int i = 0; i < n; i++) {
    first_row_[i] = i ? matrix_[(i - 1) * n + me] : 0;
    num_rows_[i] = rows_between(team_, matrix_, i, me);
    expected_[i] = rows_between(team_, matrix_, me, i);
    sent_[i] = head_[i] = published_[i] = 0;
    if (team_.forwarder(i) != me) to_send_ += num_rows_[i];
  }
  stream_ =
      row_bytes(p_) * static_cast<uint64_t>(p_.num_tokens) * static_cast<uint64_t>(n) > team_.device->cached_bytes;
}

void Combine::run() {
  if (!op_.failed()) {
    exchange_.refuse(check());
    exchange_.set_handle(p_.exchange, hash_of(team_, matrix_));
    count_rows();
    if (!exchange_.refused()) heads_.begin();
    exchange_.post(nullptr, nullptr, 0);
    wait_until(op_, [this] { return poll(); }, [this](int peer, Missing &missing) { return awaits(peer, missing); });
    rows_.finish_stream();
    op_.look_for_obituaries();
    exchange_.confirmed();
  }
  if (op_.failed() || op_.refused()) return fail_outputs();
  count_bytes();
}

// Rows for the peer's tokens that have not left are not sent; its rows for this rank's tokens add nothing.
void Combine::do_without(int peer) {
  if (team_.forwarder(peer) != team_.rank) to_send_ -= num_rows_[peer] - sent_[peer];
  num_rows_[peer] = sent_[peer];
}

void Combine::count_bytes() {
  uint64_t bytes = row_bytes(p_) + (p_.topk_weights ? weight_bytes(p_) : 0);
  for (int i = 0; i < team_.num_ranks; i++) {
    op_.sent(team_.forwarder(i), static_cast<uint64_t>(num_rows_[i]) * bytes);
    if (team_.is_local(i) || i != team_.partner(team_.node(i))) continue;
    op_.sent(i, static_cast<uint64_t>(team_.links[team_.node(i)].sent) * (sum_.record().bytes() - token_bytes(team_)));
  }
}

// Rows carry weights if any rank has weights; a rank without rows and tokens sent kAnyValue.
void Combine::agree_on_topk() {
  int32_t topk = has_weights(p_) ? p_.num_topk : 0;
  for (int i = 0; i < team_.num_ranks; i++)
    if (!exchange_.without(i)) topk = max(topk, static_cast<int32_t>(exchange_.message(i).fields[DK_FIELD_NUM_TOPK]));
  sum_.begin(topk);
  agreed_ = true;
}

Poll Combine::poll() {
  bool progress = exchange_.poll();
  if (op_.failed() || exchange_.left_out()) return Poll::done;
  if (exchange_.complete() && !accepted_) accepted_ = exchange_.accepted();
  if (exchange_.refused() || op_.refused())  // no rank sends rows before it has all messages
    return exchange_.complete() && exchange_.delivered() ? Poll::done : progress ? Poll::progress : Poll::idle;
  if (exchange_.complete()) {
    if (team_.spans_nodes() && !agreed_) agree_on_topk();
    for (int peer = 0; exchange_.shrinks() && peer < team_.num_ranks; peer++)
      if (exchange_.without(peer)) do_without(peer);
    for (int step = 1; step <= team_.num_ranks; step++) progress |= send_rows((team_.rank + step) % team_.num_ranks);
    progress |= sum_.add();
    progress |= add_tokens();
    progress |= give_credits();
    if (to_send_ == 0 && next_token_ == p_.num_tokens && sum_.done() && exchange_.delivered()) return Poll::done;
  }
  return progress ? Poll::progress : Poll::idle;
}

bool Combine::awaits(int peer, Missing &missing) {
  if (exchange_.awaits(peer, missing)) return true;
  if (!exchange_.complete() || exchange_.refused() || op_.refused() || exchange_.without(peer)) return false;
  if (awaits_rows(peer, missing) || sum_.awaits(peer, missing)) return true;
  int step = team_.spans_nodes() && team_.node_size > 1 ? team_.node_size : team_.num_ranks;
  for (int source = peer % step; team_.is_local(peer) && source < team_.num_ranks; source += step)
    if (awaits_room(source, missing)) return true;
  return false;
}

// Rows of the next token. Loads the head itself: is_complete stops at the first missing row, and a rank whose rows have
// all arrived may have left.
bool Combine::awaits_rows(int peer, Missing &missing) {
  if (next_token_ == p_.num_tokens) return false;
  if (team_.is_local(peer)) {
    int32_t index = heads_.now()[peer];
    if (peer == team_.rank || index < 0 || row_arrived(peer, index)) return false;
    missing = {index + 1, head_[peer]};
    return true;
  }
  int node = team_.node(peer);
  if (peer != team_.partner(node) || !node_has(node * team_.node_size)) return false;
  missing = {team_.links[node].consumed + records_of(node), LinkIn(team_, exchange_, sum_.record(), peer).arrived()};
  return missing.seen < missing.expected;
}

// A free slot in my ring of rows for that rank's tokens.
bool Combine::awaits_room(int source, Missing &missing) const {
  if (sent_[source] == num_rows_[source]) return false;
  missing = {sent_[source] - static_cast<int64_t>(mine_.slots()) + 1,
             static_cast<int64_t>(team_.control().combine_tail(source).rows(exchange_.number()))};
  return missing.seen < missing.expected;
}

// Rows of one source rank are contiguous in x, in the order of its tokens.
bool Combine::send_rows(int source) {
  if (sent_[source] == num_rows_[source] || team_.forwarder(source) == team_.rank) return false;
  int64_t slots = static_cast<int64_t>(mine_.slots());
  int64_t read = static_cast<int64_t>(team_.control().combine_tail(source).rows(exchange_.number()));
  int64_t count =
      min(min(slots - (sent_[source] - read), num_rows_[source] - sent_[source]), mine_.batch(p_.nvl_send_chunk));
  if (count <= 0) return false;
  Ring ring = combine_ring(team_, p_, source);
  uint64_t bytes = row_bytes(p_), weights = p_.topk_weights ? weight_bytes(p_) : 0, number = token_bytes(team_);
  for (int64_t end = sent_[source] + count; sent_[source] < end; sent_[source]++) {
    uint64_t row = static_cast<uint64_t>(first_row_[source] + sent_[source]),
             slot = static_cast<uint64_t>(sent_[source] % slots);
    uint8_t *behind = ring.extra<uint8_t>(slot) + number;
    if (number && p_.routing)
      *ring.extra<TokenNumber>(slot) = {token_of_row(p_, source, static_cast<int64_t>(row)),
                                        last_choice_of_row(p_, static_cast<int64_t>(row))};
    if (expanded(p_.routing)) {
      gather_terms(rows_, p_, static_cast<int64_t>(row), ring.row(slot),
                   weights ? reinterpret_cast<float *>(behind) : nullptr);
      continue;
    }
    rows_.copy(ring.row(slot), at<const uint8_t>(p_.x) + row * bytes, bytes, false);
    if (number && !p_.routing) ring.extra<TokenNumber>(slot)->token = at<const int32_t>(p_.recv_src_idx)[row];
    if (weights) memcpy(behind, at<const uint8_t>(p_.topk_weights) + row * weights, weights);
  }
  to_send_ -= count;
  team_.control().combine_head(source).set(exchange_.number(), static_cast<uint64_t>(sent_[source]));
  op_.ring(team_.forwarder(source));
  return true;
}

bool Combine::row_arrived(int source, int32_t index) {
  if (index < head_[source]) return true;
  head_[source] = static_cast<int64_t>(team_.peers[source].control.combine_head(team_.rank).rows(exchange_.number()));
  return index < head_[source];
}

// Records that a node sends for a token: its sum, or a row of each rank that the token went to.
int64_t Combine::records_of(int node) const {
  if (!rows_apart(p_)) return 1;
  int64_t rows = 0;
  for (int i = 0; i < team_.node_size; i++) rows += heads_.now()[node * team_.node_size + i] >= 0;
  return rows;
}

// Whether the node's sum for the next token has arrived. `consumed` counts those of the tokens before.
bool Combine::sum_arrived(int node, int32_t token) {
  LinkState &link = team_.links[node];
  LinkIn in(team_, exchange_, sum_.record(), team_.partner(node));
  int64_t wanted = link.consumed + records_of(node);
  if (wanted > link.seen) link.seen = in.arrived();
  if (wanted > link.seen) return false;
  if (team_.shrinks()) return true;  // each rank's own rows, one after the other
  int32_t number = in.extra<TokenNumber>(static_cast<uint64_t>(link.consumed) % in.slots())->token;
  if (number != token)
    op_.fail(DK_EINVAL, team_.partner(node), DK_FIELD_SRC_IDX, token, number);  // a token of another handle
  return number == token;
}

bool Combine::is_complete(int32_t token) {
  for (int source = 0; source < team_.num_ranks; source = after(source)) {
    if (source == team_.rank || !has(source)) continue;
    if (team_.is_local(source) ? !row_arrived(source, heads_.now()[source]) : !sum_arrived(team_.node(source), token))
      return false;
  }
  return true;
}

// Adds tokens while all their rows have arrived.
bool Combine::add_tokens() {
  int32_t first = next_token_, end = min(p_.num_tokens, first + kTokensAtOnce);
  while (next_token_ < end && is_complete(next_token_) && !op_.failed()) {
    add_token(next_token_);
    heads_.load(++next_token_);
  }
  if (next_token_ > first) publish_tails();
  return next_token_ > first;
}

// Releases the rows of the tokens so far to the ranks of my node.
void Combine::publish_tails() {
  for (int source = 0; source < team_.num_ranks; source++) {
    if (source == team_.rank || !team_.is_local(source)) continue;
    int64_t read = heads_.before(source);
    if (read == published_[source]) continue;
    published_[source] = read;
    team_.peers[source].control.combine_tail(team_.rank).set(exchange_.number(), static_cast<uint64_t>(read));
    op_.ring(source);
  }
}

bool Combine::give_credits() {
  bool gave = false;
  for (int node = 0; team_.spans_nodes() && node < team_.num_nodes(); node++)
    if (team_.has_link(node) && !exchange_.without(team_.partner(node)))
      gave |= LinkIn(team_, exchange_, sum_.record(), team_.partner(node)).give_credit(team_.links[node].consumed);
  return gave;
}

// A rank of another node: the record that has its row, or its node's sum. Records of ranks are in their order.
const uint8_t *Combine::record_of(int source) const {
  int node = team_.node(source), place = 0;
  for (int r = node * team_.node_size; rows_apart(p_) && r < source; r++) place += heads_.now()[r] >= 0;
  LinkIn in(team_, exchange_, sum_.record(), team_.partner(node));
  return in.row(static_cast<uint64_t>(team_.links[node].consumed + place) % in.slots());
}

// The rows that a rank has sent for the token. This rank's own ones are made where no row is sent: in the ring that it
// has toward itself.
const uint8_t *Combine::routed_row(int source) const {
  if (!team_.is_local(source)) return record_of(source);
  int32_t head = heads_.now()[source];
  if (source != team_.rank) {
    Ring ring = ring_of(source);
    return ring.row(static_cast<uint64_t>(head) % ring.slots());
  }
  return expanded(p_.routing)
             ? combine_ring(team_, p_, team_.rank).row(0)
             : at<const uint8_t>(p_.x) + static_cast<uint64_t>(first_row_[source] + head) * row_bytes(p_);
}

// The K weights that a rank has sent for the token; null: none.
const float *Combine::routed_weights(int source) const {
  int32_t head = source < 0 || exchange_.without(source) ? -1 : heads_.now()[source];
  if (head < 0) return nullptr;
  uint64_t number = token_bytes(team_);
  if (!team_.is_local(source)) {
    int part = rows_apart(p_) ? 0 : team_.index(source);
    const uint8_t *weights = record_of(source) + sum_.record().extra_at() + number;
    return reinterpret_cast<const float *>(weights) + part * p_.num_topk;
  }
  if (source != team_.rank) {
    Ring ring = ring_of(source);
    uint8_t *extra = ring.extra<uint8_t>(static_cast<uint64_t>(head) % ring.slots());
    return reinterpret_cast<const float *>(extra + number);
  }
  if (!p_.topk_weights) return nullptr;
  return expanded(p_.routing) ? combine_ring(team_, p_, team_.rank).extra<const float>(0)
                              : at<const float>(p_.topk_weights) + (first_row_[source] + head) * p_.num_topk;
}

// The sum of a token's rows of one node, in the order of the terms. It stands where no row is staged: in the ring of
// rows for a rank of another node, which this rank forwards to.
const uint16_t *Combine::add_node(int node, const uint16_t **rows, int count) const {
  if (count == 1) return rows[0];
  int my_node = team_.rank / team_.num_nvl_peers, other = node != my_node ? node : my_node ? 0 : 1;
  int spare = team_.shrinks() ? other * team_.num_nvl_peers + (node == my_node) : team_.partner(other);
  Ring ring = combine_ring(team_, p_, spare);
  uint16_t *sum = reinterpret_cast<uint16_t *>(ring.row(0));
  rows_.sum(sum, rows, count, static_cast<size_t>(p_.hidden), false);
  return sum;
}

// The rows to add, in the order of the terms. Where nodes add their ranks' rows, a node has the place of its last term.
// Rows of this node are added first, and those of another one that come one by one (Team::node).
int Combine::gather_routed(const Term *terms, int num_terms, const uint16_t **rows) const {
  uint64_t hidden = static_cast<uint64_t>(p_.hidden);
  auto node_of = [&](int i) { return terms[i].source / team_.num_nvl_peers; };
  auto row_of = [&](int i) {
    return reinterpret_cast<const uint16_t *>(routed_row(terms[i].source)) +
           hidden * static_cast<uint64_t>(terms[i].which);
  };
  bool by_node = team_.spans_nodes() && !rows_apart(p_);
  int count = 0;
  for (int i = 0; i < num_terms; i++) {
    bool last = true;
    for (int later = i + 1; by_node && later < num_terms; later++) last &= node_of(later) != node_of(i);
    if (!last) continue;
    const uint16_t *of_node[kMaxTopk];
    int num = 0;
    bool is_sum = by_node && !team_.is_local(terms[i].source) && !team_.shrinks();
    for (int j = 0; by_node && !is_sum && j < i; j++)
      if (node_of(j) == node_of(i)) of_node[num++] = row_of(j);
    of_node[num++] = row_of(i);
    rows[count++] = add_node(node_of(i), of_node, num);
  }
  return count;
}

// The order of its terms is that of its choices.
void Combine::add_routed_token(int32_t token) {
  const int32_t *head = heads_.now();
  const uint16_t *rows[kMaxTopk + 2];
  Term terms[kMaxTopk];
  int count = 0, num_terms = 0;
  for (int i = 0, all = order_terms(team_, p_, token, head, terms); i < all; i++)
    if (!exchange_.without(terms[i].source)) terms[num_terms++] = terms[i];
  uint64_t hidden = static_cast<uint64_t>(p_.hidden);
  if (head[team_.rank] >= 0 && expanded(p_.routing)) {
    Ring own = combine_ring(team_, p_, team_.rank);
    gather_terms(rows_, p_, first_row_[team_.rank] + head[team_.rank], own.row(0),
                 p_.topk_weights ? own.extra<float>(0) : nullptr);
  }
  for (uint64_t bias : p_.bias)
    if (bias) rows[count++] = at<const uint16_t>(bias) + static_cast<uint64_t>(token) * hidden;
  count += gather_routed(terms, num_terms, rows + count);
  uint16_t *to = at<uint16_t>(p_.combined_x) + static_cast<uint64_t>(token) * hidden;
  if (count)
    rows_.sum(to, rows, count, hidden, stream_);
  else
    memset(to, 0, row_bytes(p_));
  for (int32_t k = 0; p_.combined_topk_weights && k < p_.num_topk; k++) {
    const float *weights = routed_weights(rank_of_choice(team_, p_, token, k));
    at<float>(p_.combined_topk_weights)[int64_t{token} * p_.num_topk + k] = weights ? weights[k] : 0;
  }
  for (int node = 0; team_.spans_nodes() && node < team_.num_nodes(); node++)
    if (!team_.is_local(node * team_.node_size) && has(node * team_.node_size))
      team_.links[node].consumed += records_of(node);
}

// The row of a source, which is there, with its weights.
void Combine::take_row(int source, Terms &terms) {
  const uint8_t *row, *extra = nullptr;
  if (source == team_.rank) {
    uint64_t mine = static_cast<uint64_t>(first_row_[source] + heads_.now()[source]);
    row = at<const uint8_t>(p_.x) + mine * row_bytes(p_);
    if (p_.topk_weights)
      terms.weights[terms.num_weights++] = at<const float>(p_.topk_weights) + mine * static_cast<uint64_t>(p_.num_topk);
  } else if (team_.is_local(source)) {
    Ring ring = ring_of(source);
    uint64_t slot = static_cast<uint64_t>(heads_.now()[source]) % ring.slots();
    row = ring.row(slot);
    extra = ring.extra<const uint8_t>(slot);
  } else {
    LinkIn in(team_, exchange_, sum_.record(), team_.partner(team_.node(source)));
    uint64_t slot = static_cast<uint64_t>(team_.links[team_.node(source)].consumed++) % in.slots();
    row = in.row(slot);
    extra = in.extra<uint8_t>(slot);
  }
  terms.rows[terms.count++] = reinterpret_cast<const uint16_t *>(row);
  if (extra && weight_bytes(p_))
    terms.weights[terms.num_weights++] = reinterpret_cast<const float *>(extra + token_bytes(team_));
}

// Where the rows of another node's ranks come one by one (Team::node), they are added to one first, so that sums are
// those that a forwarder makes. It stands in this rank's ring of rows for that rank, which is not used otherwise.
void Combine::add_last(int rows, int source, Terms &terms) {
  Ring ring = combine_ring(team_, p_, source);
  terms.count -= rows - 1;
  const uint16_t **first = terms.rows + terms.count - 1;
  rows_.sum(reinterpret_cast<uint16_t *>(ring.row(0)), first, rows, static_cast<size_t>(p_.hidden), false);
  *first = reinterpret_cast<const uint16_t *>(ring.row(0));
  if (!weight_bytes(p_)) return;
  terms.num_weights -= rows - 1;
  const float **weights = terms.weights + terms.num_weights - 1;
  add_weights(ring.extra<float>(0), weights, rows, p_.num_topk);
  *weights = ring.extra<float>(0);
}

void Combine::add_token(int32_t token) {
  if (p_.routing) return add_routed_token(token);
  Terms terms;
  uint64_t hidden = static_cast<uint64_t>(p_.hidden);
  for (uint64_t bias : p_.bias)
    if (bias) terms.rows[terms.count++] = at<const uint16_t>(bias) + static_cast<uint64_t>(token) * hidden;
  for (int source = 0, of_node = 0; source < team_.num_ranks; source = after(source)) {
    if (source % team_.num_nvl_peers == 0) of_node = 0;
    bool is_there = has(source);
    if (is_there) take_row(source, terms);
    of_node += is_there;
    bool ends_node = (source + 1) % team_.num_nvl_peers == 0;
    if (ends_node && of_node > 1 && !team_.is_local(source)) add_last(of_node, source, terms);
  }
  uint16_t *to = at<uint16_t>(p_.combined_x) + static_cast<uint64_t>(token) * hidden;
  if (terms.count)
    rows_.sum(to, terms.rows, terms.count, hidden, stream_);
  else
    memset(to, 0, row_bytes(p_));
  if (p_.combined_topk_weights)
    add_weights(at<float>(p_.combined_topk_weights) + static_cast<int64_t>(token) * p_.num_topk, terms.weights,
                terms.num_weights, p_.num_topk);
}

// NaN, so that a caller cannot use a partial sum unnoticed.
void Combine::fail_outputs() {
  uint16_t *x = at<uint16_t>(p_.combined_x);
  for (int64_t i = 0, n = int64_t{p_.num_tokens} * p_.hidden; i < n; i++) x[i] = 0x7fc0;
  if (p_.combined_topk_weights)
    memset(at<void>(p_.combined_topk_weights), 0xff, static_cast<size_t>(p_.num_tokens) * weight_bytes(p_));
}

void run_combine(const dk_combine_params &p) {
  Op op(p, DK_OP_COMBINE);
  op.may_shrink = op.team.shrinks();
  Combine(op, p).run();
}

bool bad_combine(const Team &team, const dk_combine_params &p) {
  if (!p.rank_prefix_matrix || p.num_tokens < 0 || p.num_recv_tokens < 0 || p.num_topk < 0) return true;
  if (p.num_tokens && (!p.send_head || !p.combined_x)) return true;
  if (p.num_recv_tokens && !p.x) return true;
  if (has_weights(p) && p.num_topk == 0) return true;
  if (p.num_recv_tokens && p.combined_topk_weights && !p.topk_weights) return true;
  if (p.hidden <= 0 || p.hidden % 8 != 0) return true;
  if (p.routing < DK_ROUTING_NONE || p.routing > DK_ROUTING_EXPANDED) return true;
  if (p.routing && (p.num_topk < 1 || p.num_topk > kMaxTopk || bad_experts(team, p.num_experts) ||
                    bad_index_bytes(p.index_bytes) || (p.num_tokens && !p.topk_idx)))
    return true;
  if (expanded(p.routing) && (p.num_x_rows < 0 || (p.num_recv_tokens && !p.recv_src_metadata))) return true;
  if (!team.spans_nodes()) return false;
  bool sources = p.routing ? p.recv_src_metadata && p.num_max_tokens > 0 : p.recv_src_idx != 0;
  return (p.num_recv_tokens && !sources) ||
         link_room(team, link_record(team, p, has_weights(p) ? p.num_topk : 0)) < least_link_slots(team, p);
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_combine(dk_combine_params *p) {
  DK_ENTER(p);
  if (bad_head(*p)) return DK_EINVAL;
  if (p->x_segment >= 0) return DK_EUNSUPPORTED;
  const Team &team = *at<Team>(p->team);
  if (bad_combine(team, *p) || combine_ring(team, *p, 0).slots() == 0) return DK_EINVAL;
  return enqueue<dk_combine_params, run_combine>(*p);
}
