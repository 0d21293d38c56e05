/* What a low-latency call costs its caller: one rank, one token; the engine is the one that DEEPEP_ENGINE or the
 * machine selects. With the CPU engine the calls are asynchronous, on a GPU all are. They come in bursts, on a CPU with
 * a pause between them; hostcost.py says why.
 *
 *   host_cost CALLS FOLDER
 *
 * FOLDER is where the one rank meets itself (file bootstrap). Prints {"dispatch": [us, ...], "combine": [us, ...]}. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "arrays.h"
#include "deepep.h"

enum { HIDDEN = 128, BLOCK = 128, WARMUP_BURSTS = 50, BURST = 4, PAUSE_NS = 200000 };

static void check(deepep_status_t status, const char *what) {
  if (status == DEEPEP_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, deepep_status_name(status), deepep_last_error());
  exit(1);
}

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* The communication stream's thread of a CPU falls asleep meanwhile. A GPU has no such thread. */
static void pause_between(int host_stream) {
  const struct timespec t = {0, PAUSE_NS};
  if (host_stream) nanosleep(&t, NULL);
}

static deepep_buffer_t make_buffer(const char *folder, deepep_group_t *group, const char **engine) {
  deepep_group_options alone = DEEPEP_GROUP_OPTIONS_INIT;
  alone.bootstrap = DEEPEP_BOOTSTRAP_FILE;
  alone.rank = 0;
  alone.size = 1;
  alone.directory = folder;
  check(deepep_group_create(&alone, group), "deepep_group_create");
  deepep_buffer_options options = DEEPEP_BUFFER_OPTIONS_INIT;
  options.engine = *engine = arrays_open(0, &options.device);
  options.low_latency_mode = 1;
  options.preinitialize = 1;
  check(deepep_low_latency_size_hint(1, HIDDEN, 1, 1, &options.num_rdma_bytes), "deepep_low_latency_size_hint");
  deepep_buffer_t buffer = NULL;
  check(deepep_buffer_create(*group, &options, &buffer), "deepep_buffer_create");
  return buffer;
}

static void print(const char *name, const double *times, int count) {
  printf("\"%s\": [", name);
  for (int i = 0; i < count; i++) printf("%s%.3f", i ? ", " : "", times[i]);
  printf("]");
}

struct tensors {
  uint16_t *x, *answers, *combined;
  uint8_t *recv_x;
  int64_t *topk_idx, *layout_range;
  int32_t *recv_count, *src_info;
  float *recv_scales, *weights;
};

static const size_t kRowBytes = HIDDEN * sizeof(uint16_t);

static struct tensors make_tensors(void) {
  struct tensors t;
  t.x = array_new(kRowBytes);
  t.answers = array_new(kRowBytes);
  t.combined = array_new(kRowBytes);
  t.recv_x = array_new(HIDDEN);
  t.topk_idx = array_new(sizeof *t.topk_idx);
  t.layout_range = array_new(sizeof *t.layout_range);
  t.recv_count = array_new(sizeof *t.recv_count);
  t.src_info = array_new(sizeof *t.src_info);
  t.recv_scales = array_new(HIDDEN / BLOCK * sizeof *t.recv_scales);
  t.weights = array_new(sizeof *t.weights);
  t.weights[0] = 1.0f;
  for (int i = 0; i < HIDDEN; i++) t.x[i] = t.answers[i] = 0x3f80; /* 1.0 in BF16 */
  return t;
}

static deepep_ll_dispatch_args dispatch_args(const struct tensors *t) {
  deepep_ll_dispatch_args dispatch = DEEPEP_LL_DISPATCH_INIT;
  dispatch.num_tokens = dispatch.num_max_tokens = dispatch.num_topk = dispatch.num_experts = 1;
  dispatch.hidden = HIDDEN;
  dispatch.x = t->x;
  dispatch.topk_idx = t->topk_idx;
  dispatch.recv_x = t->recv_x;
  dispatch.recv_x_scales = t->recv_scales;
  dispatch.recv_count = t->recv_count;
  dispatch.src_info = t->src_info;
  dispatch.layout_range = t->layout_range;
  return dispatch;
}

static deepep_ll_combine_args combine_args(const struct tensors *t) {
  deepep_ll_combine_args combine = DEEPEP_LL_COMBINE_INIT;
  combine.num_tokens = combine.num_max_tokens = combine.num_topk = combine.num_experts = 1;
  combine.hidden = HIDDEN;
  combine.x = t->answers;
  combine.topk_idx = t->topk_idx;
  combine.topk_weights = t->weights;
  combine.src_info = t->src_info;
  combine.layout_range = t->layout_range;
  combine.combined_x = t->combined;
  return combine;
}

int main(int argc, char **argv) {
  int calls = argc == 3 ? atoi(argv[1]) : 0;
  if (calls < BURST) {
    fprintf(stderr, "usage: %s CALLS FOLDER (CALLS at least 4)\n", argv[0]);
    return 2;
  }
  deepep_group_t group = NULL;
  const char *engine = NULL;
  deepep_buffer_t buffer = make_buffer(argv[2], &group, &engine);
  deepep_event_t event = NULL;
  check(deepep_event_create(buffer, &event), "deepep_event_create");

  struct tensors t = make_tensors();
  deepep_ll_dispatch_args dispatch = dispatch_args(&t);
  deepep_ll_combine_args combine = combine_args(&t);
  deepep_call call = DEEPEP_CALL_INIT;
  const int host_stream = strcmp(engine, "cpu") == 0;
  call.is_async = host_stream;
  if (host_stream) call.event = event;

  int bursts = calls / BURST;
  size_t bytes = (size_t)bursts * BURST * sizeof(double);
  double *dispatched = malloc(bytes), *done = malloc(bytes), spare[BURST];
  if (!dispatched || !done) return 1;
  for (int i = -WARMUP_BURSTS; i < bursts; i++) {
    double *times = i < 0 ? spare : dispatched + i * BURST;
    pause_between(host_stream);
    for (int n = 0; n < BURST; n++) {
      double start = now_us();
      deepep_status_t status = deepep_low_latency_dispatch(buffer, &dispatch, &call);
      times[n] = now_us() - start;
      check(status, "deepep_low_latency_dispatch");
    }
    if (!host_stream) check(deepep_event_record(event, NULL), "deepep_event_record");
    check(deepep_event_wait(event, -1), "deepep_event_wait");
    times = i < 0 ? spare : done + i * BURST;
    pause_between(host_stream);
    for (int n = 0; n < BURST; n++) {
      double start = now_us();
      deepep_status_t status = deepep_low_latency_combine(buffer, &combine, &call);
      times[n] = now_us() - start;
      check(status, "deepep_low_latency_combine");
    }
    if (!host_stream) check(deepep_event_record(event, NULL), "deepep_event_record");
    check(deepep_event_wait(event, -1), "deepep_event_wait");
  }
  if (t.recv_count[0] != 1 || memcmp(t.combined, t.x, kRowBytes) != 0) {
    fprintf(stderr, "the row did not come back as it was sent\n");
    return 1;
  }
  printf("{");
  print("dispatch", dispatched, bursts * BURST);
  printf(", ");
  print("combine", done, bursts * BURST);
  printf("}\n");
  free(dispatched);
  free(done);
  check(deepep_event_destroy(event), "deepep_event_destroy");
  check(deepep_buffer_destroy(buffer), "deepep_buffer_destroy");
  check(deepep_group_destroy(group), "deepep_group_destroy");
  return 0;
}
