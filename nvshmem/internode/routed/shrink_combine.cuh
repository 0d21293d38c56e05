// shrink_combine.cuh - libdeepep_nvshmem.so: combine with a routing of a team that shrinks across nodes. Each rank
// sends its rows, or the sums of expanded rows, to the tokens' rank, and to itself, through the rings of
// normal/shrink_combine.cuh. The token's rank forms the sums that nodes would have formed, each rounded, in the order
// of combine.cuh: so a sum is that of a team which does not shrink, less the rows of lost ranks.
#pragma once
#include "internode/normal/shrink_combine.cuh"
#include "internode/routed/combine.cuh"

namespace deepep::internode {

struct RoutedShrinkCombineParams : ShrinkCombineParams {};

// A record is what a rank sends for a token: how many rows, the choices' weights, from header_bytes_of() on the rows.
__host__ __device__ inline uint32_t header_bytes_of(const dk_combine_params &p) {
  return align_up<uint32_t>(4 + 4u * p.num_topk, 16);
}

inline uint64_t record_bytes_of(const CombineParams &c) { return header_bytes_of(c) + c.slot_bytes; }

// ---- Senders: a stream is rows of this rank for a rank's tokens, every channels-th ----------------------------------

struct TermsOf {  // what TermSender::send_sum() needs of a job
  const CombineParams &p;
};
// Returns the record's bytes.
template <bool kExpand>
__device__ inline uint32_t write_record(const CombineParams &c, int64_t row, uint8_t *to) {
  auto *words = reinterpret_cast<uint32_t *>(to);
  int rows = 1;
  if constexpr (kExpand) {
    TermsOf job{c};
    const TermSender<false, TermsOf> sender{job, nullptr};
    rows =
        push_terms(c, static_cast<int>(row), to + header_bytes_of(c), words + 1,
                   [&](const Terms &terms, uint32_t which, uint8_t *place) { sender.send_sum(terms, which, place); });
  } else {
    copy_payload(to + header_bytes_of(c), c.x() + row * c.row_bytes, c.row_bytes);
    if (lane_id() < c.num_topk)
      words[1 + lane_id()] =
          c.topk_weights() == nullptr ? 0 : __float_as_uint(c.topk_weights()[row * c.num_topk + lane_id()]);
  }
  if (lane_id() == 0) words[0] = static_cast<uint32_t>(rows);
  return header_bytes_of(c) + static_cast<uint32_t>(rows) * c.row_bytes;
}

template <bool kExpand>
__device__ inline Outcome serve_record_sender(const RoutedShrinkCombineParams &p, uint64_t epoch, int stream,
                                              BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  const int owner = (team.rank + 1 + stream) % team.num_ranks, channel = stream / team.num_ranks,
            step = static_cast<int>(p.rings.channels);
  RowStream *state = p.shrink.sends() + stream;
  if (state->closed != 0) return kDone;
  const PairRows rows = rows_of_pair(p.c, owner, team.rank);
  const int before = static_cast<int>(state->count);
  int number = channel + before * step;
  bool closed = false;
  while (number < channel + (before + kSumsAtOnce) * step) {
    closed = number >= rows.count || __any_sync(kAllLanes, is_without(p.c.session, owner));
    if (closed || !has_room(team, p.internode, p.rings, epoch, owner, number)) break;
    const uint32_t bytes = write_record<kExpand>(p.c, static_cast<int64_t>(rows.first) + number,
                                                 place_for(team, p.internode, p.rings, owner, number));
    publish_row(team, p.internode, p.rings, epoch, owner, number, bytes);
    number += step;
  }
  const int sent = (number - channel) / step;
  __syncwarp();
  if (lane_id() == 0) {
    *state = {0, static_cast<uint32_t>(sent), closed, 1};
    if (closed && owner != team.rank)
      add_to(&team.scratch->sent_bytes[owner], static_cast<uint64_t>(sent) * p.c.row_bytes);
  }
  __syncwarp();
  if (closed) return kDone;
  if (sent != before) return kMoved;
  blocked = {owner == team.rank ? -1 : owner, number - static_cast<int64_t>(p.rings.places) + 1, 0};
  return kBlocked;
}

// ---- Sums -----------------------------------------------------------------------------------------------------------

// A token's choices: lane k has choice k.
struct MemberChoices {
  int rank;          // of the choice; -1: none, or one that takes no part
  uint32_t of_rank;  // the choices of its rank
  bool takes;        // this lane takes the record of its rank
  int number;        // which of that rank's records it is
};
__device__ inline MemberChoices load_member_choices(const RoutedShrinkCombineParams &p, int token) {
  const CombineParams &c = p.c;
  const TeamView &team = c.session.team;
  MemberChoices t{-1, 0, false, -1};
  if (lane_id() < c.num_topk) {
    const int64_t expert = load_index(pointer<const void>(c.topk_idx),
                                      static_cast<int64_t>(token) * c.num_topk + lane_id(), c.index_bytes);
    if (expert >= c.num_experts)
      report_refusal(c.session, kVoid, DK_EINVAL, team.rank, DK_FIELD_TOPK_IDX, c.num_experts, expert);
    else if (expert >= 0)
      t.rank = static_cast<int>(expert) / (c.num_experts / team.num_ranks);
    if (t.rank >= 0) t.number = c.send_head()[static_cast<int64_t>(token) * team.num_ranks + t.rank];
    if (t.number < 0) t.rank = -1;
  }
  // A rank may be lost while lanes look: all its choices are, if one of them is.
  const uint32_t lost = __ballot_sync(kAllLanes, t.rank >= 0 && is_without(c.session, t.rank)),
                 of_rank = same_key(t.rank);
  if ((of_rank & lost) != 0) return {-1, 0, false, -1};
  t.of_rank = of_rank;
  t.takes = t.rank >= 0 && lane_id() == last_lane(of_rank);
  return t;
}

// A lane's record; null: it takes none. False: one has not come yet, or the handle is wrong. One of peer -1 is held up
// by other warps of this rank.
__device__ inline bool find_member_records(const RoutedShrinkCombineParams &p, uint64_t epoch, const MemberChoices &t,
                                           const uint8_t *&record, BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  record = nullptr;
  const int expected = t.takes ? rows_of_pair(p.c, team.rank, t.rank).count : 0;
  const bool wrong = t.takes && t.number >= expected;
  if (wrong) report_failure(p.c.session, DK_EINVAL, t.rank, DK_FIELD_SEND_HEAD, expected - 1, t.number, 0);
  if (__any_sync(kAllLanes, wrong)) return false;
  if (t.takes && count_in(ptx::ld_acquire_sys(row_word(p.internode, p.rings, team.self, t.rank, t.number)), epoch) ==
                     static_cast<uint32_t>(t.number) + 1)
    record = team.self + p.rings.in_at(t.rank, t.number);
  const bool lacks = t.takes && record == nullptr;
  const uint32_t missing = __ballot_sync(kAllLanes, lacks);
  if (missing == 0) return true;
  const bool held_up = lacks && (t.rank == team.rank || waits_for_this_rank(p, epoch, t.rank, t.number));
  const uint32_t late = missing & ~__ballot_sync(kAllLanes, held_up);
  const int lane = __ffs(static_cast<int>(late != 0 ? late : missing)) - 1, peer = __shfl_sync(kAllLanes, t.rank, lane);
  blocked = {late != 0 ? peer : -1, static_cast<int64_t>(__shfl_sync(kAllLanes, t.number, lane)) + 1, 0};
  return false;
}

// Lists the rows in the order of the sum, with the marks of sum_node_rows(). Returns their number.
__device__ inline int list_member_rows(const RoutedShrinkCombineParams &p, const MemberChoices &t,
                                       const uint8_t *record, uint64_t *list) {
  const uint32_t below = (1u << lane_id()) - 1;
  const auto payload = reinterpret_cast<uint64_t>(record) + header_bytes_of(p.c);
  if (sends_choices(p.c)) {  // a row of each choice
    const uint8_t *its = from_lane(record, max(0, last_lane(t.of_rank)));
    const int which = __popc(t.of_rank & below);
    const bool has =
        t.rank >= 0 && which < static_cast<int>(ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(its)));
    const uint32_t all = __ballot_sync(kAllLanes, has);
    if (has)
      list[__popc(all & below)] =
          reinterpret_cast<uint64_t>(its) + header_bytes_of(p.c) + static_cast<uint64_t>(which) * p.c.row_bytes;
    return __popc(all);
  }
  const uint32_t all = __ballot_sync(kAllLanes, t.takes);
  if (are_apart(p.c)) {
    if (t.takes) list[__popc(all & below)] = payload;
    return __popc(all);
  }
  // Each node has the place of its last choice.
  const uint32_t of_node = same_key(t.takes ? p.internode.node_of(t.rank) : -1);
  const int last = last_lane(of_node);
  int at = __popc(of_node & below);
#pragma unroll 1
  for (uint32_t left = all; left != 0; left &= left - 1)
    at += __shfl_sync(kAllLanes, last, __ffs(static_cast<int>(left)) - 1) < last;
  if (t.takes) list[at] = payload | kRemoteRow | ((of_node & below) == 0 ? kNewNode : 0);
  return __popc(all);
}

