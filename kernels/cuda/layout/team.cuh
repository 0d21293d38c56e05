// team.cuh - a team as kernels see it: a view passed by value, and the team's scratch in device memory.
#pragma once
#include "abi/kernels.h"
#include "cuda/layout/control.cuh"
#include "cuda/layout/ring.cuh"

namespace deepep {

constexpr int kMaxHistogram = 65536 + 2 * DK_MAX_RANKS;  // experts, ranks and nodes that layout counts

// The send half of a low-latency call writes this for its receive half.
struct LowLatencyTicket {
  uint64_t epoch, dispatch;
};
// A dispatch whose routing is still in the wire region: combine finds it by the address of src_info.
constexpr int kRoutingCopies = 4;
struct LowLatencyRouting {
  uint64_t src_info, dispatch, has_weights, num_topk;
};

// Of a combine whose send half leaves the sums to a kernel beside the caller's stream (impl/low_latency/
// combine_outbox.cuh): the send half writes the dispatch whose rows are summed, 0: none; that kernel counts bytes and
// waits, which the receive half takes.
struct SumsBeside {
  uint64_t dispatch, sent_bytes[DK_MAX_RANKS], wait_ns[DK_MAX_RANKS];
};

// A combine with a wrong index leaves rows that it cannot name in its slot, and more may come: the next low-latency
// call that receives knows that all have come. It empties the slots, whose places are those of the combine's shape, and
// the ranks get their credit for the calls that they made.
struct Leftover {
  uint64_t slot[2], slot_bytes;
  // Where copy engines move rows: the words of rows that are left, by slot, how rows lie there, and of each rank's.
  uint64_t row_words[2], row_bytes, words_at, words_bytes;
  uint32_t rows_of_rank, max_tokens, num_words;  // num_words: of a row of LogFMT, else 0
  uint64_t epoch[DK_MAX_RANKS];                  // 0: masked
  uint32_t at[DK_MAX_RANKS];                     // in which slot that call's rows are
};

// A notify whose num_tokens_per_rank differ from its tokens in ranks: its dispatch is refused, and clears the entry.
constexpr int kExchanges = 16;  // that may be without their dispatch
struct WrongCounts {
  uint64_t call;  // of the notify; 0: none
  int32_t expected, seen;
};

// Counts of a kernel that are not on the statistics page yet: its operation, the bucket of its histogram that grew
// (DK_HIST_BUCKETS: none), its record of the trace and the number of that.
struct WaitingCount {
  uint64_t op, bucket, index;
  dk_trace_record record;
};
constexpr int kWaitingCounts = 8;  // kernels that may end without copying their counts, or those before, to the page

// Scratch::exits: how many blocks have left the running kernel; whether the last one has to look at more than that,
// since a block has failed, refused something or found what an earlier kernel left; above, when block 0 of a
// low-latency kernel began, in ns. So the last block knows all this from its own addition, without a load.
enum : uint64_t { kExitCount = 0xffff, kExitLooks = 1 << 16, kExitTimeAt = 24 };

constexpr int kRoutedBlocks = 16;  // that count the choices of a notify with a routing, at most

// Device memory of one team, zeroed once. Only this rank's kernels access it.
struct Scratch {
  uint64_t epoch;              // of the operation that runs now; the last block out adds one
  uint64_t low_latency_epoch;  // likewise, for low-latency calls
  uint64_t low_latency_dispatches;
  uint64_t exits;                            // see kExitCount
  alignas(8) uint32_t sticky;                // DK_* of the first failure
  uint32_t failed;                           // not 0: the team had failed when the newest kernel ended
  uint32_t blocks_sent;                      // blocks whose rows are all out
  uint32_t refusing;                         // Refusing: of the running kernel
  uint32_t unsettled;                        // 1: `leftover` is set
  uint64_t start_ns;                         // of the running kernel
  uint32_t tokens_taken[2], metas_taken[2];  // tickets of dispatch and of combine's sums, by parity of the epoch
  uint32_t rows_taken[2][DK_MAX_RANKS];      // tickets of combine's rows, for each destination
  uint32_t own_rows_taken;                   // tickets of an expanded dispatch's rows that stay here
  uint32_t metas_spread;                     // warps of an expanded dispatch that have spread all their metadata
  LowLatencyTicket tickets[DK_NUM_TICKETS];
  LowLatencyRouting routing[kRoutingCopies];
  WrongCounts wrong_counts[kExchanges];
  uint32_t masked[DK_MAX_RANKS];
  uint64_t masked_at[DK_MAX_RANKS];  // this rank's newest low-latency call when the caller masked it; 0: a call did
  uint64_t verdict[DK_MAX_RANKS];    // low latency with shrink: epoch << 2 | kArrived or kAbsent
  uint64_t late[DK_MAX_RANKS];       // epoch in which a rank's counts came and its rows did not
  // Low latency, for each rank. Ranks number their own calls; while no rank is masked the numbers are equal everywhere.
  uint64_t sent[2][DK_MAX_RANKS];      // this rank's newest call that wrote into each slot there
  uint64_t consumed[2][DK_MAX_RANKS];  // the peer's newest call whose rows were taken from each slot here
  uint64_t seen[DK_MAX_RANKS];         // the peer's newest call that was received or given up
  int64_t epoch_ahead[DK_MAX_RANKS], dispatch_ahead[DK_MAX_RANKS];  // the peer's numbers less this rank's
  Leftover leftover;
  uint32_t returned[DK_MAX_RANKS];  // 1: its mask was lifted, its next call may have any number
  // Calls of normal mode in a team that shrinks (sync/agreement.cuh).
  uint64_t messages;                // such calls so far, whose numbers skip
  uint64_t lifts, generation;       // this rank's Standing
  uint64_t received[DK_MAX_RANKS];  // the number of the peer's newest message that belonged to a call of this rank
  uint32_t place[DK_MAX_RANKS];     // of the peer's message of the running call
  uint32_t members[DK_MAX_RANKS / 32], told[DK_MAX_RANKS / 32], posted[DK_MAX_RANKS / 32];  // sets, a bit each
  uint64_t agreed, agreed_epoch;  // the call as this rank numbered it at first, and as all do
  uint32_t agreed_good;
  // Notify with a routing: what each block has counted, by experts, then by ranks; a wrong index that it saw, -1: none.
  uint32_t routed_blocks;  // blocks that have counted
  int64_t routed_wrong[kRoutedBlocks];
  int32_t routed_counts[kRoutedBlocks][DK_MAX_ROUTED_EXPERTS + DK_MAX_RANKS];
  SumsBeside beside[DK_NUM_TICKETS];
  uint64_t wait_ns[DK_MAX_RANKS];  // of the running kernel
  uint64_t sent_bytes[DK_MAX_RANKS];
  dk_op_stats ops[DK_NUM_OPS];
  uint64_t trace_next, progress;
  uint64_t num_waiting;
  WaitingCount waiting[kWaitingCounts];  // of the newest kernels, the oldest first
  uint64_t half_ns[DK_NUM_TICKETS];      // time of the send halves whose receive half has not run yet
  uint64_t clean_ns;                     // of a clean's first kernel
  uint64_t clock_ns;                     // %globaltimer, for measure_clock
  uint64_t peer_bytes[DK_NUM_OPS][DK_MAX_RANKS], peer_wait_ns[DK_NUM_OPS][DK_MAX_RANKS];
  uint32_t histogram[kMaxHistogram];
};

struct TeamView {
  uint8_t *const *peers;  // device array: each rank's block
  uint8_t *self;
  const uint64_t *segments;  // device array [R][DK_MAX_SEGMENTS]
  Scratch *scratch;
  dk_status *status;                                                     // host memory
  dk_stats_page *stats;                                                  // host memory, or null
  uint64_t control, wire, wire_bytes, nvl, nvl_bytes, rdma, rdma_bytes;  // offsets in a block
  ControlLayout at;
  RingFlags ring;
  int64_t clock_offset_ns;                         // CLOCK_MONOTONIC - %globaltimer
  uint64_t peers_offset, trace_offset, trace_len;  // of the statistics page
  int32_t rank, num_ranks, num_nvl_peers;
  uint32_t flags;  // DK_TEAM_*

