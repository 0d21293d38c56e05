// dispatch_roles.cuh - libdeepep_nvshmem.so: dispatch between nodes: the warps of a block by their roles, and the
// kernel with a routing and without.
#pragma once
#include "internode/normal/push_rows.cuh"

namespace deepep::internode {

// The pushers' streams begin.
__device__ inline void reset_pushers(const InternodeDispatchParams &p, int first, int step, int count) {
  const int channels = static_cast<int>(p.rings.channels);
#pragma unroll 1
  for (int i = first; i < count; i += step) {
    if (lane_id() == 0) p.lists.from_nodes[i] = {i < channels ? i : 0, 0, 0, 0};
    for (int rank = lane_id(); rank < p.internode.num_peers; rank += kWarp)
      words_pushed(p, node_pushed(p, i), i % channels)[rank] = 0;
  }
  __syncwarp();
}

template <bool kWide, class Params>
__device__ inline void run_dispatch_roles(const Params &p, uint64_t epoch, const RowsThere *there, bool stages) {
  const Session &s = p.d.session;
  const int warp = warp_id(), blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int channels = static_cast<int>(p.rings.channels), from_nodes = p.internode.num_nodes * channels,
            to_nodes = from_nodes - channels, of_others = (p.internode.num_peers - 1) * from_nodes;
  const int senders = p.shape.senders, pushers = stages ? p.shape.staging_pushers : p.shape.pushers;
  if (warp < senders) {
    const int first = warp * blocks + block, step = senders * blocks;
    reset_streams(p.lists.to_nodes, first, step, to_nodes, channels);
    serve_streams(s, kRoleSender, first, step, to_nodes,
                  [&](int stream, BlockedStream &blocked) { return serve_sender(p, epoch, stream, blocked); });
  } else if (warp < senders + pushers) {
    const int first = (warp - senders) * blocks + block, step = pushers * blocks;
    reset_pushers(p, first, step, from_nodes);
    serve_streams(s, kRolePusher, first, step, from_nodes, [&](int stream, BlockedStream &blocked) {
      return serve_pusher<kWide>(p, epoch, there, stream, blocked);
    });
  } else {
    const int first = (warp - senders - pushers) * blocks + block,
              step = (DispatchRoles::kWarps - senders - pushers) * blocks;
    reset_streams(p.lists.by_rank, first, step, of_others, channels);
    serve_streams(s, kRoleReader, first, step, of_others,
                  [&](int stream, BlockedStream &blocked) { return serve_pushed(p, epoch, stream, blocked); });
    pad_outputs(p, first, step);
  }
}

// The kernel. shared: the block's dynamic shared memory, RowsThere [R]; has_room(): whether all ranks' outputs have
// room for their rows; clear(): what outputs are after a failure.
template <class Params, class HasRoom, class Clear>
__device__ inline void dispatch_between_nodes(const DispatchChoice<Params> &choice, uint8_t *shared, HasRoom has_room,
                                              Clear clear) {
  const Params &p = choice.params[0];
  auto *there = reinterpret_cast<RowsThere *>(shared);
  const Session &s = p.d.session;
  const uint64_t epoch = ptx::ld_relaxed_gpu(&s.team.scratch->epoch) + 1;
  begin_role_times();
  if (begin(s)) {
    Handshake hand = dispatch_handshake(
        p.d, epoch, load_matrix_entry(p.d.rank_prefix_matrix(), s.team.num_ranks, threadIdx.x), load_wrong_counts(p.d));
    add_channels(hand, p.rings.channels);
    if (blockIdx.x == 0) post_messages(s, p.internode, hand);
    if (blockIdx.x == gridDim.x - 1) publish_newest_by_last_warp(s.team);
    if (await_messages(s, p.internode, hand) && has_room(epoch)) {
      if (blockIdx.x == 0) count_bytes_in_node(p);
      const bool stages = find_places(p, epoch, there);
      // Not by a number: constants that instructions name cost 1 to 3 % less.
      if (agree_on_rings(p, epoch))
        run_dispatch_roles<false>(p, epoch, there, stages);
      else
        run_dispatch_roles<true>(choice.params[1], epoch, there, stages);
    }
  }
  end_role_times(0);
  finish(s, [&](bool failed) {
    if (failed) clear();
    for (int r = threadIdx.x; r < s.team.num_ranks; r += blockDim.x)
      p.state->rows_taken[epoch % 2][r] = p.state->tokens_taken[epoch % 2][r] = 0;
    if (threadIdx.x == 0) {
      s.team.scratch->epoch = epoch;
      clear_wrong_counts(p.d);
    }
    record_kernel(s, nullptr, true, failed);
  });
}

}  // namespace deepep::internode
