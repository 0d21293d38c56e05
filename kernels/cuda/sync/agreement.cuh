// agreement.cuh - calls of normal mode, barriers and cleans of a team that shrinks: which ranks take part. The rules
// are those of kernels/cpu/team/agreement.h. Block 0's first warp finds out, the other blocks wait for it. Lane l looks
// after the ranks l, l + 32, ...: bit l of a set's word w is rank 32 w + l.
#pragma once
#include "cuda/sync/session.cuh"

namespace deepep {

__host__ __device__ inline bool shrinks(const TeamView &team) { return (team.flags & DK_TEAM_SHRINK) != 0; }
// Whether a rank takes no part in the running call, or not any more.
__device__ inline bool is_without(const Session &s, int rank) { return rank != s.team.rank && is_masked(s, rank); }
// The place of a rank's message, and of its counts.
__device__ inline int message_copy(const TeamView &team, uint64_t epoch, int rank) {
  return static_cast<int>(shrinks(team) ? team.scratch->place[rank] : epoch % kHandshakeCopies);
}
__device__ inline HandshakeMessage *message_from(const TeamView &team, uint64_t epoch, int rank) {
  return team.handshake(team.rank, message_copy(team, epoch, rank), rank);
}
// For kernels that exist apart for teams that shrink, kShrinks: what others look up, these know. A call of the others
// took 3 us longer where it looked.
template <bool kShrinks>
__device__ __forceinline__ bool is_out(const Session &s, int rank) {
  if constexpr (kShrinks) return is_without(s, rank);
  return false;
}
template <bool kShrinks>
__device__ __forceinline__ int copy_of(const TeamView &team, uint64_t epoch, int rank) {
  if constexpr (kShrinks) return static_cast<int>(team.scratch->place[rank]);
  return static_cast<int>(epoch % kHandshakeCopies);
}
// By one thread of the last block: the number of this call is that of the newest one.
__device__ __forceinline__ void end_epoch_of(const TeamView &team, uint64_t epoch) {
  team.scratch->epoch = epoch;
  tell_finished(team, epoch);
}
__device__ inline void end_epoch(const TeamView &team) {
  Scratch *scratch = team.scratch;
  const uint64_t epoch = max(scratch->epoch + 1, shrinks(team) ? scratch->agreed_epoch : 0);
  end_epoch_of(team, epoch);
  if (shrinks(team)) ++scratch->messages;
}
// Where this rank's message and counts of the running call go at every rank.
__device__ inline int own_copy(const TeamView &team, uint64_t epoch) {
  return static_cast<int>((shrinks(team) ? team.scratch->messages + 1 : epoch) % kHandshakeCopies);
}

__device__ inline bool is_dead(const Session &s, int rank) {
  return *static_cast<volatile uint8_t *>(&s.team.status->dead[rank]) != 0;
}
// Whether the rank has masked this one since this rank's caller has lifted masks.
__device__ inline bool leaves_out(const Session &s, int rank) {
  return ptx::ld_acquire_sys(s.team.notice(s.team.rank, rank)) == s.team.scratch->lifts + 1 && !is_dead(s, rank);
}

// Where ranks meet after they have lifted masks: this rank waits for one that masks it, which may not have come as far
// yet, and says nothing until then.
__device__ inline bool is_patient(const Session &s) { return s.op == DK_OP_BARRIER || s.op == DK_OP_CLEAN; }

// By one thread.
__device__ inline void post_to_member(const Session &s, const Handshake &hand, int r) {
  const TeamView &team = s.team;
  const int copy = own_copy(team, hand.epoch);
  HandshakeMessage *to = team.handshake(r, copy, team.rank);
  ptx::st_relaxed_sys(&to->epoch, 0);  // that of a call that never was may be there
  ptx::fence_acq_rel_sys();
  ptx::st_relaxed_sys(team.stamp(r, copy, team.rank), team.scratch->generation);
  write_message(to, hand.mine);
  ptx::st_release_sys(&to->epoch, hand.epoch);
}

// Whole block, instead of post_handshake. A rank that others have masked posts nothing.
__device__ __noinline__ inline void post_to_members(const Session &s, const Handshake &hand) {
  const int n = s.team.num_ranks;
  if (is_patient(s)) return;  // the voter does it
  bool left = false;
  for (int r = threadIdx.x; r < n; r += blockDim.x) left |= !is_without(s, r) && leaves_out(s, r);
  if (__syncthreads_or(left) != 0) return;
  for (int r = threadIdx.x; r < n; r += blockDim.x)
    if (!is_without(s, r)) post_to_member(s, hand, r);
}

// ---- By one warp ----------------------------------------------------------------------------------------------------

constexpr uint64_t kDecided = 1, kRevision = 2, kNumber = 1 << 16;  // parts of Ballot::version
constexpr int kForLostRows = 3;  // time limits that a rank waits at most for a lost one among rows, across nodes

// How ranks read and write what they agree by. Inside a node: by stores. Kernels across nodes have a Post of their own
// (nvshmem/internode/normal/shrink.cuh). What a whole warp does, it does for each lane's rank r if that is `wanted`.
struct MappedPost {
  const Session &s;

