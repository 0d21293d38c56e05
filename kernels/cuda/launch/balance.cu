// balance.cu - launches for copies of experts on other ranks.
#include "cuda/impl/normal/balance_kernel.cuh"
#include "cuda/launch/host.h"

namespace deepep {
namespace {

constexpr int kBalanceBlocks = 1024;  // of one launch, about

bool bad_balance(const dk_balance_params &p) {
  if (p.device == 0 || p.mapping == 0 || p.what < DK_BALANCE_COPIES || p.what > DK_BALANCE_ADD) return true;
  if (p.num_ranks < 1 || p.num_ranks > kBalanceRanks || p.rank < 0 || p.rank >= p.num_ranks) return true;
  if (p.num_slots < 1 || int64_t{p.num_slots} * p.num_ranks > DK_MAX_BALANCED_SLOTS) return true;
  if (p.num_local < 1 || p.num_rows < 1) return true;
  const int32_t end = p.what == DK_BALANCE_COPIES ? p.num_slots : p.num_rows;
  if (p.first < 0 || p.count < 1 || p.count > end || p.first > end - p.count) return true;
  if (p.what == DK_BALANCE_ADD)
    return p.rows % 16 != 0 || p.experts % 16 != 0 || p.rows == 0 || p.arrived == 0 || p.experts == 0 ||
           p.row_bytes == 0 || p.row_bytes % 16 != 0;
  return p.rank_prefix_matrix == 0 || p.send_head == 0 || p.topk_idx == 0 || p.dst_slot == 0 || p.topk_weights == 0;
}

}  // namespace

cudaError_t load_balance_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, balance_copies);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, balance_grads);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, balance_add);
  return error;
}

}  // namespace deepep

using namespace deepep;

DK_EXPORT int32_t dk_balance(dk_balance_params *p) {
  DK_ENTER(p);
  if (bad_balance(*p)) return DK_EINVAL;
  const bool grads = p->what == DK_BALANCE_GRADS;
  const int groups = grads ? p->num_slots : p->num_local;
  const int rows = p->what == DK_BALANCE_ADD ? p->count : grads ? ceil_div(p->num_rows, kBalanceThreads) : p->num_rows;
  const BalanceParams params{*p, max(1, min(rows, kBalanceBlocks / groups))};
  const int blocks = groups * params.shares;
  const cudaStream_t stream = stream_of(p->stream);
  const OnDevice on(handle_of<Device>(p->device));
  if (p->what == DK_BALANCE_COPIES)
    balance_copies<<<blocks, kBalanceThreads, 0, stream>>>(params);
  else if (grads)
    balance_grads<<<blocks, kBalanceThreads, 0, stream>>>(params);
  else
    balance_add<<<blocks, kBalanceThreads, 0, stream>>>(params);
  return launched(p);
}
