#include "cpu/rdma/rdma.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cpu/rdma/state.h"

namespace dk {
namespace {

uint64_t power_of_two(uint64_t at_least) {
  uint64_t n = 1;
  while (n < at_least) n *= 2;
  return n;
}

uint64_t ring_bytes(const NicState &s) { return s.num_queues * (s.mask + 1) * sizeof(Work); }

bool make_arrays(NicState &s) {
  uint64_t peers = static_cast<uint64_t>(s.num_peers);
  s.slots = create_array<int32_t>(static_cast<uint64_t>(s.num_ranks));
  s.blocks = create_array<uint64_t>(peers);
  s.lost = create_array<std::atomic<uint32_t>>(peers);
  s.ringing = create_array<uint64_t>(peers / 64 + 1);
  s.queues = create_array<Queue>(s.num_queues);
  s.ready = create_array<std::atomic<uint64_t>>(s.num_words);
  s.active = create_array<int32_t>(s.num_queues);
  if (!s.slots || !s.blocks || !s.lost || !s.ringing || !s.queues || !s.ready || !s.active) return false;
  if (s.num_queues == 0) return true;
  void *rings =
      mmap(nullptr, ring_bytes(s), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  s.rings = rings == MAP_FAILED ? nullptr : static_cast<Work *>(rings);
  return s.rings != nullptr;
}

void create_queues(NicState &s, const dk_transport_open_params &p) {
  int32_t created = 0;
  for (int32_t r = 0; r < s.num_ranks; r++) s.slots[r] = -1;
  for (int32_t slot = 0; slot < s.num_peers; slot++) {
    int32_t peer = at<const int32_t>(p.host_peers)[slot];
    s.slots[peer] = slot;
    s.blocks[slot] = at<const uint64_t>(p.host_blocks)[peer];
    for (int qp = 0; qp < s.num_qps; qp++) {
      Queue &q = s.queue(peer, qp);
      q.ring = s.rings + static_cast<uint64_t>(created) * (s.mask + 1);
      q.peer = peer;
      q.created = created++;
    }
  }
}

}  // namespace

NicState::NicState(const dk_transport_open_params &p)
    : rank(p.rank),
      num_ranks(p.num_ranks),
      num_qps(p.num_qps),
      num_peers(p.num_peers),
      depth(static_cast<uint64_t>(p.qp_depth)),
      mask(power_of_two(depth) - 1),
      block_bytes(p.block_bytes),
      my_block(at<const uint64_t>(p.host_blocks)[p.rank]),
      num_queues(static_cast<uint64_t>(p.num_peers) * static_cast<uint64_t>(p.num_qps)),
      flags(p.flags),
      owner(getpid()),
      random(p.seed * uint64_t{DK_MAX_RANKS} + static_cast<uint64_t>(p.rank)),
      num_words(num_queues / 64 + 1) {}

NicState::~NicState() {
  if (rings) munmap(rings, ring_bytes(*this));
  pthread_mutex_destroy(&posting);
}

int32_t Nic::open(const dk_transport_open_params &p, Nic **out, int32_t *error) {
  Owned<NicState> state = create<NicState>(p);
  Owned<Nic> nic = state && make_arrays(*state) ? create<Nic>(state.get()) : nullptr;
  if (nic) create_queues(*state, p);
  *error = nic ? start_thread(*state) : ENOMEM;
  if (*error) return *error == ENOMEM ? DK_ENOMEM : DK_ESYSTEM;
  state.release();  // close() takes it back
  *out = nic.release();
  return DK_OK;
}

void Nic::close(Nic *nic) {
  Owned<NicState> state(nic->state_);
  if (!nic->forked()) stop_thread(*state);
  Owned<Nic>{nic};
}

bool Nic::put(int peer, int qp, void *dst, const void *src, uint64_t bytes, Signal signal) {
  NicState &s = *state_;
  Queue &q = s.queue(peer, qp);
  uint64_t sum = s.flags & DK_TRANSPORT_LATE ? sum_of(src, bytes) : 0;
  uint64_t there = s.blocks[s.slots[peer]] - s.my_block;  // offset from my block to the peer's
  pthread_mutex_lock(&s.posting);
  uint64_t number = q.posted.load(std::memory_order_relaxed), queued = number - q.completed.load() + 1;
  bool gone = s.is_down(q), room = queued <= s.depth;
  if (!gone && room) {
    s.work(q, number) = {
        address_of(dst) + there, address_of(src), bytes, address_of(signal.word) + there, signal.value, signal.op, sum};
    q.bytes.store(q.bytes.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
    if (queued > q.max_queued.load(std::memory_order_relaxed)) q.max_queued.store(queued, std::memory_order_relaxed);
    q.posted.store(number + 1);
  }
  pthread_mutex_unlock(&s.posting);
  if (gone || !room) return gone;
  notify_thread(s, q);
  return true;
}

// ---- Queries --------------------------------------------------------------------------------------------------------

int Nic::num_qps() const { return state_->num_qps; }
int32_t Nic::rank() const { return state_->rank; }
int Nic::num_ranks() const { return state_->num_ranks; }
uint64_t Nic::block_bytes() const { return state_->block_bytes; }
void *Nic::block() const { return at<void>(state_->my_block); }
bool Nic::forked() const { return getpid() != state_->owner; }
bool Nic::reaches(int peer) const { return peer >= 0 && peer < state_->num_ranks && state_->slots[peer] >= 0; }
uint64_t Nic::posted(int peer, int qp) const { return state_->queue(peer, qp).posted.load(); }
// Operations to a lost peer or on a broken QP count as completed at once; the thread drops them later.
static uint64_t completed_on(const NicState &s, const Queue &q) {
  return s.is_down(q) ? q.posted.load() : q.completed.load();
}
uint64_t Nic::completed(int peer, int qp) const { return completed_on(*state_, state_->queue(peer, qp)); }
bool Nic::lost(int peer) const { return reaches(peer) && state_->lost[state_->slots[peer]].load(); }
int32_t Nic::broken(int peer, int qp) const { return state_->queue(peer, qp).broken.load(); }

bool Nic::idle(int peer) const {
  for (int qp = 0; qp < num_qps(); qp++)
    if (!idle(peer, qp)) return false;
  return true;
}

bool Nic::idle() const {
  for (uint64_t i = 0; i < state_->num_queues; i++)
    if (completed_on(*state_, state_->queues[i]) != state_->queues[i].posted.load()) return false;
  return true;
}

uint64_t Nic::delivered() const {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < state_->num_queues; i++) sum += completed_on(*state_, state_->queues[i]);
  return sum;
}

QueueCounts Nic::counts(int peer, int qp) const {
  const Queue &q = state_->queue(peer, qp);
  uint64_t completed = q.completed.load();  // loaded before posted, so that it is never greater
  return {q.posted.load(), completed, q.bytes.load(), q.max_queued.load(), q.created};
}

// ---- Failures and the doorbell ------------------------------------------------------------------------------------

void Nic::lose(int peer) {
  state_->lost[state_->slots[peer]].store(1);
  for (int qp = 0; qp < state_->num_qps; qp++) notify_thread(*state_, state_->queue(peer, qp));
}

void Nic::break_qp(int peer, int qp, int32_t code) {
  int32_t well = 0;
  state_->queue(peer, qp).broken.compare_exchange_strong(well, code);
  notify_thread(*state_, state_->queue(peer, qp));
}

void Nic::set_doorbell(void *doorbell) {
  state_->doorbell_offset.store(doorbell ? address_of(doorbell) - state_->my_block + 1 : 0);
}

// ---- Waiting --------------------------------------------------------------------------------------------------------

template <class Reached>
static bool wait_until(NicState &s, uint64_t deadline_ns, Reached reached) {
  if (reached()) return true;
  s.waiters.fetch_add(1);
  bool there = false;
  for (;;) {
    uint32_t seen = s.completions.load();
    there = reached();
    uint64_t now = now_ns();
    if (there || now >= deadline_ns) break;
    sleep_on(s.completions, seen, min<uint64_t>(deadline_ns - now, 1000000000u), Scope::process);
  }
  s.waiters.fetch_sub(1);
  return there;
}

bool Nic::wait_for_room(int peer, int qp, uint64_t deadline_ns) {
  NicState &s = *state_;
  const Queue &q = s.queue(peer, qp);
  return wait_until(s, deadline_ns, [&] { return s.is_down(q) || q.posted.load() - q.completed.load() < s.depth; });
}

bool Nic::wait_until_completed(int peer, int qp, uint64_t until, uint64_t deadline_ns) {
  const Queue &q = state_->queue(peer, qp);
  return wait_until(*state_, deadline_ns, [&] { return q.completed.load() >= until; });
}

}  // namespace dk
