#include "cpu/runtime/stream.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>

namespace dk {
namespace {

constexpr int kSpareClosures = 64;  // allocated with the stream; a deeper queue allocates more
constexpr size_t kStackBytes = 512 * 1024;
constexpr int kSpins = 200;            // a few microseconds: callers often issue calls in pairs
constexpr uint64_t kYielding = 30000;  // then yield for 30 us: about what a wake would cost the caller
constexpr uint64_t kNap = 1000000000;

Closure *pop(Stream *stream) {
  pthread_mutex_lock(&stream->lock);
  Closure *closure = stream->first;
  if (closure) stream->first = closure->next;
  if (!stream->first) stream->last = nullptr;
  pthread_mutex_unlock(&stream->lock);
  return closure;
}

void recycle(Stream *stream, Closure *closure) {
  pthread_mutex_lock(&stream->lock);
  closure->next = stream->spare;
  stream->spare = closure;
  pthread_mutex_unlock(&stream->lock);
}

void *serve(void *argument) {
  Stream *stream = static_cast<Stream *>(argument);
  pthread_setname_np(pthread_self(), "deepep-stream");
  // A new thread inherits its creator's rounding mode and flushing of denormals: sums must not depend on it.
#if defined(__SSE2__)
  __builtin_ia32_ldmxcsr(0x1f80);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
#endif
  int spins = 0;
  uint64_t idle_since = 0;
  for (;;) {
    uint32_t seen = stream->pushed.load();
    Closure *closure = pop(stream);
    if (closure) {
      closure->run(closure->argument);
      recycle(stream, closure);
      stream->pending.fetch_sub(1);
      spins = 0;
      continue;
    }
    if (stream->ending.load()) return nullptr;
    if (spins++ < kSpins) {
      cpu_relax();
      continue;
    }
    if (spins == kSpins + 1) idle_since = now_ns();
    if (now_ns() - idle_since < kYielding) {
      sched_yield();
      continue;
    }
    stream->asleep.store(true);
    if (stream->pushed.load() == seen) sleep_on(stream->pushed, seen, kNap, Scope::process);
    stream->asleep.store(false);
  }
}

void announce(Stream *stream) {
  stream->pushed.fetch_add(1);
  if (stream->asleep.load()) wake_all(stream->pushed, Scope::process);
}

// The worker blocks all signals: they belong to the application's threads.
int start_worker(Stream *stream) {
  pthread_attr_t attributes;
  int error = pthread_attr_init(&attributes);
  if (error) return error;
  pthread_attr_setstacksize(&attributes, kStackBytes);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  error = pthread_create(&stream->thread, &attributes, serve, stream);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return error;
}

}  // namespace

int32_t push(Stream *stream, void (*run)(void *), const void *argument, size_t bytes) {
  pthread_mutex_lock(&stream->lock);
  Closure *closure = stream->spare;
  if (closure)
    stream->spare = closure->next;
  else
    closure = create<Closure>().release();
  if (closure) {
    closure->run = run;
    closure->next = nullptr;
    memcpy(closure->argument, argument, bytes);
    stream->pending.fetch_add(1);
    (stream->last ? stream->last->next : stream->first) = closure;
    stream->last = closure;
  }
  pthread_mutex_unlock(&stream->lock);
  if (!closure) return DK_ENOMEM;
  announce(stream);
  return DK_OK;
}

}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_stream_create(dk_stream_create_params *p) {
  DK_ENTER(p);
  p->stream = 0;
  if (!p->device) return DK_EINVAL;
  Owned<Stream> stream = create<Stream>();
  if (!stream) return DK_ENOMEM;
  for (int i = 0; i < kSpareClosures; i++)
    if (Closure *closure = create<Closure>().release()) recycle(stream.get(), closure);
  int error = start_worker(stream.get());
  if (error) {
    p->device_error = error;
    return error == ENOMEM ? DK_ENOMEM : DK_ESYSTEM;
  }
  p->stream = address_of(stream.release());
  return DK_OK;
}

DK_EXPORT int32_t dk_stream_destroy(dk_stream_destroy_params *p) {
  DK_ENTER(p);
  Owned<Stream> stream = owned<Stream>(p->stream);
  p->stream = 0;
  if (!stream) return DK_OK;
  stream->ending.store(true);
  announce(stream.get());
  pthread_join(stream->thread, nullptr);
  return DK_OK;
}

DK_EXPORT int32_t dk_stream_query(dk_stream_query_params *p) {
  DK_ENTER(p);
  p->capturing = 0;
  if (!p->device) return DK_EINVAL;
  if (p->idle == -1) return DK_OK;
  p->idle = 1;
  if (Stream *stream = at<Stream>(p->stream)) p->idle = stream->pending.load() == 0;
  return DK_OK;
}