  __device__ const HandshakeMessage *message(int r) const { return message_from(s.team, 0, r); }
  __device__ uint64_t number_of(int r) const { return message(r)->epoch; }
  // The peer's message of this call, in either place. While the peer masks this rank, what it sent is of other calls;
  // it makes its messages void before it takes the notice back.
  __device__ bool find(int r) const {
    const TeamView &team = s.team;
    if (ptx::ld_acquire_sys(team.notice(team.rank, r)) != 0) return false;
    const uint64_t generation = ptx::ld_acquire_sys(&team.standing(team.rank, r)->generation);
    for (int copy = 0; copy < kHandshakeCopies; ++copy) {
      const uint64_t *word = &team.handshake(team.rank, copy, r)->epoch, epoch = ptx::ld_acquire_sys(word);
      if (epoch <= team.scratch->received[r] || ptx::ld_acquire_sys(team.stamp(team.rank, copy, r)) != generation ||
          ptx::ld_acquire_sys(word) != epoch)
        continue;
      team.scratch->place[r] = static_cast<uint32_t>(copy);
      return true;
    }
    return false;
  }
  // False: not posted yet, or being posted.
  __device__ bool read(int r, uint64_t &version) const {
    version = ptx::ld_acquire_sys(&s.team.ballot(s.team.rank, r)->version);
    return version / kNumber == number_of(r);
  }
  __device__ bool is_posting(int r) const { return ptx::ld_acquire_sys(&s.team.ballot(s.team.rank, r)->version) == 0; }
  __device__ uint32_t word_of(int r, int w) const {
    return ptx::ld_relaxed_sys(&s.team.ballot(s.team.rank, r)->ranks[w]);
  }

  // Whether the peer has said that it is among the rows of that call. Inside a node a lost rank's rows come to all
  // ranks or to none, so they end a call together.
  __device__ static constexpr bool is_among_rows(int, uint64_t) { return false; }

  __device__ void begin() const {}
  __device__ void post_message(const Handshake &hand, int r, bool wanted) const {
    if (wanted) post_to_member(s, hand, r);
  }
  __device__ void prepare_ballot(uint64_t, const uint32_t *, int) const {}
  __device__ void post_ballot(int r, bool wanted, uint64_t version, const uint32_t *set, int words) const {
    if (!wanted) return;
    Ballot *to = s.team.ballot(r, s.team.rank);
    ptx::st_relaxed_sys(&to->version, 0);
    ptx::fence_acq_rel_sys();
    for (int i = 0; i < words; ++i) ptx::st_relaxed_sys(&to->ranks[i], ptx::ld_relaxed_gpu(&set[i]));
    ptx::st_release_sys(&to->version, version);
  }
  __device__ void post_standing(int r, bool wanted) const {
    if (wanted) tell_standing(s.team, r);
  }
  __device__ void post_notice(int r, bool wanted) const {
    if (wanted) tell_masked(s, r);
  }
};

template <class Post>
struct Voter {
  const Post by;
  const Session &s = by.s;
  const Handshake &hand;
  uint32_t here = 0;     // bit w: the message of this lane's rank of word w has arrived
  uint32_t excused = 0;  // likewise: is_late() has excused it
  uint32_t revision = 0;
  int limits = 0;  // time limits that this agreement has taken
  uint64_t began = 0;
  bool posted, decided = false, failed = false;
  bool heard = false;  // this lane has dropped ranks that a peer does not count in, in this wait
  int left_by = -1;

  __device__ Voter(const Handshake &hand, const Post &by) : by(by), hand(hand), posted(!is_patient(by.s)) {}

