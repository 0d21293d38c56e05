// combine_push.cuh - libdeepep_nvshmem.so: combine's parameters, and how rows get from their experts' rank to the
// collector inside the node: pushers store them into its rings, by bulk copies where the GPU has those.
#pragma once
#include "cuda/common/lanes.cuh"
#include "cuda/impl/normal/matrix.cuh"
#include "internode/normal/common.cuh"
#include "internode/normal/rings.h"

namespace deepep::internode {

struct CombineRoles {
  static constexpr int kSenders = 4, kNodeCollectors = 10, kTokenCollectors = 10;
  static constexpr int kWarps = kSenders + kNodeCollectors + kTokenCollectors, kThreads = kWarps * kWarp;
};
constexpr int kSumsAtOnce = 4;  // rows or tokens of a stream in one turn of a warp

// How many of a block's warps push rows and sum for nodes; the others sum tokens. stages: rows that a pusher has in
// shared memory on their way, moved by bulk copies; 0: its lanes load and store rows.
struct CombineShape {
  int pushers = CombineRoles::kSenders, node_sums = CombineRoles::kNodeCollectors;
  uint32_t stages = 0;

  __host__ __device__ int token_sums() const { return CombineRoles::kWarps - pushers - node_sums; }
  // Shared memory of a block: the stages of all pushers, a barrier for each, then the warps' lists of rows.
  __host__ __device__ uint64_t stage_bytes(uint32_t row_bytes) const {
    return static_cast<uint64_t>(pushers) * stages * row_bytes;
  }
  __host__ __device__ uint64_t barrier_bytes() const { return static_cast<uint64_t>(pushers) * stages * 8; }
};
// With bulk copies fewer warps push, each up to kSumsAtOnce rows at a time, as far as they fit into `shared` bytes.
inline CombineShape combine_shape(bool bulk, uint32_t row_bytes, uint64_t shared) {
  constexpr int kPushers = 2, kNodeSums = 11;
  const uint64_t fit = shared / (kPushers * (row_bytes + 8ull));
  if (!bulk || fit == 0) return {};
  return {kPushers, kNodeSums, static_cast<uint32_t>(min<uint64_t>(kSumsAtOnce, fit))};
}

struct InternodeCombineParams {
  CombineParams c;
  NodeView internode;
  CombineShape shape;
  RowRings rings;
  StreamLists lists;
};

// After a row's payload: the token, then its weights.
__device__ inline uint32_t *row_words(const InternodeCombineParams &p, uint8_t *row) {
  return reinterpret_cast<uint32_t *>(row + p.c.row_bytes);
}

// ---- Pushers: a stream is a channel's rows for tokens of a source ---------------------------------------------------

// The rows of this rank for tokens of a source.
struct OwnRows {
  const int32_t *tokens;
  int first, count;
};
__device__ inline OwnRows own_rows(const InternodeCombineParams &p, int source) {
  const TeamView &team = p.c.session.team;
  const int first = rows_before(p.c.rank_prefix_matrix(), team.num_ranks, source, team.rank);
  return {p.c.recv_src_idx() + first, first, p.c.rank_prefix_matrix()[source * team.num_ranks + team.rank] - first};
}

// The first of the rows from `row` on whose token belongs to the channel; rows.count or more: none.
__device__ inline int next_row_of(const InternodeCombineParams &p, const OwnRows &rows, int channel, int row) {
  constexpr int kUnroll = 8;
  for (; row < rows.count; row += kUnroll * kWarp) {
    int token[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int mine = row + u * kWarp + lane_id();
      token[u] = mine < rows.count ? rows.tokens[mine] : 0;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const bool belongs = row + u * kWarp + lane_id() < rows.count &&
                           static_cast<uint32_t>(token[u]) % p.rings.channels == static_cast<uint32_t>(channel);
      const uint32_t found = __ballot_sync(kAllLanes, belongs);
      if (found != 0) return row + u * kWarp + __ffs(static_cast<int>(found)) - 1;
    }
  }
  return row;
}

// A pusher's rows on their way; whole warps call its functions, lane 0 moves the rows.
struct PushStages {
  uint8_t *bytes;
  uint64_t *arrived;
  uint32_t count;
  uint32_t loaded, turns;  // of this turn; bit i: the parity of what stage i awaits

