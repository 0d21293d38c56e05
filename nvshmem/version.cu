// version.cu - NVSHMEM has two halves: the device part is linked into this library, the host part is loaded. Halves of
// different versions hang without an error.
#include <dlfcn.h>

#include <cstdio>

#include "host_part.h"
#include "network.h"

namespace deepep {
namespace {

#define TEXT_OF(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)
// `deepep doctor` searches the file for this text.
constexpr char kBuiltWith[] = "built with NVSHMEM " VERSION_TEXT(
    NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION);

constexpr int number(const Version &v) { return v.major * 10000 + v.minor * 100 + v.patch; }
constexpr Version kOldest{3, 3, 9};  // the first one that creates queue pairs in a rotated order
static_assert(number(kBuiltFor) >= number(kOldest), "NVSHMEM 3.3.9 or newer is needed");

const char *own_file() {
  Dl_info info{};
  return dladdr(reinterpret_cast<void *>(check_versions), &info) != 0 && info.dli_fname != nullptr ? info.dli_fname
                                                                                                   : "?";
}

}  // namespace

Version loaded_version() {
  Version version{};
  if (host_part_file()[0] == 0) return version;
  nvshmemx_vendor_get_version_info(&version.major, &version.minor, &version.patch);
  return version;
}

int32_t check_versions(Report *report) {
  const Version loaded = loaded_version();
  const bool same = loaded == kBuiltFor;
  if (const char *error = host_part_error(); error != nullptr && (same || host_part_file()[0] == 0)) {
    report->add(
        "%s; this library is %s: install nvidia-nvshmem-cu13 of that version, or name the folder of %s in "
        "LD_LIBRARY_PATH",
        error, kBuiltWith, "libnvshmem_host.so.3");
    return DK_EUNSUPPORTED;
  }
  if (same) return DK_OK;
  report->add("%s is %s, and %s is NVSHMEM %d.%d.%d%s", own_file(), kBuiltWith, host_part_file(), loaded.major,
              loaded.minor, loaded.patch,
              number(loaded) < number(kOldest) ? " (3.3.9 is the oldest that is supported)" : "");
  report->add(
      "halves of different versions hang without an error: install the version that it was built with, or rebuild it");
  return DK_EVERSION;
}

}  // namespace deepep
