// session.cuh - how every kernel begins and ends, and the message with which each operation of all ranks begins.
#pragma once
#include "cuda/sync/stats.cuh"

namespace deepep {

// Whole block. False: the team had failed before; the kernel goes straight to its end. A failure while the kernel runs
// ends its waits, not its sends: a block that begins late still sends what peers wait for, if only to fail there.
__device__ inline bool begin(const Session &s) {
  if (blockIdx.x == 0 && threadIdx.x == 0) s.team.scratch->start_ns = ptx::global_timer_ns();
  bool failed = false;
  if (threadIdx.x == 0) {
    failed = ptx::ld_relaxed_gpu(&s.team.scratch->failed) != 0;
    if (failed) let_last_block_look(s);
  }
  return __syncthreads_or(failed) == 0;
}

// Whole block. The block that leaves last runs `last(failed)`; it sees all that the others wrote on this device. It
// looks for a failure or a refusal only where a block has found one.
template <class Last>
__device__ inline void finish(const Session &s, Last last) {
  __shared__ uint32_t exits;
  Scratch *scratch = s.team.scratch;
  __syncthreads();
  if (threadIdx.x == 0)  // of these kernels the lower half has all
    exits = ptx::atomic_add_acq_rel_gpu(reinterpret_cast<uint32_t *>(&scratch->exits), 1) + 1;
  __syncthreads();
  if ((exits & kExitCount) != gridDim.x) return;
  bool failed = false, voided = false;
  if ((exits & kExitLooks) != 0) {
    failed = has_failed(s);
    voided = ptx::ld_relaxed_gpu(&scratch->refusing) == kVoid;
    __syncthreads();  // all threads have read `refusing`
    if (threadIdx.x == 0) {
      scratch->refusing = 0;
      scratch->failed = failed;
    }
  }
  if (threadIdx.x == 0) scratch->exits = 0;
  last(failed || voided);
}

// By one thread of the last block. What the operation read it has read: reads need no release.
__device__ inline void tell_finished(const TeamView &team, uint64_t epoch) {
  ptx::st_relaxed_sys(team.finished(team.self), epoch);
}
// By a kernel that has begun and stores rows for peers before it has their messages (`wanted`): what its threads load
// of TeamView::finished, each for one rank. A team that has been stopped may have no peers' memory any more.
__device__ __forceinline__ uint64_t load_finished(const TeamView &team, bool wanted) {
  const int r = static_cast<int>(threadIdx.x);
  return wanted && r < team.num_ranks ? ptx::ld_relaxed_sys(team.finished(team.peers[r])) : 0;
}
// Whole block: waits until no rank reads any more what was sent for the operation before this one. False: the team has
// failed.
__device__ inline bool await_finished(const Session &s, uint64_t epoch, uint64_t seen) {
  bool good = true;
  for (int r = threadIdx.x; good && r < s.team.num_ranks; r += blockDim.x) {
    if (r == static_cast<int>(threadIdx.x) && seen + 1 >= epoch) continue;
    uint64_t waited = 0;
    good = wait_or_fail(s, r, static_cast<int64_t>(epoch - 1), waited, [&](int64_t &now) {
      now = static_cast<int64_t>(ptx::ld_acquire_sys(s.team.finished(s.team.peers[r])));
      return now >= static_cast<int64_t>(epoch - 1);
    });
    if (blockIdx.x == 0 && waited != 0) s.team.scratch->wait_ns[r] = waited;
  }
  return __syncthreads_or(!good) == 0;
}

// The message with which this rank begins an operation. Ranks wait for each other's, and compare them.
struct Handshake {
  uint64_t epoch;
  HandshakeMessage mine;
};

// All but the epoch.
__device__ inline void write_message(HandshakeMessage *to, const HandshakeMessage &mine) {
  to->hidden_bytes = mine.hidden_bytes;
  to->segment_offset = mine.segment_offset;
  to->op = mine.op;
  to->flags = mine.flags;
  to->num_experts = mine.num_experts;
  to->num_topk = mine.num_topk;
  to->num_scales = mine.num_scales;
  to->max_tokens = mine.max_tokens;
  to->row_limit = mine.row_limit;
  to->segment = mine.segment;
  to->handle = mine.handle;
}
__device__ inline void post_handshake(const Session &s, const Handshake &hand) {
  for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x) {
    HandshakeMessage *to = s.team.handshake(r, hand.epoch % kHandshakeCopies, s.team.rank);
    write_message(to, hand.mine);
    ptx::st_release_sys(&to->epoch, hand.epoch);
  }
}

