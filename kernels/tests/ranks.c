/* ranks.c - the ranks of a case: threads that run it, meet, fail together and free what it has made. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "process.h"
#include "suite.h"

struct offer {
  size_t bytes;
  int fd;
  char blob[MAX_BLOB];
};

/* What the ranks of a case share in one process. */
struct world {
  int count;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct forwarder {
    int arrived;
    uint64_t rounds;
  } meeting, settling;
  bool broken; /* a rank failed: the others leave at their next wait */
  struct offer offers[MAX_SEATS];
  struct rank ranks[MAX_SEATS];
};

static struct seat *seats[MAX_SEATS];
static struct world *_Atomic running;

/* ---- Meeting ----------------------------------------------------------------------------------------------------- */

/* Lock held. False: a rank failed; ranks that free things still meet then (the watchdog bounds that). */
static bool everyone_here(struct world *w, struct forwarder *forwarder) {
  uint64_t round = forwarder->rounds;
  if (++forwarder->arrived == w->count) {
    forwarder->arrived = 0;
    forwarder->rounds++;
    pthread_cond_broadcast(&w->changed);
  }
  while (forwarder->rounds == round && (forwarder == &w->settling || !w->broken))
    pthread_cond_wait(&w->changed, &w->lock);
  return forwarder->rounds != round;
}

static void settle(struct rank *me) {
  if (me->socket >= 0) {
    process_settle(me);
    return;
  }
  pthread_mutex_lock(&me->world->lock);
  everyone_here(me->world, &me->world->settling);
  pthread_mutex_unlock(&me->world->lock);
}

static _Noreturn void leave(struct rank *me) { longjmp(me->leave, 1); }

void gather(struct rank *me, const void *mine, size_t bytes, int fd, void *all, int *fds) {
  struct world *w = me->world;
  me->doing = "waiting for the other ranks of the case";
  if (me->socket >= 0) {
    if (!process_gather(me, mine, bytes, fd, all, fds)) leave(me);
    return;
  }
  pthread_mutex_lock(&w->lock);
  struct offer *offer = &w->offers[me->index];
  offer->fd = fd;
  if (bytes) memcpy(offer->blob, mine, bytes);
  bool good = everyone_here(w, &w->meeting);
  for (int i = 0; good && i < w->count; i++) {
    if (bytes) memcpy((char *)all + (size_t)i * bytes, w->offers[i].blob, bytes);
    if (fds) fds[i] = w->offers[i].fd >= 0 && i != me->index ? dup(w->offers[i].fd) : -1;
  }
  good = good && everyone_here(w, &w->meeting);
  pthread_mutex_unlock(&w->lock);
  if (!good) leave(me);
}

void meet(struct rank *me) { gather(me, NULL, 0, -1, NULL, NULL); }

/* ---- Failing ----------------------------------------------------------------------------------------------------- */

static void break_world(struct world *w) {
  pthread_mutex_lock(&w->lock);
  w->broken = true;
  for (int i = 0; i < w->count; i++)
    for (int t = 0; t < w->ranks[i].num_teams; t++) set_abort(w->ranks[i].teams[t], DK_EABORTED, -1);
  pthread_cond_broadcast(&w->changed);
  pthread_mutex_unlock(&w->lock);
}

bool others_failed(struct rank *me) {
  pthread_mutex_lock(&me->world->lock);
  bool broken = me->world->broken;
  pthread_mutex_unlock(&me->world->lock);
  return broken;
}

void keep_team(struct rank *me, struct team *t) {
  expect(me, me->num_teams < MAX_TEAMS, "the suite allows %d teams", MAX_TEAMS);
  pthread_mutex_lock(&me->world->lock); /* a failing rank reads every rank's */
  me->teams[me->num_teams++] = t;
  pthread_mutex_unlock(&me->world->lock);
}

void keep_transport(struct rank *me, uint64_t transport) {
  expect(me, me->num_transports < MAX_TEAMS, "the suite allows %d transports", MAX_TEAMS);
  me->transports[me->num_transports++] = transport;
}

static void keep_message(struct rank *me, enum verdict verdict, const char *format, va_list arguments) {
  if (me->verdict != PASSED) return;
  me->verdict = verdict;
  vsnprintf(me->message, sizeof me->message, format, arguments);
}

void fail(struct rank *me, const char *format, ...) {
  if (!others_failed(me)) { /* later failures of a case are consequences of the first */
    va_list arguments;
    va_start(arguments, format);
    keep_message(me, FAILED, format, arguments);
    va_end(arguments);
  }
  break_world(me->world);
  leave(me);
}

void skip(struct rank *me, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  keep_message(me, SKIPPED, format, arguments);
  va_end(arguments);
  leave(me);
}

void check_code(struct rank *me, const char *function, int32_t code, int32_t device_error) {
  if (code != DK_OK) fail(me, "%s returned %s, device error %d", function, code_name(code), device_error);
}

/* ---- One rank ---------------------------------------------------------------------------------------------------- */

void drop_teams(struct rank *me, struct mark mark) {
  settle(me);
  pthread_mutex_lock(&me->world->lock); /* see keep_team */
  int teams = me->num_teams;
  me->num_teams = mark.teams;
  pthread_mutex_unlock(&me->world->lock);
  for (int i = mark.teams; i < teams; i++) {
    dk_team_destroy_params p = {.size = sizeof p, .team = me->teams[i]->handle};
    if (p.team) dk.team_destroy(&p);
  }
  for (int i = mark.transports; i < me->num_transports; i++) {
    dk_transport_close_params p = {.size = sizeof p, .transport = me->transports[i]};
    if (p.transport) dk.transport_close(&p);
  }
  settle(me);
  for (int i = mark.shares; i < me->num_shares; i++) drop_share(me->shares[i], me->index, false);
  settle(me);
  for (int i = mark.shares; i < me->num_shares; i++) {
    drop_share(me->shares[i], me->index, true);
    free(me->shares[i]);
  }
  me->num_transports = mark.transports;
  me->num_shares = mark.shares;
}

