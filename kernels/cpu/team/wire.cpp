#include "cpu/team/wire.h"

#include "cpu/team/mirror.h"

namespace dk {

// The extras of a staged row of normal mode take 24 + 8 K bytes and a bit for each rank. They get an eighth of the
// rows' bytes; the floor holds one row of each rank's pair ring for any K that the interface allows.
static uint64_t extras_for(uint64_t num_ranks, uint64_t nvl_bytes) {
  return round_up(max(uint64_t{1} << 20, num_ranks * 8192) + nvl_bytes / 8, kPage);
}

static constexpr uint64_t kSpareBytes = 16 << 20, kSpareMirrorBytes = 1 << 20;
static constexpr uint64_t kSpareLinkBytes = 8 << 10;  // extras of a row, for any K that the interface allows

WireRegion::WireRegion(int num_ranks, int num_nvl_peers, uint64_t nvl_bytes, uint64_t rdma_bytes, uint32_t flags) {
  uint64_t at = 0;
  auto place = [this, &at](uint64_t bytes) {
    uint64_t offset = at;
    at += round_up(bytes, kPage);
    if (bytes) part[num_parts++] = offset;
    return offset;
  };
  rows_bytes = nvl_bytes;
  rows_offset = place(rows_bytes);
  extras_bytes = nvl_bytes ? extras_for(static_cast<uint64_t>(num_ranks), nvl_bytes) : 0;
  extras_offset = place(extras_bytes);
  // A shape that fits has rdma_bytes >= 4 E B H with H >= 8. Its dispatch slot holds B rows of 2 H bytes, and indices
  // and weights of 8 B K bytes (a call whose K > E and tiny H outgrow the slot is refused); its combine slot holds E B
  // rows of (2 + 1/32) H + 4 bytes and 20 E bytes of tables. Untouched pages cost nothing.
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
  uint64_t nodes = static_cast<uint64_t>(links_of(num_ranks, num_nvl_peers, flags));
  link_bytes = nodes > 1 && rdma_bytes ? round_up(rdma_bytes / nodes + kSpareLinkBytes, kPage) : 0;
  link_in_offset = place(nodes * link_bytes);
  link_out_offset = place(nodes * link_bytes);
  total = at;
}

uint64_t control_bytes_for(int num_ranks, int num_nvl_peers, uint32_t flags) {
  return Control::bytes(num_ranks) + RemoteControl::bytes(num_ranks, links_of(num_ranks, num_nvl_peers, flags));
}

}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_block_sizes(dk_block_sizes_params *p) {
  DK_ENTER(p);
  if (p->num_ranks < 1 || p->num_ranks > DK_MAX_RANKS || p->num_nvl_peers < 1) return DK_EINVAL;
  p->control_bytes = control_bytes_for(p->num_ranks, p->num_nvl_peers, p->flags);
  WireRegion wire(p->num_ranks, p->num_nvl_peers, p->nvl_bytes, p->rdma_bytes, p->flags);
  p->wire_bytes = wire.total;
  p->num_wire_parts = wire.num_parts;
  for (uint32_t i = 0; i < wire.num_parts; i++) p->wire_part[i] = wire.part[i];
  p->min_nvl_bytes = static_cast<uint64_t>(p->num_ranks) * round_up(p->max_row_bytes, kLine);
  int nodes = links_of(p->num_ranks, p->num_nvl_peers, p->flags);
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
