// worker.cuh - the kernel that plays the NIC (worker.h). Block 0 keeps the time: warps of it fetch posts, schedule
// them, deliver what is due, and report. Warps of the other blocks copy a chunk each, from the moment in which the port
// serves it. Words and completions appear when they are due and never before; bytes a little before
// (WorkerParams::early_ns).
#pragma once
#include "cuda/common/ptx.cuh"
#include "worker.h"

namespace testtransport {

namespace ptx = deepep::ptx;

constexpr uint32_t kFifo = 32, kChunk = 8192, kTurn = 4, kAll = 0xffffffffu;  // kTurn: chunks, while others wait
constexpr int kFetchers = 4, kFirstFetcher = 3, kCopyWarps = (kWorkerBlocks - 1) * kWorkerThreads / 32;
static_assert(kWindow % kCopyWarps == 0 && kRingSlots % kFifo == 0, "indices wrap");

struct Arrival {
  uint64_t due_ns;
  uint64_t word, value, compare, result, result_flag;
  uint32_t tag, slot;  // of its copy; tag 0: it has none
  uint8_t queue, atomic, word_bytes, last;
};

struct WorkerShared {
  Post fifo[kMaxQueues][kFifo];
  Arrival arrivals[kWindow];
  Area areas[kMaxAreas];
  uint32_t fetched[kMaxQueues], picked[kMaxQueues], complete[kMaxQueues];
  uint32_t scheduled, delivered;
  uint32_t outside, quit, lost, fetchers_ended, schedule_ended, deliver_ended;
  uint64_t late_ns, latest_ns;
  NicPort port;
  RoundRobin turn;
  uint64_t chunks;
};

__device__ inline uint32_t tag_of(uint64_t chunk) { return static_cast<uint32_t>(chunk / kWindow) + 1; }
__device__ inline int worker_lane() { return static_cast<int>(threadIdx.x % 32); }
// Of all lanes up to this one.
template <class T>
__device__ inline T sum_to_lane(T value) {
  for (int by = 1; by < 32; by *= 2) {
    const T lower = __shfl_up_sync(kAll, value, by);
    if (worker_lane() >= by) value += lower;
  }
  return value;
}
__device__ inline int leading(uint32_t ballot) { return ballot == kAll ? 32 : __ffs(static_cast<int>(~ballot)) - 1; }

template <class T>
__device__ inline T apply(T *word, Atomic what, T value, T compare) {
  switch (what) {
    case Atomic::kIncrement:
    case Atomic::kFetchIncrement: return atomicAdd_system(word, T(1));
    case Atomic::kAdd:
    case Atomic::kSignalAdd:
    case Atomic::kFetchAdd: return atomicAdd_system(word, value);
    case Atomic::kAnd:
    case Atomic::kFetchAnd: return atomicAnd_system(word, value);
    case Atomic::kOr:
    case Atomic::kFetchOr: return atomicOr_system(word, value);
    case Atomic::kXor:
    case Atomic::kFetchXor: return atomicXor_system(word, value);
    case Atomic::kFetch: return atomicAdd_system(word, T(0));
    case Atomic::kCompareSwap: return atomicCAS_system(word, compare, value);
    default: return atomicExch_system(word, value);  // set, signal, swap
  }
}
__device__ inline unsigned long long apply_word(void *word, Atomic what, int bytes, uint64_t value, uint64_t compare) {
  if (bytes == 8)
    return apply(static_cast<unsigned long long *>(word), what, static_cast<unsigned long long>(value),
                 static_cast<unsigned long long>(compare));
  if (bytes == 4)
    return apply(static_cast<unsigned *>(word), what, static_cast<unsigned>(value), static_cast<unsigned>(compare));
  if (bytes == 2)
    *static_cast<volatile unsigned short *>(word) = static_cast<unsigned short>(value);
  else
    *static_cast<volatile unsigned char *>(word) = static_cast<unsigned char>(value);
  return 0;
}

// ---- Block 0 --------------------------------------------------------------------------------------------------------

// One warp for several queues: moves posts from rings to shared memory.
__device__ inline void fetch(const WorkerParams &p, WorkerShared &s, int first) {
  WorkerState *state = p.state;
  for (bool open = true; open;) {
    // Read before the rings: what was posted before it counts.
    const bool quit = __any_sync(kAll, ptx::ld_acquire_cta(&s.quit) != 0);
    bool found = false;
    for (int q = first; q < state->num_queues; q += kFetchers) {
      const uint64_t head = state->heads[q], at = head + static_cast<uint64_t>(worker_lane());
      const uint32_t picked = __shfl_sync(kAll, ptx::ld_acquire_cta(&s.picked[q]), 0), fetched = s.fetched[q];
      const uint32_t room = kFifo - (fetched - picked);
      const Post *slot = state->rings[q] + at % kRingSlots;
      const bool ready =
          static_cast<uint32_t>(worker_lane()) < room && ptx::ld_acquire_sys(&slot->ready) == at / kRingSlots + 1;
      const int count = leading(__ballot_sync(kAll, ready));
      found |= count > 0 || room == 0;
      if (worker_lane() < count) {
        auto *to = reinterpret_cast<uint4 *>(&s.fifo[q][(fetched + static_cast<uint32_t>(worker_lane())) % kFifo]);
        for (int i = 0; i < 4; ++i) to[i] = ptx::ld_relaxed_sys_v4(reinterpret_cast<const uint4 *>(slot) + i);
      }
      __syncwarp();
      if (worker_lane() == 0 && count > 0) {
        ptx::st_release_cta(&s.fetched[q], fetched + static_cast<uint32_t>(count));
        const uint64_t now = head + static_cast<uint64_t>(count);
        state->heads[q] = now;
        if (now / 256 != head / 256) {  // posters of a full ring wait for it
          ptx::st_release_sys(&state->taken[q], now);
          ptx::st_release_sys(&p.control->taken[q], now);
        }
      }
      __syncwarp();
    }
    open = found || !quit;
  }
  if (worker_lane() == 0) atomicAdd(&s.fetchers_ended, 1u);
}

// Where a poster's address lies in this process, and how many bytes follow there; 0: nowhere.
__device__ inline uint64_t translate(const WorkerShared &s, int num_areas, uint64_t address, int pe, uint64_t *bytes) {
  *bytes = 0;
  for (int i = 0; i < num_areas; ++i) {
    const Area &area = s.areas[i];
    if (address - area.begin >= area.bytes) continue;
    *bytes = area.begin + area.bytes - address;
    return address + static_cast<uint64_t>(area.shift[pe]);
  }
  return 0;
}

// What a lane schedules: an operation, or a chunk of one.
struct Piece {
  uint64_t target, source, word;
  uint32_t bytes, room;  // room: where the target or the source, which has an address of the poster's, goes on
  bool first, last, dropped, outside;

