// wire.h - queues of operations toward PEs, and the order in which they take effect.
#pragma once
#include <cuda_runtime.h>

#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "interface.h"
#include "rings.h"
#include "testtransport.h"

namespace testtransport {

enum class What { kPut, kGet, kAtomic };
struct Work {
  What what = What::kPut;
  int queue = 0;
  uint64_t due_ns = 0, fences = 0, number = 0;  // fences of the PE before it; its index among the PE's operations
  void *target = nullptr;                       // in this process
  void *source = nullptr;
  size_t bytes = 0;
  Atomic atomic = Atomic::kFetch;  // of a word of `bytes` at target
  uint64_t value = 0, compare = 0, result_flag = 0;
  void *result = nullptr;  // null: the operation returns nothing
};

struct Settings {
  uint64_t seed = 0, max_delay_ns = 0;
  int num_queues = 1;
  bool nic = false;  // the worker plays a NIC of this timing; the others are not used
  NicTiming timing{};
};
// False, with a message on stderr, if the text has neither of the forms that testtransport.h names.
bool parse_settings(const char *text, Settings *out);

class Wire {
 public:
  Wire(int my_pe, int num_pes, const Settings &settings);
  ~Wire();
  int start();  // loads kernels and creates the stream, which must not happen while a kernel waits
  int post(int pe, Work work);
  int fence(int pe);
  int quiet(int pe);  // waits until all operations toward the PE are complete
  int progress();     // enqueues operations that are due
  int lose(int pe);
  int count(int pe, testtransport_counts *out);
  int add_area(const Area &area);  // of the heap, that kernels may post by their own addresses
  WorkerState *worker();           // null: no NIC is played
  int read_nic(testtransport_nic *out);

 private:
  struct Peer {
    std::deque<Work> waiting;  // in the order in which they were posted
    uint64_t fences = 0, posted = 0;
    bool lost = false;
    testtransport_counts counts{};
  };
  bool may_go(const Peer &peer, size_t at) const;
  int go(Peer *peer, size_t at);
  int issue(const Work &work);
  int wait_for_rings(int pe);

  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::mt19937_64 random_;
  Settings settings_;
  int my_pe_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Rings> rings_;
};

// kernels.cu
cudaError_t load_wire_kernels();
cudaError_t enqueue_atomic(const Work &work, cudaStream_t stream);

}  // namespace testtransport