  // `shared`: of the block, `warp`: among its pushers.
  __device__ PushStages(const InternodeCombineParams &p, uint8_t *shared, int warp) {
    count = p.shape.stages;
    bytes = shared + static_cast<uint64_t>(warp) * count * p.c.row_bytes;
    arrived = reinterpret_cast<uint64_t *>(shared + p.shape.stage_bytes(p.c.row_bytes)) + warp * count;
    loaded = turns = 0;
#if DEEPEP_HAS_BULK_COPY
    if (lane_id() == 0) {
      for (uint32_t i = 0; i < count; ++i) ptx::mbarrier_init(&arrived[i], 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
#endif
  }
  __device__ void load(const uint8_t *row, uint32_t row_bytes) {
#if DEEPEP_HAS_BULK_COPY
    if (lane_id() == 0) {
      ptx::mbarrier_expect(&arrived[loaded], row_bytes);
      ptx::bulk_load(bytes + loaded * row_bytes, row, row_bytes, &arrived[loaded]);
    }
    ++loaded;
#endif
  }
  // Stores what this turn has loaded, row i at place(i); afterwards a release by lane 0 publishes the rows.
  template <class Place>
  __device__ void store(uint32_t row_bytes, Place place) {
#if DEEPEP_HAS_BULK_COPY
    if (lane_id() == 0 && loaded != 0) {
      ptx::fence_global_before_bulk();  // the collector has read the rows that were there
      for (uint32_t i = 0; i < loaded; ++i) {
        spin_in_block([&] { return ptx::mbarrier_try_wait(&arrived[i], turns >> i & 1); });
        ptx::bulk_store(place(i), bytes + i * row_bytes, row_bytes);
        ptx::bulk_commit();
      }
      ptx::bulk_wait<0>();
    }
    turns ^= (1u << loaded) - 1;
    loaded = 0;
    __syncwarp();
#endif
  }
};

__device__ inline void push_row(const InternodeCombineParams &p, int64_t row, uint8_t *to, PushStages &stages) {
  const uint8_t *from = p.c.x() + row * p.c.row_bytes;
  if (stages.count != 0)
    stages.load(from, p.c.row_bytes);
  else
    copy_payload(to, nullptr, from, p.c.row_bytes);
  uint32_t *words = row_words(p, to);
  if (lane_id() == 0) words[0] = static_cast<uint32_t>(p.c.recv_src_idx()[row]);
  for (int k = lane_id(); k < p.c.num_topk; k += kWarp)
    words[1 + k] = p.c.topk_weights() == nullptr ? 0 : __float_as_uint(p.c.topk_weights()[row * p.c.num_topk + k]);
}

__device__ inline Outcome serve_pusher(const InternodeCombineParams &p, uint64_t epoch, int stream, PushStages &stages,
                                       BlockedStream &blocked) {
  const TeamView &team = p.c.session.team;
  // Of all ranks but those of this one's index, whose rows it adds where they are.
  const int others = p.internode.num_peers - 1, sources = others * p.internode.num_nodes, channel = stream / sources,
            index = (p.internode.index + 1 + stream % others) % p.internode.num_peers,
            node = (p.internode.node + 1 + stream % sources / others) % p.internode.num_nodes,
            source = node * p.internode.num_peers + index, collector = p.internode.local_rank(index);
  RowStream *state = p.lists.by_rank + stream;
  if (state->closed != 0) return kDone;
  const OwnRows rows = own_rows(p, source);
  uint8_t *block = team.peers[collector];
  uint64_t *pushed = word_at(block, p.internode.at.pushed, push_index(p.internode, p.internode.index, node, channel));
  const uint32_t taken = read_count(
                     word_at(team.self, p.internode.at.taken, push_index(p.internode, index, node, channel)), epoch),
                 before = state->count;
  const auto place = [&](uint32_t number) { return block + p.rings.local(p.internode.index, node, channel, number); };
  const uint32_t end = before + (stages.count != 0 ? stages.count : kSumsAtOnce);
  uint32_t pushed_rows = before;
  int row = state->at;
  bool last = false;
  const InPhase phase(kPhaseCopy);
  while (!last && pushed_rows < end) {
    row = next_row_of(p, rows, channel, row);
    last = row >= rows.count;
    if (last || pushed_rows - taken >= p.rings.local_slots) break;
    push_row(p, rows.first + row, place(pushed_rows), stages);
    ++pushed_rows;
    ++row;
  }
  stages.store(p.c.row_bytes, [&](uint32_t i) { return place(before + i); });
  if (last || pushed_rows != before) write_count(pushed, epoch, pushed_rows | (last ? kLastRow : 0));
  if (lane_id() == 0) {
    state->at = row;
    state->count = pushed_rows;
    state->closed = last;
  }
  __syncwarp();
  if (last) return kDone;
  if (pushed_rows != before) return kMoved;
  blocked = {collector, static_cast<int64_t>(pushed_rows) - p.rings.local_slots + 1, taken};
  return kBlocked;
}

}  // namespace deepep::internode
