// Low-latency combine. The experts' rank copies the rows of each source rank to its slot (zero copy leaves them in the
// rdma region) and posts their position; the tokens' rank reads them in place and adds them with its weights. This
// library never adds at the experts' rank, so DK_LL_UNREDUCED changes nothing.
#include <string.h>

#include "cpu/low_latency/common.h"
#include "cpu/team/check.h"

namespace dk {
namespace {

struct Range {  // rows of one source rank for one local expert
  int32_t first_row, first_source, count, reserved;
};
static_assert(sizeof(Range) == 16, "LowLatencyShape relies on it");

class Slot {
 public:
  Slot(uint64_t base, const LowLatencyShape &shape) : base_(base), shape_(shape) {}
  Range *ranges(int source) const { return at<Range>(base_) + static_cast<uint64_t>(source) * shape_.local_experts(); }
  // By expert; only the slot's owner uses them.
  int32_t *cursors() const { return at<int32_t>(base_ + shape_.combine_cursors_at()); }
  int32_t *sources() const { return at<int32_t>(base_ + shape_.combine_sources_at()); }
  uint8_t *rows() const { return at<uint8_t>(base_ + shape_.combine_rows_at()); }

 private:
  uint64_t base_;
  const LowLatencyShape &shape_;
};

bool is_logfmt(const dk_ll_combine_params &p) { return p.flags & DK_LL_LOGFMT; }
bool is_zero_copy(const dk_ll_combine_params &p) { return p.flags & DK_LL_ZERO_COPY; }

template <class Half>
void set_fields(Half &half, const dk_ll_combine_params &p) {
  half.set_field(DK_FIELD_HIDDEN_BYTES, int64_t{p.hidden} * 2);
  half.set_field(DK_FIELD_NUM_EXPERTS, p.num_experts);
  half.set_field(DK_FIELD_NUM_TOPK, p.num_topk);
  half.set_field(DK_FIELD_MAX_TOKENS, p.num_max_tokens);
  half.set_field(DK_FIELD_FORMAT, p.flags & DK_LL_LOGFMT);  // each rank chooses zero copy for itself
}

// ---- Send ----

class Sender {
 public:
  Sender(Op &op, const dk_ll_combine_params &p)
      : op_(op), team_(op.team), p_(p), shape_(p, op.team.num_ranks), half_(op, kCombine) {
    set_fields(half_, p);
  }
  void run();

 private:
  Refusal check() const;
  Refusal check_indices() const;
  void lay_out(const Slot &slot, int source);
  void put_part(const Slot &slot, int source);
  void put_rows(int source, uint64_t expert, const Slot &slot, const Range &range, uint64_t offset);
  void write_rows(const Slot &slot, const Range &range, uint64_t first);

