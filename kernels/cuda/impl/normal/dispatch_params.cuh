// dispatch_params.cuh - what dispatch is told, the words of a row's metadata, and where a destination's rows go.
#pragma once
#include "cuda/impl/normal/send_rows.cuh"

namespace deepep {

// Metadata of so many tokens is one ticket, with one system fence for all of them; fewer where theirs would take more
// shared memory than the block's buffers may have together.
constexpr uint32_t kMetaBatch = 16, kMetaBatchOfMany = 8;  // the latter where more warps send metadata
constexpr uint32_t kMetaSlots = 2;                         // buffers of a warp for what is on its way to ranks
constexpr uint32_t kMetaBuffers = 96 * 1024;

// Words of a row's metadata: scales, weights from num_scales on, the receiver's numbers of the experts, the token's
// number. Such a number takes half a word, all ones where the expert is another rank's; a word only where there are too
// many experts. The host fills this in: threads that worked it out each time they need it would divide all the time.
struct MetaShape {
  int32_t shift;             // 1: two numbers in a word, else 0
  uint32_t num_local, none;  // experts of a rank; the number of another rank's expert
  int32_t numbers_at, source_at, words;
  uint32_t stride;         // bytes
  uint32_t common_stride;  // as rows are loaded: scales, weights, experts, with room for what is made of them
};

struct DispatchParams {
  Session session;
  const uint8_t *x;
  const uint32_t *scales;
  int64_t scale_token_stride, scale_stride;
  const void *topk_idx;
  const uint32_t *topk_weights;
  const int32_t *rank_prefix_matrix, *send_head;
  uint32_t row_bytes, stage_bytes;
  uint32_t meta_rows;  // metadata of so many tokens is sent together
  int32_t num_tokens, num_scales, num_topk, index_bytes, num_experts, num_recv_tokens, num_worst_tokens;
  uint32_t cached, weights_given;
  int32_t recv_segment;
  uint64_t recv_segment_offset;
  uint8_t *recv_x;
  uint32_t *recv_scales;
  void *recv_topk_idx;
  uint32_t *recv_topk_weights;
  int32_t *recv_src_idx;

  MetaShape meta;