/* Collective where ranks are threads; a process that failed just ends. */
static void take_down(struct rank *me) {
  if (!stream_done(me->seat, seat_stream(me->seat), 60)) {
    printf("FAILED %s: rank %d: its stream never became idle\n", me->test->name, me->index);
    fflush(stdout);
    _exit(1);
  }
  drop_teams(me, (struct mark){0});
  drop_scratch(me, NULL);
  if (me->seat) reset_seat(me->seat);
}

void run_rank(struct rank *me) {
  if (setjmp(me->leave) == 0) {
    me->doing = "opening the device";
    open_seat(me);
    meet(me);
    me->doing = "running";
    me->test->run(me);
    finish(me);
    check_guards(me);
  }
  me->doing = "taking down";
  take_down(me);
}

static void *thread_of(void *argument) {
  run_rank(argument);
  return NULL;
}

struct world *new_world(const struct test_case *test, int first, int count) {
  struct world *w = calloc(1, sizeof *w);
  if (!w) abort();
  w->count = count;
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->changed, NULL);
  for (int i = 0; i < count; i++) {
    struct rank *me = &w->ranks[i];
    me->index = first + i;
    me->count = test->ranks;
    me->test = test;
    me->world = w;
    me->socket = -1;
    me->random = mix(settings.seed + (uint64_t)me->index);
    me->doing = "starting";
    if (!seats[me->index]) seats[me->index] = new_seat(me->index);
    me->seat = seats[me->index];
  }
  return w;
}

struct rank *rank_of(struct world *w, int i) { return &w->ranks[i]; }

void drop_world(struct world *w) {
  pthread_mutex_destroy(&w->lock);
  pthread_cond_destroy(&w->changed);
  free(w);
}

enum verdict run_threads(const struct test_case *test, char *why, size_t size) {
  struct world *w = new_world(test, 0, test->ranks);
  pthread_t threads[MAX_SEATS];
  running = w;
  for (int i = 1; i < w->count; i++)
    if (pthread_create(&threads[i], NULL, thread_of, &w->ranks[i])) abort();
  if (pthread_create(&threads[0], NULL, thread_of, &w->ranks[0])) abort();
  for (int i = 0; i < w->count; i++) pthread_join(threads[i], NULL);
  running = NULL;
  enum verdict verdict = PASSED;
  why[0] = 0;
  for (int i = 0; i < w->count; i++) {
    const struct rank *me = &w->ranks[i];
    if (me->verdict == PASSED || verdict == FAILED) continue;
    verdict = me->verdict;
    char seed[32] = "";
    if (me->seed) snprintf(seed, sizeof seed, ", seed %" PRIu64, me->seed);
    if (verdict == FAILED)
      snprintf(why, size, "rank %d%s: %s", i, seed, me->message);
    else
      snprintf(why, size, "%s", me->message);
  }
  drop_world(w);
  return verdict;
}

void print_state(void) {
  struct world *w = running;
  for (int i = 0; w && i < w->count; i++)
    printf("  rank %d, seed %" PRIu64 ": %s\n", i, w->ranks[i].seed, w->ranks[i].doing);
}

void close_seats(void) {
  for (int i = 0; i < MAX_SEATS; i++)
    if (seats[i]) close_seat(seats[i]);
}

/* ---- Small things ------------------------------------------------------------------------------------------------ */

void *scratch(struct rank *me, size_t bytes) {
  struct block *block = calloc(1, sizeof *block + 16 + bytes);
  if (!block) abort();
  block->next = me->blocks;
  me->blocks = block;
  return (char *)block + 16;
}

void drop_scratch(struct rank *me, struct block *until) {
  while (me->blocks != until) {
    struct block *block = me->blocks;
    me->blocks = block->next;
    free(block);
  }
}

int seeds_of(int usual) {
  if (settings.seeds) return settings.seeds;
  if (settings.heaviest < HEAVY) return settings.full ? usual : usual / 4 + 1;
  return settings.full ? 1000 : usual;
}

void pause_ms(int milliseconds) {
  struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
  nanosleep(&time, NULL);
}

uint64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

uint64_t limit_ns(double seconds) { return (uint64_t)(seconds * settings.patience * 1e9); }

uint64_t soon_ns(void) {
  double seconds = settings.patience > 10 ? 3 : settings.patience > 1 ? 1 : 0.5;
  return (uint64_t)(1e9 * seconds);
}

uint64_t mix(uint64_t x) { /* splitmix64 */
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

uint64_t hash(uint64_t salt, uint64_t a, uint64_t b, uint64_t c) { return mix(mix(mix(salt ^ a) ^ b << 20) ^ c); }

uint64_t draw(struct rank *me, uint64_t below) {
  me->random = mix(me->random);
  return me->random % below;
}

void jitter(struct rank *me) {
  if (draw(me, 12) == 0) pause_ms((int)draw(me, 3));
}

uint64_t roll(struct dice *d, uint64_t below) {
  d->state = mix(d->state);
  return d->state % below;
}
