// send_rows.cuh - sending warps, which take rows by tickets and copy them to peers, and the publisher, which sets the
// flags of rows that have arrived there. A Job defines the rows, their sources and destinations:
//   void start()                   takes the first ticket
//   int next()                     the next row's number, -1: no more (whole warp; the same in all lanes)
//   void prefetch(stage, row)      starts to fetch what each() needs (cp.async by lanes, one commit by the caller)
//   const uint8_t *source(row)
//   bool room(stage, row)          every destination has room now                } whole warp
//   bool await_room(stage, row)    waits for that; false: the team failed        }
//   void extra(stage, row)         stores what goes to the peer beside the row   }
//   void each(stage, row, f)       f(address) for each destination, in all lanes
//   kByLanes                       whether each lane stores at a destination of its own:
//   bool by_lanes(stage, row, to)  `to`: the lane's destination, or null; false: each() has what is wrong with the row
#pragma once
#include "cuda/common/copy_row.cuh"
#include "cuda/sync/session.cuh"

namespace deepep {

constexpr int kSendStages = 3;       // rows (or pieces of 16 KB) in shared memory per sending warp
constexpr int kSendOutstanding = 1;  // of them being stored; the others are being loaded
constexpr int kSendAhead = kSendStages - kSendOutstanding;
constexpr uint32_t kMaxStageBytes = 16384;
constexpr uint32_t kQueueLength = 32;

// Shared memory of a sending warp: a queue of rows whose stores are complete, for the block's publisher; its stages.
struct SendQueue {
  uint32_t posted, finished, published;
  uint32_t own_rows;  // of an expanded dispatch: its turn at rows that stay here
  int32_t rows[kQueueLength];
  uint64_t arrived[kSendStages];
  int32_t stage_row[kSendStages], stage_piece[kSendStages];
};
static_assert(sizeof(SendQueue) % 16 == 0, "what follows is aligned");

// Called by all threads: each of the block's first threads clears a queue.
__device__ inline void init_queues(SendQueue *queues, int num_queues, bool bulk) {
  if (static_cast<int>(threadIdx.x) >= num_queues) return;
  SendQueue &queue = queues[threadIdx.x];
  queue.posted = queue.finished = queue.published = queue.own_rows = 0;
#if DEEPEP_HAS_BULK_COPY
  for (int i = 0; bulk && i < kSendStages; ++i) ptx::mbarrier_init(&queue.arrived[i], 1);
  ptx::mbarrier_init_fence();
#endif
}

// Whole warp; `posted` is the warp's count.
__device__ inline void post_row(SendQueue *queue, uint32_t &posted, int row) {
  __syncwarp();
  if (lane_id() == 0) {
    spin_in_block([&] { return posted - ptx::ld_acquire_cta(&queue->published) < kQueueLength; });
    queue->rows[posted % kQueueLength] = row;
    ptx::st_release_cta(&queue->posted, posted + 1);
  }
  ++posted;
}

// A sending warp: start() takes its first rows and begins to load them, which needs no peer; then run() or abandon(),
// since loads into shared memory must end before the block does.
template <bool kBulk, class Job>
struct RowSender;

#if DEEPEP_HAS_BULK_COPY
// The Hopper form: bulk copies through shared memory, one lane issues.
template <class Job>
struct RowSender<true, Job> {
  Job &job;
  SendQueue *queue;
  uint8_t *stages;
  uint32_t row_bytes, stage_bytes;
  bool publish = false;
  int loaded = 0, stored = 0, posted_items = 0;
  uint32_t posted = 0;
  int row = -1, piece = 0;
  bool more = true;

  __device__ int pieces() const { return static_cast<int>(ceil_div(row_bytes, stage_bytes)); }
  __device__ uint32_t piece_bytes(int which) const { return min(stage_bytes, row_bytes - which * stage_bytes); }

