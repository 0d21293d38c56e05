// shrink.cuh - libdeepep_nvshmem.so, normal mode and barriers of a team that shrinks across nodes: how ranks agree who
// takes part (cuda/sync/agreement.cuh), streams of rows from rank to rank, and waits that go on without a rank.
//
// A rank of another node gets a message, a ballot or a standing by one put each. A message's tagged word carries the
// sender's generation and the call's number; each word of a ballot carries the ballot's version, so a reader sees
// whether it is whole; a standing comes before the notice that it is put with.
#pragma once
#include "cuda/impl/normal/matrix.cuh"
#include "cuda/sync/agreement.cuh"
#include "internode/normal/common.cuh"
#include "internode/standing.cuh"

namespace deepep::internode {

constexpr int kGenerationShift = 48;  // of a message's word, above the number of the call
constexpr uint64_t kCallNumber = (1ull << kGenerationShift) - 1;

struct NoCounts {
  __device__ void operator()(int, uint32_t *) const {}
};

// Voter's Post. All of this rank's block: the sender writes by stores inside the node, by puts to other nodes. What
// takes a lane's rank r does it for each lane that has one that is `wanted`, by the whole warp.
struct PutPost {
  const Session &s;
  const NodeView &internode;
  const ShrinkView &shrink;

  __device__ const Message *body(int r) const {
    return message_at(internode, s.team.self, internode.at.inbox, s.team.scratch->place[r], r);
  }
  __device__ const HandshakeMessage *message(int r) const { return &body(r)->handshake; }
  __device__ uint64_t *arrived(uint8_t *block, uint64_t copy, int source) const {
    return word_at(block, internode.at.arrived, static_cast<int64_t>(copy * s.team.num_ranks) + source);
  }
  __device__ uint64_t number_of(int r) const {
    return ptx::ld_acquire_sys(arrived(s.team.self, s.team.scratch->place[r], r)) & kCallNumber;
  }
  __device__ bool find(int r) const {
    const TeamView &team = s.team;
    if (ptx::ld_acquire_sys(team.notice(team.rank, r)) != 0) return false;
    const uint64_t generation = ptx::ld_acquire_sys(&team.standing(team.rank, r)->generation);
    for (int copy = 0; copy < kHandshakeCopies; ++copy) {
      const uint64_t word = ptx::ld_acquire_sys(arrived(team.self, copy, r));
      if ((word & kCallNumber) <= team.scratch->received[r] ||
          word >> kGenerationShift != (generation & (~0ull >> kGenerationShift)))
        continue;
      team.scratch->place[r] = static_cast<uint32_t>(copy);
      return true;
    }
    return false;
  }

  __device__ uint64_t *ballot(uint8_t *block, int source) const {
    return word_at(block, shrink.at.ballots, static_cast<int64_t>(source) * shrink.at.ballot_words);
  }
  // Not while it is being posted: all words have one tag then.
  __device__ bool read(int r, uint64_t &version) const {
    const uint64_t *words = ballot(s.team.self, r);
    version = ptx::ld_acquire_sys(words);
    if (version / kNumber != number_of(r)) return false;
    return is_whole(words, version);
  }
  __device__ bool is_whole(const uint64_t *words, uint64_t version) const {
    bool whole = true;
    for (int w = 0; w < ceil_div(s.team.num_ranks, kWarp); ++w)
      whole &= ptx::ld_acquire_sys(words + 1 + w) >> 32 == static_cast<uint32_t>(version);
    return whole;
  }
  __device__ bool is_posting(int r) const {
    const uint64_t *words = ballot(s.team.self, r);
    return !is_whole(words, ptx::ld_acquire_sys(words));
  }
  __device__ uint32_t word_of(int r, int w) const {
    return static_cast<uint32_t>(ptx::ld_relaxed_sys(ballot(s.team.self, r) + 1 + w));
  }

  __device__ uint64_t *among_rows(uint8_t *block, int source) const {
    return word_at(block, shrink.at.among_rows, source);
  }
  __device__ bool is_among_rows(int r, uint64_t epoch) const {
    return ptx::ld_acquire_sys(among_rows(s.team.self, r)) == epoch;
  }

  // For each lane with a wanted rank: act(rank), by the whole warp. Never a put to a rank that has died.
  template <class Act>
  __device__ void for_each(int r, bool wanted, Act act) const {
    const bool may = wanted && (internode.is_local(r) || !is_dead(s, r));
    for (uint32_t left = __ballot_sync(kAllLanes, may); left != 0; left &= left - 1)
      act(__shfl_sync(kAllLanes, r, __ffs(static_cast<int>(left)) - 1));
  }
  __device__ void put_standing_to(int rank) const {
    put_standing(s.team, shrink, rank,
                 [&](void *to, const void *from, uint32_t bytes, uint64_t *word, uint64_t value, int pe) {
                   put_remote(internode, pe, to, from, bytes, word, value);
                 });
  }