  __device__ int words() const { return ceil_div(s.team.num_ranks, kWarp); }
  __device__ uint32_t *set() const { return s.team.scratch->members; }
  __device__ bool has(int r) const { return (ptx::ld_relaxed_gpu(&set()[r / kWarp]) >> (r % kWarp) & 1) != 0; }
  __device__ bool looks_after(int w, int &r) const {  // a rank that is counted in
    r = w * kWarp + lane_id();
    return r < s.team.num_ranks && has(r);
  }

  __device__ void begin() {
    by.begin();
#pragma unroll 1
    for (int w = 0; w < words(); ++w) {
      const int r = w * kWarp + lane_id();
      const uint32_t bits = __ballot_sync(kAllLanes, r < s.team.num_ranks && !is_without(s, r));
      if (lane_id() == 0) set()[w] = s.team.scratch->told[w] = bits;
      if (r < s.team.num_ranks) s.team.scratch->wait_ns[r] = 0;
    }
    __syncwarp();
  }

  __device__ void compare(int r) {
    const Difference difference = compare_messages(hand.mine, by.message(r));
    if (difference.field != DK_FIELD_NONE)
      report_failure(s, DK_EMISMATCH, r, difference.field, difference.mine, difference.theirs, 0);
  }

  // Drops whom the peer does not count in. Returns whether the peer has decided.
  __device__ bool hear(int r) {
    const int me = s.team.rank;
    uint64_t version, again;
    if (!by.read(r, version)) return false;
    uint32_t mine = 0;
    bool differs = false;
#pragma unroll 1
    for (int w = 0; w < words(); ++w) {
      const uint32_t theirs = by.word_of(r, w);
      if (w == me / kWarp) mine = theirs >> (me % kWarp) & 1;
      differs |= theirs != ptx::ld_relaxed_gpu(&set()[w]);
    }
    ptx::fence_acq_rel_sys();
    if (!by.read(r, again) || again != version) return false;
    if (mine == 0) {
      left_by = r;
      return false;
    }
    if ((version & kDecided) != 0) return true;
#pragma unroll 1
    for (int w = 0; differs && w < words(); ++w) {
      const uint32_t theirs = by.word_of(r, w);  // may have lost more ranks by now
      if ((theirs >> (me % kWarp) & 1) != 0 || w != me / kWarp) heard |= (atomicAnd(&set()[w], theirs) & ~theirs) != 0;
    }
    return false;
  }
  __device__ bool agrees(int r) const {
    uint64_t version;
    if (!by.read(r, version)) return false;
    bool same = true;
#pragma unroll 1
    for (int w = 0; w < words(); ++w) same &= by.word_of(r, w) == ptx::ld_relaxed_gpu(&set()[w]);
    return same;
  }

  // A peer's decision holds for this rank too.
  __device__ void adopt(int r) {
#pragma unroll 1
    for (int w = lane_id(); w < words(); w += kWarp) set()[w] = by.word_of(r, w);
    decided = true;
    __syncwarp();
  }

  __device__ void post() {
    const TeamView &team = s.team;
    const uint64_t version = hand.epoch * kNumber + ++revision * kRevision + (decided ? kDecided : 0);
    by.prepare_ballot(version, set(), words());
#pragma unroll 1
    for (int w = 0; w < words(); ++w) {
      const int r = w * kWarp + lane_id();
      const bool told = r < team.num_ranks && r != team.rank && (team.scratch->told[w] >> lane_id() & 1) != 0;
      by.post_ballot(r, told, version, set(), words());
    }
#pragma unroll 1
    for (int w = lane_id(); w < words(); w += kWarp) team.scratch->posted[w] = ptx::ld_relaxed_gpu(&set()[w]);
    __syncwarp();
  }
  __device__ bool has_posted_set() const {
    bool same = revision != 0;
#pragma unroll 1
    for (int w = 0; w < words(); ++w) same &= s.team.scratch->posted[w] == ptx::ld_relaxed_gpu(&set()[w]);
    return same;
  }

