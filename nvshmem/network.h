// network.h - what the parts of the NVSHMEM library share: one NVSHMEM in a process, its settings, versions, memory.
// NVSHMEM's public calls alone are used here, host and device.
#pragma once
#include <nvshmem_host.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "cuda/launch/host.h"

namespace deepep {

// A text of fixed size that a caller gave; what does not fit is cut.
class Report {
 public:
  Report(char *text, size_t bytes) : text_(text), bytes_(bytes) { text_[0] = 0; }
  void add(const char *format, ...) __attribute__((format(printf, 2, 3)));  // sentences are joined by "; "

 private:
  char *text_;
  size_t bytes_, used_ = 0;
};

struct Version {
  int major, minor, patch;
};
inline bool operator==(const Version &a, const Version &b) {
  return a.major == b.major && a.minor == b.minor && a.patch == b.patch;
}
constexpr Version kBuiltFor{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
Version loaded_version();  // of the host part in this process
// DK_EVERSION unless headers, device part and host part are of one release; says both versions and where they are.
int32_t check_versions(Report *report);

// What is asked of NVSHMEM before it starts.
struct Wanted {
  int num_ranks, num_nvl_peers, num_qps, qp_depth;
};
// Puts it into the environment, where NVSHMEM reads it. What the user set stays, and is reported where it differs.
int32_t apply_settings(const Wanted &wanted, Report *report);

// NVSHMEM in this process: buffers share it. All fields are guarded by the mutex.
struct Network {
  std::mutex mutex;
  int users = 0;
  Device device;  // of its own: buffers close theirs when they like
  int rank = -1, num_ranks = 0;
  nvshmemx_uniqueid_t id{};
  std::map<uint64_t, uint64_t> blocks;  // of the heap: address, bytes
};
Network &network();
bool in_heap(uint64_t address, uint64_t bytes);  // all of it inside one block

cudaError_t load_transport_kernels();  // all of them, on the current device

}  // namespace deepep
