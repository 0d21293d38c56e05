// notify_params.cuh - the parameters of notify.
#pragma once
#include "cuda/layout/team.cuh"

namespace deepep {

// The matrix of an exchange of counts, in host memory (launch/normal_copies.h).
struct MatrixNote {
  uint64_t call;  // of the notify, stored last; 0: it is being written
  int32_t matrix[];
};

// The arguments of a call (see DispatchParams).
struct NotifyParams : dk_notify_params {
  Session session{};
  MatrixNote *note = nullptr;  // null: not wanted

  __device__ const int32_t *tokens_per_rank() const {
    return pointer<const int32_t>(dk_notify_params::tokens_per_rank);
  }
  __device__ const int32_t *tokens_per_expert() const {
    return pointer<const int32_t>(dk_notify_params::tokens_per_expert);
  }
  __device__ const uint8_t *token_in_rank() const { return pointer<const uint8_t>(dk_notify_params::token_in_rank); }
  __device__ int32_t *rank_prefix_matrix() const { return pointer<int32_t>(dk_notify_params::rank_prefix_matrix); }
  __device__ int32_t *send_head() const { return pointer<int32_t>(dk_notify_params::send_head); }
  __device__ dk_counts *counts() const { return pointer<dk_counts>(dk_notify_params::counts); }
};

}  // namespace deepep