  __device__ bool share_left_by() {
    const uint32_t leaving = __ballot_sync(kAllLanes, left_by >= 0);
    if (leaving != 0) left_by = __shfl_sync(kAllLanes, left_by, __ffs(static_cast<int>(leaving)) - 1);
    return leaving != 0;
  }
  // By the notices, before any message is looked at: the messages of ranks that leave this one out are of other calls.
  __device__ int leaver() const {  // the lowest of this lane's ranks, -1: none
#pragma unroll 1
    for (int w = 0; w < words(); ++w) {
      int r;
      if (looks_after(w, r) && r != s.team.rank && leaves_out(s, r)) return r;
    }
    return -1;
  }
  __device__ bool is_left_out() {
    if (!is_patient(s)) left_by = leaver();
    return share_left_by();
  }
  // In a patient call: posts this rank's message once nobody leaves it out. `missing`: whom it waits for.
  __device__ bool post_message(int &missing) {
    missing = leaver();
    posted = __all_sync(kAllLanes, missing < 0) != 0;
#pragma unroll 1
    for (int w = 0; posted && w < words(); ++w) {
      int r;
      const bool counted = looks_after(w, r);
      by.post_message(hand, r, counted);
    }
    __syncwarp();
    return posted;
  }

  // Looks at everything once. `missing`: the lowest of this lane's ranks that is waited for, -1: none.
  __device__ bool poll(int &missing) {
    missing = -1;
    int decider = -1;
    if (is_left_out()) return true;
    if (!posted && !post_message(missing)) return false;
#pragma unroll 1
    for (int w = 0; w < words(); ++w) {
      int r;
      if (!looks_after(w, r)) continue;
      if ((here >> w & 1) == 0 && by.find(r)) {
        here |= 1u << w;
        if (began != 0) s.team.scratch->wait_ns[r] = ptx::global_timer_ns() - began;
        compare(r);
      }
      if ((here >> w & 1) == 0)
        missing = missing < 0 ? r : missing;
      else if (r != s.team.rank && hear(r))
        decider = r;
    }
    if (began == 0) began = ptx::global_timer_ns();
    __syncwarp();
    const uint32_t found = __ballot_sync(kAllLanes, decider >= 0);
    if (share_left_by() || __any_sync(kAllLanes, has_failed(s))) return true;
    if (found != 0) {
      adopt(__shfl_sync(kAllLanes, decider, __ffs(static_cast<int>(found)) - 1));
      return true;
    }
    if (!__all_sync(kAllLanes, missing < 0)) return false;
    if (!has_posted_set()) post();
#pragma unroll 1
    for (int w = 0; w < words(); ++w) {
      int r;
      if (looks_after(w, r) && r != s.team.rank && missing < 0 && !agrees(r)) missing = r;
    }
    decided = __all_sync(kAllLanes, missing < 0) != 0;
    return decided;
  }

  // Of a rank that is counted in, at the deadline: whether it has not done its part. A ballot that comes at this moment
  // says that it has: all ranks may have the same deadline. A rank that has yet to end the call before, among whose
  // rows another one was lost, has as long again as it may wait there. Unrolled, these loops and those of drop() make
  // dispatch for sm_80 spill, which keeps its own values in registers across the agreement.
  __device__ bool is_late(int w, int r) {
    if ((here >> w & 1) == 0) return !by.is_among_rows(r, hand.epoch - 1) || limits > kForLostRows || is_dead(s, r);
    if (revision == 0) return false;
    uint64_t version;
    bool posting = false, posted_one = by.read(r, version);
#pragma unroll 1
    for (int look = 0; !posted_one && look < 3; ++look) {  // it may become whole between two looks
      posting |= by.is_posting(r);
      posted_one = by.read(r, version);
    }
    if (!posted_one) {
      const bool excuse = posting && (excused >> w & 1) == 0;  // once
      excused |= excuse ? 1u << w : 0;
      return !excuse;
    }
    bool same = true;
#pragma unroll 1
    for (int i = 0; i < words(); ++i) {
      const uint32_t theirs = by.word_of(r, i), mine = ptx::ld_relaxed_gpu(&set()[i]);
      same &= theirs == mine;
      if ((mine & ~theirs) != 0) return false;  // hear() takes it over
    }
    return !same;
  }

