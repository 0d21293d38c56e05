// team.h - libdeepep_nvshmem.so: what low latency adds to a block and to a team.
#pragma once
#include "cuda/launch/host.h"

namespace deepep::internode {

struct LowLatencyTeam;  // params.h

// In each block, after ControlOffsets: the sources of puts of handshake messages (common.cuh).
constexpr uint64_t kLowLatencyOutboxBytes = 4096;

// `team` has its view and its internode view, but no low_latency yet.
int32_t create_low_latency(dk_team_create_params *p, Team *team);
void destroy_low_latency(Team *team);  // no effect without

cudaError_t load_low_latency_kernels();  // all of them, on the current device

}  // namespace deepep::internode
