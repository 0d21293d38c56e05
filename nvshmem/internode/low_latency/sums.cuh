// sums.cuh - libdeepep_nvshmem.so, low latency for teams with a transport: combine's rows are summed at the experts'
// rank before they cross. The order of additions is that of one node (kernels/cuda/impl/low_latency/combine_send.cuh):
// a token's rows here by its entries, then the rows of ranks at the token's rank by the entries of their lowest
// experts. The weights come from the dispatch if that had them; else every combine sends them first, in one message for
// each rank, and a call that also receives waits for them. The send half alone never waits: toward ranks whose weights
// it does not have it sends each expert's row by itself. A row's word says which of the two it is, so ranks need not
// agree.
#pragma once
#include "internode/low_latency/logfmt.cuh"
#include "internode/low_latency/table.cuh"

namespace deepep::internode {

struct InternodeLlCombineParams : LowLatencyCombineBuffers {
  InternodeLlParams call;
};

// Values of a row's signal word: bits. Above them, of a spread row, the first block that is coded.
enum : uint32_t { kRowPlain = 1, kRowSum = 2, kRowLogfmt = 4, kRowSpread = 8, kRowAllCoded = 16 };
constexpr int kSpreadFirstAt = 5;
__device__ __forceinline__ bool is_sum(uint32_t kind) { return (kind & kRowSum) != 0; }
__device__ __forceinline__ bool is_logfmt(uint32_t kind) { return (kind & kRowLogfmt) != 0; }
__device__ __forceinline__ bool is_spread(uint32_t kind) { return (kind & kRowSpread) != 0; }
__device__ __forceinline__ bool is_all_coded(uint32_t kind) { return (kind & kRowAllCoded) != 0; }
static_assert(kMaxLogChannels / kScaleChannels <= 1 << (16 - kSpreadFirstAt), "16 bits of a word");

// Of a row in LogFMT.
__device__ __forceinline__ uint32_t coded_kind(const uint4 &coded, int blocks) {
  return kRowLogfmt | (coded_before(coded, blocks) == blocks ? kRowAllCoded : 0);
}
// By the thread that sends a spread row's word, after its blocks: the bits, if it has coded blocks. Returns what the
// word says of it.
__device__ __forceinline__ uint32_t end_spread_row(uint8_t *row, int blocks, const uint4 &coded) {
  if (!is_any_coded(coded)) return 0;
  const int first = first_coded(coded);
  ptx::st_stream(row + first * kPlainBlockBytes + kSpreadBitsAt, coded);
  return coded_kind(coded, blocks) | kRowSpread | static_cast<uint32_t>(first) << kSpreadFirstAt;
}

// ---- Which rows are summed ------------------------------------------------------------------------------------------

// What a combine that sends knows of the dispatches before it.
struct KnownTables {
  int table;  // of the dispatch that made src_info, if it is the newest one of that memory and had this shape; -1: none
  bool sends_weights;  // this rank's weights go to the experts' ranks: some of them may wait for them
};
__device__ inline KnownTables find_table(const InternodeLlParams &p) {
  if (!p.sends()) return {-1, false};
  ReceivedDispatch received[kTables];  // all loads are under way together
#pragma unroll
  for (int i = 0; i < kTables; ++i) received[i] = p.state->received[i];
  KnownTables known{-1, false};
  uint64_t newest = 0;
  bool fits = false, brought = true;
#pragma unroll
  for (int i = 0; i < kTables; ++i) {
    const ReceivedDispatch &it = received[i];
    brought &= it.src_info == 0 || it.brought_weights != 0;
    if (it.src_info != reinterpret_cast<uint64_t>(p.src_info) || it.src_info == 0 || it.number <= newest) continue;
    known.table = i;
    newest = it.number;
    fits = it.num_experts == p.num_experts && it.max_tokens == p.max_tokens && it.num_topk == p.num_topk;
  }
  if (!fits) known.table = -1;
  known.sends_weights = !p.shrinks() && (known.table < 0 || !brought);
  return known;
}

// For each rank the number of tokens whose sums go there, with kTableHasWeights where their weights are known;
// kApart: each row by itself.
constexpr int32_t kApart = -1;
// With zero copy the buffer of staged rows has the caller's rows, and no room for sums.
__device__ inline bool may_sum(const InternodeLlParams &p, int table) {
  return table >= 0 && (p.flags & (DK_LL_UNREDUCED | DK_LL_ZERO_COPY)) == 0;
}
// What a thread loads of the plan before the block knows whether the team has failed.
struct PlanLoads {
  int32_t count;  // of the table, for this thread's rank
  int64_t range;  // this thread's word of layout_range
};
__device__ __forceinline__ PlanLoads load_plan(const InternodeLlParams &p, int table) {
  const int thread = static_cast<int>(threadIdx.x);
  const bool wanted = may_sum(p, table);
  return {wanted && thread < p.session.team.num_ranks ? table_counts(p, table)[thread] : 0,
          wanted && thread < p.num_experts ? p.layout_range[thread] : 0};
}

// By the whole block, into shared memory: sums [R] and the first rows [L][R] of sources. Returns the greatest number of
// sums.
__device__ inline int plan_sums(const InternodeLlParams &p, int table, const PlanLoads &loads, int32_t *sums,
                                int32_t *first_row) {
  const int thread = static_cast<int>(threadIdx.x);
  __shared__ int32_t most;
  const bool sums_here = may_sum(p, table);
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
#pragma unroll 1
  for (int r = threadIdx.x; r < p.session.team.num_ranks; r += kLlThreads) {
    int32_t count = !sums_here ? kApart : r == thread ? loads.count : table_counts(p, table)[r];
    if (count >= 0 && (count & kTableHasWeights) == 0 && (!p.receives() || p.shrinks())) count = kApart;
    sums[r] = count;
    if (count >= 0) atomicMax(&most, num_tokens_of(count));
  }
  // B rows from there on are the expert's, whatever the caller's tensor holds.
  const int64_t last = p.rows_per_expert() - p.max_tokens;
#pragma unroll 1
  for (int i = threadIdx.x; sums_here && i < p.num_experts; i += kLlThreads)
    first_row[i] =
        static_cast<int32_t>(min(max((i == thread ? loads.range : p.layout_range[i]) >> 32, int64_t{0}), last));
  __syncthreads();
  return most;
}

// ---- Weights --------------------------------------------------------------------------------------------------------

// Blocks that send sums: all but the control block where the grid is not tiny, since what it waits for holds up no row.
__device__ __forceinline__ int num_workers() {
  constexpr int kTinyGrid = 32;
  return static_cast<int>(gridDim.x) - (gridDim.x > kTinyGrid ? 1 : 0);
}

// By a warp: the weights of a token's entries at a rank, as that rank's table lists them.
__device__ inline void store_weights(const InternodeLlParams &p, int64_t index, float weight, int dest, float *to) {
  const int expert = static_cast<int>(index);
  const uint32_t below = (1u << lane_id()) - 1, same = __match_any_sync(kAllLanes, expert);
  const float sum = sum_of_same(p, expert, weight, same);
  const bool mine =
      static_cast<uint32_t>(expert - dest * p.num_local) < static_cast<uint32_t>(p.num_local) && (same & below) == 0;
  const uint32_t n = __popc(__ballot_sync(kAllLanes, mine) & below);
  if (mine && n < p.at.max_entries) to[n] = sum;
}

// Whole block; the last of those that send sums have a rank each.
__device__ inline void send_weights(const InternodeLlParams &p, uint64_t epoch) {
  constexpr int kTokens = 8;  // loads in flight together
  const TeamView &team = p.session.team;
  const int slot = slot_of(epoch), workers = num_workers();
  const uint32_t used = align_up<uint32_t>(4 * static_cast<uint32_t>(p.num_tokens) * p.at.max_entries, 16);
  if (static_cast<int>(blockIdx.x) >= workers) return;
#pragma unroll 1
  for (int i = workers - 1 - static_cast<int>(blockIdx.x); i < team.num_ranks; i += workers) {
    const int dest = (team.rank + i) % team.num_ranks;
    const uint64_t in = p.at.weights_in[slot] + static_cast<uint64_t>(team.rank) * p.at.weights_bytes;
    uint8_t *block = p.blocks[dest],
            *to = block != nullptr
                      ? block + in
                      : mine_at(p, p.at.weights_out[slot] + static_cast<uint64_t>(dest) * p.at.weights_bytes);
#pragma unroll 1
    for (int first = warp_id(); first < p.num_tokens; first += kTokens * kLlWarps) {
      int64_t index[kTokens];
      float weight[kTokens];
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        index[n] = load_index_of_lane(p, first + n * kLlWarps);
        weight[n] = load_weight_of_lane(p, first + n * kLlWarps);
      }
#pragma unroll
      for (int n = 0; n < kTokens; ++n)
        if (first + n * kLlWarps < p.num_tokens)
          store_weights(p, index[n], weight[n], dest,
                        reinterpret_cast<float *>(to) + static_cast<uint64_t>(first + n * kLlWarps) * p.at.max_entries);
    }
    __syncthreads();
    if (warp_id() == 0)
      send_delivery(p, {dest, block, max(used, 16u), in, message_word_at(p, epoch, team.rank),
                        signal_word(epoch, team.rank, 0), to});
  }
}