  // Of this lane's ranks those that are dead, or all that are late. A rank that has masked this one, and does not lift
  // the mask, leaves this one out, not the other way round.
  __device__ void drop(uint32_t code) {
    uint32_t dropped = 0;  // bit w: this lane's rank of word w. The set stays as it is until all lanes have looked
#pragma unroll 1
    for (int w = 0; w < words(); ++w) {
      int r;
      if (!looks_after(w, r) || r == s.team.rank) continue;
      if (!is_late(w, r) || (code == DK_EPEERDEAD && !is_dead(s, r))) continue;
      if (!is_dead(s, r) && ptx::ld_acquire_sys(s.team.notice(s.team.rank, r)) != 0)
        left_by = r;
      else
        dropped |= 1u << w;
    }
    __syncwarp();
#pragma unroll 1
    for (int w = 0; w < words(); ++w)
      if ((dropped >> w & 1) != 0) atomicAnd(&set()[w], ~(1u << lane_id()));
    __syncwarp();
  }

  // A rank whose message is here may itself be waiting for another's: it has as long again for its ballot, also if the
  // last message comes at the deadline.
  __device__ void run() {
    begin();
    uint32_t looked = 0;  // `revision` at the last look for a reason to leave; one more poll comes after that
    while (!decided && left_by < 0 && !failed) {
      uint64_t start;
      int missing = -1;
      const uint32_t code = poll_until(
          start, [&] { return poll(missing); },
          [&](uint32_t polls) {
            looked = revision;
            const uint32_t mine = missing < 0 ? 0 : reason_to_leave(s, missing, start, polls, revision == 0 ? 1 : 2);
            const uint32_t waiting = __ballot_sync(kAllLanes, mine != 0);
            return waiting == 0 ? 0 : __shfl_sync(kAllLanes, mine, __ffs(static_cast<int>(waiting)) - 1);
          });
      failed = __any_sync(kAllLanes, has_failed(s)) != 0;
      if (code == 0 || failed) continue;
      if (code == DK_ETIMEOUT || code == DK_EPEERDEAD) {
        // A moment ago: the others have not answered yet.
        const bool changed = __any_sync(kAllLanes, heard) != 0 || looked != revision;
        heard = false;
        limits += code == DK_ETIMEOUT;
        if (code == DK_EPEERDEAD || !changed) drop(code);
        share_left_by();
        continue;
      }
      if (lane_id() == 0) report_failure(s, code, culprit(s, code, -1), DK_FIELD_NONE, 0, 0, 0);
      failed = true;
    }
  }

  // This rank takes no part, and says nothing more that could be taken for a message of a call.
  __device__ void leave() {
    const TeamView &team = s.team;
    Scratch *scratch = team.scratch;
    if (lane_id() == 0) {
      ++scratch->generation;
      ptx::st_release_sys(team.notice(team.rank, left_by), scratch->lifts + 1);
      report_refusal(s, kVoid, DK_ESTATE, left_by, DK_FIELD_MASKED, 0, left_by);
    }
    __syncwarp();
#pragma unroll 1
    for (int w = 0; w < words(); ++w) {
      const int r = w * kWarp + lane_id();
      by.post_standing(r, r < team.num_ranks);
    }
  }

