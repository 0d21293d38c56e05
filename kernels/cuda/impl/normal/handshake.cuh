// handshake.cuh - the message with which a rank begins a normal-mode call.
#pragma once
#include "cuda/impl/normal/combine_params.cuh"
#include "cuda/impl/normal/dispatch_params.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "cuda/impl/normal/notify_params.cuh"
#include "cuda/sync/agreement.cuh"

namespace deepep {

// The type of x among the flags.
__device__ inline uint32_t type_flags(int x_type) {
  return (static_cast<uint32_t>(x_type) & 0xf) << kHandshakeFormatShift;
}

// A handle as a block sees it before its first message.
struct HandleState {
  uint32_t hash, field;    // of the matrix; DK_FIELD_* of what is wrong with it
  int32_t expected, seen;  // likewise
};

// A thread's first entry of the matrix, which a kernel loads before anything else: the latency is hidden then.
struct MatrixEntry {
  int32_t rows, before;
};
__device__ __forceinline__ MatrixEntry load_matrix_entry(const int32_t *matrix, int n, int i) {
  if (i >= n * n) return {0, 0};
  return {matrix[i], i < n ? 0 : matrix[i - n]};
}

// Whole block, with two barriers: looks at the matrix of a handle that the caller gives (all of it, so that no row
// moves by a wrong one). `room`: rows of this rank's tensor; below 0: any number.
__device__ inline HandleState look_at_handle(const int32_t *matrix, const TeamView &team, int room, MatrixEntry entry) {
  __shared__ HandleState state;
  const int n = team.num_ranks, mine = (n - 1) * n + team.rank;
  if (threadIdx.x == 0) state = {0, DK_FIELD_NONE, 0, 0};
  __syncthreads();
  uint32_t hash = 0;
  for (int i = threadIdx.x; i < n * n; i += blockDim.x) {
    if (i != static_cast<int>(threadIdx.x)) entry = load_matrix_entry(matrix, n, i);
    const int rows = entry.rows, before = entry.before;
    hash += matrix_hash(rows, i);
    const bool descends = rows < before, crowded = i == mine && room >= 0 && rows > room;
    if ((descends || crowded) &&
        atomicCAS(&state.field, static_cast<uint32_t>(DK_FIELD_NONE),
                  static_cast<uint32_t>(descends ? DK_FIELD_PREFIX_MATRIX : DK_FIELD_HANDLE_ROWS)) == DK_FIELD_NONE) {
      state.expected = descends ? before : room;
      state.seen = rows;
    }
  }
  if (hash != 0) atomicAdd(&state.hash, hash);
  __syncthreads();
  return state;
}
__device__ inline void add_refusal(Handshake &hand, uint32_t field, int32_t expected, int32_t seen) {
  hand.mine.flags |= kHandshakeRefused | field << kHandshakeFieldShift;
  hand.mine.segment = expected;
  hand.mine.row_limit = seen;
}
// Ranks of a team that shrinks count their exchanges apart once one has been left out.
__device__ inline uint64_t comparable(const TeamView &team, uint64_t exchange) {
  return shrinks(team) && team.scratch->generation != 0 ? 0 : exchange;
}
__device__ inline void add_handle(Handshake &hand, const HandleState &handle, uint64_t exchange) {
  hand.mine.handle = static_cast<uint64_t>(handle.hash) << 32 | static_cast<uint32_t>(exchange);
  if (handle.field != DK_FIELD_NONE) add_refusal(hand, handle.field, handle.expected, handle.seen);
}

// What notify found wrong in the counts of a dispatch that is not cached; call 0: nothing. A kernel loads it before
// anything else. The number of the notify is the lower half of its exchange's.
__device__ __forceinline__ WrongCounts load_wrong_counts(const DispatchParams &p) {
  if (p.cached() || p.exchange == 0) return {0, 0, 0};
  return p.session.team.scratch->wrong_counts[p.exchange % kExchanges];
}
// By the last block.
__device__ inline void clear_wrong_counts(const DispatchParams &p) {
  if (!p.cached()) p.session.team.scratch->wrong_counts[p.exchange % kExchanges].call = 0;
}

__device__ inline Handshake notify_handshake(const NotifyParams &p, uint64_t epoch) {
  Handshake hand{};
  hand.epoch = epoch;
  hand.mine.hidden_bytes = p.hidden_bytes;
  hand.mine.op = DK_OP_NOTIFY;
  hand.mine.num_experts = p.num_experts;
  hand.mine.num_topk = p.num_topk;
  hand.mine.num_scales = p.num_scales;
  hand.mine.flags = type_flags(p.x_type);
  hand.mine.row_limit = p.num_worst_tokens > 0 ? p.num_worst_tokens : -1;
  return hand;
}

// Rows cross by copies that the host has made by a matrix with this hash, by which so many are this rank's: the handle
// has to have the same one.
template <class P>
__device__ inline void compare_with_copies(const P &p, uint32_t hash, int rows, HandleState &handle) {
  if (handle.field == DK_FIELD_NONE && handle.hash != hash) {
    const int n = p.session.team.num_ranks;
    handle.field = DK_FIELD_PREFIX_MATRIX;
    handle.expected = rows;
    handle.seen = p.rank_prefix_matrix()[(n - 1) * n + p.session.team.rank];
  }
}

// Whole block. Only a cached dispatch has a handle from the caller; that of another one notify has just written.
__device__ inline Handshake dispatch_handshake(const DispatchParams &p, uint64_t epoch, const MatrixEntry &early,
                                               const WrongCounts &wrong) {
  HandleState handle{0, DK_FIELD_NONE, 0, 0};
  if (p.cached()) handle = look_at_handle(p.rank_prefix_matrix(), p.session.team, p.num_recv_tokens, early);
  if (p.pulls() && p.cached()) compare_with_copies(p, p.pulled_hash, p.pulled_rows, handle);
  Handshake hand{};
  hand.epoch = epoch;
  hand.mine.hidden_bytes = p.row_bytes;
  hand.mine.op = DK_OP_DISPATCH;
  hand.mine.flags = type_flags(p.x_type) | (p.cached() ? kHandshakeCached : 0) |
                    (p.has_weights() ? kHandshakeWeights : 0) | (p.num_tokens == 0 ? kHandshakeSilent : 0);
  hand.mine.num_experts = p.num_experts;
  hand.mine.num_topk = p.num_topk;
  hand.mine.num_scales = p.num_scales;
  hand.mine.row_limit = p.num_recv_tokens;
  hand.mine.segment = p.recv_segment;
  hand.mine.segment_offset = p.recv_segment_offset;
  hand.mine.flags |= routing_flags(p.routing, 0);
  if (p.routing != DK_ROUTING_NONE) hand.mine.max_tokens = p.num_max_tokens;
  if (p.routing == DK_ROUTING_EXPANDED) hand.mine.row_limit = p.num_expanded_tokens;
  add_handle(hand, handle, comparable(p.session.team, p.exchange));
  if ((p.flags & DK_DISPATCH_CANCELLED) != 0)
    add_refusal(hand, DK_FIELD_CANCELLED, 0, p.reason);
  else if (wrong.call != 0 && static_cast<uint32_t>(wrong.call) == static_cast<uint32_t>(p.exchange))
    add_refusal(hand, DK_FIELD_TOKENS_PER_RANK, wrong.expected, wrong.seen);
  return hand;
}

// Whole block. kPushed: this rank's rows may have crossed by copies, which its message says.
template <bool kPushed = false>
__device__ inline Handshake combine_handshake(const CombineParams &p, uint64_t epoch, const MatrixEntry &early) {
  HandleState handle = look_at_handle(p.rank_prefix_matrix(), p.session.team, p.num_recv_tokens, early);
  if (kPushed && p.pushes()) compare_with_copies(p, p.pushed_hash, p.pushed_rows, handle);
  Handshake hand{};
  hand.epoch = epoch;
  hand.mine.hidden_bytes = p.row_bytes;
  hand.mine.op = DK_OP_COMBINE;
  hand.mine.num_topk = p.num_topk;
  if (kPushed) hand.mine.segment = p.inbox + 1;
  if (p.num_tokens == 0 && p.num_recv_tokens == 0) hand.mine.flags = kHandshakeSilent;
  hand.mine.flags |= routing_flags(p.routing, p.flags);
  hand.mine.max_tokens = p.num_max_tokens;
  if (p.routing != DK_ROUTING_NONE && (p.topk_weights() != nullptr || p.combined_topk_weights() != nullptr))
    hand.mine.flags |= kHandshakeWeights;
  add_handle(hand, handle, comparable(p.session.team, p.exchange));
  return hand;
}

}  // namespace deepep
