// network.h - shared by the host parts of libdeepep_nvshmem.so: the one NVSHMEM of a process, its settings, versions
// and memory. Host and device code use NVSHMEM's public functions only.
#pragma once
#include <nvshmem_host.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "cuda/launch/host.h"

namespace deepep {

// Writes sentences into a caller's text of fixed size and truncates what does not fit.
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
// DK_EVERSION, with versions and paths in the report, unless headers, device part and host part are of one release.
int32_t check_versions(Report *report);

// The caller's settings, which NVSHMEM must have before it starts.
struct Wanted {
  int num_ranks, num_nvl_peers, num_qps_per_nic, qp_depth;
  bool mnnvl;            // NVLink between hosts may be used
  const char *settings;  // lines "NAME=VALUE", which NVSHMEM gets as they are; nullptr: none
};
// Sets the environment variables that NVSHMEM reads. It keeps the user's values and reports those that differ.
int32_t apply_settings(const Wanted &wanted, Report *report);

// NVSHMEM in this process, shared by its buffers. The mutex guards all fields.
struct Network {
  std::mutex mutex;
  int users = 0;
  Device device;  // not a buffer's: a buffer may close its device first
  int rank = -1, num_ranks = 0;
  nvshmemx_uniqueid_t id{};
  std::map<uint64_t, uint64_t> blocks;  // of the heap: address, bytes
};
Network &network();
bool in_heap(uint64_t address, uint64_t bytes);  // the range lies inside one block

cudaError_t load_transport_kernels();  // all of them, on the current device

}  // namespace deepep
