// shrink_layout.h - libdeepep_nvshmem.so: what a block and a team have besides where the team shrinks and spans nodes.
// Host and device.
//
// Rows of normal mode go straight from rank to rank, so that no row is lost with a rank that would have passed it on. A
// rank's rows for another one are numbered; row n goes to place n % places of a ring that no other rank writes to, and
// its tagged word, and the reader's credit, have the same place. Received rows lie in the nvl region, whose part for a
// sender depends on the ranks alone: what a rank still sends that was left out lands where only it writes, and where
// low latency has nothing. Staged rows lie in this rank's rdma region: one that is overwritten while its put is under
// way goes to a rank that was left out of the call, which throws away what it got.
#pragma once
#include "internode/normal/rings.h"

namespace deepep::internode {

// What this rank has put last into its words at a rank of another node.
struct Told {
  uint64_t lifts, generation;  // Standing
  uint64_t notice, given_up;   // TeamView::notice, TeamView::given_up
};

// From the start of the block, for R ranks.
struct ShrinkOffsets {
  uint64_t ballots;     // uint64[R][1 + words]: of each rank its Ballot::version, then its set, 32 ranks a word, tagged
  uint64_t ballot_out;  // uint64[2][1 + words]: source of puts of this rank's ballot, by the place of its message
  uint64_t standing_out;  // Standing: source of puts of this rank's
  uint64_t told_back;     // Told[R]: what a rank has been told, as read back from there
  uint64_t among_rows;    // uint64[R]: of each rank the newest call among whose rows it was for long; that rank writes
  uint64_t end;
  uint32_t ballot_words;
};
__host__ __device__ inline ShrinkOffsets shrink_offsets(uint64_t start, uint64_t num_ranks) {
  ShrinkOffsets at{};
  at.ballot_words = align_up<uint32_t>(1 + ceil_div(static_cast<int>(num_ranks), 32), 2);  // whole 16 bytes
  at.ballots = start;
  at.ballot_out = at.ballots + align_up<uint64_t>(num_ranks * at.ballot_words * 8, 128);
  at.standing_out = at.ballot_out + align_up<uint64_t>(2 * at.ballot_words * 8, 128);
  at.told_back = at.standing_out + 128;
  at.among_rows = at.told_back + align_up<uint64_t>(num_ranks * sizeof(Told), 128);
  at.end = align_up<uint64_t>(at.among_rows + num_ranks * 8, 4096);
  return at;
}

// Device memory of a team, zeroed once; only this rank's kernels access it. Streams follow: [2][R * C].
struct ShrinkState {
  uint64_t notices[DK_MAX_RANKS];  // what this rank puts into TeamView::notice of each rank of another node
  Told told[DK_MAX_RANKS];
  uint64_t left;        // the number of the newest call within which this rank was left out
  uint64_t among_rows;  // what this rank has written last to ShrinkOffsets::among_rows of the others
};
inline uint64_t shrink_state_bytes(uint64_t num_ranks) {
  return sizeof(ShrinkState) + 2 * num_ranks * kMaxChannels * sizeof(RowStream);
}

struct ShrinkView {
  ShrinkOffsets at;
  ShrinkState *state;

  __host__ __device__ RowStream *sends() const { return reinterpret_cast<RowStream *>(state + 1); }
  __host__ __device__ RowStream *receives(int num_ranks) const { return sends() + num_ranks * kMaxChannels; }
};

struct PairRings {
  uint64_t in, out;            // rings of received and of staged rows, from the start of the block
  uint64_t in_part, out_part;  // bytes of one
  uint32_t stride, places, channels, reserved;

  __host__ __device__ uint64_t in_at(int source, int row) const { return in + source * in_part + at(row); }
  __host__ __device__ uint64_t out_at(int reader, int row) const { return out + reader * out_part + at(row); }
  __host__ __device__ uint64_t at(int row) const {
    return static_cast<uint64_t>(static_cast<uint32_t>(row) % places) * stride;
  }
};
constexpr int kMaxPlaces = 180;    // of a ring
constexpr int kPairStreams = 512;  // of a rank toward all others, about: more than warps that serve them
// places is 0 if a region is too small for a row.
inline PairRings pair_rings(const TeamView &team, uint64_t row_bytes) {
  PairRings at{};
  const uint64_t ranks = team.num_ranks;
  at.in = team.nvl;
  at.out = team.rdma;
  at.in_part = team.nvl_bytes / ranks / 128 * 128;
  at.out_part = team.rdma_bytes / ranks / 128 * 128;
  at.stride = static_cast<uint32_t>(align_up<uint64_t>(row_bytes, 128));
  at.places = static_cast<uint32_t>(min<uint64_t>(kMaxPlaces, min(at.in_part, at.out_part) / at.stride));
  at.channels = static_cast<uint32_t>(min<uint64_t>(at.places, max<uint64_t>(4, kPairStreams / ranks)));
  return at;
}

}  // namespace deepep::internode