  // By the lane that issues: the piece that `stored` counts next has been loaded into its stage.
  __device__ void await_copy(int stage) {
    spin_in_block([&] { return ptx::mbarrier_try_wait(&queue->arrived[stage], (stored / kSendStages) & 1); });
  }
  __device__ void load_next() {
    if (more && (row < 0 || piece == pieces())) {
      row = job.next();
      piece = 0;
      more = row >= 0;
    }
    if (more) {
      const int stage = loaded % kSendStages;
      if (lane_id() == 0) {
        queue->stage_row[stage] = row;
        queue->stage_piece[stage] = piece;
        ptx::mbarrier_expect(&queue->arrived[stage], piece_bytes(piece));
        ptx::bulk_load(stages + stage * stage_bytes, job.source(row) + static_cast<uint64_t>(piece) * stage_bytes,
                       piece_bytes(piece), &queue->arrived[stage]);
      }
      job.prefetch(stage, row);
      ++loaded;
      ++piece;
    }
    ptx::copy_words_commit();
  }
  // Posts rows whose stores are complete to the publisher; a row is complete with its last piece.
  __device__ void post_until(int complete) {
    for (; posted_items < complete; ++posted_items) {
      const int stage = posted_items % kSendStages;
      if (queue->stage_piece[stage] == pieces() - 1)
        post_row(queue, posted, queue->stage_row[stage]);
      else
        __syncwarp();  // all lanes have read the stage before it is filled again
    }
  }
  __device__ void drain() {
    if (Job::kByLanes || lane_id() == 0) ptx::bulk_wait<0>();
    __syncwarp();
    if (publish) post_until(stored);
  }
  // Stores one piece at all its destinations. False: the team failed.
  __device__ bool store_next() {
    const int stage = stored % kSendStages;
    const int which = queue->stage_row[stage], at = queue->stage_piece[stage];
    if (!job.room(stage, which)) {
      drain();  // peers may wait for rows that are still in flight before they free a slot
      if (!job.await_room(stage, which)) return false;
      ptx::fence_global_before_bulk();
    }
    if (Job::kByLanes || lane_id() == 0) await_copy(stage);
    const uint32_t bytes = piece_bytes(at);
    const uint64_t offset = static_cast<uint64_t>(at) * stage_bytes;
    bool done = false;
    if constexpr (Job::kByLanes) {
      uint8_t *to;
      done = job.by_lanes(stage, which, to);
      if (done && to != nullptr) ptx::bulk_store(to + offset, stages + stage * stage_bytes, bytes);
    }
    if (!done)
      job.each(stage, which, [&](uint8_t *to) {
        if (lane_id() == 0) ptx::bulk_store(to + offset, stages + stage * stage_bytes, bytes);
      });
    if (Job::kByLanes || lane_id() == 0) ptx::bulk_commit();  // a thread waits for its own stores
    if (at == pieces() - 1) job.extra(stage, which);
    ++stored;
    return true;
  }
  __device__ void start() {
    job.start();
    for (int i = 0; i < kSendAhead; ++i) load_next();
  }
  __device__ void abandon() {
    for (; stored < loaded; ++stored)
      if (lane_id() == 0) await_copy(stored % kSendStages);
    ptx::copy_words_wait<0>();
  }
  __device__ void run(bool publish_rows) {
    publish = publish_rows;
    bool good = true;
    while (good && stored < loaded) {
      ptx::copy_words_wait<kSendAhead - 1>();
      __syncwarp();
      good = store_next();
      if (!good) break;
      if (Job::kByLanes || lane_id() == 0) {
        if (publish)
          ptx::bulk_wait<kSendOutstanding>();
        else
          ptx::bulk_wait_read<kSendOutstanding>();
      }
      __syncwarp();
      if (publish) post_until(stored - kSendOutstanding);
      load_next();
    }
    drain();
    abandon();
  }
};
#endif

// The form for compute capability 8.0: a warp carries a row in registers.
template <bool kBulk, class Job>
struct RowSender {
  Job &job;
  SendQueue *queue;
  uint8_t *stages;
  uint32_t row_bytes, stage_bytes;

  __device__ void carry(int row) {
    constexpr int kUnroll = 8;
    const uint8_t *from = job.source(row);
    const int chunks = static_cast<int>(row_bytes / 16);
    for (int first = lane_id(); first < chunks + lane_id(); first += kWarp * kUnroll) {
      uint4 data[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (first + u * kWarp < chunks) data[u] = ptx::ld_stream(from + 16ull * (first + u * kWarp));
      job.each(0, row, [&](uint8_t *to) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (first + u * kWarp < chunks) ptx::st_stream(to + 16ull * (first + u * kWarp), data[u]);
      });
    }
  }
  __device__ void start() { job.start(); }
  __device__ void abandon() {}
  __device__ void run(bool publish) {
    uint32_t posted = 0;
    for (int row = job.next(); row >= 0; row = job.next()) {
      __syncwarp();
      job.prefetch(0, row);
      ptx::copy_words_commit();
      ptx::copy_words_wait<0>();
      __syncwarp();
      if (!job.room(0, row) && !job.await_room(0, row)) return;
      carry(row);
      job.extra(0, row);
      if (publish) post_row(queue, posted, row);
    }
  }
};

// The sender of this warp, in shared memory for all sending warps of the block.
template <bool kBulk, class Job>
__device__ inline RowSender<kBulk, Job> row_sender(Job &job, SendQueue *queues, uint8_t *stages, uint32_t row_bytes,
                                                   uint32_t stage_bytes) {
  return {job, queues + warp_id(), stages + static_cast<uint64_t>(warp_id()) * kSendStages * stage_bytes, row_bytes,
          stage_bytes};
}

// The publisher: one fence for all rows that the block's senders have completed, then their flags. flags(row, which)
// stores the flag of destination `which` < per_row of a row. Returns when all senders have finished, all they sent is
// published, and a fence is behind every row, also of senders that post none.
template <class Flags>
__device__ inline void publish_rows(SendQueue *queues, int num_queues, int per_row, Flags flags) {
  const int lane = lane_id();
  uint32_t published = 0;  // of the queue of this lane
  for (;;) {
    const bool mine = lane < num_queues;
    // Read before `posted`, which is final if this is set.
    const bool finished = !mine || ptx::ld_acquire_cta(&queues[lane].finished) != 0;
    const uint32_t posted = mine ? ptx::ld_acquire_cta(&queues[lane].posted) : 0;
    const uint32_t news = __ballot_sync(kAllLanes, posted != published);
    if (news == 0) {
      if (!__all_sync(kAllLanes, finished)) continue;
      __syncwarp();
      if (__all_sync(kAllLanes, published == 0)) ptx::fence_acq_rel_sys();
      return;
    }
    __syncwarp();
    ptx::fence_acq_rel_sys();
    for (uint32_t left = news; left != 0; left &= left - 1) {
      const int which = __ffs(static_cast<int>(left)) - 1;
      const uint32_t from = __shfl_sync(kAllLanes, published, which), to = __shfl_sync(kAllLanes, posted, which);
      const int pairs = static_cast<int>(to - from) * per_row;
#pragma unroll 1
      for (int i = lane; i < pairs; i += kWarp)
        flags(queues[which].rows[(from + i / per_row) % kQueueLength], i % per_row);
      __syncwarp();
    }
    published = posted;
    if (mine) ptx::st_release_cta(&queues[lane].published, published);
  }
}

}  // namespace deepep