  // Masks the others and tells them, before anything that this rank does without them. Returns whether no rank refuses.
  __device__ bool conclude(uint64_t &epoch) {
    const TeamView &team = s.team;
    uint64_t newest = hand.epoch;
    bool refused = false;
#pragma unroll 1
    for (int w = 0; w < words(); ++w) {
      const int r = w * kWarp + lane_id();
      const bool is_rank = r < team.num_ranks, counted = is_rank && has(r);
      const bool dropped = is_rank && !counted && atomicExch(&team.scratch->masked[r], 1u) == 0;
      by.post_notice(r, dropped);
      if (!counted) continue;
      const uint64_t number = by.number_of(r);
      newest = max(newest, number);
      team.scratch->received[r] = number;
      refused |= is_refused(s, hand, r, by.message(r));
    }
    for (int step = kWarp / 2; step > 0; step /= 2) newest = max(newest, __shfl_xor_sync(kAllLanes, newest, step));
    epoch = newest;
    return __any_sync(kAllLanes, refused) == 0;
  }
};

template <class Post>
__device__ __noinline__ inline void agree(const Session &s, const Handshake &hand, const Post &by) {
  Voter<Post> voter(hand, by);
  uint64_t epoch = hand.epoch;
  bool good = false;
  voter.run();
  if (voter.left_by >= 0) {
    voter.leave();
  } else if (voter.decided && !voter.failed) {
    voter.post();
    good = voter.conclude(epoch);
  }
  __syncwarp();
  if (lane_id() != 0) return;
  s.team.scratch->agreed_epoch = epoch;
  s.team.scratch->agreed_good = good;
  ptx::st_release_sys(&s.team.scratch->agreed, hand.epoch);
}

// Whole block: the number of the call that all who take part agree on. False: this rank takes no part, a rank refuses
// the call, or the team has failed.
template <class Post>
__device__ __noinline__ inline bool await_agreement(const Session &s, const Handshake &hand, uint64_t &epoch,
                                                    const Post &by) {
  Scratch *scratch = s.team.scratch;
  if (blockIdx.x == 0) {
    if (warp_id() == 0) agree(s, hand, by);
  } else if (threadIdx.x == 0) {  // block 0 ends its waits
    spin_in_block([&] { return ptx::ld_acquire_sys(&scratch->agreed) >= hand.epoch; });
  }
  __syncthreads();
  ptx::fence_acq_rel_sys();
  epoch = ptx::ld_relaxed_gpu(&scratch->agreed_epoch);
  return ptx::ld_relaxed_gpu(&scratch->agreed_good) != 0;
}
__device__ __forceinline__ bool await_agreement(const Session &s, const Handshake &hand, uint64_t &epoch) {
  return await_agreement(s, hand, epoch, MappedPost{s});
}

// Whole block.
template <bool kShrinks>
__device__ __forceinline__ void post_to_peers(const Session &s, const Handshake &hand) {
  if constexpr (kShrinks)
    post_to_members(s, hand);
  else
    post_handshake(s, hand);
}
template <bool kShrinks>
__device__ __forceinline__ bool await_peers(const Session &s, const Handshake &hand, uint64_t &epoch) {
  if constexpr (kShrinks) return await_agreement(s, hand, epoch);
  return await_handshake(s, hand);
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

// By a whole warp, whose wait for rows or room of `peer` ended with `code`. True: the peer is masked, and the call goes
// on without it.
__device__ __noinline__ inline bool go_on_without(const Session &s, uint32_t code, int peer) {
  if (!shrinks(s.team) || peer < 0 || peer == s.team.rank || (code != DK_ETIMEOUT && code != DK_EPEERDEAD))
    return false;
  if (lane_id() == 0 && atomicExch(&s.team.scratch->masked[peer], 1u) == 0) tell_masked(s, peer);
  __syncwarp();
  return true;
}

// A whole warp waits, as in warp_wait_or_fail. In a team that shrinks drop(peer), after which poll() goes on without
// the peer, takes the place of a failure. A rank that waits for room toward a lost one sends rows to others only after
// its own limit, so a wait for rows is twice as patient as one for room.
template <int kPatience, class Poll, class Missing, class Drop>
__device__ __forceinline__ bool warp_wait_or_drop(const Session &s, int64_t expected, Poll poll, Missing missing,
                                                  Drop drop) {
  int peer = -1;
  uint64_t waited = 0;
  const uint32_t code = warp_wait_until<kPatience>(s, peer, waited, poll, missing, [&](uint32_t why, int rank) {
    if (!go_on_without(s, why, rank)) return false;
    drop(rank);
    __syncwarp();
    return true;
  });
  if (code == 0) return true;
  if (lane_id() == 0) report_failure(s, code, culprit(s, code, peer), DK_FIELD_NONE, expected, 0, waited);
  __syncwarp();
  return false;
}
constexpr int kForRoom = 1, kForRows = 2;

template <bool kShrinks, int kPatience, class Poll, class Missing, class Drop>
__device__ __forceinline__ bool warp_await(const Session &s, int64_t expected, Poll poll, Missing missing, Drop drop) {
  if constexpr (kShrinks) return warp_wait_or_drop<kPatience>(s, expected, poll, missing, drop);
  return warp_wait_or_fail(s, expected, poll, missing);
}

// Whole block, after its last row: a rank that went on without this one may have used again what this one read.
__device__ __noinline__ inline void confirm_membership(const Session &s) {
  __syncthreads();
  for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x)
    if (!is_without(s, r) && leaves_out(s, r)) report_refusal(s, kVoid, DK_ESTATE, r, DK_FIELD_MASKED, 0, r);
}

// By the last block: nothing was sent to ranks that take no part.
__device__ inline void forget_bytes(const Session &s) {
  for (int r = threadIdx.x; shrinks(s.team) && r < s.team.num_ranks; r += blockDim.x)
    if (is_without(s, r)) s.team.scratch->sent_bytes[r] = 0;
  __syncthreads();
}

}  // namespace deepep
