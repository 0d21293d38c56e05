// balance_kernel.cuh - copies of experts on other ranks: the handle of the cached dispatch that moves their rows, and
// the sums of what came.
#pragma once
#include "abi/kernels.h"
#include "cuda/common/types.cuh"

namespace deepep {

struct BalanceParams : dk_balance_params {
  int shares;  // blocks of an expert or slot
  __device__ int group() const { return static_cast<int>(blockIdx.x) / shares; }
  __device__ int share() const { return static_cast<int>(blockIdx.x) % shares; }
  // The expert of a rank's slot; -1: none.
  __device__ int expert(int r, int slot) const {
    const int found = pointer<const int32_t>(mapping)[static_cast<int64_t>(r) * num_slots + slot];
    return found < 0 || found >= static_cast<int64_t>(num_ranks) * num_local ? -1 : found;
  }
  __device__ int owner(int r, int slot) const {
    const int found = expert(r, slot);
    return found < 0 ? -1 : found / num_local;
  }
  // Whether an earlier slot of the rank, in this part, has the same expert: the rows cross once for both.
  __device__ bool repeats(int r, int slot) const {
    for (int other = first; other < slot; ++other)
      if (expert(r, other) == expert(r, slot)) return true;
    return false;
  }
};

constexpr int kBalanceThreads = 256;
constexpr int kBalanceRanks = kWarp;  // a dispatch has as many choices at most

// Where this rank's rows of an expert, or of a slot, go.
struct BalancePlaces {
  int head[kBalanceRanks];  // of its first row, by rank; -1: not there
  int slot, rank;           // of a slot: place of its first row, and the rank
};

__device__ inline void write_balance_token(const BalanceParams &p, int64_t token, int topk, int k, int idx, int slot) {
  pointer<int32_t>(p.topk_idx)[token * topk + k] = idx;
  pointer<int32_t>(p.dst_slot)[token * topk + k] = slot;
  pointer<float>(p.topk_weights)[token * topk + k] = 1;
}

// A block has a share of the rows of an expert.
__global__ void __launch_bounds__(kBalanceThreads) balance_copies(const __grid_constant__ BalanceParams p) {
  __shared__ BalancePlaces places;
  const int n = p.num_ranks, own = p.rank * p.num_local + p.group(), topk = n * p.count;
  if (static_cast<int>(threadIdx.x) < n) {
    const int r = threadIdx.x;
    int before = 0;
    bool goes = false;
    for (int slot = p.first; slot < p.first + p.count; ++slot) {
      const int found = p.expert(r, slot);
      goes |= found == own;
      if (found >= p.rank * p.num_local && found < own && !p.repeats(r, slot)) ++before;
    }
    places.head[r] = goes ? before * p.num_rows : -1;
  }
  __syncthreads();
  for (int row = p.share(); row < p.num_rows; row += p.shares) {
    const int64_t token = static_cast<int64_t>(p.group()) * p.num_rows + row;
    if (static_cast<int>(threadIdx.x) < n)
      pointer<int32_t>(p.send_head)[token * n + threadIdx.x] =
          places.head[threadIdx.x] < 0 ? -1 : places.head[threadIdx.x] + row;
    for (int k = threadIdx.x; k < topk; k += blockDim.x) {
      const int slot = p.first + k % p.count;
      const bool here = p.expert(k / p.count, slot) == own;
      write_balance_token(p, token, topk, k, here ? k : -1, here ? slot * p.num_rows + row : -1);
    }
  }
  if (blockIdx.x != 0) return;
  for (int i = threadIdx.x; i < n * n; i += blockDim.x) {
    int experts = 0;
    for (int slot = p.first; slot < p.first + p.count; ++slot) {
      const int from = p.owner(i % n, slot);
      if (from >= 0 && from <= i / n && !p.repeats(i % n, slot)) ++experts;
    }
    pointer<int32_t>(p.rank_prefix_matrix)[i] = experts * p.num_rows;
  }
}

// A block has a share of the rows of a slot.
__global__ void __launch_bounds__(kBalanceThreads) balance_grads(const __grid_constant__ BalanceParams p) {
  __shared__ BalancePlaces places;
  const int n = p.num_ranks, mine = p.group();
  if (threadIdx.x == 0) {
    places.rank = p.owner(p.rank, mine);
    int before = 0, own = 0;
    for (int r = 0; places.rank >= 0 && r <= p.rank; ++r)
      for (int slot = 0; slot < (r < p.rank ? p.num_slots : mine); ++slot) {
        if (p.owner(r, slot) != places.rank) continue;
        ++before;
        own += r == p.rank;
      }
    places.slot = before * p.count;
    places.head[0] = own * p.count;
  }
  __syncthreads();
  for (int row = p.share() * blockDim.x + threadIdx.x; row < p.num_rows; row += p.shares * blockDim.x) {
    const int64_t token = static_cast<int64_t>(mine) * p.num_rows + row;
    const bool goes = places.rank >= 0 && row >= p.first && row < p.first + p.count;
    write_balance_token(p, token, 1, 0, goes ? places.rank : -1, goes ? places.slot + row - p.first : -1);
    for (int r = 0; r < n; ++r)
      pointer<int32_t>(p.send_head)[token * n + r] = goes && r == places.rank ? places.head[0] + row - p.first : -1;
  }
  if (blockIdx.x != 0) return;
  for (int i = threadIdx.x; i < n * n; i += blockDim.x) {
    int copies = 0;
    for (int r = 0; r <= i / n; ++r)
      for (int slot = 0; slot < p.num_slots; ++slot) copies += p.owner(r, slot) == i % n;
    pointer<int32_t>(p.rank_prefix_matrix)[i] = copies * p.count;
  }
}

// A block has a share of the rows of an expert. A thread adds all copies of its words, in their order.
__global__ void __launch_bounds__(kBalanceThreads) balance_add(const __grid_constant__ BalanceParams p) {
  __shared__ int copies[DK_MAX_BALANCED_SLOTS], num_copies;  // places of the expert's copies among this rank's
  const int own = p.rank * p.num_local + p.group();
  if (threadIdx.x == 0) {
    int place = 0, found = 0;
    for (int i = 0; i < p.num_ranks * p.num_slots; ++i) {
      const int expert = p.expert(i / p.num_slots, i % p.num_slots);
      if (expert < 0 || expert / p.num_local != p.rank) continue;
      if (expert == own) copies[found++] = place;
      ++place;
    }
    num_copies = found;
  }
  __syncthreads();
  const int64_t pieces = static_cast<int64_t>(p.row_bytes / 16);
  for (int row = p.share(); num_copies > 0 && row < p.count; row += p.shares) {
    auto *to = pointer<float4>(p.experts) + (static_cast<int64_t>(p.group()) * p.num_rows + p.first + row) * pieces;
    for (int64_t i = threadIdx.x; i < pieces; i += blockDim.x) {
      float4 sum = to[i];
      for (int c = 0; c < num_copies; ++c) {
        const int64_t place = static_cast<int64_t>(copies[c]) * p.count + row;
        if (pointer<const float>(p.arrived)[place] != 1) continue;
        const float4 more = pointer<const float4>(p.rows)[place * pieces + i];
        sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
      }
      to[i] = sum;
    }
  }
}

}  // namespace deepep
