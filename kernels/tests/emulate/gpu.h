// gpu.h - the emulated devices, and the thread that runs all that is enqueued.
#pragma once
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <string>

#include "emulate.h"

namespace emulate {

// DEEPEP_EMULATE="devices=8,sms=4,cc=90,seed=0": number of devices, SMs of each, compute capability (80, 89, 90, 100,
// 103 or 120), seed of random turns; driver=12040: one that supports CUDA 12.4.
struct Settings {
  int devices = 8, sms = 4, cc = 90, seed = 0, driver = CUDART_VERSION;
};
const Settings &settings();
double threads_of_sm(), shared_of_sm();

cudaError_t failed(cudaError_t error);  // keeps it as the thread's last error
int current_device();

struct Event {
  uint64_t issued = 0, reached = 0;
};
struct Kernel {
  std::string name;
  int grid, threads, device;
  size_t shared;
  std::function<void()> body;
  double sms = 0;  // share of the device that a block takes
  int begun = 0;
  std::list<std::unique_ptr<Block>> blocks;  // running
  bool done = false;
};
struct Operation {
  std::function<void()> call;      // done at once; or
  std::shared_ptr<Kernel> kernel;  // or
  std::shared_ptr<Event> event;    // waits until it is reached
  uint64_t until = 0;
};
struct Stream {
  int device;
  std::deque<Operation> queue{};  // the first one may be going on
  bool closed = false;
};

class Gpu {
 public:
  static Gpu &get();

  cudaStream_t create_stream();
  cudaError_t close_stream(cudaStream_t stream);
  cudaError_t enqueue(cudaStream_t stream, Operation operation);
  cudaError_t record(const std::shared_ptr<Event> &event, cudaStream_t stream);
  cudaError_t wait_for(const std::shared_ptr<Event> &event, cudaStream_t stream);
  cudaError_t query(const std::shared_ptr<Event> &event);
  cudaError_t query(cudaStream_t stream);
  cudaError_t synchronize(cudaStream_t stream);
  void synchronize_device(int device);

 private:
  Gpu();
  Stream *find(cudaStream_t stream);
  void serve();
  bool advance(Stream *stream);
  void begin_blocks(Kernel *kernel);
  void run_blocks(Kernel *kernel);

  std::mutex lock_;
  std::condition_variable work_, progress_;
  std::map<Stream *, std::unique_ptr<Stream>> streams_;
  std::map<int, Stream *> default_streams_;
  std::list<std::shared_ptr<Kernel>> running_;
  std::vector<double> free_sms_;
};

}  // namespace emulate
