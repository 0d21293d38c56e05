// The control region at the head of a rank's block: everything that ranks exchange except payload. Callers never see
// it.
//
// Rule: each line of 64 bytes has one writer, and a word that a peer polls is alone on its line. A peer writes its
// "from" lines into my block, so that a waiting rank polls only its own memory; cursors of rings are read where they
// are written.
#pragma once
#include "cpu/runtime/doorbell.h"

namespace dk {

constexpr int kNumFields = DK_NUM_COMPARED;  // compared fields, by DK_FIELD_* number

// Why a rank's arguments make a call impossible. It travels in the rank's message, so that every rank refuses the call
// before rows move, and the team goes on.
struct Refusal {
  uint32_t code = 0, field = 0;  // DK_*, DK_FIELD_*; code 0: none
  int64_t expected = 0, seen = 0;
};

// Written while this rank waits: a peer can distinguish a rank that waits for a third one from a rank that does not
// run.
struct alignas(kLine) Heartbeat {
  std::atomic<uint64_t> stamp_ns;
  std::atomic<int32_t> awaiting;   // the rank that it waits for, plus 1; 0: none
  std::atomic<uint32_t> op;        // the newest operation, DK_OP_*
  std::atomic<uint64_t> since_ns;  // when this wait began
};

// The first failure of this rank. Peers that read it fail at once instead of at their own deadline.
struct alignas(kLine) FailureRecord {
  std::atomic<uint64_t> set;  // stored last
  dk_failure failure;
};

// Position in a ring: rows in the low half, the number of the collective call in the high half. The cursor of another
// call reads as zero, so no cursor is reset between calls.
struct alignas(kLine) Cursor {
  std::atomic<uint64_t> value;

  static uint64_t pack(uint64_t call, uint64_t rows) { return call << 32 | rows; }
  static uint64_t unpack(uint64_t value, uint64_t call) {
    return value >> 32 == (call & 0xffffffffu) ? value & 0xffffffffu : 0;
  }
  void set(uint64_t call, uint64_t rows) { value.store(pack(call, rows)); }
  uint64_t rows(uint64_t call) const { return unpack(value.load(), call); }
};
constexpr uint64_t kAllRows = 0xffffffffu;

// A rank's arguments of a normal-mode call. The counts of notify follow: int32 rows[num_ranks], then an int32 for each
// expert of the receiver; with a routing, for each expert of all ranks.
struct alignas(kLine) CallMessage {
  std::atomic<uint64_t> number;      // of the collective call; stored last
  std::atomic<uint64_t> generation;  // of a team that shrinks: RankState::generation
  uint64_t ring_slots, ring_stride;
  uint64_t link_slots, link_queues;  // of the rows that the rank sends to other nodes
  int64_t fields[kNumFields];
  int64_t row_limit;       // rows that the rank has room for; -1: as many as arrive
  int64_t expanded_limit;  // the same of expanded rows
  uint64_t matrix_hash;    // of the rank's rank_prefix_matrix; 0: it has none in this call
  Refusal refusal;
};

// The ranks that a rank counts in (agreement.h), in a team that shrinks.
struct alignas(kLine) Ballot {
  std::atomic<uint64_t> version;  // number of the sender's message, revision, whether it has decided; stored last
  std::atomic<uint64_t> ranks[DK_MAX_RANKS / 64];
};

// A rank's arguments of a low-latency send. A rank numbers its sends of each kind (epochs); epoch n uses slot n % 2 of
// its wire region and of this array.
struct alignas(kLine) SendMessage {
  std::atomic<uint64_t> epoch;        // stored last; 0: none yet
  std::atomic<uint64_t> since_clean;  // sends since clean number `cleans` (of masks or of slots)
  std::atomic<uint32_t> cleans;
  int32_t num_tokens;
  uint64_t rows_offset, rows_stride;  // combine: position of the rows in the wire or rdma region
  int64_t fields[kNumFields];
  uint64_t rows_in_rdma;
  Refusal refusal;  // the message comes without rows
  uint64_t qps[2];  // of remote ranks (mirror.h): the QPs that carry the rows, a bit each
};

// What a receive half has copied of a SendMessage: the peer may overwrite that once it has masked this rank.
struct Arrival {
  uint64_t epoch, since_clean, rows_offset, rows_stride, rows_in_rdma, qps[2];
  uint32_t cleans;
  int32_t num_tokens;
  int64_t fields[kNumFields];
  Refusal refusal;