// ---- One sum --------------------------------------------------------------------------------------------------------

struct SumList {  // shared, of a group: the rows of x that belong to a token
  const uint8_t *row[kMaxTopk];
  float weight[kMaxTopk];
  uint32_t coded[4];  // LogFMT: a bit for each block
  int32_t count, token, lowest_expert;

  __device__ uint4 all_coded() const { return {coded[0], coded[1], coded[2], coded[3]}; }
};

// By a warp: whether a source's weights have come. The wait ends as all others do; then the sum is not sent.
__device__ inline bool await_weights(const InternodeLlParams &p, uint64_t epoch, int source) {
  bool here = false;
  if (lane_id() == 0) {
    const uint64_t start = ptx::global_timer_ns();
    here = await_message_word(p, epoch, epoch, source);
    if (is_control_block())  // groups wait at the same time
      atomicMax(reinterpret_cast<unsigned long long *>(&p.session.team.scratch->wait_ns[source]),
                ptx::global_timer_ns() - start);
  }
  return __shfl_sync(kAllLanes, static_cast<int>(here), 0) != 0;
}

struct SumWords {  // of the table, for a source's token: its head and the lane's entry
  uint64_t head, entry;
};
__device__ __forceinline__ SumWords load_words(const InternodeLlParams &p, int table, int source, int number) {
  const uint64_t *words = table_token(p, table, source, number);
  return {words[0], lane_id() < static_cast<int>(p.at.max_entries) ? words[1 + lane_id()] : 0};
}

