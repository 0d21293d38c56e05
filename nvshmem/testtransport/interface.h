// interface.h - NVSHMEM 3.4's interface of transport plugins (version 3), as far as this plugin needs it. NVSHMEM ships
// no header for it: these structs have the same layout under names of our own, checked below against the wheel's
// plugins.
#pragma once
#include <cstddef>
#include <cstdint>

namespace testtransport {

constexpr int kInterface =
    3;  // the first part of the version that the host library gives, which is major * 10000 + minor * 100
constexpr int kInterfaceVersion = kInterface * 10000;

// Of a transport toward a PE; of a transport.
enum Capability { kCpuWrite = 1 << 4, kCpuRead = 1 << 5, kCpuAtomics = 1 << 6 };
enum Attribute { kConnected = 1 << 1 };

enum class Verb : int { kPut = 1, kValue = 2, kGet = 4, kGetValue = 5 };
enum class Atomic : int {
  kIncrement = 2,
  kSet = 3,
  kAdd = 4,
  kAnd = 5,
  kOr = 6,
  kXor = 7,
  kSignal = 8,
  kSignalSet = 9,
  kSignalAdd = 10,
  kLastWithoutResult = 11,
  kFetch = 12,
  kFetchIncrement = 13,
  kFetchAdd = 14,
  kFetchAnd = 15,
  kFetchOr = 16,
  kFetchXor = 17,
  kSwap = 18,
  kCompareSwap = 19
};

struct MemoryHandle {
  char bytes[512];
};
struct PeInfo {
  int32_t pci[3], pe;
  uint64_t host;
  char gpu[16];
};
struct RmaVerb {
  Verb what;
  int no_wait, on_stream;
  void *stream;
};
struct Place {
  void *address;
  uint64_t offset;
  MemoryHandle *handle;
};  // of a PE's memory, in that PE's addresses
struct RmaSize {
  size_t count;
  int element_bytes;
  ptrdiff_t source_stride, target_stride;
};
struct AtomicVerb {
  Atomic what;
  int fetches, has_value, has_compare;
};
struct AtomicPlace {
  Place target;
  uint64_t result_flag;  // written after the result
  void *result, *value_address, *compare_address;
  uint64_t value, compare;
  MemoryHandle *result_handle;
};
struct AtomicSize {
  int type, bytes;
};

struct Transport;
struct Operations {
  int (*can_reach_peer)(int *access, PeInfo *peer, Transport *);
  int (*connect_endpoints)(Transport *, int *devices, int num_devices);
  int (*get_mem_handle)(MemoryHandle *, void *address, size_t bytes, Transport *, bool local_only);
  int (*release_mem_handle)(MemoryHandle *, Transport *);
  int (*finalize)(Transport *);
  int (*show_info)(Transport *, int style);
  int (*progress)(Transport *);
  int (*rma)(Transport *, int pe, RmaVerb, Place *remote, Place *local, RmaSize, int by_proxy);
  int (*amo)(Transport *, int pe, void *, AtomicVerb, AtomicPlace *, AtomicSize, int by_proxy);
  int (*fence)(Transport *, int pe, int by_proxy);
  int (*quiet)(Transport *, int pe, int by_proxy);
  int (*enforce_cst)(Transport *);
  int (*enforce_cst_at_target)(Transport *);
  int (*add_device_remote_mem_handles)(Transport *, int, MemoryHandle *, uint64_t, size_t);
};

struct Transport {
  int version, type;
  int *capabilities;  // * here and below: the host library fills it
  Operations operations;
  void *bootstrap;  // *
  void *state, *shared_state;
  void *cache;  // *
  char **device_paths;
  int attributes, num_devices;
  bool atomics_complete_on_quiet, initialized, without_proxy;
  void *heap_base;          // *
  size_t log2_granularity;  // *
  uint64_t max_bytes;       // of one operation
  uint32_t host_endian_atomics;
  int index, my_pe, num_pes;  // *
  void *aliases, *extended;   // *
};

static_assert(sizeof(Transport) == 240 && sizeof(Operations) == 14 * 8, "the struct of interface 3");
static_assert(offsetof(Transport, operations) == 0x10 && offsetof(Transport, state) == 0x88 &&
                  offsetof(Transport, attributes) == 0xa8 && offsetof(Transport, initialized) == 0xb1 &&
                  offsetof(Transport, max_bytes) == 0xc8 && offsetof(Transport, my_pe) == 0xd8,
              "places of interface 3");
static_assert(offsetof(Operations, rma) == 0x38 && offsetof(Operations, quiet) == 0x50, "operations of interface 3");
static_assert(sizeof(Place) == 24 && sizeof(RmaVerb) == 24 && sizeof(RmaSize) == 32 && sizeof(AtomicPlace) == 80,
              "arguments of interface 3");

}  // namespace testtransport