// The message of a low-latency call, within a node or among nodes, without the number of the call.
template <class P>
__device__ inline HandshakeMessage low_latency_message(const P &p, int max_tokens, uint32_t format) {
  HandshakeMessage mine{};
  mine.hidden_bytes = static_cast<uint64_t>(p.hidden) * 2;
  mine.op = p.session.op;
  mine.num_experts = p.num_experts;
  mine.num_topk = p.num_topk;
  mine.max_tokens = max_tokens;
  mine.flags = format << kHandshakeFormatShift | (p.flags & (DK_LL_ROUND_SCALE | DK_LL_UE8M0 | DK_LL_LOGFMT))
                                                     << (kHandshakeFormatShift + 4);
  return mine;
}

struct Difference {
  uint32_t field;
  int64_t mine, theirs;
};
// The routing of a normal-mode call among its flags, and as DK_FIELD_ROUTING records it.
constexpr uint32_t kRoutingFlags = 15u << kHandshakeRoutingShift;
__device__ inline uint32_t routing_flags(int routing, uint32_t combine_flags) {
  return (static_cast<uint32_t>(routing) | (combine_flags & (DK_COMBINE_UNREDUCED | DK_COMBINE_APART)) << 2)
         << kHandshakeRoutingShift;
}
__device__ inline int64_t routing_field(uint32_t flags) {
  const uint32_t routing = flags >> kHandshakeRoutingShift & 15;
  return (routing & 3) | (routing >> 2) << 8;
}
// An operation's flags as DK_FIELD_FORMAT records them: of low-latency dispatch the format, whether weights are given,
// and DK_LL_* flags; of low-latency combine these flags; of the others whether weights are given.
__device__ inline int64_t format_field(uint32_t op, uint32_t flags) {
  const uint32_t format = flags >> kHandshakeFormatShift & 0xf, ll = flags >> (kHandshakeFormatShift + 4);
  const bool weights = (flags & kHandshakeWeights) != 0;
  if (op == DK_OP_LL_DISPATCH) return format | (weights ? DK_FORMAT_WEIGHTS : 0) | ll << 8;
  return op == DK_OP_LL_COMBINE ? ll : weights;
}
__device__ __forceinline__ bool is_cancelled(uint32_t flags) {
  return (flags & kHandshakeRefused) != 0 && flags >> kHandshakeFieldShift == DK_FIELD_CANCELLED;
}
__device__ inline Difference compare_messages(const HandshakeMessage &mine, const HandshakeMessage *theirs) {
  if (mine.op != theirs->op)
    return {DK_FIELD_OPERATION, static_cast<int64_t>(mine.op), static_cast<int64_t>(theirs->op)};
  if ((mine.flags ^ theirs->flags) & kHandshakeCached)
    return {DK_FIELD_OPERATION, mine.flags & kHandshakeCached, theirs->flags & kHandshakeCached};
  if (is_cancelled(mine.flags) || is_cancelled(theirs->flags)) return {DK_FIELD_NONE, 0, 0};  // it fits any dispatch
  if ((mine.flags ^ theirs->flags) & kRoutingFlags)
    return {DK_FIELD_ROUTING, routing_field(mine.flags), routing_field(theirs->flags)};
  if (mine.hidden_bytes != theirs->hidden_bytes)
    return {DK_FIELD_HIDDEN_BYTES, static_cast<int64_t>(mine.hidden_bytes), static_cast<int64_t>(theirs->hidden_bytes)};
  if (mine.num_experts != theirs->num_experts) return {DK_FIELD_NUM_EXPERTS, mine.num_experts, theirs->num_experts};
  const bool silent = ((mine.flags | theirs->flags) & kHandshakeSilent) != 0;
  if (mine.num_topk != theirs->num_topk && !(silent && mine.op == DK_OP_COMBINE))
    return {DK_FIELD_NUM_TOPK, mine.num_topk, theirs->num_topk};
  if (mine.num_scales != theirs->num_scales) return {DK_FIELD_NUM_SCALES, mine.num_scales, theirs->num_scales};
  if (mine.max_tokens != theirs->max_tokens) return {DK_FIELD_MAX_TOKENS, mine.max_tokens, theirs->max_tokens};
  constexpr uint32_t kRefusal = kHandshakeRefused | ~0u << kHandshakeFieldShift, kType = 0xfu << kHandshakeFormatShift;
  const bool normal = mine.op == DK_OP_NOTIFY || mine.op == DK_OP_DISPATCH;
  if (normal && ((mine.flags ^ theirs->flags) & kType) != 0)
    return {DK_FIELD_X_TYPE, (mine.flags & kType) >> kHandshakeFormatShift,
            (theirs->flags & kType) >> kHandshakeFormatShift};
  const uint32_t compared = ~kRefusal & (silent ? ~(kHandshakeSilent | kHandshakeWeights) : ~0u);
  if (((mine.flags ^ theirs->flags) & compared) != 0)
    return {DK_FIELD_FORMAT, format_field(mine.op, mine.flags), format_field(mine.op, theirs->flags)};
  return {DK_FIELD_NONE, 0, 0};
}