// By the first warp of a group: lists the rows of a source's token.
__device__ inline void read_sum(const InternodeLlCombineParams &c, uint64_t epoch, int source, const SumWords &words,
                                bool has_weights, const int32_t *first_row, SumList *list) {
  const InternodeLlParams &p = c.call;
  const int lane = lane_id();
  const uint64_t head = words.head, entry = words.entry;
  const int token = static_cast<int>(head & 0xffff), expert = static_cast<int>(entry >> 16 & 0xffff),
            position = static_cast<int>(entry & 0xffff);
  bool good = token < p.max_tokens && !is_masked(p.session, source);
  good = __shfl_sync(kAllLanes, static_cast<int>(good), 0) != 0;  // a mask may be set meanwhile
  const int count = good ? min(static_cast<int>(head >> 32), static_cast<int>(p.at.max_entries)) : 0;
  const bool mine = lane < count && expert < p.num_local && position < p.max_tokens;
  float weight = __uint_as_float(static_cast<uint32_t>(entry >> 32));
  bool here = true;
  if (!has_weights && count > 0) {
    here = await_weights(p, epoch, source);
    const auto *sent =
        mine_at<uint32_t>(p, p.at.weights_in[slot_of(epoch)] + static_cast<uint64_t>(source) * p.at.weights_bytes);
    if (here && mine)
      weight = __uint_as_float(ptx::ld_relaxed_sys(sent + static_cast<uint64_t>(token) * p.at.max_entries + lane));
  }
  const uint32_t rows = here ? __ballot_sync(kAllLanes, mine) : 0;
  const int lowest = __reduce_min_sync(kAllLanes, mine ? expert : 0x7fffffff);
  if ((rows >> lane & 1) != 0) {
    const int n = __popc(rows & ((1u << lane) - 1));
    const int64_t row = first_row[expert * p.session.team.num_ranks + source] + position;
    list->row[n] = c.x + static_cast<uint64_t>(expert * p.rows_per_expert() + row) * c.x_row_stride;
    list->weight[n] = weight;
  }
  if (lane < 4) list->coded[lane] = 0;
  if (lane == 0) {
    list->count = __popc(rows);
    list->token = token;
    list->lowest_expert = lowest;
  }
}