  // All but the words by which it is found.
  void copy(const SendMessage &from) {
    num_tokens = from.num_tokens;
    rows_offset = from.rows_offset;
    rows_stride = from.rows_stride;
    rows_in_rdma = from.rows_in_rdma;
    for (int i = 0; i < kNumFields; i++) fields[i] = from.fields[i];
    refusal = from.refusal;
    for (int i = 0; i < 2; i++) qps[i] = from.qps[i];
  }
};

struct CleanMessage {
  std::atomic<uint64_t> count;  // stored last
  uint64_t cleans;
};

struct RankSet {
  uint64_t words[DK_MAX_RANKS / 64] = {};

  bool has(int rank) const { return words[rank / 64] >> (rank % 64) & 1; }
  void add(int rank) { words[rank / 64] |= uint64_t{1} << (rank % 64); }
  void remove(int rank) { words[rank / 64] &= ~(uint64_t{1} << (rank % 64)); }
  void keep(const RankSet &others) {
    for (int w = 0; w < DK_MAX_RANKS / 64; w++) words[w] &= others.words[w];
  }
  bool operator==(const RankSet &other) const {
    for (int w = 0; w < DK_MAX_RANKS / 64; w++)
      if (words[w] != other.words[w]) return false;
    return true;
  }
};

enum Kind { kDispatch = 0, kCombine = 1 };  // of low latency

struct Ticket {
  uint64_t epoch, since_clean;
  uint64_t spent_ns, waited_ns, bytes;  // of the send half, for the statistics of the whole call
  uint32_t cleans, kind, open, reserved;
};

// Only this rank's operations access it, except `cleans` and `writing`, which peers read.
struct alignas(kLine) RankState {
  uint64_t calls;     // collective calls of normal mode so far
  uint64_t epoch[2];  // low-latency sends so far, by kind
  uint64_t since_clean[2];
  uint64_t clean_calls;
  std::atomic<uint32_t> cleans;
  uint32_t reserved;
  Ticket tickets[DK_NUM_TICKETS];
  uint64_t messages;  // collective calls in a team that shrinks, whose numbers skip
  // In a team that shrinks, read by peers: how often the caller has lifted masks; how often this rank's earlier
  // messages became void, by that or because others had masked it.
  std::atomic<uint64_t> lifts, generation;
  alignas(kLine) std::atomic<uint64_t> writing[2];  // epoch whose staging slot is being, or was last, filled
};

struct PeerState {            // what this rank keeps about a peer
  uint64_t credit_floor[2];   // epochs up to here count as read by the peer
  uint64_t seen_at_clean[2];  // the peer's greatest epoch at the last clean or unmask
  uint64_t read_early[2];     // the peer's epoch received before an older one; credited with the older one
  uint64_t clean_seen;        // the peer's newest clean that this rank has waited for
  uint32_t masked, reserved;
};

struct CallState {    // likewise, of collective calls in a team that shrinks
  uint64_t received;  // the number of the peer's newest message that belonged to a call of this rank
};

class Control {
 public:
  Control(uint64_t base, int num_ranks) : base_(base), ranks_(static_cast<uint64_t>(num_ranks)) {}
  static uint64_t bytes(int num_ranks) { return round_up(Control(0, num_ranks).end(), kPage); }
  static uint64_t call_bytes(int num_ranks) {  // of a CallMessage with its counts
    uint64_t experts = max<uint64_t>(max_local_experts(num_ranks), DK_MAX_ROUTED_EXPERTS);
    return round_up(sizeof(CallMessage) + 4 * (static_cast<uint64_t>(num_ranks) + experts), kLine);
  }
  static uint64_t max_local_experts(int num_ranks) { return kMaxExperts / static_cast<uint64_t>(num_ranks) + 1; }