  __device__ bool whole() const { return dropped || room == bytes; }  // no address in between
  __device__ uint32_t chunks() const { return whole() && (dropped || bytes == 0) ? 1 : (room + kChunk - 1) / kChunk; }
};

// The operation from its byte `at` on.
__device__ inline Piece piece_of(const WorkerParams &p, const WorkerShared &s, const Post &post, uint32_t at) {
  const int num_areas = p.state->num_areas;
  Piece piece{post.target + at, post.source + at, post.word, post.bytes - at, 0, at == 0, true, false, false};
  uint64_t room = piece.bytes, rest = 1;
  if ((post.flags & kSymmetric) != 0) {
    uint64_t &named = (post.flags & kReturns) != 0 ? piece.source : piece.target;
    if (piece.bytes != 0) named = translate(s, num_areas, named, post.pe, &room);
    if (post.word_bytes != 0) piece.word = translate(s, num_areas, piece.word, post.pe, &rest);
  }
  const bool outside = (room == 0 && piece.bytes != 0) || rest == 0;
  piece.dropped = outside || (*static_cast<const volatile uint32_t *>(&s.lost) >> post.pe & 1) != 0;
  piece.room = piece.dropped ? piece.bytes : static_cast<uint32_t>(room < piece.bytes ? room : piece.bytes);
  piece.outside = outside;
  return piece;
}

// The lane's piece is that of the port after those of lower lanes. Writes its arrival, and the mail of its copy.
__device__ inline void send_piece(const WorkerState &at, WorkerShared &s, const Post &post, const Piece &piece, int q,
                                  const Passage &passage, uint64_t chunk, bool copies, uint32_t index, uint64_t early) {
  const uint32_t slot = static_cast<uint32_t>(chunk % kWindow), tag = tag_of(chunk);
  if (copies) {
    const uint64_t begin = passage.due > passage.begin + early ? passage.due - early : passage.begin;
    auto *mail = const_cast<Mail *>(&at.mail[slot]);
    uint4 half;
    half.x = static_cast<uint32_t>(piece.target);
    half.y = static_cast<uint32_t>(piece.target >> 32);
    half.z = static_cast<uint32_t>(at.origin + (begin + 999) / 1000);
    half.w = tag;
    ptx::st_relaxed_sys_v4(&mail->target, half);
    half.x = static_cast<uint32_t>(piece.source);
    half.y = static_cast<uint32_t>(piece.source >> 32);
    half.z = piece.bytes;
    ptx::st_relaxed_sys_v4(&mail->source, half);
  }
  Arrival &arrival = s.arrivals[index % kWindow];
  arrival.due_ns = at.origin + (passage.due + 999) / 1000;
  arrival.tag = copies ? tag : 0;
  arrival.slot = slot;
  arrival.queue = static_cast<uint8_t>(q);
  arrival.last = piece.last;
  arrival.word_bytes = piece.last && !piece.dropped ? post.word_bytes : 0;
  arrival.atomic = post.atomic;
  arrival.word = piece.word;
  arrival.value = post.value;
  arrival.compare = post.source;
  arrival.result = (post.flags & kHasResult) != 0 ? post.target : 0;
  arrival.result_flag = post.result_flag;
}

// A lane's share of a turn: of the queue's operations, which lanes have in order, the chunk with the lane's number.
struct Share {
  Piece piece;
  uint32_t operation;        // its place among the lanes' operations
  uint32_t chunks;           // of the turn, at most `limit`
  uint32_t complete, begun;  // operations that end in this turn; bytes of the one after them that it moves
};

__device__ inline Share share_out(const Piece &operation, bool has_operation, uint32_t limit) {
  const int lane = worker_lane();
  const uint32_t mine = has_operation ? operation.chunks() : 0, until = sum_to_lane(mine);
  // What follows an address where the memory goes on elsewhere waits for the next turn.
  const int usable = leading(__ballot_sync(kAll, has_operation && operation.whole())) + 1;
  const uint32_t from = until - mine;
  const bool begins = has_operation && lane < usable && from < limit;
  const uint32_t starts = __reduce_or_sync(kAll, begins ? 1u << from : 0);
  const uint32_t begun = static_cast<uint32_t>(__popc(starts));
  Share share{};
  share.complete = static_cast<uint32_t>(__popc(__ballot_sync(kAll, begins && operation.whole() && until <= limit)));
  share.chunks = __reduce_max_sync(kAll, begins ? until < limit ? until : limit : 0);
  share.operation = static_cast<uint32_t>(__popc(starts & (kAll >> (31 - lane)))) - 1;

  const int of = static_cast<int>(share.operation);
  const uint32_t at = (static_cast<uint32_t>(lane) - __shfl_sync(kAll, from, of)) * kChunk;
  const uint32_t room = __shfl_sync(kAll, operation.room, of), bytes = __shfl_sync(kAll, operation.bytes, of);
  share.piece.target = __shfl_sync(kAll, operation.target, of) + at;
  share.piece.source = __shfl_sync(kAll, operation.source, of) + at;
  share.piece.word = __shfl_sync(kAll, operation.word, of);
  share.piece.first = __shfl_sync(kAll, operation.first, of) != 0 && at == 0;
  share.piece.dropped = __shfl_sync(kAll, operation.dropped, of) != 0;
  share.piece.outside = __shfl_sync(kAll, operation.outside, of) != 0;
  const uint32_t left = at < room ? room - at : 0;
  share.piece.bytes = share.piece.dropped || left < kChunk ? left : kChunk;
  share.piece.last = at + share.piece.bytes == bytes;
  if (share.complete < begun) {
    const int next = static_cast<int>(share.complete);
    const uint32_t moved = (share.chunks - __shfl_sync(kAll, from, next)) * kChunk;
    const uint32_t there = __shfl_sync(kAll, operation.room, next);
    share.begun = moved < there ? moved : there;
  }
  return share;
}

// One warp: takes queues in turn and passes their operations through the port, up to 32 chunks at once.
__device__ inline void schedule(const WorkerParams &p, WorkerShared &s) {
  WorkerState *state = p.state;
  const int num_queues = state->num_queues, lane = worker_lane();
  const NicTiming timing = state->timing;
  uint32_t done_bytes = 0;  // lane q: of the first operation of queue q
  NicPort port = s.port;
  RoundRobin turn = s.turn;
  uint64_t chunks = s.chunks;
  uint32_t scheduled = 0;
  while (true) {
    const bool closed = ptx::ld_acquire_cta(&s.fetchers_ended) == kFetchers;
    const int mine = lane < num_queues ? lane : 0;
    const uint32_t there = ptx::ld_acquire_cta(&s.fetched[mine]) - s.picked[mine];
    const uint32_t waiting = __ballot_sync(kAll, lane < num_queues && there != 0);
    if (waiting == 0 && __all_sync(kAll, closed)) break;
    const uint32_t room = __shfl_sync(kAll, kWindow - (scheduled - ptx::ld_acquire_cta(&s.delivered)), 0);
    if (waiting == 0 || room == 0) continue;

    const int q = turn.pick(waiting);
    const uint32_t picked = s.picked[q], before = __shfl_sync(kAll, done_bytes, q);
    const uint32_t limit = (waiting & (waiting - 1)) != 0 ? kTurn : 32, posts = __shfl_sync(kAll, there, q);
    const bool has_post = static_cast<uint32_t>(lane) < posts;
    const Post &mine_now = s.fifo[q][(picked + (has_post ? static_cast<uint32_t>(lane) : 0)) % kFifo];
    const Share share =
        share_out(piece_of(p, s, mine_now, lane == 0 || !has_post ? before : 0), has_post, limit < room ? limit : room);
    const Piece &piece = share.piece;
    const Post *post = &s.fifo[q][(picked + share.operation) % kFifo];
    const uint32_t count = share.chunks;
    const bool goes = static_cast<uint32_t>(lane) < count, copies = goes && piece.bytes != 0 && !piece.dropped;
    const uint64_t on_wire = piece.dropped ? 0 : piece.bytes + (piece.last ? post->word_bytes : 0u);
    const uint64_t time = goes ? port_time(timing, on_wire, piece.first) : 0, until = sum_to_lane(time);
    const uint64_t now = __shfl_sync(kAll, (ptx::global_timer_ns() - state->origin) * 1000, 0);
    const uint64_t begin = port.begin(now, __shfl_sync(kAll, until, 31));
    const uint64_t crossings = (post->flags & kReturns) != 0 ? 2 : 1, end = begin + until;
    const uint32_t copying = __ballot_sync(kAll, copies);
    if (goes)
      send_piece(*state, s, *post, piece, q, {end - time, end, end + timing.latency * crossings},
                 chunks + static_cast<uint64_t>(__popc(copying & ((1u << lane) - 1))), copies,
                 scheduled + static_cast<uint32_t>(lane), p.early_ns * 1000);
    if (goes && piece.outside) atomicAdd(&s.outside, 1u);
    __syncwarp();
    chunks += static_cast<uint64_t>(__popc(copying));
    scheduled += count;
    if (lane == q) done_bytes = (share.complete != 0 ? 0 : before) + share.begun;
    if (lane == 0) {
      ptx::st_release_cta(&s.scheduled, scheduled);
      if (share.complete != 0) ptx::st_release_cta(&s.picked[q], picked + share.complete);
    }
    __syncwarp();
  }
  if (lane != 0) return;
  s.port = port;
  s.turn = turn;
  s.chunks = chunks;
  ptx::st_release_cta(&s.schedule_ended, 1);
}

// One warp: lets words appear that are due and whose copies are complete, in the order of the port. Of one turn they
// may appear in any order, unless they are the same word.
__device__ inline void deliver(const WorkerParams &p, WorkerShared &s) {
  WorkerState *state = p.state;
  const int num_queues = state->num_queues;
  uint32_t delivered = 0, complete = 0;  // complete: lane q's queue
  uint64_t late = 0, latest = 0;
  while (true) {
    const bool closed = __all_sync(kAll, ptx::ld_acquire_cta(&s.schedule_ended) != 0);
    const uint32_t there = __shfl_sync(kAll, ptx::ld_acquire_cta(&s.scheduled), 0) - delivered;
    if (there == 0 && closed) break;
    const bool mine = static_cast<uint32_t>(worker_lane()) < there;
    const Arrival arrival = s.arrivals[(delivered + static_cast<uint32_t>(worker_lane())) % kWindow];
    const bool moved = mine && (arrival.tag == 0 || ptx::ld_acquire_gpu(&state->moved[arrival.slot]) == arrival.tag);
    const uint64_t now = ptx::global_timer_ns();
    const bool due = moved && now >= arrival.due_ns;
    const uint64_t word = due && arrival.word_bytes != 0 ? arrival.word : static_cast<uint64_t>(worker_lane());
    const uint32_t same = __match_any_sync(kAll, word), lower = (1u << worker_lane()) - 1;
    const int count = leading(__ballot_sync(kAll, due && (same & lower) == 0));
    const bool goes = worker_lane() < count;
    if (goes && arrival.word_bytes != 0) {
      const auto what = static_cast<Atomic>(arrival.atomic);
      if (arrival.word_bytes == 8 && arrival.result == 0 &&
          (what == Atomic::kSet || what == Atomic::kSignal || what == Atomic::kSignalSet)) {
        // The warps that copied have made their bytes visible to all before they said so.
        ptx::st_relaxed_sys(reinterpret_cast<uint64_t *>(arrival.word), arrival.value);
      } else {
        const unsigned long long old = apply_word(reinterpret_cast<void *>(arrival.word), what, arrival.word_bytes,
                                                  arrival.value, arrival.compare);
        if (arrival.result != 0) {
          auto *result = reinterpret_cast<uint64_t *>(arrival.result);
          ptx::st_relaxed_sys(result, static_cast<uint64_t>(old));
          ptx::st_release_sys(result + 1, arrival.result_flag);
        }
      }
    }
    if (goes) {
      late += now - arrival.due_ns;
      latest = now - arrival.due_ns > latest ? now - arrival.due_ns : latest;
    }
    for (int q = 0; q < num_queues && count > 0; ++q) {
      const uint32_t of_queue = __ballot_sync(kAll, goes && arrival.last != 0 && arrival.queue == q);
      if (worker_lane() == q) complete += static_cast<uint32_t>(__popc(of_queue));
    }
    __syncwarp();
    if (count == 0) continue;
    delivered += static_cast<uint32_t>(count);
    if (worker_lane() < num_queues) ptx::st_release_cta(&s.complete[worker_lane()], complete);
    if (worker_lane() == 0) ptx::st_release_cta(&s.delivered, delivered);
    __syncwarp();
  }
  atomicAdd(reinterpret_cast<unsigned long long *>(&s.late_ns), static_cast<unsigned long long>(late));
  latest = latest > 0xffffffffu ? 0xffffffffu : latest;
  latest = __reduce_max_sync(kAll, static_cast<uint32_t>(latest));
  __syncwarp();
  if (worker_lane() == 0) {
    s.latest_ns = latest;
    ptx::st_release_cta(&s.deliver_ended, 1);
  }
}

// One warp: publishes completions, reads what the host says, and ends the worker when nothing has come for long.
__device__ inline void report(const WorkerParams &p, WorkerShared &s) {
  WorkerState *state = p.state;
  const bool has_queue = worker_lane() < state->num_queues;
  const int q = has_queue ? worker_lane() : 0;
  const uint64_t base = state->done[q];
  uint32_t published = 0;
  uint64_t busy_at = ptx::global_timer_ns();
  for (bool open = true; open;) {
    open = __any_sync(kAll, ptx::ld_acquire_cta(&s.deliver_ended) == 0);
    const uint32_t complete = ptx::ld_acquire_cta(&s.complete[q]);
    const bool news = has_queue && complete != published;
    const bool busy = news || ptx::ld_acquire_cta(&s.fetched[q]) != complete;
    if (__any_sync(kAll, news)) {
      ptx::fence_acq_rel_sys();
      if (news) {
        ptx::st_relaxed_sys(&state->done[q], base + complete);
        ptx::st_relaxed_sys(&p.control->done[q], base + complete);
      }
      published = complete;
    }
    const uint64_t now = __shfl_sync(kAll, ptx::global_timer_ns(), 0);
    if (__any_sync(kAll, has_queue && busy)) busy_at = now;
    if (worker_lane() == 0) {
      const uint64_t stop = ptx::ld_relaxed_sys(&p.control->stop), lost = ptx::ld_relaxed_sys(&p.control->lost);
      *static_cast<volatile uint32_t *>(&s.lost) = static_cast<uint32_t>(lost);
      if (stop != 0 || now - busy_at > p.idle_ns) ptx::st_release_cta(&s.quit, 1);
    }
    __syncwarp();
  }
}

// ---- The other blocks -----------------------------------------------------------------------------------------------

template <class T>
__device__ inline void copy_small(uint64_t target, uint64_t source, uint32_t bytes) {
  for (uint32_t i = static_cast<uint32_t>(worker_lane()) * sizeof(T); i < bytes; i += 32 * sizeof(T))
    *reinterpret_cast<volatile T *>(target + i) = *reinterpret_cast<const volatile T *>(source + i);
}
__device__ inline void copy_chunk(uint64_t target, uint64_t source, uint32_t bytes) {
  constexpr uint32_t kAtOnce = 8, kStep = kAtOnce * 512;  // of each lane, in registers
  if ((target | source | bytes) % 16 == 0) {
    for (uint32_t first = static_cast<uint32_t>(worker_lane()) * 16; first < bytes; first += kStep) {
      uint4 data[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (first + i * 512 < bytes)
          data[i] = ptx::ld_relaxed_sys_v4(reinterpret_cast<const void *>(source + first + i * 512));
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (first + i * 512 < bytes) ptx::st_stream(reinterpret_cast<void *>(target + first + i * 512), data[i]);
    }
  } else if ((target | source | bytes) % 4 == 0) {
    copy_small<uint32_t>(target, source, bytes);
  } else {
    copy_small<uint8_t>(target, source, bytes);
  }
}

// A warp copies chunks w, w + kCopyWarps, ... until block 0 has ended, which it does when all chunks are complete.
__device__ inline void copy(const WorkerParams &p, int w) {
  WorkerState *state = p.state;
  uint64_t chunk = state->chunks;  // of this launch: block 0 changes it when it ends, and nothing is left to copy
  chunk += (static_cast<uint64_t>(w) + kCopyWarps - chunk % kCopyWarps) % kCopyWarps;
  while (true) {
    const uint32_t slot = static_cast<uint32_t>(chunk % kWindow), tag = tag_of(chunk);
    const uint4 from = ptx::ld_relaxed_sys_v4(&state->mail[slot].source);
    const uint4 to = ptx::ld_relaxed_sys_v4(&state->mail[slot].target);
    const bool ready = from.w == tag && to.w == tag;
    if (!__all_sync(kAll, ready)) {
      if (__any_sync(kAll, ptx::ld_relaxed_sys(&state->ended) == p.launch)) return;
      continue;
    }
    while (__any_sync(kAll, static_cast<int32_t>(static_cast<uint32_t>(ptx::global_timer_ns()) - to.z) < 0)) {
    }
    copy_chunk(static_cast<uint64_t>(to.y) << 32 | to.x, static_cast<uint64_t>(from.y) << 32 | from.x, from.z);
    __syncwarp();
    if (worker_lane() == 0) ptx::st_release_sys(&state->moved[slot], tag);  // what all lanes have stored comes first
    chunk += kCopyWarps;
  }
}

__device__ inline void work(const WorkerParams &p, WorkerShared &s) {
  WorkerState *state = p.state;
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (blockIdx.x != 0) {
    copy(p, static_cast<int>(blockIdx.x - 1) * (kWorkerThreads / 32) + warp);
    return;
  }
  if (threadIdx.x < kMaxQueues) s.fetched[threadIdx.x] = s.picked[threadIdx.x] = s.complete[threadIdx.x] = 0;
  if (threadIdx.x < kMaxAreas) s.areas[threadIdx.x] = state->areas[threadIdx.x];
  if (threadIdx.x == 0) {
    s.scheduled = s.delivered = s.quit = s.lost = s.fetchers_ended = s.schedule_ended = s.deliver_ended = 0;
    s.late_ns = s.latest_ns = 0;
    s.outside = 0;
    s.port = state->port;
    s.turn = state->turn;
    s.chunks = state->chunks;
    if (state->origin == 0) state->origin = ptx::global_timer_ns();
  }
  __syncthreads();
  if (warp == 0) schedule(p, s);
  if (warp == 1) deliver(p, s);
  if (warp == 2) report(p, s);
  if (warp >= kFirstFetcher && warp < kFirstFetcher + kFetchers) fetch(p, s, warp - kFirstFetcher);
  __syncthreads();
  if (threadIdx.x != 0) return;
  state->port = s.port;
  state->turn = s.turn;
  p.control->chunks += s.chunks - state->chunks;
  p.control->outside += s.outside;
  p.control->arrivals += s.scheduled;
  p.control->late_ns += s.late_ns;
  if (s.latest_ns > p.control->latest_ns) p.control->latest_ns = s.latest_ns;
  state->chunks = s.chunks;
  for (int q = 0; q < state->num_queues; ++q) {
    ptx::st_relaxed_sys(&state->taken[q], state->heads[q]);
    ptx::st_relaxed_sys(&p.control->taken[q], state->heads[q]);
  }
  ptx::fence_acq_rel_sys();
  ptx::st_release_sys(&state->ended, p.launch);
  ptx::st_release_sys(&p.control->running, 0);
}

}  // namespace testtransport
