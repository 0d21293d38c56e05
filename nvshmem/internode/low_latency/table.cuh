// table.cuh - libdeepep_nvshmem.so, low latency for teams with a transport: which rows a received dispatch made of each
// source's tokens, and with which weights. A combine sums by it. It is in the wire region, where users never write, but
// only this rank accesses it: for each source the number of its tokens here, then for each of these a word with the
// token and the number of its rows, and as many words with an expert, the row's position among the source's rows of it
// and the weight. Combine takes the first rows of sources from layout_range.
#pragma once
#include "internode/low_latency/common.cuh"

namespace deepep::internode {

// The number of a source's tokens has this bit where their weights came with the dispatch.
constexpr int32_t kTableHasWeights = 1 << 30;
__device__ __forceinline__ int num_tokens_of(int32_t rows) { return rows & ~kTableHasWeights; }

__device__ inline int32_t *table_counts(const InternodeLlParams &p, int table) {
  return mine_at<int32_t>(p, p.at.table[table]);
}
// The words of a source's token with this number.
__device__ inline uint64_t *table_token(const InternodeLlParams &p, int table, int source, int number) {
  return mine_at<uint64_t>(p, p.at.table[table] + p.at.table_tokens_at) +
         (static_cast<uint64_t>(source) * p.max_tokens + number) * (1 + p.at.max_entries);
}

struct TableEntry {
  int32_t expert, position;  // of this rank; among the source's rows of that expert
  uint32_t weight;           // float
};
// By a warp of a dispatch: keeps the entries of the lanes in `rows`.
__device__ inline void keep_token(const InternodeLlParams &p, int table, int source, int number, int token,
                                  uint32_t rows, const TableEntry &entry) {
  const int lane = lane_id();
  uint64_t *words = table_token(p, table, source, number);
  const uint32_t n = __popc(rows & ((1u << lane) - 1));
  if (lane == 0) words[0] = static_cast<uint64_t>(__popc(rows)) << 32 | static_cast<uint32_t>(token);
  if ((rows >> lane & 1) != 0 && n < p.at.max_entries)
    words[1 + n] = static_cast<uint64_t>(entry.weight) << 32 | static_cast<uint32_t>(entry.expert) << 16 |
                   static_cast<uint32_t>(entry.position);
}
static_assert(kMaxLocalExperts <= 65536 && kMaxLowLatencyTokens <= 65536, "16 bits each");

// By the last block of a dispatch that receives, the `number`th. rows: shared, [R]. Without failure a source's rows are
// all here, or none.
__device__ inline void keep_dispatch(const InternodeLlParams &p, uint64_t epoch, uint64_t number, const int32_t *rows,
                                     bool failed) {
  const int table = static_cast<int>(number % kTables);
  for (int r = threadIdx.x; r < p.session.team.num_ranks && !failed; r += kLlThreads)
    table_counts(p, table)[r] = p.session.team.scratch->late[r] == epoch ? 0 : rows[r];
  if (threadIdx.x != 0) return;
  const int32_t brought = p.num_tokens == 0 || p.brings_weights() ? 1 : 0;
  p.state->received[table] = {
      failed ? 0 : reinterpret_cast<uint64_t>(p.src_info), number, p.num_experts, p.max_tokens, p.num_topk, brought};
  p.state->num_received = number;
}

}  // namespace deepep::internode