// By a group: chunks first + thread, + kLlGroupThreads, ... of a sum; zeros past the end. Loads of several chunks and
// rows are in flight together.
template <int kChunks>
__device__ __forceinline__ void sum_piece(const SumList *list, int base, int chunks, uint4 (&out)[kChunks]) {
  constexpr int kRows = 2;
  float sum[kChunks][8] = {};
#pragma unroll 1
  for (int first = 0; first < list->count; first += kRows) {
    uint4 data[kRows][kChunks];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (first + n >= list->count) continue;
      const uint8_t *from = list->row[first + n] + 16 * base;
#pragma unroll
      for (int u = 0; u < kChunks; ++u)
        if (base + u * kLlGroupThreads < chunks) data[n][u] = ptx::ld_stream(from + 16 * kLlGroupThreads * u);
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (first + n >= list->count) continue;
#pragma unroll
      for (int u = 0; u < kChunks; ++u)
        if (base + u * kLlGroupThreads < chunks) add_weighted(sum[u], data[n][u], list->weight[first + n]);
    }
  }
#pragma unroll
  for (int u = 0; u < kChunks; ++u) out[u] = round_bf16(sum[u]);
}
template <int kChunks>
__device__ __forceinline__ void store_piece(uint8_t *to, int base, int chunks, const uint4 (&data)[kChunks]) {
#pragma unroll
  for (int u = 0; u < kChunks; ++u)
    if (base + u * kLlGroupThreads < chunks) ptx::st_stream(to + 16 * (base + u * kLlGroupThreads), data[u]);
}

// Chunks that a thread has at a time.
constexpr int kPieceChunks = 4;

struct Coding {  // shared, of a group that sends LogFMT: what the codes of a sum's blocks need
  LogEncoder *encoders;
  uint32_t *ranges, *places;
  uint4 *sum;  // null: there is no room for it
};
__host__ __device__ inline uint32_t coding_bytes(int hidden) {
  return align_up<uint32_t>(static_cast<uint32_t>(hidden / kScaleChannels) * (sizeof(LogEncoder) + 8), 16);
}
__device__ __forceinline__ Coding coding_of(const InternodeLlParams &p, void *shared, int group) {
  if (p.coding_at == 0) return {};
  const uint32_t blocks = p.hidden / kScaleChannels, bytes = coding_bytes(p.hidden);
  auto *at = static_cast<uint8_t *>(shared) + p.coding_at;
  auto *encoders = reinterpret_cast<LogEncoder *>(at + group * bytes);
  auto *ranges = reinterpret_cast<uint32_t *>(encoders + blocks);
  auto *sums = reinterpret_cast<uint4 *>(at + kLlGroups * bytes);
  return {encoders, ranges, ranges + blocks, p.keeps_sums ? sums + group * (p.hidden / 8) : nullptr};
}

// By a group, each chunk by one thread: which blocks are to be coded, and their ranges.
__device__ __forceinline__ void choose_block(SumList *list, const Coding &coding, int chunk, int chunks,
                                             const uint4 &data) {
  const BlockRange bits = range_of_block(data);
  if (chunk >= chunks || chunk % 16 != 0) return;
  coding.ranges[chunk / 16] = range_word(bits);
  if (is_log_coded(bits)) atomicOr(&list->coded[chunk / 512], 1u << (chunk / 16 % 32));
}
// By a group, each block by one thread: where it lies and how its codes are made. Writes the ranges of coded blocks.
__device__ __forceinline__ void place_blocks(uint8_t *to, int blocks, const uint4 &coded, const Coding &coding,
                                             int thread) {
#pragma unroll 1
  for (int block = thread; block < blocks; block += kLlGroupThreads) {
    const BlockRange bits{coding.ranges[block] & 0x7fff, coding.ranges[block] >> 15};
    const uint32_t place = coding.places[block] = place_of_block(coded, block);
    if ((place & kCodedPlace) == 0) continue;
    coding.encoders[block] = log_encoder(log_range(bits));
    write_range(to + (place & ~kCodedPlace), bits);
  }
}

