/* memory.c - memory of a case: tensors with a copy on the host, words that host and device share, memory of all ranks.
 * */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "suite.h"

#define ARENA_BYTES ((uint64_t)64 << 20)
#define WORDS_BYTES ((uint64_t)1 << 20)
#define GUARD 64 /* guard bytes before and after each tensor */
#define FILLER 0xa5

/* A rank's device and stream in this process; kept from case to case, since opening a device may be slow. */
struct seat {
  int index, ordinal;
  bool open;
  uint32_t isa;
  uint64_t device, stream, event, mem, at, used;
  char *mirror, *words;
  uint64_t mirror_at, words_at, words_used;
};

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

struct seat *new_seat(int index) {
  struct seat *seat = calloc(1, sizeof *seat);
  if (!seat) abort();
  seat->index = index;
  return seat;
}

uint64_t seat_device(const struct seat *seat) { return seat->device; }
uint64_t seat_stream(const struct seat *seat) { return seat->stream; }
int seat_ordinal(const struct seat *seat) { return seat->ordinal; }

static void drop_pages(struct seat *seat, char *pages, uint64_t bytes) {
  dk_host_unregister_params p = {.size = sizeof p, .device = seat->device, .host = (uintptr_t)pages};
  if (!pages) return;
  dk.host_unregister(&p);
  munmap(pages, bytes);
}

static void close_parts(struct seat *seat) {
  dk_event_destroy_params event = {.size = sizeof event, .device = seat->device, .event = seat->event};
  if (seat->event) dk.event_destroy(&event);
  dk_stream_destroy_params stream = {.size = sizeof stream, .device = seat->device, .stream = seat->stream};
  if (seat->stream) dk.stream_destroy(&stream);
  drop_pages(seat, seat->mirror, ARENA_BYTES);
  drop_pages(seat, seat->words, WORDS_BYTES);
  dk_mem_free_params mem = {.size = sizeof mem, .mem = seat->mem};
  if (seat->mem) dk.mem_free(&mem);
  dk_device_close_params device = {.size = sizeof device, .device = seat->device};
  dk.device_close(&device);
  *seat = (struct seat){.index = seat->index};
}

void close_seat(struct seat *seat) {
  if (seat->open) close_parts(seat);
  free(seat);
}

static char *host_pages(struct rank *me, uint64_t bytes, uint64_t *at) {
  void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) abort();
  dk_host_register_params p = {.size = sizeof p, .device = me->seat->device, .host = (uintptr_t)pages, .bytes = bytes};
  CALL(me, host_register, &p);
  *at = p.address;
  return pages;
}

static void open_device(struct rank *me, uint32_t isa) {
  struct seat *seat = me->seat;
  int wanted = settings.device >= 0 ? settings.device : seat->index % library.num_devices;
  dk_device_open_params p = {.size = sizeof p, .ordinal = wanted, .isa = isa};
  int32_t code = dk.device_open(&p);
  if (code == DK_EUNSUPPORTED && me->test->isa) skip(me, "no such instruction set here");
  check_code(me, "dk_device_open", code, p.device_error);
  seat->device = p.device;
  seat->ordinal = p.out_ordinal;
  seat->isa = isa;
  seat->open = true;
}

static void open_parts(struct rank *me) {
  struct seat *seat = me->seat;
  dk_stream_create_params stream = {.size = sizeof stream, .device = seat->device};
  CALL(me, stream_create, &stream);
  seat->stream = stream.stream;
  dk_event_create_params event = {.size = sizeof event, .device = seat->device};
  CALL(me, event_create, &event);
  seat->event = event.event;
  dk_mem_alloc_params arena = {.size = sizeof arena, .device = seat->device, .bytes = ARENA_BYTES};
  CALL(me, mem_alloc, &arena);
  seat->mem = arena.mem;
  seat->at = arena.address;
  seat->mirror = host_pages(me, ARENA_BYTES, &seat->mirror_at);
  seat->words = host_pages(me, WORDS_BYTES, &seat->words_at);
}

void open_seat(struct rank *me) {
  uint32_t isa = me->test->isa ? me->test->isa : settings.isa;
  if (me->seat->open && me->seat->isa != isa) close_parts(me->seat);
  if (!me->seat->open) {
    open_device(me, isa);
    open_parts(me);
  }
  me->stream = me->seat->stream;
}

