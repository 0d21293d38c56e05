// common.cuh - libdeepep_nvshmem.so, normal mode and barriers across nodes: puts by a warp, tagged words, messages from
// every rank to every rank, and the loop in which a warp serves many streams of rows without waiting for a single one.
#pragma once
#include "cuda/impl/normal/send_rows.cuh"
#include "cuda/sync/session.cuh"
#include "internode/layout.h"
#include "internode/normal/timeline.cuh"
#ifdef DEEPEP_TEST_WIRE
#include "internode/wire.cuh"
#endif
#include "queue.cuh"

namespace deepep::internode {

// ---- Puts: by a whole warp, from this rank's block into that of a rank of another node ------------------------------

// All puts of a thread block toward a rank use one queue pair, so they arrive in order.
#if DEEPEP_QUEUE_HANDLES
__device__ inline nvshmemx_qp_handle_t queue_of_block(const NodeView &internode) {
  return internode.num_queues == 0
             ? NVSHMEMX_QP_DEFAULT
             : static_cast<nvshmemx_qp_handle_t>(internode.queues[blockIdx.x % internode.num_queues]);
}
#endif

// Where puts are stores, after this warp has stored into NodeView::blocks: the word there that lies at `word` in this
// rank's block.
__device__ inline void set_word(const NodeView &internode, const TeamView &team, int rank, const uint64_t *word,
                                uint64_t value) {
  __syncwarp();
  if (lane_id() == 0) {
    const ptrdiff_t at = reinterpret_cast<const uint8_t *>(word) - team.self;
    ptx::st_release_sys(reinterpret_cast<uint64_t *>(internode.blocks[rank] + at), value);
  }
  __syncwarp();
}

// Puts `bytes` (a multiple of 16), then sets the word: a rank that acquires the word sees the bytes. This warp has
// written the source, which must not change until the rank has answered.
__device__ __noinline__ inline void put_remote(const NodeView &internode, int rank, void *to, const void *from,
                                               uint64_t bytes, uint64_t *word, uint64_t value) {
  __syncwarp();
  if (lane_id() == 0) ptx::fence_acq_rel_sys();  // the NIC reads what all lanes stored
  __syncwarp();
#ifdef DEEPEP_TEST_WIRE
  if (put_by_wire(rank, to, from, bytes, word, value)) return;
#endif
#if DEEPEP_QUEUE_HANDLES
  nvshmemx_qp_uchar_put_signal_nbi_warp(static_cast<unsigned char *>(to), static_cast<const unsigned char *>(from),
                                        bytes, word, value, NVSHMEM_SIGNAL_SET, rank, queue_of_block(internode));
#else
  (void)internode;
  nvshmemx_putmem_signal_nbi_warp(to, from, bytes, word, value, NVSHMEM_SIGNAL_SET, rank);
#endif
}

// A row's payload, by a warp; `bytes` is a multiple of 16. Not unrolled further: with so many warps in a block
// registers are few.
__device__ inline void copy_payload(uint8_t *to, const uint8_t *from, uint32_t bytes) {
  constexpr int kAtOnce = 8;
  const int chunks = static_cast<int>(bytes / 16);
#pragma unroll 1
  for (int first = lane_id(); first < chunks; first += kWarp * kAtOnce) {
    uint4 data[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (first + u * kWarp < chunks) data[u] = ptx::ld_stream(from + 16ull * (first + u * kWarp));
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (first + u * kWarp < chunks) ptx::st_stream(to + 16ull * (first + u * kWarp), data[u]);
  }
}

// Sets the word alone. With 16 bytes of blank, since NVSHMEM's proxy may let a later signal overtake one without bytes.
__device__ inline void signal_remote(const NodeView &internode, const TeamView &team, int rank, uint64_t *word,
                                     uint64_t value) {
  if (internode.puts_are_stores) return set_word(internode, team, rank, word, value);
  uint8_t *blank = team.self + internode.at.blank;
  put_remote(internode, rank, blank, blank + 32, 16, word, value);
}

// ---- Words that a peer writes during a call -------------------------------------------------------------------------

constexpr uint32_t kAllRows = 0xffffffffu;  // instead of a count: the reader needs no more rows
constexpr uint32_t kLastRow = 0x80000000u;  // set in a count: the sender sends no more rows

__device__ __forceinline__ uint64_t tagged(uint64_t epoch, uint32_t count) { return epoch << 32 | count; }
__device__ __forceinline__ uint32_t count_in(uint64_t word, uint64_t epoch) {
  return (word ^ epoch << 32) >> 32 == 0 ? static_cast<uint32_t>(word) : 0;
}
// By a whole warp: afterwards all lanes see what the peer wrote before the word.
__device__ __forceinline__ uint32_t read_count(const uint64_t *word, uint64_t epoch) {
  uint32_t count = 0;
  if (lane_id() == 0) count = count_in(ptx::ld_acquire_sys(word), epoch);
  __syncwarp();
  return __shfl_sync(kAllLanes, count, 0);
}
// By a whole warp, to a rank of this node: released after everything that its lanes have read and written.
__device__ __forceinline__ void write_count(uint64_t *word, uint64_t epoch, uint32_t count) {
  __syncwarp();
  if (lane_id() == 0) ptx::st_release_sys(word, tagged(epoch, count));
}

__device__ inline uint64_t *word_at(uint8_t *block, uint64_t offset, int64_t index) {
  return reinterpret_cast<uint64_t *>(block + offset) + index;
}

// Of ControlOffsets::pushed and taken.
__device__ inline int64_t push_index(const NodeView &internode, int index, int node, int channel) {
  return (static_cast<int64_t>(index) * internode.num_nodes + node) * kMaxChannels + channel;
}

// ---- Messages from every rank to every rank -------------------------------------------------------------------------

struct Message {
  HandshakeMessage handshake;  // its `epoch` stays 0: receivers poll ControlOffsets::arrived instead
  uint32_t counts[];           // of notify
};
__device__ inline Message *message_at(const NodeView &internode, uint8_t *block, uint64_t array, uint64_t epoch,
                                      int rank) {
  const uint64_t index = epoch % kHandshakeCopies * (internode.num_nodes * internode.num_peers) + rank;
  return reinterpret_cast<Message *>(block + array + index * internode.at.message_bytes);
}
__device__ inline Message *message_from(const Session &s, const NodeView &internode, uint64_t epoch, int rank) {
  return message_at(internode, s.team.self, internode.at.inbox, epoch, rank);
}
__device__ inline uint64_t *arrived_from(const Session &s, const NodeView &internode, uint64_t epoch, int rank) {
  return word_at(s.team.self, internode.at.arrived, epoch % kHandshakeCopies * s.team.num_ranks + rank);
}

// A masked rank that has died: puts would never reach it, and no rank waits for its message.
__device__ inline bool is_gone(const Session &s, int rank) {
  return is_masked(s, rank) && *static_cast<volatile uint8_t *>(&s.team.status->dead[rank]) != 0;
}

// Whole block: posts a message to every rank. fill(rank, counts): by a whole warp, writes `words` counts for the rank.
// The outbox's copy for a rank is overwritten two operations later: the rank's next message has arrived by then, which
// it sent after it had read this one.
template <class Fill>
__device__ inline void post_messages(const Session &s, const NodeView &internode, const Handshake &hand, uint32_t words,
                                     Fill fill) {
  const int num_ranks = s.team.num_ranks, me = s.team.rank, warps = static_cast<int>(blockDim.x) / kWarp;
  for (int r = warp_id(); r < num_ranks; r += warps) {
    const bool stores = internode.is_local(r) || internode.puts_are_stores;
    uint8_t *block = !stores ? s.team.self : internode.is_local(r) ? s.team.peers[r] : internode.blocks[r];
    Message *message = stores ? message_at(internode, block, internode.at.inbox, hand.epoch, me)
                              : message_at(internode, block, internode.at.outbox, hand.epoch, r);
    if (lane_id() == 0) {
      message->handshake = hand.mine;
      message->handshake.epoch = 0;
    }
    fill(r, message->counts);
    uint64_t *word = word_at(block, internode.at.arrived, hand.epoch % kHandshakeCopies * num_ranks + me);
    __syncwarp();
    if (stores) {
      if (lane_id() == 0) ptx::st_release_sys(word, hand.epoch);
    } else if (__all_sync(kAllLanes, !is_gone(s, r))) {
      put_remote(internode, r, message_from(s, internode, hand.epoch, me), message,
                 sizeof(HandshakeMessage) + align_up(words * 4, 16u), word, hand.epoch);
    }
  }
}
__device__ inline void post_messages(const Session &s, const NodeView &internode, const Handshake &hand) {
  post_messages(s, internode, hand, 0, [](int, uint32_t *) {});
}

// Whole block: waits for every rank's message. True if all have arrived with the same arguments, and no rank refuses.
__device__ inline bool await_messages(const Session &s, const NodeView &internode, const Handshake &hand) {
  bool good = true;
  for (int r = threadIdx.x; good && r < s.team.num_ranks; r += blockDim.x)
    good = await_message(s, hand, r, arrived_from(s, internode, hand.epoch, r),
                         &message_from(s, internode, hand.epoch, r)->handshake) &&
           !is_refused(s, hand, r, &message_from(s, internode, hand.epoch, r)->handshake);
  return __syncthreads_or(!good) == 0;
}

// Beside segment_offset: how many channels a rank's rings have.
constexpr int kChannelsAt = 48;
__device__ inline void add_channels(Handshake &hand, uint32_t channels) {
  hand.mine.segment_offset |= static_cast<uint64_t>(channels) << kChannelsAt;
}
// By all ranks' messages. A thread's share; the block sees alike.
__device__ inline bool agree_on_channels(const Session &s, const NodeView &internode, uint64_t epoch,
                                         uint32_t channels) {
  bool agree = true;
  for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x)
    agree &= message_from(s, internode, epoch, r)->handshake.segment_offset >> kChannelsAt == channels;
  return agree;
}

// ---- Streams --------------------------------------------------------------------------------------------------------

enum Outcome { kDone, kMoved, kBlocked };
struct BlockedStream {  // the rank that a stream waits for, the count that it needs and the one that it sees
  int peer;
  int64_t expected, seen;
};

// Of a warp that gives up, for a reason, on what it waits for since `start`. Whole warp.
__device__ inline void report_blocked(const Session &s, uint32_t reason, const BlockedStream &missing, uint64_t start) {
  if (lane_id() == 0)
    report_failure(s, reason, culprit(s, reason, missing.peer), DK_FIELD_NONE, missing.expected, missing.seen,
                   ptx::global_timer_ns() - start);
  __syncwarp();
}

// A warp serves streams first, first + step, ... of `count` in turn. It never waits for one while another one could
// move: a peer may wait for room in one ring before it goes on with another. advance(stream, blocked) does what is
// possible at once, with the same outcome in all lanes. The timeout counts while no stream of this warp moves.
template <class Advance>
__device__ inline void serve_streams(const Session &s, Role role, int first, int step, int count, Advance advance) {
  InRole timed(role, first < count);
  uint64_t start = 0;
  uint32_t polls = 0, reason = 0;
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
      timed.moved();
      polls = 0;
      reason = 0;
      if (__any_sync(kAllLanes, lane_id() == 0 && has_failed(s))) return;
      continue;
    }
    if (reason != 0)  // and no stream moved in the round after it
      return report_blocked(s, reason, missing, start);
    if (polls++ == 0) start = ptx::global_timer_ns();
    if (polls % kPollsPerLook == 0 && lane_id() == 0) reason = reason_to_leave(s, missing.peer, start, polls, 1);
    reason = __shfl_sync(kAllLanes, reason, 0);
  }
}

}  // namespace deepep::internode