// By a group: stores a sum in LogFMT, spread; list->coded has the bits of its blocks after a barrier.
__device__ __noinline__ inline void store_spread_sum(const InternodeLlParams &p, SumList *list, uint8_t *to,
                                                     int thread) {
  const int chunks = p.hidden / 8;
#pragma unroll 1
  for (int base = thread; base - thread < chunks; base += kPieceChunks * kLlGroupThreads) {
    uint4 data[kPieceChunks];
    sum_piece(list, base, chunks, data);
#pragma unroll
    for (int u = 0; u < kPieceChunks; ++u) {
      const int chunk = base + u * kLlGroupThreads, block = chunk / 16, part = chunk % 16;
      const BlockRange range = range_of_block(data[u]);
      if (chunk < chunks && store_spread_part(to, block, part, data[u], range) && part == 0)
        atomicOr(&list->coded[block / 32], 1u << (block % 32));
    }
  }
}

// By a group: writes a sum in LogFMT, or as it is where no block is coded. Returns its bytes. Which blocks are coded
// must be known first, so the sum is kept until then; without room for it, it is made again. The loops take a chunk at
// a time: a call runs them once, and waits for code that is longer (RATIONALE.md).
__device__ __noinline__ inline uint32_t write_logfmt_sum(const InternodeLlParams &p, SumList *list, uint8_t *to,
                                                         const Coding &coding, int group, int thread, uint32_t &kind) {
  const int chunks = p.hidden / 8;
#pragma unroll 1
  for (int base = thread; base < chunks && coding.sum != nullptr; base += kPieceChunks * kLlGroupThreads) {
    uint4 data[kPieceChunks];
    sum_piece(list, base, chunks, data);
#pragma unroll
    for (int u = 0; u < kPieceChunks; ++u)
      if (base + u * kLlGroupThreads < chunks) coding.sum[base + u * kLlGroupThreads] = data[u];
  }
  const auto chunk_of_sum = [&](int chunk) {  // zeros past the end
    uint4 data[1]{};
    if (coding.sum == nullptr)
      sum_piece(list, chunk, chunks, data);
    else if (chunk < chunks)
      data[0] = coding.sum[chunk];
    return data[0];
  };
#pragma unroll 1
  for (int chunk = thread; chunk - thread < chunks; chunk += kLlGroupThreads)  // by whole warps
    choose_block(list, coding, chunk, chunks, chunk_of_sum(chunk));
  ptx::barrier_among<kLlGroupThreads>(1 + group);
  const uint4 coded = list->all_coded();
  const bool any = is_any_coded(coded);
  if (any) kind |= coded_kind(coded, p.hidden / kScaleChannels);
  if (any) {
    if (thread == 0) ptx::st_stream(to, coded);
    place_blocks(to, p.hidden / kScaleChannels, coded, coding, thread);
    ptx::barrier_among<kLlGroupThreads>(1 + group);
  }
#pragma unroll 1
  for (int chunk = thread; chunk < chunks; chunk += kLlGroupThreads) {
    const int block = chunk / 16, part = chunk % 16;
    const uint32_t place = any ? coding.places[block] : static_cast<uint32_t>(block) * kPlainBlockBytes;
    const uint4 data = chunk_of_sum(chunk);
    if ((place & kCodedPlace) != 0)
      encode_part(to + (place & ~kCodedPlace), part, data, coding.encoders[block]);
    else
      ptx::st_stream(to + place + 16 * part, data);
  }
  return any ? log_block_at(coded, p.hidden / kScaleChannels) : 2 * static_cast<uint32_t>(p.hidden);
}