  Op &op_;
  Team &team_;
  const dk_ll_combine_params &p_;
  const LowLatencyShape shape_;
  SendHalf half_;
  uint64_t num_rows_ = 0;  // so far, of all sources
};

void Sender::run() {
  if (!half_.begin()) return;
  Slot slot(half_.slot(), shape_);
  Refusal wrong = check();
  if (wrong.code) {
    half_.refuse(wrong);
    return half_.finish(0, p_.ticket);
  }
  if (is_zero_copy(p_))
    half_.set_rows(true, p_.x - team_.peers[team_.rank].rdma, p_.x_row_stride);
  else
    half_.set_rows(false, address_of(slot.rows()) - team_.peers[team_.rank].wire,
                   shape_.combine_row_bytes(is_logfmt(p_)));
  for (int source = 0; source < team_.num_ranks; source++) {
    uint64_t before = num_rows_;
    lay_out(slot, source);
    if (is_remote(team_, source)) put_part(slot, source);
    op_.sent(source, (num_rows_ - before) * shape_.combine_row_bytes(is_logfmt(p_)));
  }
  half_.finish(p_.num_tokens, p_.ticket);
}

// Everything that the call goes by, before a row moves: whether a dispatch of this shape can have written this layout.
Refusal Sender::check() const {
  int64_t most = static_cast<int64_t>(shape_.num_max_tokens), rows = static_cast<int64_t>(shape_.recv_rows());
  for (uint64_t i = 0; i < shape_.num_experts; i++) {  // [L,R]
    int64_t entry = at<const int64_t>(p_.layout_range)[i], first = entry >> 32, count = entry & 0xffffffff;
    if (first < 0 || count > most || first + count > rows) return {DK_EINVAL, DK_FIELD_LAYOUT_RANGE, most, entry};
    const int32_t *tokens = at<const int32_t>(p_.src_info) + static_cast<int64_t>(i / shape_.num_ranks) * rows + first;
    for (int64_t n = 0, before = -1; n < count; before = tokens[n++])
      if (tokens[n] <= before || tokens[n] >= most) return {DK_EINVAL, DK_FIELD_SRC_INFO, most, tokens[n]};
  }
  return p_.topk_idx ? check_indices() : Refusal{};
}

Refusal Sender::check_indices() const {
  for (size_t i = 0, n = static_cast<size_t>(p_.num_tokens) * static_cast<size_t>(p_.num_topk); i < n; i++) {
    int64_t expert = index_at(p_.topk_idx, p_.index_bytes, i);
    if (expert < -1 || expert >= p_.num_experts) return {DK_EINVAL, DK_FIELD_TOPK_IDX, p_.num_experts, expert};
  }
  return {};
}

void Sender::lay_out(const Slot &slot, int source) {
  const int64_t *layout = at<const int64_t>(p_.layout_range) + source;
  uint64_t recv_rows = shape_.recv_rows();
  for (uint64_t e = 0; e < shape_.local_experts(); e++) {
    Range &range = slot.ranges(source)[e];
    uint64_t entry = static_cast<uint64_t>(layout[e * shape_.num_ranks]), first = entry >> 32,
             count = entry & 0xffffffffu;
    // Bounded again: the caller may have changed the layout since check().
    if (team_.masked(source) || count > shape_.num_max_tokens || first + count > recv_rows) first = count = 0;
    uint64_t at_row = e * recv_rows + first;
    range = {static_cast<int32_t>(is_zero_copy(p_) ? at_row : num_rows_), static_cast<int32_t>(num_rows_),
             static_cast<int32_t>(count), 0};
    if (count) memcpy(slot.sources() + num_rows_, at<const int32_t>(p_.src_info) + at_row, count * sizeof(int32_t));
    if (!is_zero_copy(p_)) write_rows(slot, range, at_row);
    num_rows_ += count;
  }
}

// The mirror has no gaps: a range's rows start at the index of its sources.
void Sender::put_part(const Slot &slot, int source) {
  const Range *ranges = slot.ranges(source);
  uint64_t first = static_cast<uint64_t>(ranges->first_source), count = num_rows_ - first;
  half_.remote().put(source, 0, 0, ranges, shape_.local_experts() * sizeof(Range));
  if (count) half_.remote().put(source, 0, shape_.mirror_sources_at(), slot.sources() + first, count * sizeof(int32_t));
  for (uint64_t e = 0; e < shape_.local_experts(); e++) {
    uint64_t at_row = static_cast<uint64_t>(ranges[e].first_source) - first;
    if (ranges[e].count)
      put_rows(source, e, slot, ranges[e], shape_.mirror_rows_at() + at_row * shape_.combine_row_bytes(is_logfmt(p_)));
  }
}

void Sender::put_rows(int source, uint64_t expert, const Slot &slot, const Range &range, uint64_t offset) {
  uint64_t bytes = shape_.combine_row_bytes(is_logfmt(p_)), first = static_cast<uint64_t>(range.first_row);
  for (uint64_t i = 0; i < static_cast<uint64_t>(range.count); i++) {
    const uint8_t *row =
        is_zero_copy(p_) ? at<const uint8_t>(p_.x + (first + i) * p_.x_row_stride) : slot.rows() + (first + i) * bytes;
    half_.remote().put(source, expert, offset + i * bytes, row, bytes);
  }
}

void Sender::write_rows(const Slot &slot, const Range &range, uint64_t first) {
  const RowKernels &rows = *team_.device->rows;
  uint64_t stride = shape_.combine_row_bytes(is_logfmt(p_)),
           x_stride = p_.x_row_stride ? p_.x_row_stride : shape_.hidden * 2;
  for (uint64_t i = 0; i < static_cast<uint64_t>(range.count); i++) {
    const uint8_t *from = at<const uint8_t>(p_.x) + (first + i) * x_stride;
    uint8_t *to = slot.rows() + (static_cast<uint64_t>(range.first_row) + i) * stride;
    if (is_logfmt(p_))
      rows.logfmt_encode(to, reinterpret_cast<const uint16_t *>(from), shape_.hidden / kScaleChannels);
    else
      rows.copy(to, from, shape_.hidden * 2, false);
  }
}

// ---- Receive ----

struct Found {  // rows that add to one token
  const uint16_t *rows[kMaxTopk];
  float weights[kMaxTopk];
  int count;
};

class Receiver {
 public:
  Receiver(Op &op, const dk_ll_combine_params &p)
      : op_(op),
        team_(op.team),
        p_(p),
        rows_(*op.team.device->rows),
        shape_(p, op.team.num_ranks),
        half_(op, kCombine, p.ticket) {
    set_fields(half_, p);
  }
  void run();

