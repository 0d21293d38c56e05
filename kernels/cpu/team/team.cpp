#include "cpu/team/team.h"

#include <string.h>

namespace dk {

static bool all_local(const dk_team_create_params &p) {
  const uint64_t *blocks = at<const uint64_t>(p.host_peer_blocks);
  for (int i = 0; i < p.num_ranks; i++)
    if (!blocks[i]) return false;
  return true;
}

static Peer peer_at(const dk_team_create_params &p, uint64_t block) {
  if (!block) return {};
  Control control(block + p.control_offset, p.num_ranks);
  RemoteControl remote(block + p.control_offset + Control::bytes(p.num_ranks), p.num_ranks,
                       links_of(p.num_ranks, p.num_nvl_peers, p.flags));
  return {control, remote, block + p.wire_offset, block + p.rdma_offset};
}

Team::Team(const dk_team_create_params &p)
    : device(at<Device>(p.device)),
      rank(p.rank),
      num_ranks(p.num_ranks),
      num_nvl_peers(p.num_nvl_peers),
      node_size(p.flags & DK_TEAM_SHRINK ? 1 : p.num_nvl_peers),
      flags(p.flags),
      rdma_bytes(p.rdma_bytes),
      wire(p.num_ranks, p.num_nvl_peers, p.nvl_bytes, p.rdma_bytes, p.flags),
      status(at<dk_status>(p.status)),
      stats(at<dk_stats_page>(p.stats)),
      nic(at<Nic>(p.transport)) {}

Owned<Team> Team::make(const dk_team_create_params &p) {
  Owned<Team> team = create<Team>(p);
  if (!team) return nullptr;
  uint64_t ranks = static_cast<uint64_t>(p.num_ranks);
  bool local = all_local(p);
  team->peers = create_array<Peer>(ranks);
  team->scratch = create_array<int64_t>(ranks * kScratch);
  team->experts = create_array<int32_t>(2 * Control::max_local_experts(p.num_ranks));
  team->matrix = create_array<int32_t>(ranks * ranks);
  team->arrivals = create_array<Arrival>(ranks);
  team->doorbells = create_array<uint64_t>(ranks / 64 + 1);
  if (!local) team->links = create_array<LinkState>(static_cast<uint64_t>(team->num_nodes()));
  if (!local) team->told = create_array<Told>(ranks);
  if (!team->peers || !team->scratch || !team->experts || !team->matrix || !team->arrivals || !team->doorbells)
    return nullptr;
  if (!local && (!team->links || !team->told)) return nullptr;
  for (int i = 0; i < p.num_ranks; i++) team->peers[i] = peer_at(p, at<const uint64_t>(p.host_peer_blocks)[i]);
  if (team->nic) team->nic->set_doorbell(&team->control().doorbell());
  return team;
}

void Team::start_anew(Nic *transport) {
  uint64_t ranks = static_cast<uint64_t>(num_ranks);
  memset(scratch.get(), 0, sizeof(int64_t) * ranks * kScratch);
  for (uint64_t i = 0; i < ranks; i++) arrivals[i] = Arrival();
  memset(doorbells.get(), 0, sizeof(uint64_t) * (ranks / 64 + 1));
  for (int i = 0; links && i < num_nodes(); i++) links[static_cast<size_t>(i)] = LinkState();
  for (uint64_t i = 0; told && i < ranks; i++) told[i] = Told();
  failed.store(0);
  nic = transport;
  if (nic) nic->set_doorbell(&control().doorbell());
}

Team::~Team() {
  if (nic) nic->set_doorbell(nullptr);
  pthread_mutex_destroy(&running);
}

// Blocks of my node's ranks are mapped, the transport reaches all others; nodes have the same size, so that every rank
// has partners.
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
  if (p.control_bytes < control_bytes_for(p.num_ranks, p.num_nvl_peers, p.flags) || p.control_offset % kLine ||
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
  Owned<Team> team = Team::make(*p);
  if (!team) return DK_ENOMEM;
  p->team = address_of(team.release());
  return DK_OK;
}

DK_EXPORT int32_t dk_team_destroy(dk_team_destroy_params *p) {
  DK_ENTER(p);
  owned<Team>(p->team);
  p->team = 0;
  return DK_OK;
}

DK_EXPORT int32_t dk_team_release(dk_team_release_params *p) {
  DK_ENTER(p);
  Team *team = at<Team>(p->team);
  if (!team) return DK_EINVAL;
  pthread_mutex_lock(&team->running);
  team->released.store(true);
  if (team->nic) team->nic->set_doorbell(nullptr);
  team->nic = nullptr;
  pthread_mutex_unlock(&team->running);
  return DK_OK;
}

DK_EXPORT int32_t dk_team_restore(dk_team_restore_params *p) {
  DK_ENTER(p);
  Team *team = at<Team>(p->team);
  if (!team) return DK_EINVAL;
  Nic *nic = at<Nic>(p->transport);
  for (int i = 0; i < team->num_ranks; i++)
    if (!team->is_local(i) && !(nic && nic->reaches(i))) return DK_EINVAL;
  pthread_mutex_lock(&team->running);
  team->start_anew(nic);
  team->released.store(false);
  pthread_mutex_unlock(&team->running);
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
