#include "cpu/runtime/device.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cpu/runtime/heap.h"
#include "cpu_build_id.h"

namespace dk {

enum : uint32_t { kIsaBest = 0, kIsaBaseline = 1, kIsaAvx2 = 2, kIsaAvx512 = 3 };

// The table for an isa of dk_device_open; null if this processor does not have it.
static const RowKernels *rows_for(uint32_t isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == kIsaAvx512 || (isa == kIsaBest && avx512)) return avx512 ? &kRowsAvx512 : nullptr;
  if (isa == kIsaAvx2 || (isa == kIsaBest && avx2)) return avx2 ? &kRowsAvx2 : nullptr;
#endif
  return isa == kIsaBest || isa == kIsaBaseline ? &kRowsBaseline : nullptr;
}

static int32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return max(1, CPU_COUNT(&set));
  return static_cast<int32_t>(max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
}

// Half of the last-level cache: the other half is left to the rows that are read meanwhile.
static uint64_t cached_bytes() {
  long bytes = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  bytes = max(sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE));
#endif
  return bytes > 0 ? static_cast<uint64_t>(bytes) / 2 : uint64_t{4} << 20;
}

// Ranks with equal ids run on the same machine: all its processes read the same boot id.
static void read_uuid(uint8_t *uuid) {
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
  if (!file) return;
  char text[40] = {};
  size_t got = fread(text, 1, sizeof text - 1, file), digits = 0;
  fclose(file);
  for (size_t i = 0; i < got && digits < 32; i++) {
    char c = text[i];
    int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0) continue;
    uuid[digits / 2] = static_cast<uint8_t>(uuid[digits / 2] << 4 | value);
    digits++;
  }
}

static void read_name(char *name, size_t size) {
  snprintf(name, size, "processor");
  FILE *file = fopen("/proc/cpuinfo", "re");
  if (!file) return;
  char line[256];
  while (fgets(line, sizeof line, file)) {
    const char *value = strchr(line, ':');
    if (strncmp(line, "model name", 10) != 0 || !value) continue;
    snprintf(name, size, "%.*s", static_cast<int>(strcspn(value + 2, "\n")), value + 2);
    break;
  }
  fclose(file);
}

}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_info(dk_info_params *p) {
  DK_ENTER(p);
  p->abi_version = DK_ABI_VERSION;
  p->caps = DK_CAP_HOST_STREAM | DK_CAP_CHUNKS | DK_CAP_ROUTED_NODES | DK_CAP_ROUTED_SHRINK | DK_CAP_SHRINK_NODES |
            DK_CAP_ROUTED_SHRINK_NODES;
  p->num_devices = 1;
  snprintf(p->kind, sizeof p->kind, "cpu");
  snprintf(p->build, sizeof p->build, "%s", DK_BUILD_ID);
  p->reason[0] = 0;
  p->max_ll_topk = kMaxTopk;
  p->max_ll_tokens = kMaxTokens;
  p->max_ll_local_experts = static_cast<int32_t>(kMaxExperts);
  p->reserved1 = 0;
  return DK_OK;
}

DK_EXPORT int32_t dk_device_open(dk_device_open_params *p) {
  DK_ENTER(p);
  p->device = 0;
  if (p->ordinal < -1 || p->ordinal > 0 || p->isa > kIsaAvx512) return DK_EINVAL;
  const RowKernels *rows = rows_for(p->isa);
  if (!rows) return DK_EUNSUPPORTED;
  Owned<Device> device = create<Device>(Device{rows, cached_bytes(), usable_cores()});
  if (!device) return DK_ENOMEM;
  p->device = address_of(device.release());
  p->out_ordinal = 0;
  p->num_sms = 1;
  p->cc_major = p->cc_minor = 0;
  uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  p->total_bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * page;
  p->free_bytes = static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
  memset(p->uuid, 0, sizeof p->uuid);
  read_uuid(p->uuid);
  read_name(p->name, sizeof p->name);
  snprintf(p->isa_name, sizeof p->isa_name, "%s", rows->name);
  return DK_OK;
}

DK_EXPORT int32_t dk_device_close(dk_device_close_params *p) {
  DK_ENTER(p);
  owned<Device>(p->device);
  p->device = 0;
  return DK_OK;
}