// Biases are added first.
__device__ inline void sum_member_rows(const RoutedShrinkCombineParams &p, const uint64_t *list, int count, int token) {
  const uint32_t bytes = p.c.row_bytes;
  const uint64_t first = static_cast<uint64_t>(token) * bytes;
  __syncwarp();  // all lanes see the list
#pragma unroll 1
  for (uint32_t base = 16 * lane_id(); base < bytes; base += 16 * kWarp * kNodePieces) {
    float sum[kNodePieces][8] = {}, node[kNodePieces][8] = {};
#pragma unroll 1
    for (int b = 0; b < 2; ++b)
      if (p.c.bias(b) != nullptr) add_row(sum, p.c.bias(b) + first, base, bytes);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const auto *row = reinterpret_cast<const uint8_t *>(list[i] & ~(kRemoteRow | kNewNode));
      if ((list[i] & kNewNode) != 0) add_node(sum, node);
      if ((list[i] & kRemoteRow) != 0)
        add_row(node, row, base, bytes);
      else
        add_row(sum, row, base, bytes);
    }
    add_node(sum, node);
#pragma unroll
    for (int u = 0; u < kNodePieces; ++u)
      if (base + 16 * kWarp * u < bytes)
        ptx::st_stream(p.c.combined_x() + first + base + 16 * kWarp * u, round_bf16(sum[u]));
  }
}