  // Ranks of other nodes that calls of low latency, which do not tell, have masked.
  __device__ void begin() const {
    for (int base = 0; base < s.team.num_ranks; base += kWarp) {
      const int r = base + lane_id();
      const bool masked = r < s.team.num_ranks && !internode.is_local(r) && is_without(s, r);
      for_each(r, masked && note_mask(s.team, shrink, r), [&](int rank) { put_standing_to(rank); });
    }
  }

  // A message to one rank. fill(rank, counts): writes `words` counts for the rank.
  template <class Fill>
  __device__ void post_to(const Handshake &hand, int rank, uint32_t words, Fill fill) const {
    const TeamView &team = s.team;
    const bool local = internode.is_local(rank);
    const uint64_t copy = own_copy(team, hand.epoch),
                   value = team.scratch->generation << kGenerationShift | (hand.epoch & kCallNumber);
    uint8_t *block = local ? team.peers[rank] : team.self;
    Message *to = local ? message_at(internode, block, internode.at.inbox, copy, team.rank)
                        : message_at(internode, block, internode.at.outbox, copy, rank);
    uint64_t *word = arrived(block, copy, team.rank);
    if (local && lane_id() == 0) {
      ptx::st_relaxed_sys(word, 0);  // that of a call that never was may be there
      ptx::fence_acq_rel_sys();
    }
    __syncwarp();
    if (lane_id() == 0) {
      write_message(&to->handshake, hand.mine);
      to->handshake.epoch = 0;
    }
    fill(rank, to->counts);
    __syncwarp();
    if (!local)
      put_remote(internode, rank, message_at(internode, team.self, internode.at.inbox, copy, team.rank), to,
                 sizeof(HandshakeMessage) + align_up(words * 4, 16u), word, value);
    else if (lane_id() == 0)
      ptx::st_release_sys(word, value);
  }
  __device__ void post_message(const Handshake &hand, int r, bool wanted) const {
    for_each(r, wanted, [&](int rank) { post_to(hand, rank, 0, NoCounts{}); });
  }

  __device__ uint64_t *ballot_out() const {
    const uint64_t copy = own_copy(s.team, 0);
    return word_at(s.team.self, shrink.at.ballot_out, static_cast<int64_t>(copy * shrink.at.ballot_words));
  }
  __device__ void prepare_ballot(uint64_t version, const uint32_t *set, int words) const {
    uint64_t *to = ballot_out();
    if (lane_id() == 0) ptx::st_relaxed_sys(to, version);
#pragma unroll 1
    for (int w = lane_id(); w < words; w += kWarp)
      ptx::st_relaxed_sys(to + 1 + w, version << 32 | ptx::ld_relaxed_gpu(&set[w]));
    __syncwarp();
  }
  __device__ void post_ballot(int r, bool wanted, uint64_t version, const uint32_t *, int words) const {
    for_each(r, wanted, [&](int rank) {
      const uint64_t *from = ballot_out();
      if (!internode.is_local(rank)) {
        uint64_t *there = ballot(s.team.self, s.team.rank);
        put_remote(internode, rank, there, from, shrink.at.ballot_words * 8, there, version);
        return;
      }
      uint64_t *to = ballot(s.team.peers[rank], s.team.rank);
#pragma unroll 1
      for (int w = lane_id(); w < words; w += kWarp) ptx::st_relaxed_sys(to + 1 + w, ptx::ld_relaxed_sys(from + 1 + w));
      __syncwarp();
      if (lane_id() == 0) ptx::st_release_sys(to, version);
    });
  }

