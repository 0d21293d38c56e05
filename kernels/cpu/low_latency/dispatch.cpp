// Low-latency dispatch. The sender casts each token once into its slot, with its indices; each receiver reads the
// indices of all senders and copies the rows of its experts to the output, ordered by source rank and then by token. A
// remote receiver reads a mirror of the slot, into which the sender puts the indices and that receiver's rows.
#include <string.h>

#include "cpu/low_latency/common.h"
#include "cpu/team/check.h"

namespace dk {
namespace {

class Slot {  // of a sender, as laid out by LowLatencyShape
 public:
  Slot(uint64_t base, const LowLatencyShape &shape, const dk_ll_dispatch_params &p)
      : base_(base),
        rows_(base + shape.dispatch_rows_at(p.num_topk)),
        stride_(shape.dispatch_row_bytes()),
        topk_(static_cast<uint64_t>(p.num_topk)),
        weights_at_(shape.num_max_tokens * topk_ * 4) {}
  int32_t *idx(uint64_t token) const { return at<int32_t>(base_) + token * topk_; }
  float *weights(uint64_t token) const { return at<float>(base_ + weights_at_) + token * topk_; }
  uint8_t *row(uint64_t token) const { return at<uint8_t>(rows_ + token * stride_); }
  uint64_t offset_of_row(uint64_t token) const { return rows_ - base_ + token * stride_; }