// Each choice's weight, as its rank has sent it.
__device__ inline void take_member_weights(const RoutedShrinkCombineParams &p, const MemberChoices &t,
                                           const uint8_t *record, int token) {
  const uint8_t *its = from_lane(record, max(0, last_lane(t.of_rank)));
  if (p.c.combined_topk_weights() == nullptr || lane_id() >= p.c.num_topk) return;
  const float weight =
      t.rank < 0 ? 0 : __uint_as_float(ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t *>(its) + 1 + lane_id()));
  p.c.combined_topk_weights()[static_cast<int64_t>(token) * p.c.num_topk + lane_id()] = weight;
}

// As serve_tokens() without a routing.
__device__ inline Outcome serve_member_tokens(const RoutedShrinkCombineParams &p, uint64_t epoch, int step,
                                              uint64_t *list, int &token, BlockedStream &blocked) {
  const int before = token;
  for (int turn = 0; turn < kSumsAtOnce && token < p.c.num_tokens; ++turn, token += step) {
    const MemberChoices t = load_member_choices(p, token);
    const uint8_t *record;
    if (!find_member_records(p, epoch, t, record, blocked)) break;
    const int count = list_member_rows(p, t, record, list);
    sum_member_rows(p, list, count, token);
    take_member_weights(p, t, record, token);
    __syncwarp();                              // all lanes have read the records
    release_node_rows(p, epoch, token, true);  // also of choices that were changed since
  }
  if (token >= p.c.num_tokens) return kDone;
  return token != before ? kMoved : kBlocked;
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

template <bool kExpand>
__device__ inline void run_record_roles(const RoutedShrinkCombineParams &p, const PutPost &by, uint64_t epoch) {
  using Roles = ShrinkCombineRoles;
  __shared__ uint64_t lists[Roles::kSums][kWarp];
  const int warp = warp_id(), blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  if (warp < Roles::kSenders) {
    const int first = warp * blocks + block, step = Roles::kSenders * blocks,
              count = p.c.session.team.num_ranks * static_cast<int>(p.rings.channels);
    reset_pairs(p.shrink.sends(), first, step, count);
    serve_pairs(by, kForPairRoom, first, step, count, [&](int stream, BlockedStream &blocked) {
      return serve_record_sender<kExpand>(p, epoch, stream, blocked);
    });
  } else {
    const int worker = warp - Roles::kSenders, step = Roles::kSums * blocks;
    int token = worker * blocks + block;
    serve_pairs(by, kForPairRows, 0, 1, 1, [&](int, BlockedStream &blocked) {
      return serve_member_tokens(p, epoch, step, lists[worker], token, blocked);
    });
  }
}

}  // namespace deepep::internode

namespace deep_ep::internode {
using namespace deepep;
using namespace deepep::internode;

template <bool kExpand>
__global__ void __launch_bounds__(ShrinkCombineRoles::kThreads, 1)
    combine_routed_shrinking(const __grid_constant__ RoutedShrinkCombineParams p) {
  const Session &s = p.c.session;
  const PutPost by{s, p.internode, p.shrink};
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    const Handshake hand =
        combine_handshake(p.c, epoch, load_matrix_entry(p.c.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x));
    if (blockIdx.x == 0) post_to_members(by, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_agreement(s, hand, epoch, by)) {
      run_record_roles<kExpand>(p, by, epoch);
      confirm_membership(s);
    }
  }
  finish(s, [&](bool failed) {
    if (failed) clear_combine_outputs(p.c);
    forget_bytes(s);
    if (threadIdx.x == 0) end_epoch(s.team);
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::internode
