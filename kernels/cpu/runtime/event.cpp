// Events. Each record creates a new point, so a wait refers to the record that was the newest when the wait was queued,
// even if the event is recorded again before the wait runs.
#include "cpu/runtime/heap.h"
#include "cpu/runtime/stream.h"

namespace dk {
namespace {

enum : uint32_t { kPending = 0, kPendingWatched = 1, kReached = 2 };

struct Point {
  Word state{kPending};
  std::atomic<uint32_t> users{1};  // the event, and each closure in a queue
};

void release(Point *point) {
  if (point && point->users.fetch_sub(1) == 1) Owned<Point>{point};
}

struct Event {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  Point *point = nullptr;  // of the last record; null: never recorded

  ~Event() {
    release(point);
    pthread_mutex_destroy(&lock);
  }
};

void reach(Point *point) {
  if (point->state.exchange(kReached) == kPendingWatched) wake_all(point->state, Scope::process);
}

// True when reached within the time.
bool wait_for(Point *point, uint64_t timeout_ns) {
  uint64_t start = 0;
  for (;;) {
    if (point->state.load() == kReached) return true;
    if (timeout_ns == 0) return false;
    uint64_t now = now_ns();
    if (!start) start = now;
    if (now - start >= timeout_ns) return false;
    uint32_t pending = kPending;
    point->state.compare_exchange_strong(pending, kPendingWatched);
    sleep_on(point->state, kPendingWatched, min<uint64_t>(timeout_ns - (now - start), 1000000000u), Scope::process);
  }
}

Point *current(Event *event) {
  pthread_mutex_lock(&event->lock);
  Point *point = event->point;
  if (point) point->users.fetch_add(1);
  pthread_mutex_unlock(&event->lock);
  return point;
}

void replace(Event *event, Point *point) {
  pthread_mutex_lock(&event->lock);
  Point *before = event->point;
  event->point = point;
  pthread_mutex_unlock(&event->lock);
  release(before);
}

void run_record(void *argument) {
  Point *point = *static_cast<Point **>(argument);
  reach(point);
  release(point);
}

// No time limit: operations queued before the point have deadlines of their own.
void run_wait(void *argument) {
  Point *point = *static_cast<Point **>(argument);
  wait_for(point, UINT64_MAX);
  release(point);
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_event_create(dk_event_create_params *p) {
  DK_ENTER(p);
  p->event = 0;
  if (!p->device) return DK_EINVAL;
  Owned<Event> event = create<Event>();
  if (!event) return DK_ENOMEM;
  p->event = address_of(event.release());
  return DK_OK;
}

DK_EXPORT int32_t dk_event_destroy(dk_event_destroy_params *p) {
  DK_ENTER(p);
  owned<Event>(p->event);
  p->event = 0;
  return DK_OK;
}

DK_EXPORT int32_t dk_event_record(dk_event_record_params *p) {
  DK_ENTER(p);
  Event *event = at<Event>(p->event);
  if (!event) return DK_EINVAL;
  if (!p->stream) {  // no queue: the calling thread has reached the point already
    replace(event, nullptr);
    return DK_OK;
  }
  Owned<Point> point = create<Point>();
  if (!point) return DK_ENOMEM;
  point->users.store(2);  // the event and the closure
  int32_t code = push(at<Stream>(p->stream), run_record, point.get());
  if (code == DK_OK) replace(event, point.release());
  return code;
}

DK_EXPORT int32_t dk_stream_wait_event(dk_stream_wait_event_params *p) {
  DK_ENTER(p);
  Event *event = at<Event>(p->event);
  if (!event) return DK_EINVAL;
  if (!p->stream) return DK_EUNSUPPORTED;
  Point *point = current(event);
  if (!point) return DK_OK;
  int32_t code = push(at<Stream>(p->stream), run_wait, point);
  if (code != DK_OK) release(point);
  return code;
}

DK_EXPORT int32_t dk_event_wait(dk_event_wait_params *p) {
  DK_ENTER(p);
  Event *event = at<Event>(p->event);
  if (!event) return DK_EINVAL;
  Point *point = current(event);
  if (!point) return DK_OK;
  bool reached = wait_for(point, p->timeout_ns);
  release(point);
  return reached ? DK_OK : DK_ETIMEOUT;
}
