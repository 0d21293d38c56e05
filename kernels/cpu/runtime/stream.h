// A stream is a queue of closures served by one thread, in order. An event is a point in a queue.
#pragma once
#include <pthread.h>
#include <string.h>

#include "cpu/runtime/futex.h"
#include "cpu/runtime/heap.h"

namespace dk {

constexpr size_t kClosureBytes = 320;

struct Closure {
  void (*run)(void *argument);
  alignas(8) unsigned char argument[kClosureBytes];
  Closure *next;
};

struct Stream {
  pthread_t thread;
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // guards the three lists
  Closure *first = nullptr, *last = nullptr, *spare = nullptr;
  Word pushed{0};  // number of pushes, plus one when the stream ends; the worker sleeps on it
  std::atomic<uint64_t> pending{0};
  std::atomic<bool> ending{false}, asleep{false};

  ~Stream() {
    while (Closure *closure = spare) {
      spare = closure->next;
      Owned<Closure>{closure};
    }
    pthread_mutex_destroy(&lock);
  }
};

// Queues a copy of `argument`. DK_ENOMEM if there is no memory for another closure.
int32_t push(Stream *stream, void (*run)(void *), const void *argument, size_t bytes);

template <class T>
int32_t push(Stream *stream, void (*run)(void *), const T &argument) {
  static_assert(sizeof(T) <= kClosureBytes, "enlarge kClosureBytes");
  return push(stream, run, &argument, sizeof(T));
}

}  // namespace dk
