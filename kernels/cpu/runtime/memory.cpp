// Memory that other processes can map: an anonymous file each. Nothing has a name, so nothing is left behind, and the
// size of /dev/shm does not matter. Pages come into being when they are first touched.
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cpu/runtime/base.h"

namespace dk {
namespace {

struct Memory {
  void *base;
  uint64_t bytes;
  int fd;  // -1: imported; the mapping alone keeps it
};

int32_t code_of(int error) {
  return error == ENOMEM || error == ENOSPC || error == EFBIG || error == EOVERFLOW ? DK_ENOMEM : DK_ESYSTEM;
}

// Maps `fd`, which the result owns if `keep`. On failure the descriptor stays the caller's.
int32_t map_file(int fd, uint64_t bytes, bool keep, Memory **out) {
  Memory *memory = static_cast<Memory *>(calloc(1, sizeof(Memory)));
  if (!memory) return DK_ENOMEM;
  void *base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    int error = errno;
    free(memory);
    errno = error;
    return code_of(error);
  }
  *memory = {base, bytes, keep ? fd : -1};
  *out = memory;
  return DK_OK;
}

// The seals keep a peer from shrinking the file under our feet, which would be a SIGBUS here.
int32_t new_file(uint64_t bytes, int *fd) {
  *fd = memfd_create("deepep", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (*fd < 0) return code_of(errno);
  if (ftruncate(*fd, static_cast<off_t>(bytes)) == 0 &&
      fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
    return DK_OK;
  int error = errno;
  close(*fd);
  errno = error;
  return code_of(error);
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_mem_alloc(dk_mem_alloc_params *p) {
  DK_ENTER(p);
  p->mem = p->address = p->out_bytes = 0;
  if (!p->device || p->bytes == 0 || p->bytes > uint64_t{1} << 46) return DK_EINVAL;
  uint64_t bytes = round_up(p->bytes, kPage);
  int fd = -1;
  int32_t code = new_file(bytes, &fd);
  Memory *memory = nullptr;
  if (code == DK_OK) {
    code = map_file(fd, bytes, true, &memory);
    if (code != DK_OK) {
      int error = errno;
      close(fd);
      errno = error;
    }
  }
  if (code != DK_OK) {
    p->device_error = errno;
    return code;
  }
  p->mem = address_of(memory);
  p->address = address_of(memory->base);
  p->out_bytes = bytes;
  return DK_OK;
}

DK_EXPORT int32_t dk_mem_export(dk_mem_export_params *p) {
  DK_ENTER(p);
  p->kind = DK_SHARE_NONE;
  p->fd = -1;
  memset(p->blob, 0, sizeof p->blob);
  Memory *memory = at<Memory>(p->mem);
  if (!memory || memory->fd < 0) return DK_EINVAL;
  p->fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
  if (p->fd < 0) {
    p->device_error = errno;
    return DK_ESYSTEM;
  }
  p->kind = DK_SHARE_FD;
  return DK_OK;
}

DK_EXPORT int32_t dk_mem_import(dk_mem_import_params *p) {
  DK_ENTER(p);
  p->mem = p->address = 0;
  if (!p->device || p->bytes == 0) return DK_EINVAL;
  if (p->kind != DK_SHARE_FD) return DK_EUNSUPPORTED;
  uint64_t bytes = round_up(p->bytes, kPage);
  struct stat file;
  if (fstat(p->fd, &file) != 0) {
    p->device_error = errno;
    return DK_ESYSTEM;
  }
  // Touching pages past the file's end would be a SIGBUS.
  if (static_cast<uint64_t>(file.st_size) < bytes) return DK_EINVAL;
  Memory *memory = nullptr;
  int32_t code = map_file(p->fd, bytes, false, &memory);
  if (code != DK_OK) {
    p->device_error = errno;
    return code;
  }
  p->mem = address_of(memory);
  p->address = address_of(memory->base);
  return DK_OK;
}

DK_EXPORT int32_t dk_mem_free(dk_mem_free_params *p) {
  DK_ENTER(p);
  Memory *memory = at<Memory>(p->mem);
  p->mem = 0;
  if (!memory) return DK_OK;
  munmap(memory->base, memory->bytes);
  if (memory->fd >= 0) close(memory->fd);
  free(memory);
  return DK_OK;
}
