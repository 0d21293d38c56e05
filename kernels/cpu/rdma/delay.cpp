// The latest and least ordered service that queue pairs allow (DK_TRANSPORT_LATE). Each operation of a queue waits for
// a random time; some queues, or all to one peer, are deferred until nothing else happens; a put arrives in pieces, in
// any order, interleaved with other queues; a completion comes after its operation, and the source must not have
// changed until then.
#include <string.h>

#include "cpu/rdma/state.h"

namespace dk {
namespace {

constexpr uint64_t kMicrosecond = 1000;
constexpr uint64_t kMaxDelay = 1000 * kMicrosecond;  // longest delay of an operation that is not deferred
constexpr uint64_t kMaxDeferral = 4 * kMaxDelay;     // longest time that a deferred one waits for silence
constexpr uint64_t kNever = UINT64_MAX, kNap = 1000000000;

class Late {
 public:
  explicit Late(NicState &nic) : nic_(nic) {}
  void serve();

 private:
  void take_new();
  bool next_event(Queue **queue, bool *completion, uint64_t *at_ns);
  uint64_t time_of(uint64_t due, bool last) const;
  void draw_delay(Queue &q);
  uint64_t draw_ns();
  void cut(Delay &delay, uint64_t bytes);
  bool deliver_piece(Queue &q, const Work &work);
  void advance(Queue &q);
  void check_source(Queue &q, const Work &work);
  void finish_some(Queue &q);
  bool chance(uint64_t percent) { return nic_.random.below(100) < percent; }

