// plugin.cpp - a transport of NVSHMEM for tests: it connects GPUs of one machine as if a network were between them. The
// host enqueues copies and atomics in an order that is no stricter than a NIC's; testtransport.h has the settings. Its
// soname is that of NVSHMEM's ibdevx transport: a process that loads it before NVSHMEM starts, with
// NVSHMEM_REMOTE_TRANSPORT=ibdevx, uses it.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "log.h"
#include "memory.h"
#include "wire.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace testtransport {
namespace {

std::unique_ptr<Wire> wire;  // of this process; connect_endpoints() creates it, when the PE is known
std::vector<Area> areas;     // of the heap

int can_reach_peer(int *access, PeInfo *, Transport *) {
  *access = kCpuWrite | kCpuRead | kCpuAtomics;
  return 0;
}

int connect_endpoints(Transport *t, int *, int) {
  Settings settings;
  if (!parse_settings(getenv("DEEPEP_TESTTRANSPORT"), &settings)) return 1;
  if (settings.nic && t->num_pes > kMaxPes)
    return complain("a NIC is played for at most %d PEs, not %d", kMaxPes, t->num_pes);
  wire = std::make_unique<Wire>(t->my_pe, t->num_pes, settings);
  int failed = wire->start();
  for (const Area &area : areas)
    if (failed == 0) failed = wire->add_area(area);
  return failed;
}

int get_mem_handle(MemoryHandle *handle, void *address, size_t bytes, Transport *, bool local_only) {
  return share_memory(handle, address, bytes, local_only);
}
// Handles of a part of the heap, all of a PE next to each other. They are mapped now: at their first use a kernel may
// be running that waits for a peer.
int add_remote_handles(Transport *t, int handles_per_pe, MemoryHandle *handles, uint64_t, size_t bytes) {
  Area area{reinterpret_cast<uint64_t>(start_of(handles[t->my_pe * handles_per_pe + t->index])), bytes, {}};
  for (int pe = 0; pe < t->num_pes; ++pe) {
    const MemoryHandle &handle = handles[pe * handles_per_pe + t->index];
    if (!prepare_memory(handle)) return 1;
    if (pe < kMaxPes) area.shift[pe] = static_cast<int64_t>(reinterpret_cast<uint64_t>(start_of(handle)) - area.begin);
  }
  if (area.begin == 0) return 0;
  areas.push_back(area);
  return wire == nullptr ? 0 : wire->add_area(area);
}
int release_mem_handle(MemoryHandle *handle, Transport *) { return unshare_memory(handle); }

int finalize(Transport *) {  // the host library may still read the struct, so it is not freed
  wire.reset();
  areas.clear();
  forget_memory();
  return 0;
}

int show_info(Transport *, int) { return 0; }
int progress(Transport *) { return wire == nullptr ? 0 : wire->progress(); }

int rma(Transport *, int pe, RmaVerb verb, Place *remote, Place *local, RmaSize size, int) {
  void *there = reach_memory(*remote);
  if (there == nullptr) return 1;
  Work work;
  work.bytes = size.count * static_cast<size_t>(size.element_bytes);
  work.target = there;
  work.source = local->address;
  if (verb.what == Verb::kGet || verb.what == Verb::kGetValue) {
    work.what = What::kGet;
    std::swap(work.target, work.source);
  } else if (local->handle == nullptr &&
             work.bytes <= sizeof work.value) {  // a value on the caller's stack: copied into the operation
    work.what = What::kAtomic;
    work.atomic = Atomic::kSet;
    memcpy(&work.value, local->address, work.bytes);
  } else if (verb.what == Verb::kValue) {
    return complain("a value of %zu bytes", work.bytes);
  }
  return wire->post(pe, work);
}

int amo(Transport *, int pe, void *, AtomicVerb verb, AtomicPlace *place, AtomicSize size, int) {
  Work work;
  work.what = What::kAtomic;
  work.atomic = verb.what;
  work.bytes = static_cast<size_t>(size.bytes);
  work.target = reach_memory(place->target);
  work.value = place->value;
  work.compare = place->compare;
  if (work.target == nullptr || (size.bytes != 4 && size.bytes != 8))
    return complain("an atomic of %d bytes", size.bytes);
  if (verb.what > Atomic::kLastWithoutResult) {
    work.result = place->result;
    work.result_flag = place->result_flag;
  }
  return wire->post(pe, work);
}

int fence(Transport *, int pe, int) { return wire->fence(pe); }
int quiet(Transport *, int pe, int) { return wire->quiet(pe); }

}  // namespace
}  // namespace testtransport

using namespace testtransport;

EXPORT int nvshmemt_init(Transport **out, void *, int interface_version) {
  if (interface_version / 10000 != kInterface)
    return complain("it speaks interface %d of NVSHMEM's transports (3.4), the host library interface %d", kInterface,
                    interface_version / 10000);
  auto *t = static_cast<Transport *>(calloc(1, sizeof(Transport)));
  if (t == nullptr) return 1;
  t->version = kInterfaceVersion;
  t->operations = {can_reach_peer,
                   connect_endpoints,
                   get_mem_handle,
                   release_mem_handle,
                   finalize,
                   show_info,
                   progress,
                   rma,
                   amo,
                   fence,
                   quiet,
                   nullptr,
                   nullptr,
                   add_remote_handles};
  t->attributes = kConnected;
  t->num_devices = 1;
  t->max_bytes = 1u << 30;
  t->initialized = true;
  *out = t;
  return 0;
}

EXPORT int testtransport_count(int pe, testtransport_counts *out) { return wire == nullptr ? 1 : wire->count(pe, out); }
EXPORT int testtransport_lose(int pe) { return wire == nullptr ? 1 : wire->lose(pe); }
EXPORT void *testtransport_worker(void) { return wire == nullptr ? nullptr : wire->worker(); }
EXPORT int testtransport_read_nic(testtransport_nic *out) { return wire == nullptr ? 1 : wire->read_nic(out); }
