#include "cpu/team/team.h"

#include <stdlib.h>
#include <string.h>

#include <new>

#include "cpu/team/mirror.h"
#include "cpu/normal/link.h"

namespace dk {

// What goes with a staged row of normal mode takes 24 + 8 K bytes and a bit for each rank. A small share of the rows'
// own bytes, with a floor that gives every rank of a pair ring its row for any K that the interface allows.
static uint64_t extras_for(uint64_t num_ranks, uint64_t nvl_bytes) {
  return round_up(max(uint64_t{1} << 20, num_ranks * 8192) + nvl_bytes / 8, kPage);
}

static constexpr uint64_t kSpareBytes = 16 << 20, kSpareMirrorBytes = 1 << 20;
static constexpr uint64_t kSpareLinkBytes = 8 << 10;  // what goes with a row, for any K that the interface allows

static int nodes_of(int num_ranks, int num_nvl_peers) { return (num_ranks + num_nvl_peers - 1) / num_nvl_peers; }

WireRegion::WireRegion(int num_ranks, int num_nvl_peers, uint64_t nvl_bytes, uint64_t rdma_bytes, uint32_t flags) {
  uint64_t at = 0;
  auto place = [&at](uint64_t bytes) {
    uint64_t offset = at;
    at += round_up(bytes, kPage);
    return offset;
  };
  rows_bytes = nvl_bytes;
  rows_offset = place(rows_bytes);
  extras_bytes = nvl_bytes ? extras_for(static_cast<uint64_t>(num_ranks), nvl_bytes) : 0;
  extras_offset = place(extras_bytes);
  // A shape that fits has rdma_bytes >= 4 E B H with H >= 8. Its dispatch slot holds B rows of 2 H bytes, and indices
  // and weights of 8 B K bytes (K > E and a tiny H may outgrow the slot: such a call is refused); its combine slot
  // holds E B rows of (2 + 1/32) H + 4 bytes and 20 E bytes of tables. Pages that are not touched cost nothing.
  slot_bytes[kDispatch] = rdma_bytes ? round_up(rdma_bytes + kSpareBytes, kPage) : 0;
  slot_bytes[kCombine] = rdma_bytes ? round_up(rdma_bytes + 20 * kMaxExperts + kPage, kPage) : 0;
  for (int kind = 0; kind < 2; kind++)
    for (int slot = 0; slot < 2; slot++) slot_offset[kind][slot] = place(slot_bytes[kind]);
  // A mirror holds 1/R of such a combine slot, or a dispatch slot: B (2 H + 8 K) bytes, of which the rows take at most
  // half of rdma_bytes / R.
  uint64_t ranks = static_cast<uint64_t>(num_ranks);
  bool remote = rdma_bytes && (num_ranks > num_nvl_peers || flags & DK_TEAM_LL_TRANSPORT);
  mirror_bytes[kDispatch] = remote ? round_up(rdma_bytes / ranks + kSpareMirrorBytes, kPage) : 0;
  mirror_bytes[kCombine] =
      remote ? round_up(rdma_bytes / ranks + 16 * Control::max_local_experts(num_ranks) + kPage, kPage) : 0;
  remote_offset = place(remote ? ranks * sizeof(RemotePeer) : 0);
  for (int kind = 0; kind < 2; kind++) mirror_offset[kind] = place(2 * ranks * mirror_bytes[kind]);
  uint64_t nodes = static_cast<uint64_t>(nodes_of(num_ranks, num_nvl_peers));
  link_bytes = nodes > 1 && rdma_bytes ? round_up(rdma_bytes / nodes + kSpareLinkBytes, kPage) : 0;
  link_in_offset = place(nodes * link_bytes);
  link_out_offset = place(nodes * link_bytes);
  total = at;
}

static uint64_t control_bytes_for(int num_ranks, int num_nvl_peers) {
  return Control::bytes(num_ranks) + RemoteControl::bytes(num_ranks, nodes_of(num_ranks, num_nvl_peers));
}

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

DK_EXPORT int32_t dk_block_sizes(dk_block_sizes_params *p) {
  DK_ENTER(p);
  if (p->num_ranks < 1 || p->num_ranks > DK_MAX_RANKS || p->num_nvl_peers < 1) return DK_EINVAL;
  p->control_bytes = control_bytes_for(p->num_ranks, p->num_nvl_peers);
  p->wire_bytes = WireRegion(p->num_ranks, p->num_nvl_peers, p->nvl_bytes, p->rdma_bytes, p->flags).total;
  p->min_nvl_bytes = static_cast<uint64_t>(p->num_ranks) * round_up(p->max_row_bytes, kLine);
  int nodes = nodes_of(p->num_ranks, p->num_nvl_peers);
  p->min_rdma_bytes = nodes > 1 ? static_cast<uint64_t>(nodes) * round_up(p->max_row_bytes, kLine) : 0;
  return DK_OK;
}

DK_EXPORT int32_t dk_ll_layout(dk_ll_layout_params *p) {
  DK_ENTER(p);
  if (p->num_ranks < 1 || p->num_max_tokens < 1 || p->hidden < 8 || p->hidden % 8 || p->num_experts < 1 ||
      p->num_experts % p->num_ranks)
    return DK_EINVAL;
  LowLatencyShape shape(*p, p->num_ranks);
  p->rdma_bytes = shape.rdma_bytes();
  p->wire_bytes = 2 * (shape.dispatch_slot_bytes(min(p->num_experts, 128)) +
                       shape.combine_slot_bytes(p->hidden % kScaleChannels == 0));
  p->zero_copy_offset[0] = 0;
  p->zero_copy_offset[1] = shape.zero_copy_bytes();
  p->zero_copy_row_stride = shape.hidden * 2;
  return DK_OK;
}

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

// Rows always go through the wire region here (no DK_CAP_PEER_ROWS), so there is nothing that a segment could be used
// for.
// Operations count on the page themselves, so it is up to date.
DK_EXPORT int32_t dk_stats_flush(dk_stats_flush_params *p) {
  DK_ENTER(p);
  return p->team ? DK_OK : DK_EINVAL;
}

DK_EXPORT int32_t dk_team_segment(dk_team_segment_params *p) {
  DK_ENTER(p);
  return DK_EUNSUPPORTED;
}