  NicState &nic_;
  uint64_t deferred_peer_ = kNever;  // slot of the peer whose queues are all deferred
  uint64_t num_active_ = 0, now_ = 0, last_event_ = 0, silence_ = 100 * kMicrosecond;
};

void Late::serve() {
  while (!nic_.ending.load()) {
    now_ = now_ns();
    take_new();
    Queue *q = nullptr;
    bool completion = false;
    uint64_t at_ns = kNever;
    if (!next_event(&q, &completion, &at_ns)) {
      sleep_until_posted(nic_, at_ns == kNever ? kNap : at_ns - now_);
      continue;
    }
    if (completion)
      finish_some(*q);
    else
      advance(*q);
  }
}

void Late::take_new() {
  for (uint64_t word = 0; word < nic_.num_words; word++) {
    if (nic_.ready[word].load(std::memory_order_relaxed) == 0) continue;
    for (uint64_t bits = nic_.ready[word].exchange(0); bits; bits &= bits - 1) {
      uint64_t index = word * 64 + static_cast<uint64_t>(__builtin_ctzll(bits));
      Queue &q = nic_.queues[index];
      if (q.delay.active) continue;
      q.delay.active = true;
      nic_.active[num_active_++] = static_cast<int32_t>(index);
    }
    last_event_ = now_;
  }
}

// A deferred queue waits for a period without other events, but not forever: other queues may be busy all the time.
uint64_t Late::time_of(uint64_t due, bool last) const {
  return last ? min(max(due, last_event_ + silence_), due + kMaxDeferral) : due;
}

// Chooses at random among the events that are due. False: none is due before at_ns.
bool Late::next_event(Queue **queue, bool *completion, uint64_t *at_ns) {
  uint64_t choices = 0;
  for (uint64_t i = 0; i < num_active_;) {
    Queue &q = nic_.queues[nic_.active[i]];
    if (!drop_if_down(nic_, q) && q.executed != q.posted.load() && !q.delay.drawn) draw_delay(q);
    bool head = q.delay.drawn, done = q.executed != q.completed.load();
    if (!head && !done) {
      q.delay.active = false;
      nic_.active[i] = nic_.active[--num_active_];
      continue;
    }
    for (int what = 0; what < 2; what++) {
      if (!(what ? done : head)) continue;
      uint64_t time = what ? time_of(q.delay.done_due, q.delay.done_deferred) : time_of(q.delay.due, q.delay.deferred);
      *at_ns = min(*at_ns, time);
      if (time > now_ || nic_.random.below(++choices)) continue;
      *queue = &q;
      *completion = what;
    }
    i++;
  }
  return choices != 0;
}

uint64_t Late::draw_ns() {
  uint64_t kind = nic_.random.below(100);
  return kind < 60 ? 0 : nic_.random.below(kind < 85 ? 20 * kMicrosecond : kind < 98 ? 100 * kMicrosecond : kMaxDelay);
}

// A queue stays deferred, or not, for up to 64 operations, so that some calls meet it deferred throughout.
void Late::draw_delay(Queue &q) {
  Delay &delay = q.delay;
  if (delay.remaining-- <= 0) {
    if (chance(10)) deferred_peer_ = nic_.random.below(2 * static_cast<uint64_t>(nic_.num_peers));
    delay.remaining = static_cast<int>(nic_.random.below(64));
    delay.deferred = chance(25) || deferred_peer_ == static_cast<uint64_t>(nic_.slots[q.peer]);
  }
  delay.drawn = true;
  delay.pieces = 0;
  delay.due = now_ + (delay.deferred ? 0 : draw_ns());
}

// Pieces are cut at any byte, and any of them arrives first.
void Late::cut(Delay &delay, uint64_t bytes) {
  uint64_t pieces = bytes < 2 || chance(50) ? 1 : 1 + nic_.random.below(min<uint64_t>(bytes, Delay::kMaxPieces));
  delay.pieces = static_cast<int>(pieces);
  delay.next = 0;
  delay.first = static_cast<int>(nic_.random.below(pieces));
  delay.cuts[0] = 0;
  delay.cuts[pieces] = bytes;
  for (uint64_t i = 1; i < pieces; i++)
    delay.cuts[i] = delay.cuts[i - 1] + nic_.random.below(bytes - delay.cuts[i - 1] + 1);
}

// True: that was the last piece.
bool Late::deliver_piece(Queue &q, const Work &work) {
  Delay &delay = q.delay;
  if (delay.pieces == 0) cut(delay, work.bytes);
  int piece = (delay.first + delay.next++) % delay.pieces;
  uint64_t from = delay.cuts[piece], bytes = delay.cuts[piece + 1] - from;
  if (bytes) memcpy(at<char>(work.dst) + from, at<const char>(work.src) + from, bytes);
  return delay.next == delay.pieces;
}

void Late::advance(Queue &q) {
  Delay &delay = q.delay;
  // Operations of a deferred queue come in bursts, else each would wait for a silence of its own.
  uint64_t burst = delay.deferred ? 1 + nic_.random.below(32) : 1;
  for (uint64_t posted = q.posted.load(); burst && q.executed != posted; burst--) {
    const Work &work = nic_.work(q, q.executed);
    if (!deliver_piece(q, work)) {
      delay.drawn = true;
      delay.due = now_ + nic_.random.below(10 * kMicrosecond);
      break;
    }
    carry_out_signal(nic_, q, work);
    if (q.completed.load() == q.executed) {  // the first executed operation that is not completed
      delay.done_deferred = chance(40);
      delay.done_due = now_ + draw_ns();
    }
    q.executed++;
    delay.pieces = 0;
    delay.drawn = false;
  }
  if (delay.deferred)
    silence_ = chance(10) ? kMaxDelay : (50 + nic_.random.below(150)) * kMicrosecond;
  else
    last_event_ = now_;
  ring_doorbells(nic_, false);
}

// A NIC may read the source again until the operation is completed. A caller that wrote to it before gets DK_EMISMATCH.
void Late::check_source(Queue &q, const Work &work) {
  int32_t well = 0;
  if (sum_of(at<const void>(work.src), work.bytes) != work.source_sum)
    q.broken.compare_exchange_strong(well, DK_EMISMATCH);
}

void Late::finish_some(Queue &q) {
  uint64_t completed = q.completed.load(), done = q.executed - completed;
  uint64_t some = chance(70) ? done : 1 + nic_.random.below(done);
  for (uint64_t i = 0; i < some; i++) check_source(q, nic_.work(q, completed + i));
  complete(nic_, q, completed + some);
  q.delay.done_due = now_ + draw_ns();
  ring_doorbells(nic_, true);
}

}  // namespace

uint64_t sum_of(const void *bytes, uint64_t count) {
  const char *from = static_cast<const char *>(bytes);
  uint64_t sum = count;
  for (uint64_t i = 0; i < count; i += 8) {
    uint64_t word = 0;
    memcpy(&word, from + i, min<uint64_t>(8, count - i));
    sum = (sum ^ word) * 0x9e3779b97f4a7c15u + 1;
  }
  return sum;
}

void serve_late(NicState &nic) { Late(nic).serve(); }

}  // namespace dk
