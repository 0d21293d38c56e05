// shrink_dispatch.cuh - libdeepep_nvshmem.so: dispatch of a team that shrinks across nodes. A stream is the rows of a
// pair of ranks with the numbers channel, channel + channels, ...: a sender finds their tokens, a reader knows which
// rows it lacks when their rank is lost. Those become rows of zeros that name no expert.
#pragma once
#include "cuda/impl/normal/failed_outputs.cuh"
#include "cuda/impl/normal/handshake.cuh"
#include "internode/normal/dispatch.cuh"
#include "internode/normal/shrink.cuh"

namespace deepep::internode {

struct ShrinkDispatchParams {
  DispatchParams d;
  NodeView internode;
  ShrinkView shrink;
  PairRings rings;
};

struct ShrinkDispatchRoles {
  static constexpr int kSenders = 10, kReaders = 10;
  static constexpr int kWarps = kSenders + kReaders, kThreads = kWarps * kWarp;
};
constexpr int kPairRowsAtOnce = 4;  // of a stream in one turn of a warp

// Words after a row's payload: the token, weights, experts, scales.
__host__ __device__ inline RowWords pair_words(const DispatchParams &d) { return RowWords(d, 0); }
// What a row takes of a place. Parameters of another kind have functions of their own for this, and to send, take and
// blank a row.
__host__ __device__ inline uint32_t pair_bytes(const ShrinkDispatchParams &p) {
  return p.d.row_bytes + 4u * pair_words(p.d).end;
}
__device__ inline PairRows rows_of_pair(const DispatchParams &d, int source, int reader) {
  return pair_rows(d.rank_prefix_matrix(), d.session.team.num_ranks, source, reader);
}

// ---- Senders --------------------------------------------------------------------------------------------------------

// The next token, from `from` on, whose row for the reader is of the channel; num_tokens: none. head: the row's number.
__device__ inline int find_token(const ShrinkDispatchParams &p, int reader, int channel, int from, int &head) {
  constexpr int kUnroll = 4;
  const auto channels = static_cast<uint32_t>(p.rings.channels);
  for (int token = from; token < p.d.num_tokens; token += kUnroll * kWarp) {
    int mine[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = token + u * kWarp + lane_id();
      mine[u] = at < p.d.num_tokens ? p.d.send_head()[at * p.d.session.team.num_ranks + reader] : -1;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const bool found = mine[u] >= 0 && static_cast<uint32_t>(mine[u]) % channels == static_cast<uint32_t>(channel);
      const uint32_t lanes = __ballot_sync(kAllLanes, found);
      if (lanes == 0) continue;
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      head = __shfl_sync(kAllLanes, mine[u], lane);
      return token + u * kWarp + lane;
    }
  }
  return p.d.num_tokens;
}

// Copies a token's row to a ring's place, or (place null) to row `own` of this rank's outputs.
__device__ inline void send_pair_row(const ShrinkDispatchParams &p, int token, uint8_t *place, int64_t own) {
  const DispatchParams &d = p.d;
  const RowWords at = pair_words(d);
  RowExtras extras = load_extras(d, token, 0);
  uint8_t *to = place == nullptr ? d.recv_x() + own * d.row_bytes : place;
  copy_payload(to, d.x() + static_cast<uint64_t>(token) * d.row_bytes, d.row_bytes);
  auto *words = reinterpret_cast<uint32_t *>(place + d.row_bytes);
  if (lane_id() == 0 && place != nullptr) words[0] = static_cast<uint32_t>(token);
  if (lane_id() == 0 && place == nullptr && d.recv_src_idx() != nullptr) d.recv_src_idx()[own] = token;
#pragma unroll 1
  for (int first = 0; first == 0 || has_extras(d, first); first += kWarp) {
    if (first != 0) extras = load_extras(d, token, first);
    check_expert(d, extras);
    if (place == nullptr)
      store_extras(d, own, extras, first);
    else
      store_words(d, at, words, extras, first);
  }
}

// Streams of a channel come after those of the one before, in each the reader after this rank first.
template <class Params>
__device__ inline Outcome serve_pair_sender(const Params &p, uint64_t epoch, int stream, BlockedStream &blocked) {
  const DispatchParams &d = p.d;
  const TeamView &team = d.session.team;
  const int reader = (team.rank + 1 + stream) % team.num_ranks, channel = stream / team.num_ranks,
            step = static_cast<int>(p.rings.channels);
  RowStream *state = p.shrink.sends() + stream;
  if (state->closed != 0) return kDone;
  const PairRows rows = rows_of_pair(d, team.rank, reader);
  const int before = static_cast<int>(state->count);
  int number = channel + before * step, token = state->at;
  bool closed = false;
  while (number < channel + (before + kPairRowsAtOnce) * step) {
    closed = number >= rows.count || __any_sync(kAllLanes, is_without(d.session, reader));
    if (closed || (reader != team.rank && !has_room(team, p.internode, p.rings, epoch, reader, number))) break;
    int head = -1;
    token = find_token(p, reader, channel, token, head);
    if (head != number) {  // the handle gives the reader another number of rows than its matrix
      if (lane_id() == 0) report_failure(d.session, DK_EINVAL, reader, DK_FIELD_SEND_HEAD, number, head, 0);
      __syncwarp();
      return kBlocked;
    }
    if (reader == team.rank) {
      send_pair_row(p, token, nullptr, static_cast<int64_t>(rows.first) + number);
    } else {
      send_pair_row(p, token, place_for(team, p.internode, p.rings, reader, number), -1);
      publish_row(team, p.internode, p.rings, epoch, reader, number, pair_bytes(p));
    }
    number += step;
    ++token;
  }
  const int sent = (number - channel) / step;
  __syncwarp();
  if (lane_id() == 0) {
    *state = {token, static_cast<uint32_t>(sent), closed, 1};
    if (closed)
      add_to(&team.scratch->sent_bytes[reader], static_cast<uint64_t>(sent) * (d.row_bytes + 4ull * d.num_scales));
  }
  __syncwarp();
  if (closed) return kDone;
  if (sent != before) return kMoved;
  blocked = {reader, number - static_cast<int64_t>(p.rings.places) + 1, 0};
  return kBlocked;
}

// ---- Readers --------------------------------------------------------------------------------------------------------

__device__ inline void take_pair_row(const ShrinkDispatchParams &p, const uint8_t *from, int64_t row) {
  const DispatchParams &d = p.d;
  const RowWords at = pair_words(d);
  const auto *words = reinterpret_cast<const uint32_t *>(from + d.row_bytes);
  const auto token = static_cast<int32_t>(ptx::ld_relaxed_sys(words));
  RowExtras extras = load_arrived_extras(d, at, words, 0);
  copy_payload(d.recv_x() + row * d.row_bytes, from, d.row_bytes);
  if (lane_id() == 0 && d.recv_src_idx() != nullptr) d.recv_src_idx()[row] = token;
#pragma unroll 1
  for (int first = 0; first == 0 || has_extras(d, first); first += kWarp) {
    if (first != 0) extras = load_arrived_extras(d, at, words, first);
    store_extras(d, row, extras, first);
  }
}

__device__ inline void zero_recv_row(const DispatchParams &d, int64_t row) {
  auto *to = reinterpret_cast<uint4 *>(d.recv_x() + static_cast<uint64_t>(row) * d.row_bytes);
  for (uint32_t i = lane_id(); i < d.row_bytes / 16; i += kWarp) to[i] = {0, 0, 0, 0};
}

// A row of a rank that takes no part (any more). Its token is made up.
__device__ __noinline__ inline void blank_row(const DispatchParams &d, int64_t row, int number) {
  zero_recv_row(d, row);
  for (int first = 0; first == 0 || has_extras(d, first); first += kWarp)
    store_extras(d, row, RowExtras{-1, 0, {}}, first);
  if (lane_id() == 0 && !d.cached() && d.recv_src_idx() != nullptr) d.recv_src_idx()[row] = number;
}

__device__ inline void blank_pair_row(const ShrinkDispatchParams &p, int, const PairRows &rows, int number) {
  blank_row(p.d, static_cast<int64_t>(rows.first) + number, number);
}

template <class Params>
__device__ inline Outcome serve_pair_reader(const Params &p, uint64_t epoch, int stream, BlockedStream &blocked) {
  const DispatchParams &d = p.d;
  const TeamView &team = d.session.team;
  const int source = (team.rank + 1 + stream) % team.num_ranks, channel = stream / team.num_ranks,
            step = static_cast<int>(p.rings.channels);
  RowStream *state = p.shrink.receives(team.num_ranks) + stream;
  if (source == team.rank || state->closed != 0) return kDone;
  const PairRows rows = rows_of_pair(d, source, team.rank);
  const int before = static_cast<int>(state->count);
  int number = channel + before * step;
  const bool lost = __any_sync(kAllLanes, is_without(d.session, source)) != 0;
  for (; lost && number < rows.count; number += step) blank_pair_row(p, source, rows, number);
  while (number < min(rows.count, channel + (before + kPairRowsAtOnce) * step)) {
    if (read_count(row_word(p.internode, p.rings, team.self, source, number), epoch) !=
        static_cast<uint32_t>(number) + 1)
      break;
    take_pair_row(p, team.self + p.rings.in_at(source, number), static_cast<int64_t>(rows.first) + number);
    if (number + static_cast<int>(p.rings.places) < rows.count)
      release_row(team, p.internode, p.rings, epoch, source, number);
    number += step;
  }
  const int read = (number - channel) / step;
  const bool closed = number >= rows.count;
  __syncwarp();
  if (lane_id() == 0) *state = {0, static_cast<uint32_t>(read), closed, 1};
  __syncwarp();
  if (closed) return kDone;
  if (read != before) return kMoved;
  blocked = {source, static_cast<int64_t>(number) + 1, 0};
  return kBlocked;
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

// False: the output of a rank that takes part has no room for the rows that the matrix gives it.
__device__ inline bool members_have_room(const ShrinkDispatchParams &p, const PutPost &by) {
  const Session &s = p.d.session;
  const int num_ranks = s.team.num_ranks;
  bool good = true;
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    if (is_without(s, r)) continue;
    const int limit = by.message(r)->row_limit, arriving = p.d.rank_prefix_matrix()[(num_ranks - 1) * num_ranks + r];
    if (limit < 0 || arriving <= limit) continue;
    if (blockIdx.x == 0) report_refusal(s, kVoid, DK_EINVAL, r, DK_FIELD_WORST_TOKENS, limit, arriving);
    good = false;
  }
  return __syncthreads_or(!good) == 0;
}

// What no row is written to.
__device__ inline void pad_pair_rows(const ShrinkDispatchParams &p, int worker, int workers) {
  if (p.d.num_worst_tokens > 0) pad_rows(p.d, worker, workers);
}

template <class Params>
__device__ inline void run_pair_roles(const Params &p, const PutPost &by, uint64_t epoch) {
  using Roles = ShrinkDispatchRoles;
  const int warp = warp_id(), blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x),
            num_ranks = p.d.session.team.num_ranks, count = num_ranks * static_cast<int>(p.rings.channels);
  if (warp < Roles::kSenders) {
    const int first = warp * blocks + block, step = Roles::kSenders * blocks;
    reset_pairs(p.shrink.sends(), first, step, count);
    serve_pairs(by, kForPairRoom, first, step, count,
                [&](int stream, BlockedStream &blocked) { return serve_pair_sender(p, epoch, stream, blocked); });
  } else {
    const int first = (warp - Roles::kSenders) * blocks + block, step = Roles::kReaders * blocks;
    reset_pairs(p.shrink.receives(num_ranks), first, step, count);
    serve_pairs(by, kForPairRows, first, step, count,
                [&](int stream, BlockedStream &blocked) { return serve_pair_reader(p, epoch, stream, blocked); });
    pad_pair_rows(p, first, step);
  }
}

}  // namespace deepep::internode

namespace deep_ep::internode {  // V1's names: tools find kernels in traces by them
using namespace deepep;
using namespace deepep::internode;

__global__ void __launch_bounds__(ShrinkDispatchRoles::kThreads, 1)
    dispatch_with_notify_shrinking(const __grid_constant__ ShrinkDispatchParams p) {
  const Session &s = p.d.session;
  const PutPost by{s, p.internode, p.shrink};
  uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  if (begin(s)) {
    const Handshake hand =
        dispatch_handshake(p.d, epoch, load_matrix_entry(p.d.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x),
                           load_wrong_counts(p.d));  // with `segment`, which kernels across nodes do not use
    if (blockIdx.x == 0) post_to_members(by, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_agreement(s, hand, epoch, by) && members_have_room(p, by)) {
      run_pair_roles(p, by, epoch);
      confirm_membership(s);
    }
  }
  finish(s, [&](bool failed) {
    if (failed) clear_dispatch_outputs(p.d);
    forget_bytes(s);
    if (threadIdx.x == 0) {
      end_epoch(s.team);
      clear_wrong_counts(p.d);
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deep_ep::internode
