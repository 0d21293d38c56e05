// library.cu - opens a rank: device, block, peers' blocks, transport, status and statistics pages, team.
#include "library.h"

void *g_library = nullptr;

std::vector<uint64_t> Rank::allocate_shared(uint64_t bytes) {
  dk_mem_alloc_params a{};
  a.device = device;
  a.bytes = bytes;
  DK(mem_alloc, a);
  dk_mem_export_params e{};
  e.mem = a.mem;
  e.kind = world->shape.share_by_descriptor ? DK_SHARE_FD : DK_SHARE_LOCAL;
  DK(mem_export, e);
  world->descriptors[rank] = e.fd;
  world->blobs[rank].assign(e.blob, e.blob + 64);
  meet();
  std::vector<uint64_t> addresses(world->shape.ranks);
  for (int r = 0; r < world->shape.ranks; ++r) {
    if (r == rank) {
      addresses[r] = a.address;
      continue;
    }
    dk_mem_import_params i{};
    i.device = device;
    i.bytes = bytes;
    i.kind = e.kind;
    i.fd = world->descriptors[r];
    memcpy(i.blob, world->blobs[r].data(), 64);
    DK(mem_import, i);
    addresses[r] = i.address;
  }
  meet();
  if (e.fd >= 0) close(e.fd);
  return addresses;
}

constexpr int kQueuePairs = 8, kQueueDepth = 1024;

// Of ranks on several nodes: attaches to the transport's library, and takes the block from its heap.
std::vector<uint64_t> Rank::allocate_in_heap(uint64_t bytes) {
  const int peers_of_node = world->shape.ranks / world->shape.nodes;
  if (rank == 0) {
    dk_transport_unique_id_params u{};
    u.num_ranks = world->shape.ranks;
    u.num_nvl_peers = peers_of_node;
    u.num_qps_per_nic = kQueuePairs;
    u.qp_depth = kQueueDepth;
    DK(transport_unique_id, u);
    memcpy(world->shared->transport_id, u.id, sizeof u.id);
  }
  meet();
  dk_transport_attach_params a{};
  a.device = device;
  a.rank = rank;
  a.num_ranks = world->shape.ranks;
  a.num_nvl_peers = peers_of_node;
  a.num_qps_per_nic = kQueuePairs;
  a.qp_depth = kQueueDepth;
  memcpy(a.id, world->shared->transport_id, sizeof a.id);
  DK(transport_attach, a);
  std::vector<uint64_t> addresses(world->shape.ranks);
  dk_transport_alloc_params m{};
  m.attachment = a.attachment;
  m.bytes = bytes;
  m.host_peer_blocks = reinterpret_cast<uint64_t>(addresses.data());
  DK(transport_alloc, m);
  for (int r = 0; r < world->shape.ranks; ++r)
    if (r / peers_of_node != rank / peers_of_node) addresses[r] = 0;  // by the transport alone, mapped or not
  meet();
  return addresses;
}

void Rank::open_transport(uint64_t bytes) {
  std::vector<int32_t> others;
  std::vector<uint64_t> blocks(world->shape.ranks, 0);
  for (int r = 0; r < world->shape.ranks; ++r)
    if (r != rank) others.push_back(r);
  blocks[rank] = block;
  dk_transport_open_params o{};
  o.device = device;
  o.rank = rank;
  o.num_ranks = world->shape.ranks;
  o.num_qps = kQueuePairs;
  o.qp_depth = kQueueDepth;
  o.num_peers = static_cast<int32_t>(others.size());
  o.host_peers = reinterpret_cast<uint64_t>(others.data());
  o.host_blocks = reinterpret_cast<uint64_t>(blocks.data());
  o.block_bytes = bytes;
  DK(transport_open, o);
  transport = o.transport;
}

