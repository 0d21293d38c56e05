// Objects on the heap without exceptions: null where memory is short, so that the caller returns DK_ENOMEM. operator
// new would bring 70 KB of unwinding into the library.
#pragma once
#include <stdlib.h>

#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "cpu/runtime/base.h"

namespace dk {

struct Destroy {
  template <class T>
  void operator()(T *object) const {
    object->~T();
    free(object);
  }
};
struct Free {
  void operator()(void *memory) const { free(memory); }
};
template <class T>
using Owned = std::unique_ptr<T, Destroy>;
template <class T>
using OwnedArray = std::unique_ptr<T[], Free>;

template <class T>
void *allocate(uint64_t count) {
  constexpr uint64_t alignment = max(alignof(T), alignof(max_align_t));
  return aligned_alloc(alignment, round_up(max<uint64_t>(count, 1) * sizeof(T), alignment));
}

template <class T, class... Arguments>
Owned<T> create(Arguments &&...arguments) {
  void *memory = allocate<T>(1);
  return Owned<T>(memory ? new (memory) T(std::forward<Arguments>(arguments)...) : nullptr);
}

// `count` elements as T() makes them.
template <class T>
OwnedArray<T> create_array(uint64_t count) {
  static_assert(std::is_trivially_destructible<T>::value, "Free calls no destructor");
  T *array = static_cast<T *>(allocate<T>(count));
  for (uint64_t i = 0; array && i < count; i++) new (array + i) T();
  return OwnedArray<T>(array);
}

// Takes an object back that was handed out as a handle of the interface.
template <class T>
Owned<T> owned(uint64_t handle) {
  return Owned<T>(at<T>(handle));
}

}  // namespace dk