  __host__ __device__ int index_words() const { return index_bytes / 4; }  // as the caller has them
};

inline MetaShape meta_shape(const DispatchParams &p) {
  MetaShape meta{};
  meta.num_local = p.num_experts / p.session.team.num_ranks;
  meta.shift = meta.num_local < 0xffff ? 1 : 0;
  meta.none = meta.shift == 1 ? 0xffffu : 0xffffffffu;
  meta.numbers_at = p.num_scales + p.num_topk;
  meta.source_at = meta.numbers_at + ceil_div(p.num_topk, 1 + meta.shift);
  meta.words = meta.source_at + (p.cached ? 0 : 1);
  meta.stride = align_up(4u * meta.words, 16u);
  meta.common_stride = max(meta.stride, align_up(4u * (meta.numbers_at + p.num_topk * p.index_words()), 16u));
  return meta;
}

// One for each rank, in shared memory.
struct DispatchDest {
  uint8_t *rows;  // my first row there: its final place, or slot 0 of my ring; before the handshake its nvl region
  uint8_t *meta;  // slot 0 of my ring
  uint64_t *flags[2];
  const uint64_t *credits[2];  // here
  uint32_t slots, row_stride, meta_stride, direct;
  int32_t first_row, num_rows, arriving, reserved;  // mine there, and everybody's
};

__device__ inline int rows_before(const int32_t *matrix, int num_ranks, int source, int owner) {
  return source == 0 ? 0 : matrix[(source - 1) * num_ranks + owner];
}

__host__ __device__ inline RingShape dispatch_ring(const DispatchParams &p, bool direct) {
  return ring_shape(p.session.team.nvl_bytes, p.session.team.num_ranks, direct ? 0 : p.row_bytes, p.meta.words * 4);
}

__device__ inline Handshake dispatch_handshake(const DispatchParams &p, uint64_t epoch) {
  Handshake hand{};
  hand.epoch = epoch;
  hand.mine.hidden_bytes = p.row_bytes;
  hand.mine.op = DK_OP_DISPATCH;
  hand.mine.flags =
      (p.cached ? kEnterCached : 0) | (p.weights_given ? kEnterWeights : 0) | (p.num_tokens == 0 ? kEnterSilent : 0);
  hand.mine.num_experts = p.num_experts;
  hand.mine.num_topk = p.num_topk;
  hand.mine.num_scales = p.num_scales;
  hand.mine.row_limit = p.num_recv_tokens;
  hand.mine.segment = p.recv_segment;
  hand.mine.segment_offset = p.recv_segment_offset;
  return hand;
}

// Before the handshake, by the whole block: all of a destination that does not need the peer's message, which is on its
// way meanwhile.
__device__ inline void prepare_dests(const DispatchParams &p, DispatchDest *dests) {
  const TeamView &team = p.session.team;
  const int num_ranks = team.num_ranks, me = team.rank;
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    DispatchDest dest{};
    dest.first_row = rows_before(p.rank_prefix_matrix, num_ranks, me, r);
    dest.num_rows = p.rank_prefix_matrix[me * num_ranks + r] - dest.first_row;
    dest.arriving = p.rank_prefix_matrix[(num_ranks - 1) * num_ranks + r];
    dest.rows = team.peers[r] + team.nvl;
    for (int part = 0; part < 2; ++part) {
      dest.flags[part] = team.ring_flag(r, static_cast<RingPart>(part), me);
      dest.credits[part] = team.ring_credit(me, static_cast<RingPart>(part), r);
    }
    dests[r] = dest;
    if (blockIdx.x == 0)
      team.scratch->sent_bytes[r] = static_cast<uint64_t>(dest.num_rows) * (p.row_bytes + 4ull * p.num_scales);
  }
}

// After it, by the same threads. False: some rank has no room for what is sent to it.
__device__ inline bool set_up_dests(const DispatchParams &p, uint64_t epoch, DispatchDest *dests) {
  const TeamView &team = p.session.team;
  const int num_ranks = team.num_ranks, me = team.rank;
  bool good = true;
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const HandshakeMessage *from = team.handshake(me, epoch % kHandshakeCopies, r);
    DispatchDest &dest = dests[r];
    uint8_t *nvl = dest.rows;
    dest.direct = from->segment >= 0;
    const RingShape ring = dispatch_ring(p, dest.direct);
    dest.slots = ring.slots;
    dest.row_stride = dest.direct ? p.row_bytes : ring.payload_stride;
    dest.meta_stride = ring.meta_stride;
    dest.meta = nvl + ring.meta(me, 0);
    dest.rows = nvl + ring.payload(me, 0);
    if (dest.direct) {
      const uint64_t segment = team.segments[r * DK_MAX_SEGMENTS + from->segment];
      dest.rows =
          pointer<uint8_t>(segment) + from->segment_offset + static_cast<uint64_t>(dest.first_row) * p.row_bytes;
      good &= segment != 0;
    }
    if (from->row_limit >= 0 && dest.arriving > from->row_limit) {
      report_failure(p.session, DK_EMISMATCH, r, DK_FIELD_WORST_TOKENS, from->row_limit, dest.arriving, 0);
      good = false;
    } else if (!good) {
      report_failure(p.session, DK_EINTERNAL, r, DK_FIELD_NONE, from->segment, 0, 0);
    }
  }
  return __syncthreads_or(!good) == 0;
}