void Rank::open(World *w, int r) {
  world = w;
  rank = r;
  const Shape &shape = w->shape;
  device_ordinal = r % shape.devices;
  CHECK_CUDA(cudaSetDevice(device_ordinal));
  dk_device_open_params d{};
  d.ordinal = device_ordinal;
  d.isa = shape.isa;
  DK(device_open, d);
  device = d.device;
  sizes = {};
  sizes.num_ranks = shape.ranks;
  sizes.num_nvl_peers = shape.ranks / shape.nodes;
  sizes.nvl_bytes = shape.nvl_bytes;
  sizes.rdma_bytes = shape.rdma_bytes;
  sizes.max_row_bytes = 2 * shape.hidden;
  DK(block_sizes, sizes);
  // Among nodes the segment is in the heap too: one process cannot give another one memory here.
  if (shape.nodes > 1) segment_bytes = 2ull * shape.ranks * shape.tokens * shape.hidden;
  const uint64_t bytes = segment_offset() + segment_bytes;
  peers = shape.nodes > 1 ? allocate_in_heap(bytes) : allocate_shared(bytes);
  block = peers[r];
  if (shape.nodes > 1) open_transport(bytes);
  const uint64_t stats_bytes = 1 << 20;
  auto pinned = [&](uint64_t bytes, uint64_t &address) {
    void *host = aligned_alloc(4096, bytes);
    memset(host, 0, bytes);
    dk_host_register_params h{};
    h.device = device;
    h.host = reinterpret_cast<uint64_t>(host);
    h.bytes = bytes;
    DK(host_register, h);
    address = h.address;
    return host;
  };
  status = static_cast<dk_status *>(pinned(DK_STATUS_BYTES, status_device));
  stats = static_cast<dk_stats_page *>(pinned(stats_bytes, stats_device));
  stats->peers_offset = (sizeof(dk_stats_page) + 63) / 64 * 64;
  stats->trace_offset = stats->peers_offset + 2ull * DK_NUM_OPS * shape.ranks * 8;
  stats->trace_len = 256;
  dk_team_create_params t{};
  t.device = device;
  t.rank = r;
  t.num_ranks = shape.ranks;
  t.num_nvl_peers = shape.ranks / shape.nodes;
  t.flags = shape.nodes > 1
                ? 0
                : DK_TEAM_LOW_LATENCY | (shape.copies ? DK_TEAM_LL_COPY : 0) | (shape.shrink ? DK_TEAM_SHRINK : 0);
  t.transport = transport;
  t.host_peer_blocks = reinterpret_cast<uint64_t>(peers.data());
  t.control_offset = 0;
  t.control_bytes = sizes.control_bytes;
  t.wire_offset = sizes.control_bytes;
  t.wire_bytes = sizes.wire_bytes;
  t.nvl_offset = nvl_offset();
  t.nvl_bytes = shape.nvl_bytes;
  t.rdma_offset = rdma_offset();
  t.rdma_bytes = shape.rdma_bytes;
  t.host_status = reinterpret_cast<uint64_t>(status);
  t.status = status_device;
  if (shape.keep_stats) {
    t.host_stats = reinterpret_cast<uint64_t>(stats);
    t.stats = stats_device;
  }
  t.sm_share = shape.nodes > 1 ? 1 : (shape.ranks + shape.devices - 1) / shape.devices;
  t.sm_share_index = shape.nodes > 1 ? 0 : r / shape.devices;
  DK(team_create, t);
  team = t.team;
  dk_stream_create_params s{};
  s.device = device;
  s.high_priority = 1;
  DK(stream_create, s);
  stream = s.stream;
  meet();
}

void Rank::register_segment(uint64_t bytes) {
  std::vector<uint64_t> addresses = peers;
  for (uint64_t &address : addresses) address += address == 0 ? 0 : segment_offset();
  if (segment_bytes < bytes) addresses = allocate_shared(bytes);
  segment = addresses[rank];
  segment_bytes = bytes;
  peer_segments = addresses;
  for (int r = 0; r < world->shape.ranks; ++r) {
    dk_team_segment_params p{};
    p.team = team;
    p.index = 0;
    p.owner = r;
    p.address = addresses[r];
    p.bytes = bytes;
    DK(team_segment, p);
  }
  meet();
}