 private:
  uint64_t base_, rows_, stride_, topk_, weights_at_;
};

bool is_fp8(const dk_ll_dispatch_params &p) { return p.format == DK_FORMAT_FP8; }
bool is_fp4(const dk_ll_dispatch_params &p) { return p.format == DK_FORMAT_FP4 || p.format == DK_FORMAT_NVFP4; }
uint64_t value_bytes(const dk_ll_dispatch_params &p) {
  uint64_t hidden = static_cast<uint64_t>(p.hidden);
  return is_fp4(p) ? hidden / 2 : is_fp8(p) ? hidden : 2 * hidden;
}
// Words of scales of a row: a float for each 128 channels, or four exponents or scales of FP4 in a word.
uint64_t scale_words(const dk_ll_dispatch_params &p) {
  uint64_t hidden = static_cast<uint64_t>(p.hidden);
  if (is_fp4(p)) return hidden / (4 * kFp4Channels);
  return is_fp8(p) ? hidden / (p.flags & DK_LL_UE8M0 ? 4 * kScaleChannels : kScaleChannels) : 0;
}
// Where the scales of an output row are: the first word, and how far it is to the next.
struct ScalePlace {
  uint64_t first, step;
};
ScalePlace scale_place(const dk_ll_dispatch_params &p, uint64_t rows, uint64_t expert, uint64_t row) {
  uint64_t words = scale_words(p);
  if (p.format == DK_FORMAT_FP4) return {(expert * rows + row) * words, 1};
  if (p.format == DK_FORMAT_NVFP4)  // tiles of 128 rows x one word
    return {(expert * ((rows + 127) / 128) + row / 128) * words * 128 + row % 32 * 4 + row / 32 % 4, 128};
  return {expert * words * rows + row, rows};
}

template <class Half>
void set_fields(Half &half, const dk_ll_dispatch_params &p) {
  half.set_field(DK_FIELD_HIDDEN_BYTES, int64_t{p.hidden} * 2);
  half.set_field(DK_FIELD_NUM_EXPERTS, p.num_experts);
  half.set_field(DK_FIELD_NUM_TOPK, p.num_topk);
  half.set_field(DK_FIELD_MAX_TOKENS, p.num_max_tokens);
  half.set_field(DK_FIELD_FORMAT, p.format | static_cast<int64_t>(p.flags) << 8);
}

bool named_before(const int32_t *idx, int k) {
  for (int i = 0; i < k; i++)
    if (idx[i] == idx[k]) return true;
  return false;
}

// ---- Send ----

Refusal copy_routing(const dk_ll_dispatch_params &p, const Slot &slot) {
  size_t entries = static_cast<size_t>(p.num_tokens) * static_cast<size_t>(p.num_topk);
  int32_t *to = slot.idx(0);
  for (size_t i = 0; i < entries; i++) {
    int64_t expert = index_at(p.topk_idx, p.index_bytes, i);
    if (expert < -1 || expert >= p.num_experts) return {DK_EINVAL, DK_FIELD_TOPK_IDX, p.num_experts, expert};
    to[i] = static_cast<int32_t>(expert);
  }
  if (p.topk_weights && entries) memcpy(slot.weights(0), at<const float>(p.topk_weights), entries * sizeof(float));
  return {};
}

// Exponents of power-of-two scales, four in a word, lowest first.
void pack_exponents(uint32_t *words, const float *scales, uint64_t count) {
  for (uint64_t w = 0; w < count; w++) {
    uint32_t bits[4], word = 0;
    memcpy(bits, scales + 4 * w, sizeof bits);
    for (int i = 0; i < 4; i++) word |= (bits[i] >> 23 & 0xff) << (8 * i);
    memcpy(words + w, &word, sizeof word);  // words may overlap scales that were read already
  }
}

void write_row(const Team &team, const dk_ll_dispatch_params &p, uint8_t *to, uint64_t token) {
  const RowKernels &rows = *team.device->rows;
  uint64_t hidden = static_cast<uint64_t>(p.hidden);
  if (p.format == DK_FORMAT_FP4) {
    rows.copy(to, at<const uint8_t>(p.x) + token * (hidden / 2), hidden / 2, false);
    return rows.copy(to + hidden / 2, at<const uint8_t>(p.x_scales) + token * (hidden / kFp4Channels),
                     hidden / kFp4Channels, false);
  }
  const uint16_t *x = at<const uint16_t>(p.x) + token * hidden;
  if (p.format == DK_FORMAT_NVFP4)
    return rows.cast_fp4(to, to + hidden / 2, x, hidden / kFp4Channels, p.x_scales ? *at<const float>(p.x_scales) : 1);
  if (!is_fp8(p)) return rows.copy(to, x, 2 * hidden, false);
  // The float scales of the row fit after its values: 2 H bytes hold H + H/32.
  float *scales = reinterpret_cast<float *>(to + hidden);
  rows.cast_fp8(to, scales, x, hidden / kScaleChannels, p.flags & DK_LL_ROUND_SCALE);
  if (p.flags & DK_LL_UE8M0) pack_exponents(reinterpret_cast<uint32_t *>(scales), scales, scale_words(p));
}

// Whether an earlier expert of the token is at the same rank as expert k.
bool rank_named_before(const int32_t *idx, int k, int local) {
  for (int i = 0; i < k; i++)
    if (idx[i] >= 0 && idx[i] / local == idx[k] / local) return true;
  return false;
}

// Puts a row once to each remote rank, for all its experts.
void put_row(Op &op, const dk_ll_dispatch_params &p, RemoteSender &remote, const Slot &slot, uint64_t token) {
  int local = p.num_experts / op.team.num_ranks;
  uint64_t bytes = value_bytes(p) + 4 * scale_words(p);
  const int32_t *idx = slot.idx(token);
  for (int k = 0; k < p.num_topk; k++) {
    if (idx[k] < 0 || rank_named_before(idx, k, local) || !is_remote(op.team, idx[k] / local)) continue;
    remote.put(idx[k] / local, static_cast<uint64_t>(idx[k] % local), slot.offset_of_row(token), slot.row(token),
               bytes);
  }
}

void put_routing(Op &op, const dk_ll_dispatch_params &p, RemoteSender &remote, const Slot &slot) {
  uint64_t bytes = static_cast<uint64_t>(p.num_tokens) * static_cast<uint64_t>(p.num_topk) * sizeof(int32_t);
  for (int peer = 0; peer < op.team.num_ranks && bytes; peer++)
    if (is_remote(op.team, peer)) remote.put(peer, 0, 0, slot.idx(0), bytes);
}

void count_sent(Op &op, const dk_ll_dispatch_params &p, const Slot &slot) {
  int local = p.num_experts / op.team.num_ranks;
  int64_t *rows = op.team.numbers(3);
  memset(rows, 0, sizeof(int64_t) * static_cast<size_t>(op.team.num_ranks));
  for (uint64_t token = 0; token < static_cast<uint64_t>(p.num_tokens); token++) {
    const int32_t *idx = slot.idx(token);
    for (int k = 0; k < p.num_topk; k++)
      if (idx[k] >= 0 && !rank_named_before(idx, k, local)) rows[idx[k] / local]++;
  }
  for (int peer = 0; peer < op.team.num_ranks; peer++)
    if (!op.team.masked(peer)) op.sent(peer, static_cast<uint64_t>(rows[peer]) * (value_bytes(p) + 4 * scale_words(p)));
}

void send(Op &op, const dk_ll_dispatch_params &p) {
  SendHalf half(op, kDispatch);
  set_fields(half, p);
  if (!half.begin()) return;
  Slot slot(half.slot(), LowLatencyShape(p, op.team.num_ranks), p);
  Refusal wrong = copy_routing(p, slot);
  if (wrong.code) {
    half.refuse(wrong);
    return half.finish(0, p.ticket);
  }
  for (uint64_t token = 0; token < static_cast<uint64_t>(p.num_tokens); token++) {
    write_row(op.team, p, slot.row(token), token);
    if (any_remote(op.team)) put_row(op, p, half.remote(), slot, token);
  }
  if (any_remote(op.team)) put_routing(op, p, half.remote(), slot);
  half.finish(p.num_tokens, p.ticket);
  count_sent(op, p, slot);
}

// ---- Receive ----

class Receiver {
 public:
  Receiver(Op &op, const dk_ll_dispatch_params &p)
      : op_(op),
        team_(op.team),
        p_(p),
        shape_(p, op.team.num_ranks),
        half_(op, kDispatch, p.ticket),
        local_(static_cast<int>(shape_.local_experts())),
        first_expert_(local_ * op.team.rank),
        count_(op.team.expert_rows()),
        before_(count_ + local_),
        ranges_(at<int64_t>(p.layout_range)) {
    set_fields(half_, p);
    uint64_t all = shape_.recv_rows() * static_cast<uint64_t>(p.num_topk) * value_bytes(p);
    stream_ = all > team_.device->cached_bytes;
  }
  void run();