 private:
  bool wait_for_all();
  void add_all();
  bool check_slots();
  void find_rows(int32_t token, int32_t *cursors, Found &found);
  const uint16_t *find_row(int source, int64_t expert, int32_t token, int32_t *cursors);
  const uint16_t *find_remote_row(int source, int64_t expert, int32_t token, int32_t &cursor);
  void add_logfmt(uint16_t *to, const Found &found);
  void fill_nan();

  Op &op_;
  Team &team_;
  const dk_ll_combine_params &p_;
  const RowKernels &rows_;
  const LowLatencyShape shape_;
  RecvHalf half_;
};

void Receiver::run() {
  bool good = !op_.failed() && wait_for_all();
  while (good) {
    if (half_.accepted()) add_all();
    if (op_.failed()) break;
    if (check_slots()) {
      half_.give_credits();
      half_.add_waits(p_.wait_stats);
      if (wait_for_callers_rows(op_, half_.sent_epoch()) && op_.look_for_obituaries() && !op_.refused()) return;
      break;
    }
    good = !op_.failed();
  }
  fill_nan();
}

bool Receiver::wait_for_all() {
  auto poll = [this] {
    bool progress = half_.poll();
    return half_.all_settled() ? Poll::done : progress ? Poll::progress : Poll::idle;
  };
  return wait_until(op_, poll, [this](int peer, Missing &missing) { return half_.awaits(peer, missing); });
}

// False: a peer has gone on without this rank while its rows were read; the sums are made again without it.
bool Receiver::check_slots() {
  bool intact = true;
  for (int peer = 0; peer < team_.num_ranks; peer++) {
    if (!half_.has_arrived(peer) || half_.intact(peer)) continue;
    intact = false;
    if (op_.may_shrink)
      mask_peer(team_, peer);
    else
      op_.fail(DK_EABORTED, peer);
  }
  return intact;
}

void Receiver::add_all() {
  // The slot of this rank's send of this call: no peer accesses its cursors, and no other receive half uses them.
  int32_t *cursors = Slot(half_.sent_slot(), shape_).cursors();
  memset(cursors, 0, sizeof(int32_t) * shape_.num_experts);
  for (int32_t token = 0; token < p_.num_tokens && !op_.refused(); token++) {
    Found found;
    find_rows(token, cursors, found);
    uint16_t *to = at<uint16_t>(p_.combined_x) + static_cast<uint64_t>(token) * shape_.hidden;
    if (is_logfmt(p_))
      add_logfmt(to, found);
    else
      rows_.weighted_sum(to, found.rows, found.weights, found.count, shape_.hidden);
  }
}

// In the order of the token's indices; an expert that occurs more than once counts once, with the sum of its weights.
void Receiver::find_rows(int32_t token, int32_t *cursors, Found &found) {
  found.count = 0;
  int64_t experts[kMaxTopk];
  size_t first = static_cast<size_t>(token) * static_cast<size_t>(p_.num_topk);
  for (int k = 0; k < p_.num_topk; k++) {
    int64_t expert = index_at(p_.topk_idx, p_.index_bytes, first + static_cast<size_t>(k));
    if (expert < 0) continue;
    if (expert >= p_.num_experts)  // other indices than the send half has checked: this rank's sums alone are void
      return op_.refuse(team_.rank, {DK_EINVAL, DK_FIELD_TOPK_IDX, p_.num_experts, expert});
    float weight = at<const float>(p_.topk_weights)[first + static_cast<size_t>(k)];
    int same = 0;
    while (same < found.count && experts[same] != expert) same++;
    if (same < found.count) {
      found.weights[same] += weight;
      continue;
    }
    int source = static_cast<int>(static_cast<uint64_t>(expert) / shape_.local_experts());
    const uint16_t *row = half_.has_arrived(source) ? find_row(source, expert, token, cursors) : nullptr;
    if (!row) continue;
    experts[found.count] = expert;
    found.weights[found.count] = weight;
    found.rows[found.count++] = row;
  }
}

// An expert's rows are ordered by token, and tokens are searched in order, so each list is traversed once.
const uint16_t *Receiver::find_row(int source, int64_t expert, int32_t token, int32_t *cursors) {
  if (is_remote(team_, source)) return find_remote_row(source, expert, token, cursors[expert]);
  // Its contents are checked: a peer that has masked this rank may be overwriting them.
  Slot slot(half_.slot(source), shape_);
  const Range range = slot.ranges(team_.rank)[static_cast<uint64_t>(expert) % shape_.local_experts()];
  if (range.first_source < 0 || range.first_row < 0 || range.count < 0 ||
      static_cast<uint64_t>(range.first_source) + static_cast<uint64_t>(range.count) >
          shape_.num_experts * shape_.num_max_tokens)
    return nullptr;
  const int32_t *sources = slot.sources() + range.first_source;
  int32_t &cursor = cursors[expert];
  while (cursor < range.count && sources[cursor] < token) cursor++;
  if (cursor >= range.count || sources[cursor] != token) return nullptr;
  const Arrival &message = half_.message(source);
  uint64_t base = message.rows_in_rdma ? team_.peers[source].rdma : team_.peers[source].wire,
           bytes = message.rows_in_rdma ? team_.rdma_bytes : team_.wire.total,
           offset = message.rows_offset +
                    (static_cast<uint64_t>(range.first_row) + static_cast<uint64_t>(cursor)) * message.rows_stride;
  if (offset > bytes || bytes - offset < shape_.combine_row_bytes(is_logfmt(p_))) return nullptr;
  return at<const uint16_t>(base + offset);
}

// The same in a mirror.
const uint16_t *Receiver::find_remote_row(int source, int64_t expert, int32_t token, int32_t &cursor) {
  uint64_t mirror = half_.slot(source), local = shape_.local_experts();
  const Range *ranges = at<const Range>(mirror), range = ranges[static_cast<uint64_t>(expert) % local];
  int64_t first = int64_t{range.first_source} - ranges[0].first_source;
  if (first < 0 || range.count < 0 || static_cast<uint64_t>(first + range.count) > local * shape_.num_max_tokens)
    return nullptr;
  const int32_t *sources = at<const int32_t>(mirror + shape_.mirror_sources_at()) + first;
  while (cursor < range.count && sources[cursor] < token) cursor++;
  if (cursor >= range.count || sources[cursor] != token) return nullptr;
  uint64_t row = static_cast<uint64_t>(first + cursor);
  return at<const uint16_t>(mirror + shape_.mirror_rows_at() + row * shape_.combine_row_bytes(is_logfmt(p_)));
}

void Receiver::add_logfmt(uint16_t *to, const Found &found) {
  constexpr uint64_t kBlocks = 8;  // at a time: the sums stay in the L1 cache
  uint64_t blocks = shape_.hidden / kScaleChannels;
  for (uint64_t first = 0; first < blocks; first += kBlocks) {
    float acc[kBlocks * kScaleChannels] = {};
    uint64_t count = min(kBlocks, blocks - first);
    for (int i = 0; i < found.count; i++)
      rows_.logfmt_add(acc, reinterpret_cast<const uint8_t *>(found.rows[i]), found.weights[i], blocks, first, count);
    rows_.store_sums(to + first * kScaleChannels, acc, count);
  }
}

void Receiver::fill_nan() {
  uint16_t *x = at<uint16_t>(p_.combined_x);
  for (uint64_t i = 0, n = static_cast<uint64_t>(p_.num_tokens) * shape_.hidden; i < n; i++) x[i] = 0x7fc0;
}

void run_ll_combine(const dk_ll_combine_params &p) {
  Op op(p, DK_OP_LL_COMBINE, p.phases);
  op.may_shrink = op.team.shrinks();
  if (p.phases & DK_PHASE_SEND) Sender(op, p).run();
  if (p.phases & DK_PHASE_RECV)
    Receiver(op, p).run();
  else if (!op.failed())
    op.save_to(op.team.control().state().tickets[p.ticket]);
}

bool bad_zero_copy(const Team &team, const dk_ll_combine_params &p) {
  uint64_t base = team.peers[team.rank].rdma, rows = LowLatencyShape(p, team.num_ranks).recv_rows();
  uint64_t count = rows * static_cast<uint64_t>(p.num_experts / team.num_ranks),
           row_bytes = 2 * static_cast<uint64_t>(p.hidden);
  if (p.x_row_stride < row_bytes || p.x_row_stride % 2 || p.x < base || p.x % 2 || is_logfmt(p)) return true;
  return p.x - base + (count - 1) * p.x_row_stride + row_bytes > team.rdma_bytes || count > INT32_MAX;
}

bool bad_ll_combine(const Team &team, const dk_ll_combine_params &p) {
  if (bad_shape(p, team) || bad_index_bytes(p.index_bytes)) return true;
  if (p.flags & ~uint32_t{DK_LL_LOGFMT | DK_LL_ZERO_COPY | DK_LL_UNREDUCED}) return true;
  if (is_logfmt(p) && p.hidden % kScaleChannels) return true;
  if (LowLatencyShape(p, team.num_ranks).combine_slot_bytes(is_logfmt(p)) > team.wire.slot_bytes[kCombine]) return true;
  if (p.x_row_stride && p.x_row_stride < 2 * static_cast<uint64_t>(p.hidden)) return true;
  if (p.phases & DK_PHASE_SEND && (!p.x || !p.src_info || !p.layout_range)) return true;
  if (p.phases & DK_PHASE_SEND && is_zero_copy(p) && bad_zero_copy(team, p)) return true;
  return p.phases & DK_PHASE_RECV && p.num_tokens && (!p.topk_idx || !p.topk_weights || !p.combined_x);
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_ll_combine(dk_ll_combine_params *p) {
  DK_ENTER(p);
  if (bad_head(*p) || bad_ll_combine(*at<Team>(p->team), *p)) return DK_EINVAL;
  return enqueue<dk_ll_combine_params, run_ll_combine>(*p);
}