void reset_seat(struct seat *seat) {
  if (seat->words) memset(seat->words, 0, seat->words_used);
  seat->used = seat->words_used = 0;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

void fill(struct rank *me, uint64_t at, uint64_t bytes, uint32_t value) {
  dk_fill_params p = {
      .size = sizeof p, .device = me->seat->device, .stream = me->stream, .dst = at, .bytes = bytes, .value = value};
  CALL(me, fill, &p);
}

/* Every other tensor begins 16 bytes off a line: the interface guarantees an alignment of 16 only. */
struct tensor tensor(struct rank *me, const char *name, uint64_t bytes) {
  struct seat *seat = me->seat;
  if (bytes == 0) return (struct tensor){.host = seat->mirror};
  uint64_t from = seat->used, at = round_up(from + GUARD, 256) + (uint64_t)(me->num_tensors % 2) * 16;
  seat->used = round_up(at + bytes + GUARD, 16);
  expect(me, seat->used <= ARENA_BYTES && me->num_tensors < MAX_TENSORS, "the suite's arena is too small for %s", name);
  fill(me, seat->at + from, seat->used - from, FILLER);
  me->tensors[me->num_tensors++] = (struct guarded){name, at, bytes};
  return (struct tensor){seat->mirror + at, seat->at + at, bytes};
}

void copy(struct rank *me, uint64_t dst, uint64_t src, uint64_t bytes) {
  dk_copy_params p = {
      .size = sizeof p, .device = me->seat->device, .stream = me->stream, .dst = dst, .src = src, .bytes = bytes};
  CALL(me, copy, &p);
}

static uint64_t mirror_of(struct rank *me, struct tensor t) { return me->seat->mirror_at + (t.at - me->seat->at); }

void send_tensor(struct rank *me, struct tensor t) {
  if (t.bytes) copy(me, t.at, mirror_of(me, t), t.bytes);
}

void fetch_tensor(struct rank *me, struct tensor t) {
  if (t.bytes) copy(me, mirror_of(me, t), t.at, t.bytes);
}

void poison(struct rank *me, struct tensor t) {
  if (t.bytes) fill(me, t.at, t.bytes, FILLER);
}

void *host_words(struct rank *me, uint64_t bytes, uint64_t align, uint64_t *at) {
  struct seat *seat = me->seat;
  uint64_t from = round_up(seat->words_used, align);
  seat->words_used = from + bytes;
  expect(me, seat->words_used <= WORDS_BYTES, "the suite's shared words are too small");
  *at = seat->words_at + from;
  return seat->words + from;
}

static const char *tensor_local(const struct rank *me, uint64_t offset, bool *before) {
  for (int i = 0; i < me->num_tensors; i++) {
    const struct guarded *t = &me->tensors[i];
    *before = offset < t->offset;
    if (offset < t->offset + t->bytes + GUARD) return t->name;
  }
  return "the last tensor";
}

static void check_guards_from(struct rank *me, struct mark mark) {
  struct seat *seat = me->seat;
  if (me->num_tensors == mark.tensors) return;
  copy(me, seat->mirror_at + mark.used, seat->at + mark.used, seat->used - mark.used);
  finish(me);
  uint64_t from = mark.used;
  for (int i = mark.tensors; i <= me->num_tensors; i++) {
    uint64_t to = i < me->num_tensors ? me->tensors[i].offset : seat->used;
    for (uint64_t b = from; b < to; b++) {
      if ((uint8_t)seat->mirror[b] == FILLER) continue;
      bool before = false;
      const char *name = tensor_local(me, b, &before);
      fail(me, "something wrote %s %s (byte 0x%02x)", before ? "before" : "behind", name, (uint8_t)seat->mirror[b]);
    }
    if (i < me->num_tensors) from = me->tensors[i].offset + me->tensors[i].bytes;
  }
}

void check_guards(struct rank *me) { check_guards_from(me, (struct mark){0}); }

struct mark set_mark(struct rank *me) {
  return (struct mark){me->num_tensors, me->num_teams,        me->num_transports, me->num_shares,
                       me->seat->used,  me->seat->words_used, me->blocks};
}

void back_to(struct rank *me, struct mark mark) {
  struct seat *seat = me->seat;
  check_guards_from(me, mark);
  if (me->num_teams > mark.teams) {
    drop_teams(me, mark);
    memset(seat->words + mark.words, 0, seat->words_used - mark.words);
    seat->words_used = mark.words;
  }
  me->num_tensors = mark.tensors;
  seat->used = mark.used;
  drop_scratch(me, mark.block);
}

/* ---- Waiting ----------------------------------------------------------------------------------------------------- */

bool stream_done(struct seat *seat, uint64_t stream, double seconds) {
  if (!seat || !seat->event) return true;
  dk_event_record_params record = {
      .size = sizeof record, .device = seat->device, .event = seat->event, .stream = stream};
  if (dk.event_record(&record) != DK_OK) return false;
  uint64_t end = now_ns() + limit_ns(seconds);
  for (;;) {
    dk_event_wait_params wait = {
        .size = sizeof wait, .device = seat->device, .event = seat->event, .timeout_ns = 50000000};
    int32_t code = dk.event_wait(&wait);
    if (code == DK_OK) return true;
    if (code != DK_ETIMEOUT || now_ns() > end) return false;
  }
}

void finish(struct rank *me) {
  const char *was = me->doing;
  me->doing = "waiting for its stream";
  if (!stream_done(me->seat, me->stream, 30)) fail(me, "the stream is not idle after 30 s");
  me->doing = was;
  if (others_failed(me)) longjmp(me->leave, 1);
}

/* ---- Memory of all ranks ----------------------------------------------------------------------------------------- */

struct share_offer {
  uint64_t bytes, at;
  uint32_t kind;
  uint8_t blob[64];
};

static void import(struct rank *me, struct share *s, int owner, const struct share_offer *offer, int fd) {
  dk_mem_import_params p = {
      .size = sizeof p, .device = me->seat->device, .bytes = offer->bytes, .kind = offer->kind, .fd = fd};
  memcpy(p.blob, offer->blob, sizeof p.blob);
  CALL(me, mem_import, &p);
  s->peers[owner] = p.mem;
  s->at[owner] = p.address;
}

/* Each rank's export of its part of a share: from then on a copy of its descriptor is open here. */
static void gather_offers(struct rank *me, const struct share *s, uint64_t bytes, struct share_offer *all, int *fds) {
  dk_mem_export_params out = {.size = sizeof out, .mem = s->mem, .fd = -1};
  CALL(me, mem_export, &out);
  struct share_offer mine = {bytes, s->at[me->index], out.kind, {0}};
  memcpy(mine.blob, out.blob, sizeof mine.blob);
  gather(me, &mine, sizeof mine, out.fd, all, fds);
  if (out.fd >= 0) close(out.fd);
}

struct share *share(struct rank *me, uint64_t bytes) {
  expect(me, me->num_shares < MAX_SHARES, "the suite allows %d shares", MAX_SHARES);
  struct share *s = calloc(1, sizeof *s); /* scratch may go before the memory does */
  if (!s) abort();
  me->shares[me->num_shares++] = s;
  dk_mem_alloc_params own = {.size = sizeof own, .device = me->seat->device, .bytes = bytes};
  CALL(me, mem_alloc, &own);
  s->mem = own.mem;
  s->at[me->index] = own.address;
  s->bytes = bytes;
  struct share_offer all[MAX_SEATS];
  int fds[MAX_SEATS];
  gather_offers(me, s, own.out_bytes, all, fds);
  for (int i = 0; i < me->count; i++) {
    if (i != me->index && settings.one_mapping && me->socket < 0)
      s->at[i] = all[i].at;
    else if (i != me->index)
      import(me, s, i, &all[i], fds[i]);
    if (fds[i] >= 0) close(fds[i]);
  }
  return s;
}

void release_share(struct rank *me, struct share *s) {
  for (int i = 0; i < me->count; i++) {
    dk_mem_release_params p = {.size = sizeof p, .mem = i == me->index ? s->mem : s->peers[i]};
    if (p.mem) CALL(me, mem_release, &p);
  }
}

void restore_share(struct rank *me, struct share *s) {
  dk_mem_restore_params own = {.size = sizeof own, .mem = s->mem, .kind = DK_SHARE_NONE, .fd = -1};
  CALL(me, mem_restore, &own);
  struct share_offer all[MAX_SEATS];
  int fds[MAX_SEATS];
  gather_offers(me, s, s->bytes, all, fds);
  for (int i = 0; i < me->count; i++) {
    dk_mem_restore_params p = {.size = sizeof p, .mem = s->peers[i], .kind = all[i].kind, .fd = fds[i]};
    if (p.mem) CALL(me, mem_restore, &p);
    if (fds[i] >= 0) close(fds[i]);
  }
}

void drop_share(struct share *s, int self, bool own) {
  for (int i = 0; i < MAX_SEATS; i++) {
    dk_mem_free_params p = {.size = sizeof p, .mem = own ? s->mem : s->peers[i]};
    if (p.mem && own == (i == self)) dk.mem_free(&p);
  }
}
