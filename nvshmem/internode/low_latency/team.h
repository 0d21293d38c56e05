// team.h - low latency among nodes: what it adds to a block and to a team.
#pragma once
#include "cuda/launch/host.h"

namespace deepep {

struct InternodeLowLatency;  // of a team

// What a block has for it besides InternodeControl, multiples of 4096; {0, 0} where a team has no low latency.
struct InternodeLowLatencyBytes {
  uint64_t control, wire;
};
InternodeLowLatencyBytes internode_ll_bytes(int num_ranks, int num_nvl_peers, uint64_t rdma_bytes, uint32_t flags);

// team->internode is there, without its `ll` yet. The view of the team and of its remote part are filled.
int32_t internode_ll_team_create(dk_team_create_params *p, Team *team);
void internode_ll_team_destroy(Team *team);  // no effect without
// Between two barriers of all ranks: enqueues what empties the low-latency slots of a shape; 0, 0, 0: of all.
int32_t internode_ll_clear(dk_clean_params *p, const Team *team);

cudaError_t load_remote_ll_kernels();  // all of them, on the current device

}  // namespace deepep