// By a group: the sum is stored at its place as it comes to be, for a NIC where that can read it. `place`: among those
// of the buffer of staged rows.
__device__ inline void send_sum(const InternodeLlParams &p, uint64_t epoch, int dest, int64_t place, SumList *list,
                                const Coding &coding, int group, int thread) {
  const TeamView &team = p.session.team;
  const int expert = team.rank * p.num_local + list->lowest_expert, token = list->token, chunks = p.hidden / 8;
  const uint64_t at = expert_row_at(p, epoch, expert, token);
  uint8_t *block = p.blocks[dest],
          *to = block != nullptr ? block + at : mine_at(p, p.at.stage + static_cast<uint64_t>(place) * 2 * p.hidden);
  uint32_t kind = kRowPlain | kRowSum, bytes = 2 * static_cast<uint32_t>(p.hidden);
  const bool logfmt = (p.flags & DK_LL_LOGFMT) != 0, spread = logfmt && block != nullptr;
  if (spread) {
    store_spread_sum(p, list, to, thread);
  } else if (logfmt) {
    bytes = write_logfmt_sum(p, list, to, coding, group, thread, kind);
  } else {
#pragma unroll 1
    for (int base = thread; base < chunks; base += kPieceChunks * kLlGroupThreads) {
      uint4 out[kPieceChunks];
      sum_piece(list, base, chunks, out);
      store_piece(to, base, chunks, out);
    }
  }
  ptx::barrier_among<kLlGroupThreads>(1 + group);
  mark(kMarkRowOut, thread == 0);
  if (thread >= kWarp) return;
  if (spread && thread == 0) kind |= end_spread_row(to, p.hidden / kScaleChannels, list->all_coded());
  send_delivery(
      p, {dest, block, bytes, at, expert_word_at(p, epoch, expert, token), signal_word(epoch, team.rank, kind), to});
  if (thread == 0) count_bytes(p.session, dest, 2ull * p.hidden);
}

// Groups take tokens in turn: the first one of each source, then the second ones.
struct SumTurn {
  int number, dest;
};
__device__ __forceinline__ int first_turn() {
  return static_cast<int>(threadIdx.x) / kLlGroupThreads * num_workers() + static_cast<int>(blockIdx.x);
}
__device__ __forceinline__ SumTurn turn_of(const InternodeLlParams &p, int i) {
  const int num_ranks = p.session.team.num_ranks;
  return {i / num_ranks, (i + p.session.team.rank) % num_ranks};
}
// What the first warp of a group loads for its first sum, before the block knows whether the slots are empty.
__device__ __forceinline__ SumWords load_first_words(const InternodeLlParams &p, int table) {
  const SumTurn turn = turn_of(p, first_turn());
  const bool wanted = may_sum(p, table) && turn.number < p.max_tokens && threadIdx.x % kLlGroupThreads < kWarp;
  return wanted ? load_words(p, table, turn.dest, turn.number) : SumWords{0, 0};
}
__device__ inline void send_sums(const InternodeLlCombineParams &c, uint64_t epoch, int table, const SumWords &first,
                                 int most, const int32_t *sums, const int32_t *first_row, SumList *lists,
                                 void *shared) {
  const InternodeLlParams &p = c.call;
  const int num_ranks = p.session.team.num_ranks, group = static_cast<int>(threadIdx.x) / kLlGroupThreads,
            thread = static_cast<int>(threadIdx.x) % kLlGroupThreads, workers = num_workers();
  if (static_cast<int>(blockIdx.x) >= workers) return;
  SumList *list = lists + group;
  const Coding coding = coding_of(p, shared, group);
  const int stride = kLlGroups * workers;
#pragma unroll 1
  for (int i = first_turn(); i < most * num_ranks; i += stride) {
    const auto [number, dest] = turn_of(p, i);
    if (sums[dest] < 0 || number >= num_tokens_of(sums[dest])) continue;
    if (thread < kWarp) {
      const SumWords words = i == first_turn() ? first : load_words(p, table, dest, number);
      read_sum(c, epoch, dest, words, (sums[dest] & kTableHasWeights) != 0, first_row, list);
    }
    ptx::barrier_among<kLlGroupThreads>(1 + group);
    if (list->count > 0)
      send_sum(p, epoch, dest, static_cast<int64_t>(dest) * p.max_tokens + number, list, coding, group, thread);
    ptx::barrier_among<kLlGroupThreads>(1 + group);
  }
}

}  // namespace deepep::internode
