#include "cpu/team/team.h"

#include <stdlib.h>
#include <string.h>

#include <new>

namespace dk {

static bool all_local(const dk_team_create_params &p) {
  const uint64_t *blocks = at<const uint64_t>(p.host_peer_blocks);
  for (int i = 0; i < p.num_ranks; i++)
    if (!blocks[i]) return false;
  return true;
}

static Peer peer_at(const dk_team_create_params &p, uint64_t block) {
  Control control(block + p.control_offset, p.num_ranks);
  if (!block) return {Control(0, p.num_ranks), RemoteControl(0, 1, 1), 0, 0};
  RemoteControl remote(block + p.control_offset + Control::bytes(p.num_ranks), p.num_ranks,
                       nodes_of(p.num_ranks, p.num_nvl_peers));
  return {control, remote, block + p.wire_offset, block + p.rdma_offset};
}

static void free_team(Team *team) {
  free(team->doorbells);
  free(team->scratch);
  free(team->peers);
  free(team->links);
  pthread_mutex_destroy(&team->running);
  free(team);
}

// The blocks are mapped and zeroed: nothing to prepare but this rank's own memory of its peers.
static Team *new_team(const dk_team_create_params &p) {
  uint64_t ranks = static_cast<uint64_t>(p.num_ranks);
  Team *team = static_cast<Team *>(calloc(1, sizeof(Team)));
  if (!team) return nullptr;
  new (team) Team{at<Device>(p.device),
                  p.rank,
                  p.num_ranks,
                  p.num_nvl_peers,
                  p.flags,
                  p.rdma_bytes,
                  WireRegion(p.num_ranks, p.num_nvl_peers, p.nvl_bytes, p.rdma_bytes, p.flags),
                  at<dk_status>(p.status),
                  at<dk_stats_page>(p.stats),
                  PTHREAD_MUTEX_INITIALIZER,
                  {},
                  nullptr,
                  nullptr,
                  nullptr,
                  at<Nic>(p.transport),
                  nullptr};
  bool local = all_local(p);
  team->peers = static_cast<Peer *>(calloc(ranks, sizeof(Peer)));
  team->scratch = static_cast<int64_t *>(calloc(ranks * kScratch, sizeof(int64_t)));
  team->doorbells = static_cast<uint64_t *>(calloc(ranks / 64 + 1, sizeof(uint64_t)));
  if (!local)
    team->links = static_cast<LinkState *>(calloc(static_cast<uint64_t>(team->num_nodes()), sizeof(LinkState)));
  if (!team->peers || !team->scratch || !team->doorbells || (!local && !team->links)) {
    free_team(team);
    return nullptr;
  }
  for (int i = 0; i < p.num_ranks; i++)
    new (team->peers + i) Peer(peer_at(p, at<const uint64_t>(p.host_peer_blocks)[i]));
  if (team->nic) team->nic->set_doorbell(&team->control().doorbell());
  return team;
}

// Those of my node are mapped, all others go through the transport; nodes are of one size, so that everybody has
// partners.
static int32_t check_remote(const dk_team_create_params &p) {
  const Nic *nic = at<const Nic>(p.transport);
  if (!nic) return DK_EUNSUPPORTED;
  if (p.num_ranks % p.num_nvl_peers) return DK_EINVAL;
  for (int i = 0; i < p.num_ranks; i++) {
    bool mapped = at<const uint64_t>(p.host_peer_blocks)[i] != 0,
         mine = i / p.num_nvl_peers == p.rank / p.num_nvl_peers;
    if (mapped != mine || (!mine && !nic->reaches(i))) return DK_EINVAL;
  }
  return DK_OK;
}

static int32_t check_low_latency(const dk_team_create_params &p) {
  const Nic *nic = at<const Nic>(p.transport);
  if (!(p.flags & DK_TEAM_LL_TRANSPORT) || p.num_ranks == 1) return DK_OK;
  if (!nic) return DK_EUNSUPPORTED;
  for (int i = 0; i < p.num_ranks; i++)
    if (i != p.rank && !nic->reaches(i)) return DK_EINVAL;
  return DK_OK;
}

static int32_t check_team(const dk_team_create_params &p) {
  if (!p.device || p.num_ranks < 1 || p.num_ranks > DK_MAX_RANKS || p.rank < 0 || p.rank >= p.num_ranks)
    return DK_EINVAL;
  if (p.num_nvl_peers < 1 || !p.host_peer_blocks || !p.status) return DK_EINVAL;
  if (p.control_bytes < control_bytes_for(p.num_ranks, p.num_nvl_peers) || p.control_offset % kLine ||
      p.wire_offset % kLine)
    return DK_EINVAL;
  if (p.wire_bytes < WireRegion(p.num_ranks, p.num_nvl_peers, p.nvl_bytes, p.rdma_bytes, p.flags).total)
    return DK_EINVAL;
  int32_t code = check_low_latency(p);
  return code != DK_OK || all_local(p) ? code : check_remote(p);
}

}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_team_create(dk_team_create_params *p) {
  DK_ENTER(p);
  p->team = 0;
  int32_t code = check_team(*p);
  if (code != DK_OK) return code;
  Team *team = new_team(*p);
  if (!team) return DK_ENOMEM;
  p->team = address_of(team);
  return DK_OK;
}

DK_EXPORT int32_t dk_team_destroy(dk_team_destroy_params *p) {
  DK_ENTER(p);
  Team *team = at<Team>(p->team);
  p->team = 0;
  if (!team) return DK_OK;
  if (team->nic) team->nic->set_doorbell(nullptr);
  free_team(team);
  return DK_OK;
}

// Operations write the page themselves, so it is always up to date.
DK_EXPORT int32_t dk_stats_flush(dk_stats_flush_params *p) {
  DK_ENTER(p);
  return p->team ? DK_OK : DK_EINVAL;
}

// Rows always pass through the wire region here (no DK_CAP_PEER_ROWS), so a segment has no use.
DK_EXPORT int32_t dk_team_segment(dk_team_segment_params *p) {
  DK_ENTER(p);
  return DK_EUNSUPPORTED;
}