  RankState &state() const { return *at<RankState>(base_); }
  Doorbell &doorbell() const { return *at<Doorbell>(base_ + kStateBytes); }
  Heartbeat &heartbeat() const { return *at<Heartbeat>(base_ + kStateBytes + kLine); }
  FailureRecord &failure_record() const { return *at<FailureRecord>(base_ + kStateBytes + 2 * kLine); }
  Cursor &dispatch_head() const { return *at<Cursor>(base_ + kStateBytes + 3 * kLine); }
  // One line for each peer.
  Cursor &dispatch_tail(int reader) const { return *line<Cursor>(0, reader); }  // written by the reader of my ring
  Cursor &combine_head(int reader) const { return *line<Cursor>(1, reader); }   // written by me
  Cursor &combine_tail(int reader) const { return *line<Cursor>(2, reader); }   // written by the reader
  Cursor &credit(Kind kind, int reader) const {
    return *line<Cursor>(3 + kind, reader);
  }  // the epoch that was read, not packed
  CleanMessage &clean_from(int peer, uint64_t parity) const { return line<CleanMessage>(5, peer)[parity]; }  // one line
  PeerState &peer_state(int peer) const { return *line<PeerState>(6, peer); }
  // Not 0: the peer has masked this rank, when this rank's RankState::lifts was one less.
  std::atomic<uint64_t> &notice_from(int peer) const { return *line<std::atomic<uint64_t>>(7, peer); }
  CallState &call_state(int peer) const { return *line<CallState>(8, peer); }
  Ballot &ballot_from(int peer) const { return at<Ballot>(ballots())[peer]; }
  SendMessage &send_from(Kind kind, uint64_t slot, int peer) const {
    return *at<SendMessage>(sends() + ((kind * 2 + slot) * ranks_ + static_cast<uint64_t>(peer)) * sizeof(SendMessage));
  }
  CallMessage &call_from(uint64_t parity, int peer) const {
    return *at<CallMessage>(calls() +
                            (parity * ranks_ + static_cast<uint64_t>(peer)) * call_bytes(static_cast<int>(ranks_)));
  }
  int32_t *rows_of(CallMessage &message) const { return reinterpret_cast<int32_t *>(&message + 1); }
  int32_t *experts_of(CallMessage &message) const { return rows_of(message) + ranks_; }

 private:
  static constexpr uint64_t kNumLines = 9;
  static constexpr uint64_t kStateBytes = round_up(sizeof(RankState), kLine);
  static constexpr uint64_t kHeadBytes = kStateBytes + 4 * kLine;

  template <class T>
  T *line(uint64_t array, int peer) const {
    static_assert(sizeof(T) <= kLine, "one line each");
    return at<T>(base_ + kHeadBytes + (array * ranks_ + static_cast<uint64_t>(peer)) * kLine);
  }
  uint64_t sends() const { return base_ + kHeadBytes + kNumLines * ranks_ * kLine; }
  uint64_t calls() const { return sends() + 4 * ranks_ * sizeof(SendMessage); }
  uint64_t ballots() const { return calls() + 2 * ranks_ * call_bytes(static_cast<int>(ranks_)); }
  uint64_t end() const { return ballots() + ranks_ * sizeof(Ballot); }

  uint64_t base_, ranks_;
};

static_assert(sizeof(Heartbeat) == kLine && sizeof(FailureRecord) == kLine, "places in Control");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

}  // namespace dk
