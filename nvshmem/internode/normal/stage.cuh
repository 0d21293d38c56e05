// stage.cuh - libdeepep_nvshmem.so: a row that a warp has in shared memory on its way to another node.
#pragma once
#include "internode/normal/common.cuh"

namespace deepep::internode {

// Where a block's stages are in its shared memory, one for each warp that sends.
struct StageShape {
  uint32_t at, bytes, count;  // from the start of shared memory; of a stage, 0: there are none; stages

  __host__ __device__ uint32_t end() const { return at + count * (bytes + 8); }
};
// If they fit into `shared` bytes, of which `used` are taken.
inline StageShape stage_shape(uint64_t row_bytes, int warps, uint64_t used, uint64_t shared) {
  const StageShape stages{static_cast<uint32_t>(align_up<uint64_t>(used, 128)),
                          static_cast<uint32_t>(align_up<uint64_t>(row_bytes, 16)), static_cast<uint32_t>(warps)};
  return row_bytes <= shared && stages.end() <= shared ? stages : StageShape{static_cast<uint32_t>(used), 0, 0};
}

struct RowStage {
  uint8_t *row = nullptr;  // null: the warp has none
  uint64_t *arrived = nullptr;
  uint32_t parity = 0;

  RowStage() = default;
  // `warp`: among those that send.
  __device__ RowStage(const StageShape &shape, uint8_t *shared, int warp) {
    if (shape.bytes == 0) return;
    row = shared + shape.at + warp * shape.bytes;
    arrived = reinterpret_cast<uint64_t *>(shared + shape.at + shape.count * shape.bytes) + warp;
#if DEEPEP_HAS_BULK_COPY
    if (lane_id() == 0) {
      ptx::mbarrier_init(arrived, 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
#endif
  }
  // A payload, of global memory; after wait() it is there.
  __device__ void load(const uint8_t *from, uint32_t bytes) {
#if DEEPEP_HAS_BULK_COPY
    if (lane_id() == 0) {
      ptx::mbarrier_expect(arrived, bytes);
      ptx::bulk_load(row, from, bytes, arrived);
    }
#endif
  }
  __device__ void wait() {
#if DEEPEP_HAS_BULK_COPY
    spin_in_block([&] { return ptx::mbarrier_try_wait(arrived, parity); });
    parity ^= 1;
    __syncwarp();
#endif
  }
};

}  // namespace deepep::internode
