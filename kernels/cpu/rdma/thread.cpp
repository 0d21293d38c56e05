// The NIC's thread: how it executes operations, rings doorbells, and serves queues without delays.
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>

#include "cpu/rdma/state.h"
#include "cpu/runtime/order.h"

namespace dk {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kSpins = 100;  // a microsecond or two: puts come in bursts
constexpr uint64_t kNap = 1000000000;
constexpr uint64_t kLongestTurn = 32;

void execute(NicState &nic, Queue &q, const Work &work) {
  if (work.bytes) memcpy(at<void>(work.dst), at<const void>(work.src), work.bytes);
  carry_out_signal(nic, q, work);
}

// Executes a random number of operations of one queue, so that callers cannot rely on an order among queues.
void serve_queue(NicState &nic, uint64_t index) {
  Queue &q = nic.queues[index];
  if (drop_if_down(nic, q)) return;
  uint64_t posted = q.posted.load(), turn = min(posted - q.executed, 1 + nic.random.below(kLongestTurn));
  for (uint64_t i = 0; i < turn; i++) {
    execute(nic, q, nic.work(q, q.executed));
    complete(nic, q, ++q.executed);
  }
  if (q.executed != posted) nic.ready[index / 64].fetch_or(uint64_t{1} << index % 64);
  ring_doorbells(nic, turn != 0);
}

// True: an operation was executed. Begins at a random queue.
bool serve_ready(NicState &nic) {
  bool served = false;
  uint64_t first = nic.random.below(nic.num_words);
  for (uint64_t i = 0; i < nic.num_words; i++) {
    uint64_t word = (first + i) % nic.num_words;
    if (nic.ready[word].load(std::memory_order_relaxed) == 0) continue;
    uint64_t bits = nic.ready[word].exchange(0), turn = nic.random.below(64);
    bits = bits >> turn | bits << (64 - turn) % 64;
    served |= bits != 0;
    for (; bits; bits &= bits - 1)
      serve_queue(nic, word * 64 + (static_cast<uint64_t>(__builtin_ctzll(bits)) + turn) % 64);
  }
  return served;
}

void serve_promptly(NicState &nic) {
  for (int spins = 0; !nic.ending.load();) {
    if (serve_ready(nic))
      spins = 0;
    else if (spins++ < kSpins)
      cpu_relax();
    else
      sleep_until_posted(nic, kNap);
  }
}

void *run(void *argument) {
  NicState &nic = *static_cast<NicState *>(argument);
  pthread_setname_np(pthread_self(), "deepep-nic");
  prctl(PR_SET_TIMERSLACK, 1000);  // delays are shorter than the default slack of 50 us
  if (nic.flags & DK_TRANSPORT_LATE)
    serve_late(nic);
  else
    serve_promptly(nic);
  return nullptr;
}

}  // namespace

void carry_out_signal(NicState &nic, const Queue &q, const Work &work) {
  if (work.op == DK_SIGNAL_NONE) return;
  // Sequentially consistent, not just release: a sleeper raises `sleepers` and then loads the word.
  auto &word = *at<std::atomic<uint64_t>>(work.word);
  if (work.op == DK_SIGNAL_SET)
    word.store(work.value);
  else
    word.fetch_add(work.value);
  before_overwriting();  // by later puts of the queue: receivers rely on their order
  uint64_t slot = static_cast<uint64_t>(nic.slots[q.peer]);
  nic.ringing[slot / 64] |= uint64_t{1} << slot % 64;
}

void complete(NicState &nic, Queue &q, uint64_t until) {
  q.completed.store(until);
  if (nic.waiters.load() == 0) return;
  nic.completions.fetch_add(1);
  wake_all(nic.completions, Scope::process);
}

bool drop_if_down(NicState &nic, Queue &q) {
  if (!nic.is_down(q)) return false;
  q.delay.drawn = false;
  q.delay.pieces = 0;
  q.executed = q.posted.load();
  complete(nic, q, q.executed);
  ring_doorbells(nic, true);
  return true;
}

void ring_doorbells(NicState &nic, bool mine) {
  uint64_t doorbell = nic.doorbell_offset.load();
  if (doorbell && mine) at<Doorbell>(nic.my_block + doorbell - 1)->ring();
  for (uint64_t word = 0; word * 64 < static_cast<uint64_t>(nic.num_peers); word++) {
    uint64_t bits = nic.ringing[word];
    nic.ringing[word] = 0;
    for (; doorbell && bits; bits &= bits - 1)
      at<Doorbell>(nic.blocks[word * 64 + static_cast<uint64_t>(__builtin_ctzll(bits))] + doorbell - 1)->ring();
  }
}

// A posting thread sets a bit of `ready` and then loads `asleep`; the NIC's thread stores `asleep` and then loads
// `ready`.
void sleep_until_posted(NicState &nic, uint64_t nanoseconds) {
  uint32_t seen = nic.doorbell.load();
  nic.asleep.store(true);
  bool nothing = !nic.ending.load();
  for (uint64_t i = 0; i < nic.num_words && nothing; i++) nothing = nic.ready[i].load() == 0;
  if (nothing) sleep_on(nic.doorbell, seen, nanoseconds, Scope::process);
  nic.asleep.store(false);
}

void notify_thread(NicState &nic, const Queue &q) {
  uint64_t index = static_cast<uint64_t>(&q - nic.queues.get()), bit = uint64_t{1} << index % 64;
  if (!(nic.ready[index / 64].load() & bit)) nic.ready[index / 64].fetch_or(bit);
  if (!nic.asleep.load() || !nic.asleep.exchange(false)) return;
  nic.doorbell.fetch_add(1);
  wake_all(nic.doorbell, Scope::process);
}

int start_thread(NicState &nic) {
  pthread_attr_t attributes;
  int error = pthread_attr_init(&attributes);
  if (error) return error;
  pthread_attr_setstacksize(&attributes, kStackBytes);
  sigset_t all, before;
  sigfillset(&all);  // signals belong to the application's threads
  pthread_sigmask(SIG_SETMASK, &all, &before);
  error = pthread_create(&nic.thread, &attributes, run, &nic);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return error;
}

void stop_thread(NicState &nic) {
  nic.ending.store(true);
  nic.doorbell.fetch_add(1);
  wake_all(nic.doorbell, Scope::process);
  pthread_join(nic.thread, nullptr);
}

}  // namespace dk