// The lowest of this lane's ranks whose ring has no room for the token's row yet; -1: all have.
__device__ inline int rank_without_room(const DispatchParams &p, const DispatchDest *dests, uint64_t epoch,
                                        RingPart part, const int32_t *heads) {
  for (int r = lane_id(); r < p.session.team.num_ranks; r += kWarp) {
    const int head = heads[r];
    if (head < 0 || static_cast<uint32_t>(head) < dests[r].slots || (part == kPayload && dests[r].direct)) continue;
    const RingPlace place = ring_place(head, dests[r].slots);
    if (ptx::ld_acquire_sys(&dests[r].credits[part][place.slot]) != ring_value(epoch, place.lap - 1)) return r;
  }
  return -1;
}
__device__ inline bool await_ring_room(const DispatchParams &p, const DispatchDest *dests, uint64_t epoch,
                                       RingPart part, const int32_t *heads) {
  int missing = -1;
  const bool good = warp_wait_or_fail(
      p.session, static_cast<int64_t>(epoch),
      [&] {
        missing = rank_without_room(p, dests, epoch, part, heads);
        return __all_sync(kAllLanes, missing < 0) != 0;
      },
      [&] { return missing; });
  __syncwarp();
  return good;
}

// The rows of this rank's tokens: what send_rows.cuh asks for.
struct DispatchJob {
  const DispatchParams &p;
  const DispatchDest *dests;
  uint64_t epoch;
  int32_t *heads;   // shared: [stages][R]
  int ticket = -1;  // lane 0: taken one ahead

  __device__ uint32_t *counter() const { return &p.session.team.scratch->tokens_taken[epoch % 2]; }
  __device__ void start() {
    if (lane_id() == 0) ticket = static_cast<int>(atomicAdd(counter(), 1u));
  }
  __device__ int next() {
    const int token = __shfl_sync(kAllLanes, ticket, 0);
    if (token >= p.num_tokens) return -1;
    if (lane_id() == 0) ticket = static_cast<int>(atomicAdd(counter(), 1u));
    return token;
  }
  __device__ void prefetch(int stage, int token) {
    const int num_ranks = p.session.team.num_ranks;
    for (int r = lane_id(); r < num_ranks; r += kWarp)
      ptx::copy_word_async(&heads[stage * num_ranks + r], &p.send_head[static_cast<int64_t>(token) * num_ranks + r]);
  }
  __device__ const uint8_t *source(int token) const { return p.x + static_cast<uint64_t>(token) * p.row_bytes; }
  __device__ const int32_t *heads_of(int stage) const { return heads + stage * p.session.team.num_ranks; }
  __device__ bool room(int stage, int) const {
    return __all_sync(kAllLanes, rank_without_room(p, dests, epoch, kPayload, heads_of(stage)) < 0) != 0;
  }
  __device__ bool await_room(int stage, int) const {
    return await_ring_room(p, dests, epoch, kPayload, heads_of(stage));
  }
  __device__ void extra(int, int) const {}
  template <class F>
  __device__ void each(int stage, int, F f) const {
    for (int r = 0; r < p.session.team.num_ranks; ++r) {
      const int head = heads_of(stage)[r];
      if (head < 0) continue;
      const uint32_t slot = dests[r].direct ? static_cast<uint32_t>(head) : ring_place(head, dests[r].slots).slot;
      f(dests[r].rows + static_cast<uint64_t>(slot) * dests[r].row_stride);
    }
  }
};

// A failed dispatch leaves rows that name nothing.
__device__ inline void clear_dispatch_outputs(const DispatchParams &p) {
  const int64_t rows = max(p.num_recv_tokens, 0), entries = rows * p.num_topk;
  for (int64_t i = threadIdx.x; i < entries; i += blockDim.x) {
    if (p.recv_topk_idx != nullptr)
      for (int w = 0; w < p.index_words(); ++w)
        static_cast<uint32_t *>(p.recv_topk_idx)[i * p.index_words() + w] = 0xffffffffu;
    if (p.recv_topk_weights != nullptr) p.recv_topk_weights[i] = 0;
  }
  for (int64_t i = threadIdx.x; p.recv_src_idx != nullptr && i < rows; i += blockDim.x) p.recv_src_idx[i] = 0;
}

}  // namespace deepep
