// rings.h - the host's side of the worker: its rings, its launches, its end.
#pragma once
#include <vector>

#include "testtransport.h"
#include "worker.h"

namespace testtransport {

class Rings {
 public:
  ~Rings();
  int start(int num_pes, const NicTiming &timing);  // allocates and loads, which must not happen while a kernel waits
  int post(int pe, Post post);                      // waits while the ring is full
  bool is_done(int pe) const;                       // what the host has posted toward it
  int keep_running();                               // launches the worker where it has ended
  int check() const;                                // an error of the worker, after its message was printed
  int add_area(const Area &area);
  void lose(int pe);
  WorkerState *state() const { return state_; }
  int read(testtransport_nic *out) const;

 private:
  int pause();  // until the worker has ended

  WorkerState *state_ = nullptr;      // device memory
  WorkerControl *control_ = nullptr;  // host memory
  Post *slots_ = nullptr;             // host memory, [pe][kRingSlots]
  Post *kernel_slots_ = nullptr;      // device memory, likewise
  std::vector<uint64_t> posted_;      // [pe]
  std::vector<uint64_t> areas_;       // where each begins
  uint64_t launches_ = 0;
  cudaStream_t stream_ = nullptr;
};

// kernels.cu
cudaError_t load_worker();
cudaError_t measure_tick(uint64_t *ns, cudaStream_t stream);  // to memory that the GPU writes
cudaError_t launch_worker(const WorkerParams &params, cudaStream_t stream);

}  // namespace testtransport
