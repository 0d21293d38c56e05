/* arrays.h - memory that an example fills and checks, and that the engine reads and writes: plain memory for the CPU
 * engine, page-locked host memory for GPUs, which they reach at its own address. A real program passes device memory
 * instead, its tensors. The engine is the one that DEEPEP_ENGINE or the machine selects; rank r takes GPU r % their
 * number. */
#ifndef DEEPEP_EXAMPLE_ARRAYS_H
#define DEEPEP_EXAMPLE_ARRAYS_H
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deepep.h"

typedef int (*driver_init_fn)(unsigned flags);
typedef int (*driver_device_fn)(int *device, int ordinal);
typedef int (*driver_context_fn)(void **context, int device);
typedef int (*driver_current_fn)(void *context);
typedef int (*driver_allocate_fn)(void **memory, size_t bytes, unsigned flags);
typedef int (*driver_copy_fn)(unsigned long long to, unsigned long long from, size_t bytes);
static driver_allocate_fn arrays_allocate; /* NULL: plain memory */
static driver_copy_fn arrays_copy;

/* Makes the GPU's primary context the thread's, so that the driver can allocate in it. 0 is success. */
static int arrays_open_driver(int ordinal) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
  int device = 0;
  if (driver == NULL) return -1;
  arrays_allocate = (driver_allocate_fn)dlsym(driver, "cuMemHostAlloc");
  arrays_copy = (driver_copy_fn)dlsym(driver, "cuMemcpy");
  return ((driver_init_fn)dlsym(driver, "cuInit"))(0) ||
         ((driver_device_fn)dlsym(driver, "cuDeviceGet"))(&device, ordinal) ||
         ((driver_context_fn)dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, device) ||
         ((driver_current_fn)dlsym(driver, "cuCtxSetCurrent"))(context);
}

/* The engine's name, and in *device the rank's GPU (-1 without one). Call it before the first array_new. */
static const char *arrays_open(int rank, int *device) {
  static deepep_engine_info engine = DEEPEP_ENGINE_INFO_INIT;
  *device = -1;
  if (deepep_engine_query("auto", &engine) != DEEPEP_OK || strcmp(engine.name, "cuda") != 0 || engine.num_devices == 0)
    return engine.name; /* deepep_buffer_create says what is wrong, if anything is */
  *device = rank % engine.num_devices;
  if (arrays_open_driver(*device) == 0) return engine.name;
  fprintf(stderr, "rank %d: the driver (libcuda.so.1) gives no memory that GPU %d can reach\n", rank, *device);
  exit(1);
}

/* Zeroed; ends the program if there is no memory. Freed with the process. */
static void *array_new(size_t bytes) {
  void *memory = NULL;
  if (bytes == 0) bytes = 1;
  if (arrays_allocate == NULL)
    memory = malloc(bytes);
  else if (arrays_allocate(&memory, bytes, 1 /* portable: for every GPU */) != 0)
    memory = NULL;
  if (memory == NULL) {
    fprintf(stderr, "no memory for an array of %zu bytes\n", bytes);
    exit(1);
  }
  return memset(memory, 0, bytes);
}

/* Copies between arrays and memory of the engine, such as a segment: on GPUs that is the device's. */
static inline void array_copy(void *to, const void *from, size_t bytes) {
  if (arrays_copy == NULL)
    memcpy(to, from, bytes);
  else if (arrays_copy((unsigned long long)(size_t)to, (unsigned long long)(size_t)from, bytes) != 0) {
    fprintf(stderr, "the driver does not copy %zu bytes\n", bytes);
    exit(1);
  }
}

#ifdef __cplusplus
#include <vector>

template <class T>
struct ArrayAllocator {
  using value_type = T;
  ArrayAllocator() = default;
  template <class U>
  ArrayAllocator(const ArrayAllocator<U> &) {}
  T *allocate(size_t count) { return static_cast<T *>(array_new(count * sizeof(T))); }
  void deallocate(T *, size_t) {}  // with the process
  bool operator==(const ArrayAllocator &) const { return true; }
  bool operator!=(const ArrayAllocator &) const { return false; }
};
template <class T>
using Array = std::vector<T, ArrayAllocator<T>>;
#endif
#endif