  // Of DK_TEAM_NORMAL_COPY: rows of a dispatch for a rank, at their sender.
  __host__ __device__ uint64_t outbox_bytes() const { return nvl_bytes / num_ranks / 128 * 128; }  // for one rank
  __host__ __device__ uint64_t outbox(int rank) const { return nvl + nvl_bytes + rank * outbox_bytes(); }
  // And rows of a combine from a rank, at their receiver: its newest ones and those before in turn. What was in the
  // outbox for that rank it has taken: its copies from there come before its combine in its stream.
  __host__ __device__ uint64_t inbox_bytes() const { return outbox_bytes() / 2 / 128 * 128; }
  __host__ __device__ uint64_t inbox(int rank, int which) const { return outbox(rank) + which * inbox_bytes(); }

#ifdef __CUDACC__
  __device__ HandshakeMessage *handshake(int owner, int copy, int source) const {
    return reinterpret_cast<HandshakeMessage *>(peers[owner] + control + at.handshake) + copy * num_ranks + source;
  }
  __device__ HandshakeMessage *low_latency_handshake(int owner, int copy, int source) const {
    return reinterpret_cast<HandshakeMessage *>(peers[owner] + control + at.low_latency_handshake) + copy * num_ranks +
           source;
  }
  __device__ uint64_t *done(int owner, int source) const {
    return reinterpret_cast<uint64_t *>(peers[owner] + control + at.done) + source;
  }
  __device__ uint64_t *consumed(int owner, int slot, int source) const {
    return reinterpret_cast<uint64_t *>(peers[owner] + control + at.consumed) + slot * num_ranks + source;
  }
  // The newest low-latency call of `source` before it lifted its mask of the owner: it went on without the owner, which
  // will not receive the calls up to this one.
  __device__ uint64_t *given_up(uint8_t *owners_block, int source) const {
    return reinterpret_cast<uint64_t *>(owners_block + control + at.given_up) + source;
  }
  __device__ Ballot *ballot(int owner, int source) const {
    return reinterpret_cast<Ballot *>(peers[owner] + control + at.ballots) + source;
  }
  __device__ Standing *standing(int owner, int source) const {
    return reinterpret_cast<Standing *>(peers[owner] + control + at.standings) + source;
  }
  // Not 0: the source has masked the owner, whose Standing::lifts was one less. In a team whose combines cross by
  // copies and which never shrinks: a combine of the source has failed, with this code, and its copies may go on.
  __device__ uint64_t *notice(int owner, int source) const {
    return reinterpret_cast<uint64_t *>(peers[owner] + control + at.notices) + source;
  }
  // Standing::generation of a message.
  __device__ uint64_t *stamp(int owner, int copy, int source) const {
    return reinterpret_cast<uint64_t *>(peers[owner] + control + at.stamps) + copy * num_ranks + source;
  }
  // The owner's newest operation of normal mode that has ended: it reads nothing any more that was sent for it. Its own
  // kernels write it, others read it; nothing is stored at a peer that may be gone by then.
  __device__ uint64_t *finished(uint8_t *owners_block) const {
    return reinterpret_cast<uint64_t *>(owners_block + control + at.finished);
  }
  __device__ uint32_t *counts(int owner, int copy, int source) const {
    return reinterpret_cast<uint32_t *>(peers[owner] + control + at.counts) +
           (static_cast<uint64_t>(copy) * num_ranks + source) * counts_words(num_ranks);
  }
  // Flags of rows that `source` sends to `owner` lie at the owner, credits at the source.
  __device__ uint64_t *ring_flag(int owner, RingPart part, int source) const {
    return reinterpret_cast<uint64_t *>(peers[owner] + wire + ring.flags[part]) +
           static_cast<uint64_t>(source) * ring.per_source;
  }
  __device__ uint64_t *ring_credit(int source, RingPart part, int owner) const {
    return reinterpret_cast<uint64_t *>(peers[source] + wire + ring.credits[part]) +
           static_cast<uint64_t>(owner) * ring.per_source;
  }
#endif
};

// What the parameters of every kernel of an operation hold.
struct Session {
  TeamView team;
  uint64_t call, timeout_ns;
  uint32_t op, phase;
};

}  // namespace deepep
