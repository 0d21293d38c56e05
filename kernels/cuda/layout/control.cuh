// control.cuh - the control region of a rank's block: messages and counts that peers write there. Zeroed at the start,
// and never part of what users view. Every message has two copies, by the parity of the epoch: a peer may be one
// operation ahead, never two, since each operation begins with a message from every rank to every rank.
#pragma once
#include "cuda/common/types.cuh"

namespace deepep {

// What a rank writes to each peer when it begins an operation: it is in operation `epoch`, has finished all before, and
// has read what peers sent for them.
struct alignas(64) HandshakeMessage {
  uint64_t hidden_bytes;
  union {
    uint64_t segment_offset;  // dispatch: of recv_x in `segment`
    uint64_t newest_call;     // clean: the sender's newest low-latency call
  };
  uint32_t op, flags;  // flags: kHandshakeCached and the others below
  int32_t num_experts, num_topk, num_scales, max_tokens;
  int32_t row_limit;  // rows that the sender of this message has room for; -1: as many as the matrix says
  int32_t segment;    // where peers may write rows straight to their places; -1: rows are staged
  uint64_t epoch;     // stored last, with release
  uint64_t handle;    // dispatch, combine: number of the handle's exchange, 0 not known, and above it the matrix's hash
};
static_assert(sizeof(HandshakeMessage) == 64, "one message is one line");
enum : uint32_t {
  kHandshakeCached = 1,
  kHandshakeWeights = 2,
  kHandshakeSilent = 4,        // the sender has no row, so whether it gives weights means nothing
  kHandshakeRefused = 8,       // the sender's handle is wrong: `segment` and `row_limit` say what is expected and seen
  kHandshakeRoutingShift = 4,  // normal mode: DK_ROUTING_*, 2 bits, then combine's DK_COMBINE_*, 2 bits
  kHandshakeFormatShift = 8,   // low latency: the format, 4 bits, and flags; normal mode: the type of x
  kHandshakeAtOnce = 1 << 16,  // notify: rows come with it, so no dispatch follows
  kHandshakeFieldShift = 24    // of a refusal: DK_FIELD_*
};

constexpr uint32_t kMaxRoutedExperts = 2048;  // DK_MAX_ROUTED_EXPERTS

// In a team that shrinks (sync/agreement.cuh): the ranks that a rank counts in, a bit each. version: number of the
// sender's message, revision, whether it has decided; stored last.
struct alignas(64) Ballot {
  uint64_t version;
  uint32_t ranks[1024 / 32];
};
// Likewise: how often the sender's caller has lifted masks; how often its earlier messages became void.
struct alignas(16) Standing {
  uint64_t lifts, generation;
};

constexpr int kHandshakeCopies = 2, kLowLatencyHandshakeCopies = 4;

// Words of the counts from one rank to one peer: the rank's row of the matrix, then the peer's experts; with a routing
// the experts of all ranks.
__host__ __device__ inline uint32_t max_local_experts(uint32_t num_ranks) { return max(1024u, 65536u / num_ranks); }
__host__ __device__ inline uint32_t counts_words(uint32_t num_ranks) {
  return align_up(num_ranks + max(max_local_experts(num_ranks), kMaxRoutedExperts), 16u);
}

struct ControlLayout {
  uint64_t handshake, low_latency_handshake, done, consumed, given_up, ballots, standings, notices, stamps, finished,
      counts, bytes;
};
__host__ __device__ inline ControlLayout control_layout(uint64_t num_ranks) {
  ControlLayout at{};
  at.handshake = 0;
  at.low_latency_handshake = at.handshake + kHandshakeCopies * num_ranks * sizeof(HandshakeMessage);
  at.done = at.low_latency_handshake + kLowLatencyHandshakeCopies * num_ranks * sizeof(HandshakeMessage);
  at.consumed = at.done + align_up<uint64_t>(num_ranks * 8, 128);
  at.given_up = at.consumed + align_up<uint64_t>(2 * num_ranks * 8, 128);  // a word for each slot of each rank
  at.ballots = at.given_up + align_up<uint64_t>(num_ranks * 8, 128);
  at.standings = at.ballots + align_up<uint64_t>(num_ranks * sizeof(Ballot), 128);
  at.notices = at.standings + align_up<uint64_t>(num_ranks * sizeof(Standing), 128);
  at.stamps = at.notices + align_up<uint64_t>(num_ranks * 8, 128);
  at.finished = at.stamps + align_up<uint64_t>(kHandshakeCopies * num_ranks * 8, 128);
  at.counts = at.finished + 128;
  at.bytes = align_up<uint64_t>(at.counts + 2 * num_ranks * counts_words(static_cast<uint32_t>(num_ranks)) * 4, 4096);
  return at;
}

}  // namespace deepep
