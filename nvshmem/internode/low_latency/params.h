// params.h - libdeepep_nvshmem.so: the interface's parameters of low latency in the form that the kernels take. Host.
// kernels/cuda/launch/low_latency.h has the checks and arguments that are the same in the CUDA library.
#pragma once
#include "cuda/launch/low_latency.h"
#include "internode/low_latency/combine.cuh"
#include "internode/low_latency/dispatch.cuh"

namespace deepep::internode {

static_assert(kMaxTopk <= kWarp, "a lane for each entry of a token");
static_assert(kMaxLowLatencyTokens <= 0xffff, "a token and a position take 16 bits of a word");

// Dynamic shared memory: calls [R], then counts [E] and rows [R] of dispatch; of combine sums [R], then first rows
// [L][R] or row counts [L + 1].
template <class P>
size_t shared_bytes(const P *p, int num_ranks) {
  return sizeof(uint64_t) * num_ranks + 4ull * (p->num_experts + num_ranks + 1);
}

struct LowLatencyTeam {
  TeamView view;
  uint64_t outbox;  // from the start of the block, kLowLatencyOutboxBytes
  LowLatencyState *state;
  int next_stage;          // index of the buffer of staged rows that the next combine sends from
  uint8_t *const *blocks;  // of InternodeLlParams
  size_t max_shared;       // dynamic shared memory that a block of combine gets
};

// The wire region behind the ring's flags: for each slot areas of arrival words, counts, a table of a dispatch's tokens
// and weights, of so many 32nds each. Shapes may differ from call to call, so where an area begins depends on the size
// of the region alone.
enum WirePart { kWords, kCounts, kTable, kWeights, kNumWireParts };
constexpr uint64_t kWireShares[kNumWireParts] = {5, 1, 5, 5}, kWireShareSum = 16, kWireAreas = 2 * kWireShareSum;
static_assert(kWireShares[kWords] + kWireShares[kCounts] + kWireShares[kTable] + kWireShares[kWeights] == kWireShareSum,
              "all of it");
static_assert(kLowLatencySlots == 2 && kTables == 2, "two areas of each kind");

inline uint32_t counts_bytes(uint64_t num_local) {
  return align_up<uint32_t>(8 * static_cast<uint32_t>(num_local + kCountWords), 16);
}
inline uint32_t weights_bytes(uint64_t tokens, uint64_t entries) {
  return align_up<uint32_t>(static_cast<uint32_t>(4 * tokens * entries), 16);
}
inline uint64_t table_tokens_at(uint64_t ranks) { return align_up<uint64_t>(4 * ranks, 16); }

// Bytes that each area must have; of counts and weights there is one part that comes in and one that goes out.
struct WireSizes {
  uint64_t bytes[kNumWireParts];
  WireSizes(uint64_t ranks, uint64_t tokens, uint64_t experts) {
    const uint64_t num_local = experts / ranks, entries = min<uint64_t>(num_local, kMaxTopk);
    bytes[kWords] = experts * tokens * 8 + ranks * 8;
    bytes[kCounts] = 2 * ranks * counts_bytes(num_local);
    bytes[kTable] = table_tokens_at(ranks) + ranks * tokens * 8 * (1 + entries);
    bytes[kWeights] = 2 * ranks * weights_bytes(tokens, entries);
  }
  uint64_t region() const {
    uint64_t all = 0;
    for (int part = 0; part < kNumWireParts; ++part)
      all = max(all, (bytes[part] + 128) * kWireAreas / kWireShares[part] + 1);
    return align_up<uint64_t>(all, 128);
  }
  bool fit(uint64_t region) const {
    for (int part = 0; part < kNumWireParts; ++part)
      if (region * kWireShares[part] / kWireAreas < bytes[part] + 128) return false;
    return true;
  }
};
// Where an area begins in the region.
inline uint64_t wire_part_at(uint64_t region, WirePart part, int slot) {
  uint64_t before = slot * kWireShareSum;
  for (int i = 0; i < part; ++i) before += kWireShares[i];
  return region * before / kWireAreas / 128 * 128;
}

// Offsets for a call's shape. False: the regions of this team are too small for it.
template <class P>
bool find_offsets(const P *p, const LowLatencyTeam &team, uint32_t payload, LowLatencyOffsets *at) {
  const TeamView &view = team.view;
  const uint64_t ranks = view.num_ranks, experts = p->num_experts, tokens = p->num_max_tokens, hidden = p->hidden;
  const LowLatencyLayout layout = low_latency_layout(ranks, tokens, hidden, experts);
  // With one expert a rank, a row's number is its position among that expert's rows: no header. Behind the payload lie
  // the weights, and with one expert a rank the entries to which they belong, where there is room for them: BF16 with
  // one expert a rank has none.
  const uint32_t entries_bytes = align_up<uint32_t>(4 * p->num_topk, 16);
  at->header_bytes = experts == ranks ? 0 : entries_bytes;
  at->row_bytes = at->weights_at = at->header_bytes + payload;
  const uint32_t with_weights = at->row_bytes + (experts == ranks ? 2 : 1) * entries_bytes;
  if (tokens * with_weights <= layout.zero_copy_bytes / ranks) at->row_bytes = with_weights;
  at->counts_bytes = counts_bytes(experts / ranks);
  at->max_entries = static_cast<uint32_t>(min<uint64_t>(experts / ranks, p->num_topk));
  at->weights_bytes = weights_bytes(tokens, at->max_entries);
  at->stage_bytes = layout.zero_copy_bytes;
  at->source_bytes = max<uint64_t>(layout.zero_copy_bytes / ranks, tokens * at->row_bytes);
  if (layout.rdma_bytes > view.rdma_bytes || ranks * at->source_bytes > layout.slot_bytes) return false;
  if (view.wire_bytes < view.ring.bytes) return false;
  const uint64_t wire = view.wire + view.ring.bytes, region = view.wire_bytes - view.ring.bytes;
  const WireSizes needed(ranks, tokens, experts);
  if (!needed.fit(region)) return false;
  for (int i = 0; i < kLowLatencySlots; ++i) {
    at->slot[i] = view.rdma + slot_offset(view.rdma_bytes, layout.slot_bytes, i);
    at->words[i] = wire + wire_part_at(region, kWords, i);
    at->counts_in[i] = wire + wire_part_at(region, kCounts, i);
    at->counts_out[i] = at->counts_in[i] + ranks * at->counts_bytes;
    at->table[i] = wire + wire_part_at(region, kTable, i);
    at->weights_in[i] = wire + wire_part_at(region, kWeights, i);
    at->weights_out[i] = at->weights_in[i] + ranks * at->weights_bytes;
  }
  at->table_tokens_at = static_cast<uint32_t>(table_tokens_at(ranks));
  at->outbox = team.outbox;
  return true;
}

template <class P>
int32_t fill_call(const P *p, const LowLatencyTeam &team, uint32_t op, uint32_t payload, InternodeLlParams *call) {
  const int32_t code = check_low_latency(p, team.view);
  if (code != DK_OK) return code;
  if (!find_offsets(p, team, payload, &call->at)) return DK_EINVAL;
  if (shared_bytes(p, team.view.num_ranks) > kMaxTables) return DK_EUNSUPPORTED;
  static_cast<LowLatencyArguments &>(*call) = low_latency_arguments(p, team.view, op);
  call->state = team.state;
  call->blocks = team.blocks;
  call->num_local = p->num_experts / team.view.num_ranks;
  return DK_OK;
}

inline int32_t fill_dispatch(const dk_ll_dispatch_params *p, const LowLatencyTeam &team, InternodeLlDispatchParams *d) {
  if (!is_sane_format(p)) return DK_EINVAL;
  const uint32_t hidden = static_cast<uint32_t>(p->hidden), values = static_cast<uint32_t>(value_bytes(*p)),
                 scales = p->format == DK_FORMAT_BF16 ? 0 : hidden / (is_fp4(*p) ? kFp4Channels : 32);
  const int32_t code = fill_call(p, team, DK_OP_LL_DISPATCH, values + align_up(scales, 16u), &d->call);
  d->call.format = static_cast<uint32_t>(p->format);
  static_cast<LowLatencyDispatchBuffers &>(*d) = low_latency_buffers(p);
  return code;
}

inline bool bad_zero_copy(const dk_ll_combine_params *p, const TeamView &view) {
  const uint64_t base = reinterpret_cast<uint64_t>(view.self + view.rdma),
                 rows = static_cast<uint64_t>(p->num_experts) * p->num_max_tokens;
  return p->x < base || p->x - base + (rows - 1) * p->x_row_stride + 2ull * p->hidden > view.rdma_bytes;
}

// Rows are staged in the buffers that zero copy hands out, alternately, so that a call never overwrites rows that a put
// still reads. With zero copy the caller has chosen the buffer: p->x is in it.
inline int32_t fill_combine(const dk_ll_combine_params *p, const LowLatencyTeam &team, InternodeLlCombineParams *c) {
  const bool zero_copy = (p->flags & DK_LL_ZERO_COPY) != 0;
  if (!is_sane_format(p)) return DK_EINVAL;
  if ((p->flags & DK_LL_LOGFMT) != 0 && p->hidden > kMaxLogChannels) return DK_EUNSUPPORTED;
  const int32_t code = fill_call(p, team, DK_OP_LL_COMBINE, 0, &c->call);
  if (code != DK_OK) return code;
  if (zero_copy && (p->phases & DK_PHASE_SEND) != 0 && bad_zero_copy(p, team.view)) return DK_EINVAL;
  const uint64_t second = reinterpret_cast<uint64_t>(team.view.self + team.view.rdma + c->call.at.stage_bytes);
  c->call.stage = zero_copy ? p->x == second : team.next_stage;
  c->call.at.stage = team.view.rdma + c->call.stage * c->call.at.stage_bytes;
  static_cast<LowLatencyCombineBuffers &>(*c) = low_latency_buffers(p);
  if ((p->flags & DK_LL_LOGFMT) == 0 || (p->phases & DK_PHASE_SEND) == 0) return DK_OK;
  c->call.coding_at = align_up<uint32_t>(static_cast<uint32_t>(shared_bytes(p, team.view.num_ranks)), 16);
  c->call.keeps_sums = c->call.coding_at + kLlGroups * (coding_bytes(p->hidden) + 2 * p->hidden) <= team.max_shared;
  return DK_OK;
}
// Dynamic shared memory of a combine that fill_combine has filled in.
inline size_t combine_shared_bytes(const dk_ll_combine_params *p, const InternodeLlCombineParams &c) {
  if (c.call.coding_at == 0) return shared_bytes(p, c.call.session.team.num_ranks);
  return c.call.coding_at + kLlGroups * (coding_bytes(p->hidden) + (c.call.keeps_sums ? 2 * p->hidden : 0));
}

}  // namespace deepep::internode