// With shrink, low-latency operations and those that clean up after them go on without ranks that do not come.
__device__ inline bool can_shrink(const Session &s) {
  return (s.team.flags & DK_TEAM_SHRINK) != 0 && s.op != DK_OP_NOTIFY && s.op != DK_OP_DISPATCH &&
         s.op != DK_OP_COMBINE;
}
__device__ inline bool is_masked(const Session &s, int rank) {
  return (s.team.flags & DK_TEAM_SHRINK) != 0 && ptx::ld_relaxed_gpu(&s.team.scratch->masked[rank]) != 0;
}
// With shrink: calls of a rank up to this one belong to no call of this rank (TeamView::given_up).
__device__ inline uint64_t given_up_by(const TeamView &team, int rank) {
  return (team.flags & DK_TEAM_SHRINK) == 0 ? 0 : ptx::ld_acquire_sys(team.given_up(team.self, rank));
}
// Tells a rank of this node that this one has masked it, or how this one stands.
__device__ inline void tell_masked(const Session &s, int peer) {
  const TeamView &team = s.team;
  if (peer == team.rank || team.peers[peer] == nullptr) return;
  ptx::st_release_sys(team.notice(peer, team.rank), ptx::ld_relaxed_sys(&team.standing(team.rank, peer)->lifts) + 1);
}
__device__ inline void tell_standing(const TeamView &team, int peer) {
  if (team.peers[peer] == nullptr) return;
  Standing *to = team.standing(peer, team.rank);
  ptx::st_relaxed_sys(&to->lifts, team.scratch->lifts);
  ptx::st_release_sys(&to->generation, team.scratch->generation);
}
// A wait for `peer` ended with `code`. True: the peer is masked from now on and the call goes on. False: the caller
// reports the failure.
__device__ inline bool mask_instead(const Session &s, uint32_t code, int peer) {
  if (!can_shrink(s) || (code != DK_ETIMEOUT && code != DK_EPEERDEAD)) return false;
  if (atomicExch(&s.team.scratch->masked[peer], 1u) == 0) tell_masked(s, peer);
  return true;
}

// A wait that may mask a rank. True: it came. False: the rank is masked now, or the team has failed.
template <class Poll>
__device__ __forceinline__ bool wait_or_mask(const Session &s, int peer, uint64_t expected, Poll poll) {
  int64_t seen = 0;
  uint64_t waited = 0;
  const uint32_t code = wait_until(s, peer, seen, waited, poll);
  if (code == 0) return true;
  if (!mask_instead(s, code, peer))
    report_failure(s, code, culprit(s, code, peer), DK_FIELD_NONE, static_cast<int64_t>(expected), seen, waited);
  return false;
}