  __device__ void post_standing(int r, bool wanted) const {
    if (wanted && internode.is_local(r)) tell_standing(s.team, r);
    for_each(r, wanted && !internode.is_local(r), [&](int rank) { put_standing_to(rank); });
  }
  __device__ void post_notice(int r, bool wanted) const {
    if (wanted && internode.is_local(r)) tell_masked(s, r);
    for_each(r, wanted && !internode.is_local(r) && note_mask(s.team, shrink, r),
             [&](int rank) { put_standing_to(rank); });
  }
};

// Whole block, as post_to_members: a rank that others have masked posts nothing.
template <class Fill>
__device__ inline void post_to_members(const PutPost &by, const Handshake &hand, uint32_t words, Fill fill) {
  const Session &s = by.s;
  const int n = s.team.num_ranks, warps = static_cast<int>(blockDim.x) / kWarp;
  if (is_patient(s)) return;  // the voter does it
  bool left = false;
  for (int r = threadIdx.x; r < n; r += blockDim.x) left |= !is_without(s, r) && leaves_out(s, r);
  if (__syncthreads_or(left) != 0) return;
  for (int r = warp_id(); r < n; r += warps) {
    const bool posts = !is_without(s, r) && (by.internode.is_local(r) || !is_dead(s, r));
    if (__all_sync(kAllLanes, posts) != 0) by.post_to(hand, r, words, fill);
  }
}
__device__ inline void post_to_members(const PutPost &by, const Handshake &hand) {
  post_to_members(by, hand, 0, NoCounts{});
}

// ---- Streams --------------------------------------------------------------------------------------------------------

// Words of rows from `source`, in the reader's block; words of credits of `reader`, in the sender's.
__device__ inline uint64_t *row_word(const NodeView &internode, const PairRings &rings, uint8_t *block, int source,
                                     int row) {
  return word_at(block, internode.at.pushed,
                 static_cast<int64_t>(source) * kMaxChannels + static_cast<uint32_t>(row) % rings.places);
}
__device__ inline uint64_t *credit_word(const NodeView &internode, const PairRings &rings, uint8_t *block, int reader,
                                        int row) {
  return word_at(block, internode.at.taken,
                 static_cast<int64_t>(reader) * kMaxChannels + static_cast<uint32_t>(row) % rings.places);
}

// Row `row` of this rank for `reader`: where it is written, and how it is sent. By a whole warp.
__device__ inline uint8_t *place_for(const TeamView &team, const NodeView &internode, const PairRings &rings,
                                     int reader, int row) {
  return internode.is_local(reader) ? team.peers[reader] + rings.in_at(team.rank, row)
                                    : team.self + rings.out_at(reader, row);
}
__device__ inline void publish_row(const TeamView &team, const NodeView &internode, const PairRings &rings,
                                   uint64_t epoch, int reader, int row, uint32_t bytes) {
  const bool local = internode.is_local(reader);
  uint64_t *word = row_word(internode, rings, local ? team.peers[reader] : team.self, team.rank, row);
  if (local)
    write_count(word, epoch, static_cast<uint32_t>(row) + 1);
  else
    put_remote(internode, reader, team.self + rings.in_at(team.rank, row), team.self + rings.out_at(reader, row),
               align_up(bytes, 16u), word, tagged(epoch, static_cast<uint32_t>(row) + 1));
}
__device__ inline bool has_room(const TeamView &team, const NodeView &internode, const PairRings &rings, uint64_t epoch,
                                int reader, int row) {
  if (static_cast<uint32_t>(row) < rings.places) return true;
  return read_count(credit_word(internode, rings, team.self, reader, row), epoch) ==
         static_cast<uint32_t>(row) - rings.places + 1;
}
// By a whole warp, which has read the row.
__device__ inline void release_row(const TeamView &team, const NodeView &internode, const PairRings &rings,
                                   uint64_t epoch, int source, int row) {
  const bool local = internode.is_local(source);
  uint64_t *word = credit_word(internode, rings, local ? team.peers[source] : team.self, team.rank, row);
  if (local)
    write_count(word, epoch, static_cast<uint32_t>(row) + 1);
  else
    signal_remote(internode, team, source, word, tagged(epoch, static_cast<uint32_t>(row) + 1));
}

// By a whole warp: whether a rank that takes part has left this one out, or had when another warp looked. Then the call
// is void here.
__device__ inline bool is_left_out(const PutPost &by) {
  const Session &s = by.s;
  int leaver = -1;
  for (int r = lane_id(); r < s.team.num_ranks && leaver < 0; r += kWarp)
    if (!is_without(s, r) && leaves_out(s, r)) leaver = r;
  const uint32_t found = __ballot_sync(kAllLanes, leaver >= 0);
  if (found == 0) return __any_sync(kAllLanes, ptx::ld_relaxed_gpu(&by.shrink.state->left) == s.call) != 0;
  if (lane_id() == __ffs(static_cast<int>(found)) - 1) {
    report_refusal(s, kVoid, DK_ESTATE, leaver, DK_FIELD_MASKED, 0, leaver);
    ptx::st_relaxed_sys(&by.shrink.state->left, s.call);
  }
  __syncwarp();
  return true;
}

// The team has failed, or another warp has found that this rank is left out. A call that is void because of what its
// arguments hold goes on: the others do not know, and wait for this rank's rows.
__device__ inline bool has_ended(const PutPost &by) {
  return has_failed(by.s) || ptx::ld_relaxed_gpu(&by.shrink.state->left) == by.s.call;
}

enum LostRank { kGoOn, kLeave, kFail };
// By a whole warp, whose wait for `peer` ended with `code`: masks it, and tells it before anything is done without it.
__device__ __noinline__ inline LostRank lose(const PutPost &by, uint32_t code, int peer) {
  const Session &s = by.s;
  if (peer < 0 || peer == s.team.rank || (code != DK_ETIMEOUT && code != DK_EPEERDEAD)) return kFail;
  if (is_left_out(by)) return kLeave;
  const bool first = lane_id() == 0 && atomicExch(&s.team.scratch->masked[peer], 1u) == 0;
  by.post_notice(peer, first);
  return kGoOn;
}

// By a whole warp that waits among rows. Half a time limit after the call began this rank tells the others that it is
// there: they may have all of a lost rank's rows, of which it waits for some until its own limit, and wait for this
// rank in the next call meanwhile.
__device__ __noinline__ inline void tell_of_rows(const PutPost &by) {
  const Session &s = by.s;
  const TeamView &team = s.team;
  const uint64_t epoch = ptx::ld_relaxed_gpu(&team.scratch->agreed_epoch);
  bool tells = false;
  if (lane_id() == 0 && ptx::global_timer_ns() - ptx::ld_relaxed_gpu(&team.scratch->start_ns) > s.timeout_ns / 2)
    tells = atomicExch(reinterpret_cast<unsigned long long *>(&by.shrink.state->among_rows),
                       static_cast<unsigned long long>(epoch)) != epoch;
  if (__any_sync(kAllLanes, tells) == 0) return;
  for (int base = 0; base < team.num_ranks; base += kWarp) {
    const int r = base + lane_id();
    const bool wanted = r < team.num_ranks && r != team.rank && !is_without(s, r),
               local = wanted && by.internode.is_local(r);
    if (local) ptx::st_release_sys(by.among_rows(team.peers[r], team.rank), epoch);
    by.for_each(r, wanted && !local,
                [&](int rank) { signal_remote(by.internode, team, rank, by.among_rows(team.self, team.rank), epoch); });
  }
}

// As serve_streams, but a rank that is late or dead is masked: advance() goes on without masked ranks. A wait for a
// rank's rows ends first; one that waits for room may wait for a rank which waits for a lost one. A stream that waits
// for peer -1 waits for other warps of this rank, which may lose all other ranks one after the other; the time of a
// wait for another rank begins after that.
constexpr int kForPairRows = 1, kForPairRoom = kForLostRows;  // times the time limit
template <class Advance>
__device__ inline void serve_pairs(const PutPost &by, int patience, int first, int step, int count, Advance advance) {
  const Session &s = by.s;
  uint64_t start = 0;
  uint32_t polls = 0, reason = 0;
  // Time limits that a wait for other warps has lasted: a rank that was stopped is not over all at once.
  int limits = 0;
  bool for_own = false;
  for (;;) {
    bool moved = false, open = false;
    BlockedStream missing{-1, 0, 0};
    for (int stream = first; stream < count; stream += step) {
      BlockedStream blocked{-1, 0, 0};
      const Outcome outcome = advance(stream, blocked);
      moved |= outcome == kMoved;
      open |= outcome != kDone;
      if (outcome == kBlocked && missing.peer < 0) missing = blocked;
    }
    if (!open) return;
    if (moved) {
      polls = reason = limits = 0;
      if (__any_sync(kAllLanes, lane_id() == 0 && has_ended(by))) return;
      continue;
    }
    if (for_own != (missing.peer < 0)) {
      for_own = !for_own;
      polls = reason = limits = 0;
    }
    if (reason != 0) {  // and no stream moved in the round after it
      const LostRank lost = lose(by, reason, missing.peer);
      if (lost == kFail && lane_id() == 0)
        report_failure(s, reason, culprit(s, reason, missing.peer < 0 ? s.team.rank : missing.peer), DK_FIELD_NONE,
                       missing.expected, missing.seen, ptx::global_timer_ns() - start);
      __syncwarp();
      if (lost != kGoOn) return;
      reason = 0;
    }
    if (polls++ == 0) start = ptx::global_timer_ns();
    if (polls % kPollsPerLook != 0) continue;
    if (is_left_out(by)) return;
    tell_of_rows(by);
    if (lane_id() == 0) reason = reason_to_leave(s, missing.peer, start, polls, for_own ? 1 : patience);
    reason = __shfl_sync(kAllLanes, reason, 0);
    if (for_own && reason == DK_ETIMEOUT && ++limits < patience + kForPairRows * s.team.num_ranks) polls = reason = 0;
  }
}

// The rows that `source` sends `reader`, by the matrix.
struct PairRows {
  int first, count;  // the first one's place in the reader's output
};
__device__ inline PairRows pair_rows(const int32_t *matrix, int num_ranks, int source, int reader) {
  const int first = rows_before(matrix, num_ranks, source, reader);
  return {first, matrix[source * num_ranks + reader] - first};
}

__device__ inline void reset_pairs(RowStream *streams, int first, int step, int count) {
#pragma unroll 1
  for (int i = first; i < count; i += step)
    if (lane_id() == 0) streams[i] = {0, 0, 0, 0};
  __syncwarp();
}

}  // namespace deepep::internode
