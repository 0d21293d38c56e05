// host_part.cpp - opens NVSHMEM's host part. libdeepep_nvshmem.so does not name it as needed: so it loads without
// NVSHMEM, and dk_info says what is missing. The functions at the end have NVSHMEM's names, for the host code here and
// for the device part that is linked in; they call those of the file that was opened.
#include "host_part.h"

#include <dlfcn.h>
#include <nvshmem_host.h>

#include <cstdio>

namespace {

constexpr char kFile[] = "libnvshmem_host.so.3";

// X(type, name, parameters, arguments); the compiler compares them with the headers.
#define FUNCTIONS(X)                                                                                           \
  X(void *, nvshmem_align, (size_t alignment, size_t bytes), (alignment, bytes))                               \
  X(void, nvshmem_free, (void *block), (block))                                                                \
  X(int, nvshmem_my_pe, (), ())                                                                                \
  X(int, nvshmem_n_pes, (), ())                                                                                \
  X(void *, nvshmem_ptr, (const void *address, int pe), (address, pe))                                         \
  X(void, nvshmemid_hostlib_finalize, (void *device, void *transport), (device, transport))                    \
  X(int, nvshmemid_hostlib_init_attr,                                                                          \
    (int requested, int *provided, unsigned int flags, nvshmemx_init_attr_t *attr, nvshmemi_version_t version, \
     nvshmemx_device_lib_init_cb callback),                                                                    \
    (requested, provided, flags, attr, version, callback))                                                     \
  X(int, nvshmemid_init_status, (), ())                                                                        \
  X(int, nvshmemx_get_uniqueid, (nvshmemx_uniqueid_t * id), (id))                                              \
  X(int, nvshmemx_init_status, (), ())                                                                         \
  X(int, nvshmemx_set_attr_uniqueid_args,                                                                      \
    (const int rank, const int num_ranks, const nvshmemx_uniqueid_t *id, nvshmemx_init_attr_t *attr),          \
    (rank, num_ranks, id, attr))                                                                               \
  X(void, nvshmemx_vendor_get_version_info, (int *major, int *minor, int *patch), (major, minor, patch))

struct HostPart {
  void *library;
  char error[512] = "", file[512] = "";
#define FIELD(type, name, parameters, arguments) decltype(&::name) name = nullptr;
  FUNCTIONS(FIELD)

  HostPart() : library(dlopen(kFile, RTLD_NOW | RTLD_LOCAL)) {
    if (library == nullptr) {
      const char *why = dlerror();
      snprintf(error, sizeof error, "NVSHMEM's host part cannot be opened: %s", why != nullptr ? why : kFile);
      return;
    }
#define FIND(type, name, parameters, arguments) find(&this->name, #name);
    FUNCTIONS(FIND)
    Dl_info info{};
    if (dladdr(reinterpret_cast<void *>(nvshmemx_vendor_get_version_info), &info) != 0 && info.dli_fname != nullptr)
      snprintf(file, sizeof file, "%s", info.dli_fname);
  }

  template <class F>
  void find(F *function, const char *name) {
    *function = reinterpret_cast<F>(dlsym(library, name));
    if (*function == nullptr && error[0] == 0) snprintf(error, sizeof error, "%s has no function %s", kFile, name);
  }
};

const HostPart &host_part() {
  static const auto *one = new HostPart;  // stays open: NVSHMEM cannot be unloaded
  return *one;
}

}  // namespace

const char *deepep::host_part_error() {
  const HostPart &part = host_part();
  return part.error[0] != 0 ? part.error : nullptr;
}
const char *deepep::host_part_file() { return host_part().file; }

extern "C" {
#define CALL(type, name, parameters, arguments) \
  type name parameters { return host_part().name arguments; }
FUNCTIONS(CALL)
}