// Of a notify: whether the rank makes it with its dispatch. Teams that shrink do not.
__device__ inline int64_t operation_of(uint32_t flags) {
  return (flags & kHandshakeAtOnce) != 0 ? DK_OP_DISPATCH : DK_OP_NOTIFY;
}
__device__ __noinline__ inline void report_difference(const Session &s, int r, Difference difference, uint32_t mine,
                                                      uint32_t theirs) {
  if (difference.field == DK_FIELD_FORMAT && ((mine ^ theirs) & kHandshakeAtOnce) != 0)
    difference = {DK_FIELD_OPERATION, operation_of(mine), operation_of(theirs)};
  report_failure(s, DK_EMISMATCH, r, difference.field, difference.mine, difference.theirs, 0);
}

// By one thread: waits for the message of rank r, which is complete once `word` has the epoch, and compares it.
__device__ inline bool await_message(const Session &s, const Handshake &hand, int r, const uint64_t *word,
                                     const HandshakeMessage *from) {
  if (is_masked(s, r)) return true;
  uint64_t waited = 0;
  int64_t seen = 0;
  const uint32_t code = wait_until(s, r, seen, waited, [&](int64_t &now) {
    now = static_cast<int64_t>(ptx::ld_acquire_sys(word));
    return now >= static_cast<int64_t>(hand.epoch);
  });
  if (blockIdx.x == 0 && waited != 0) s.team.scratch->wait_ns[r] += waited;
  if (code != 0) {
    if (mask_instead(s, code, r)) return true;
    report_failure(s, code, culprit(s, code, r), DK_FIELD_NONE, static_cast<int64_t>(hand.epoch), seen, waited);
    return false;
  }
  const Difference difference = compare_messages(hand.mine, from);
  if (difference.field == DK_FIELD_NONE) return true;
  report_difference(s, r, difference, hand.mine.flags, from->flags);
  return false;
}

// By the thread that has awaited the message of rank r: whether the rank refuses the call, or has another handle. Block
// 0 reports it.
__device__ inline bool is_refused(const Session &s, const Handshake &hand, int r, const HandshakeMessage *from) {
  const uint64_t mine = hand.mine.handle, theirs = from->handle;
  const auto exchange = static_cast<uint32_t>(mine), other = static_cast<uint32_t>(theirs);
  uint32_t code = DK_EINVAL, field = DK_FIELD_NONE;
  int64_t expected = exchange, seen = other;
  if ((from->flags & kHandshakeRefused) != 0) {
    field = from->flags >> kHandshakeFieldShift;
    expected = from->segment;
    seen = from->row_limit;
  } else if ((hand.mine.flags & kHandshakeRefused) != 0) {
    return true;  // this rank's own message says why
  } else if (exchange != 0 && other != 0 && exchange != other) {
    code = DK_EMISMATCH;
    field = DK_FIELD_EXCHANGE;
  } else if ((mine ^ theirs) >> 32 != 0) {
    field = DK_FIELD_PREFIX_MATRIX;
    expected = s.team.rank;
    seen = INT64_MIN;
  }
  if (field == DK_FIELD_CANCELLED && r == s.team.rank)
    refuse_quietly(s);  // the engine has told its caller
  else if (field != DK_FIELD_NONE && blockIdx.x == 0)
    report_refusal(s, kVoid, code, r, field, expected, seen);
  return field != DK_FIELD_NONE;
}

// By threads `first` of `step`: whether every rank has begun the same operation, and no rank refuses it: all ranks have
// the same messages and decide alike. Block 0 records how long it waited.
__device__ inline bool await_messages(const Session &s, const Handshake &hand, int first, int step) {
  bool good = true;
  for (int r = first; good && r < s.team.num_ranks; r += step) {
    const HandshakeMessage *from = s.team.handshake(s.team.rank, hand.epoch % kHandshakeCopies, r);
    good = await_message(s, hand, r, &from->epoch, from) && !is_refused(s, hand, r, from);
  }
  return good;
}
// Likewise by the whole block.
__device__ inline bool await_handshake(const Session &s, const Handshake &hand) {
  return __syncthreads_or(!await_messages(s, hand, threadIdx.x, blockDim.x)) == 0;
}

}  // namespace deepep
