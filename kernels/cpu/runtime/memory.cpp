// Memory that other processes can map: one memfd each. It has no name, so nothing stays behind after a crash, and the
// size of /dev/shm does not matter. Pages are allocated when they are first touched.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cpu/runtime/heap.h"

namespace dk {
namespace {

struct Memory {
  void *base = MAP_FAILED;
  uint64_t bytes = 0;
  int fd = -1;  // stays -1 where the memory is imported: the mapping alone keeps the file
  dev_t device = 0;
  ino_t inode = 0;  // of fd's file
  bool imported = false, released = false;

  // Something else in the process may close a descriptor that is not its own, and another file get its number.
  bool owns_fd() const {
    struct stat file;
    return fd >= 0 && fstat(fd, &file) == 0 && file.st_dev == device && file.st_ino == inode;
  }

  void close_fd() {
    if (owns_fd()) close(fd);
    fd = -1;
  }

  ~Memory() {
    if (base != MAP_FAILED) munmap(base, bytes);
    close_fd();
  }
};

int32_t code_of(int error) {
  return error == ENOMEM || error == ENOSPC || error == EFBIG || error == EOVERFLOW ? DK_ENOMEM : DK_ESYSTEM;
}

// As bootstrap.LowestFD: the Go runtime must not come to write to memory whose number was its own before.
constexpr int kLowestFd = 64;

// Duplicates a descriptor; -1 with errno. Any number will do where the process's limit leaves none above: it lies below
// (EINVAL), or all numbers from there on are taken (EMFILE).
int duplicate_above(int fd) {
  int high = fcntl(fd, F_DUPFD_CLOEXEC, kLowestFd);
  return high >= 0 || (errno != EINVAL && errno != EMFILE) ? high : fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

int create_above() {
  int low = memfd_create("deepep", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (low < 0 || low >= kLowestFd) return low;
  int high = duplicate_above(low);
  if (high < 0) return low;
  close(low);
  return high;
}

// These return errno, 0 on success.
int map_file(Memory &memory, int fd, uint64_t bytes) {
  memory.base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  memory.bytes = bytes;
  return memory.base == MAP_FAILED ? errno : 0;
}

// In place of what is mapped there; at an error that stays.
int map_again(const Memory &memory, int protection, int flags, int fd) {
  return mmap(memory.base, memory.bytes, protection, flags | MAP_FIXED, fd, 0) == MAP_FAILED ? errno : 0;
}

// The seals keep a peer from shrinking the file, which would make the next access here a SIGBUS.
int create_file(Memory &memory, uint64_t bytes) {
  memory.fd = create_above();
  struct stat file;
  if (memory.fd < 0 || fstat(memory.fd, &file) != 0) return errno;
  memory.device = file.st_dev;
  memory.inode = file.st_ino;
  if (ftruncate(memory.fd, static_cast<off_t>(bytes)) != 0) return errno;
  return fcntl(memory.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0 ? 0 : errno;
}

// Touching pages past the file's end would be a SIGBUS, also where the peer shortens the file later.
int32_t check_file(int fd, uint64_t bytes, int32_t &device_error) {
  struct stat file;
  if (fstat(fd, &file) != 0) {
    device_error = errno;
    return DK_ESYSTEM;
  }
  int seals = fcntl(fd, F_GET_SEALS);
  return static_cast<uint64_t>(file.st_size) < bytes || seals < 0 || !(seals & F_SEAL_SHRINK) ? DK_EINVAL : DK_OK;
}

int restore_own(Memory &memory) {
  int error = create_file(memory, memory.bytes);
  if (!error) error = map_again(memory, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd);
  if (error) memory.close_fd();
  return error;
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_mem_alloc(dk_mem_alloc_params *p) {
  DK_ENTER(p);
  p->mem = p->address = p->out_bytes = 0;
  if (!p->device || p->bytes == 0 || p->bytes > uint64_t{1} << 46) return DK_EINVAL;
  uint64_t bytes = round_up(p->bytes, kPage);
  Owned<Memory> memory = create<Memory>();
  int error = memory ? create_file(*memory, bytes) : ENOMEM;
  if (!error) error = map_file(*memory, memory->fd, bytes);
  if (!error && !memory->owns_fd()) error = EBADF;
  if (error) {
    p->device_error = error;
    return code_of(error);
  }
  p->address = address_of(memory->base);
  p->out_bytes = bytes;
  p->mem = address_of(memory.release());
  return DK_OK;
}

DK_EXPORT int32_t dk_mem_export(dk_mem_export_params *p) {
  DK_ENTER(p);
  p->kind = DK_SHARE_NONE;
  p->fd = -1;
  memset(p->blob, 0, sizeof p->blob);
  Memory *memory = at<Memory>(p->mem);
  if (!memory || memory->fd < 0) return DK_EINVAL;
  bool owned = memory->owns_fd();
  p->fd = owned ? duplicate_above(memory->fd) : -1;
  if (p->fd < 0) {
    p->device_error = owned ? errno : EBADF;
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
  int32_t code = check_file(p->fd, bytes, p->device_error);
  if (code != DK_OK) return code;
  Owned<Memory> memory = create<Memory>();
  int error = memory ? map_file(*memory, p->fd, bytes) : ENOMEM;
  if (error) {
    p->device_error = error;
    return code_of(error);
  }
  memory->imported = true;
  p->address = address_of(memory->base);
  p->mem = address_of(memory.release());
  return DK_OK;
}

DK_EXPORT int32_t dk_mem_free(dk_mem_free_params *p) {
  DK_ENTER(p);
  owned<Memory>(p->mem);
  p->mem = 0;
  return DK_OK;
}

// Private pages, which appear as they are touched and go with dk_mem_restore, stand in for allocated memory: a caller
// may still have a view of it.
DK_EXPORT int32_t dk_mem_release(dk_mem_release_params *p) {
  DK_ENTER(p);
  Memory *memory = at<Memory>(p->mem);
  if (!memory) return DK_EINVAL;
  if (memory->released) return DK_ESTATE;
  int error = map_again(*memory, memory->imported ? PROT_NONE : PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  if (error) {
    p->device_error = error;
    return code_of(error);
  }
  memory->close_fd();
  memory->released = true;
  return DK_OK;
}

DK_EXPORT int32_t dk_mem_restore(dk_mem_restore_params *p) {
  DK_ENTER(p);
  Memory *memory = at<Memory>(p->mem);
  if (!memory) return DK_EINVAL;
  if (!memory->released) return DK_ESTATE;
  if (p->kind != (memory->imported ? DK_SHARE_FD : DK_SHARE_NONE)) return DK_EUNSUPPORTED;
  int error = 0;
  if (memory->imported) {
    int32_t code = check_file(p->fd, memory->bytes, p->device_error);
    if (code != DK_OK) return code;
    error = map_again(*memory, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd);
  } else {
    error = restore_own(*memory);
  }
  if (error) {
    p->device_error = error;
    return code_of(error);
  }
  memory->released = false;
  return DK_OK;
}