 private:
  Poll poll();
  void receive_from(int source);
  void receive_token(const Slot &slot, uint64_t token);
  void write_output_row(int expert, const uint8_t *row, uint64_t token);
  void clear_counts();

  Op &op_;
  Team &team_;
  const dk_ll_dispatch_params &p_;
  const LowLatencyShape shape_;
  RecvHalf half_;
  const int local_, first_expert_;
  int32_t *const count_;   // by local expert: its rows, in memory that no output can overlap
  int32_t *const before_;  // those of the sources before this one
  int64_t *const ranges_;
  int next_ = 0;
  bool stream_ = false;
};

void Receiver::clear_counts() {
  memset(count_, 0, sizeof(int32_t) * static_cast<size_t>(local_));
  memset(at<int32_t>(p_.recv_count), 0, sizeof(int32_t) * static_cast<size_t>(local_));
  memset(ranges_, 0, sizeof(int64_t) * static_cast<size_t>(local_) * static_cast<size_t>(team_.num_ranks));
}

void Receiver::run() {
  clear_counts();
  if (op_.failed()) return;
  bool ended = wait_until(
      op_, [this] { return poll(); }, [this](int peer, Missing &missing) { return half_.awaits(peer, missing); });
  team_.device->rows->finish_stream();
  if (!ended || !op_.look_for_obituaries()) return clear_counts();
  half_.give_credits();
  if (!half_.accepted()) return clear_counts();
  memcpy(at<int32_t>(p_.recv_count), count_, sizeof(int32_t) * static_cast<size_t>(local_));
  half_.add_waits(p_.wait_stats);
  if (!p_.cumulative_stats) return;
  for (int e = 0; e < local_; e++) at<uint32_t>(p_.cumulative_stats)[e] += static_cast<uint32_t>(count_[e]);
}

// The output is ordered by source rank, so ranks are received in order, each as soon as it has arrived.
Poll Receiver::poll() {
  bool progress = half_.poll();
  if (op_.failed()) return Poll::done;
  if (next_ < team_.num_ranks && half_.settled(next_)) {
    receive_from(next_++);
    progress = true;
  }
  return next_ == team_.num_ranks ? Poll::done : progress ? Poll::progress : Poll::idle;
}

void Receiver::receive_from(int source) {
  int64_t *range = ranges_ + source;
  memcpy(before_, count_, sizeof(int32_t) * static_cast<size_t>(local_));
  for (int e = 0; e < local_; e++) range[e * team_.num_ranks] = int64_t{before_[e]} << 32;
  if (!half_.has_arrived(source)) return;
  Slot slot(half_.slot(source), shape_, p_);
  // Bounded, since the message may be being overwritten.
  uint64_t tokens = min(static_cast<uint64_t>(half_.message(source).num_tokens), shape_.num_max_tokens);
  for (uint64_t token = 0; token < tokens; token++) receive_token(slot, token);
  if (!half_.intact(source)) {
    memcpy(count_, before_, sizeof(int32_t) * static_cast<size_t>(local_));
    if (op_.may_shrink)
      mask_peer(team_, source);
    else
      op_.fail(DK_EABORTED, source);
    return;
  }
  for (int e = 0; e < local_; e++) range[e * team_.num_ranks] = int64_t{before_[e]} << 32 | (count_[e] - before_[e]);
}

void Receiver::receive_token(const Slot &slot, uint64_t token) {
  // Copied once: a token whose indices change meanwhile must not take more than a row of each expert.
  int32_t idx[kMaxTopk];
  memcpy(idx, slot.idx(token), sizeof(int32_t) * static_cast<size_t>(p_.num_topk));
  for (int k = 0; k < p_.num_topk; k++) {
    int expert = idx[k] - first_expert_;
    if (expert >= 0 && expert < local_ && !named_before(idx, k)) write_output_row(expert, slot.row(token), token);
  }
}

// Scales of FP8 are stored with the row axis contiguous.
void Receiver::write_output_row(int expert, const uint8_t *row, uint64_t token) {
  uint64_t rows = shape_.recv_rows(), e = static_cast<uint64_t>(expert), r = static_cast<uint64_t>(count_[expert]++);
  at<int32_t>(p_.src_info)[e * rows + r] = static_cast<int32_t>(token);
  team_.device->rows->copy(at<uint8_t>(p_.recv_x) + (e * rows + r) * value_bytes(p_), row, value_bytes(p_), stream_);
  uint64_t words = scale_words(p_);
  const uint32_t *from = reinterpret_cast<const uint32_t *>(row + value_bytes(p_));
  ScalePlace place = scale_place(p_, rows, e, r);
  uint32_t *to = at<uint32_t>(p_.recv_scales) + place.first;
  for (uint64_t s = 0; s < words; s++) to[s * place.step] = from[s];
}

void run_ll_dispatch(const dk_ll_dispatch_params &p) {
  Op op(p, DK_OP_LL_DISPATCH, p.phases);
  op.may_shrink = op.team.shrinks();
  if (p.phases & DK_PHASE_SEND) send(op, p);
  if (p.phases & DK_PHASE_RECV)
    Receiver(op, p).run();
  else if (!op.failed())
    op.save_to(op.team.control().state().tickets[p.ticket]);
}

bool bad_ll_dispatch(const Team &team, const dk_ll_dispatch_params &p) {
  if (bad_shape(p, team) || bad_index_bytes(p.index_bytes)) return true;
  if (LowLatencyShape(p, team.num_ranks).dispatch_slot_bytes(p.num_topk) > team.wire.slot_bytes[kDispatch]) return true;
  if (any_remote(team) &&
      LowLatencyShape(p, team.num_ranks).dispatch_slot_bytes(p.num_topk) > team.wire.mirror_bytes[kDispatch])
    return true;
  if (p.format != DK_FORMAT_BF16 && !is_fp8(p) && !is_fp4(p)) return true;
  if (is_fp4(p) && p.hidden % kScaleChannels) return true;
  if (p.flags & ~uint32_t{DK_LL_ROUND_SCALE | DK_LL_UE8M0} || (p.flags && !is_fp8(p)) || p.flags == DK_LL_UE8M0)
    return true;
  if (is_fp8(p) && p.hidden % (p.flags & DK_LL_UE8M0 ? 4 * kScaleChannels : kScaleChannels)) return true;
  if (p.phases & DK_PHASE_SEND && p.num_tokens && (!p.x || !p.topk_idx || (p.format == DK_FORMAT_FP4 && !p.x_scales)))
    return true;
  return p.phases & DK_PHASE_RECV && (!p.recv_x || !p.recv_count || !p.src_info || !p.layout_range ||
                                      (p.format != DK_FORMAT_BF16 && !p.recv_scales));
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_ll_dispatch(dk_ll_dispatch_params *p) {
  DK_ENTER(p);
  if (bad_head(*p) || bad_ll_dispatch(*at<Team>(p->team), *p)) return DK_EINVAL;
  return enqueue<dk_ll_dispatch_params, run_ll_dispatch>(*p);
}
