/* case_memory.c - memory: allocation, sharing between mappings, host memory, copies and fills. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "suite.h"

static dk_mem_alloc_params allocate(struct rank *me, uint64_t bytes) {
  dk_mem_alloc_params p = {.size = sizeof p, .device = seat_device(me->seat), .bytes = bytes};
  CALL(me, mem_alloc, &p);
  return p;
}

static void free_memory(struct rank *me, uint64_t mem) {
  dk_mem_free_params p = {.size = sizeof p, .mem = mem};
  CALL(me, mem_free, &p);
}

static void expect_bytes(struct rank *me, const char *what, uint64_t at, uint64_t bytes, uint8_t wanted) {
  struct mark mark = set_mark(me);
  struct tensor t = tensor(me, what, bytes);
  copy(me, t.at, at, bytes);
  fetch_tensor(me, t);
  finish(me);
  for (uint64_t i = 0; i < bytes; i++)
    expect(me, ((uint8_t *)t.host)[i] == wanted, "%s: byte %lu is 0x%02x, wanted 0x%02x", what, (unsigned long)i,
           ((uint8_t *)t.host)[i], wanted);
  back_to(me, mark);
}

static void allocation(struct rank *me) {
  const uint64_t sizes[] = {1, 4096, 100000, 3 << 20};
  for (int i = 0; i < COUNT(sizes); i++) {
    dk_mem_alloc_params p = allocate(me, sizes[i]);
    expect(me, p.out_bytes >= sizes[i] && p.address % 4096 == 0, "%lu bytes at 0x%lx for %lu",
           (unsigned long)p.out_bytes, (unsigned long)p.address, (unsigned long)sizes[i]);
    expect_bytes(me, "new memory", p.address, sizes[i], 0);
    fill(me, p.address, p.out_bytes, 0x3c);
    expect_bytes(me, "filled memory", p.address, sizes[i], 0x3c);
    free_memory(me, p.mem);
  }
}

static void too_much(struct rank *me) {
  const uint64_t sizes[] = {0, (uint64_t)1 << 60, UINT64_MAX};
  for (int i = 0; i < COUNT(sizes); i++) {
    dk_mem_alloc_params p = {.size = sizeof p, .device = seat_device(me->seat), .bytes = sizes[i]};
    int32_t code = dk.mem_alloc(&p);
    expect(me, code != DK_OK && !p.mem, "%lx bytes were allocated", (unsigned long)sizes[i]);
  }
}

struct sharing {
  dk_mem_export_params out;
  dk_mem_import_params in;
};

static struct sharing share_with_self(struct rank *me, const dk_mem_alloc_params *owned) {
  struct sharing s = {.out = {.size = sizeof s.out, .mem = owned->mem, .fd = -1}};
  CALL(me, mem_export, &s.out);
  expect(me, s.out.kind != DK_SHARE_NONE, "nothing is exported");
  expect(me, s.out.kind != DK_SHARE_FD || s.out.fd >= 0, "kind FD without a descriptor");
  s.in = (dk_mem_import_params){
      .size = sizeof s.in, .device = seat_device(me->seat), .bytes = owned->out_bytes, .kind = s.out.kind};
  s.in.fd = s.out.fd;
  memcpy(s.in.blob, s.out.blob, sizeof s.in.blob);
  CALL(me, mem_import, &s.in);
  return s;
}

static void two_mappings(struct rank *me) {
  dk_mem_alloc_params owned = allocate(me, 200000);
  struct sharing s = share_with_self(me, &owned);
  if (s.out.fd >= 0) expect(me, close(s.out.fd) == 0, "the exported descriptor was not the caller's");
  fill(me, owned.address, 200000, 0x11);
  expect_bytes(me, "second mapping", s.in.address, 200000, 0x11);
  fill(me, s.in.address + 100000, 100000, 0x22);
  expect_bytes(me, "first mapping", owned.address + 100000, 100000, 0x22);
  free_memory(me, owned.mem);
  expect_bytes(me, "mapping of freed memory", s.in.address, 100000, 0x11);
  fill(me, s.in.address, 100000, 0x33);
  expect_bytes(me, "mapping of freed memory", s.in.address, 100000, 0x33);
  free_memory(me, s.in.mem);
}

static void bad_imports(struct rank *me) {
  dk_mem_import_params p = {
      .size = sizeof p, .device = seat_device(me->seat), .bytes = 4096, .kind = DK_SHARE_NONE, .fd = -1};
  expect(me, dk.mem_import(&p) != DK_OK && !p.mem, "nothing was imported");
  p.kind = 99;
  expect(me, dk.mem_import(&p) != DK_OK && !p.mem, "kind 99 was imported");
  p.kind = DK_SHARE_FD;
  expect(me, dk.mem_import(&p) != DK_OK && !p.mem, "descriptor -1 was imported");
  int pipes[2];
  expect(me, pipe(pipes) == 0, "pipe failed");
  p.fd = pipes[0];
  expect(me, dk.mem_import(&p) != DK_OK && !p.mem, "a pipe was imported");
  close(pipes[0]);
  close(pipes[1]);
  if (library.caps & DK_CAP_HOST_STREAM) { /* memory that its owner can cut short under this rank's feet */
    p.fd = memfd_create("unsealed", MFD_ALLOW_SEALING);
    expect(me, p.fd >= 0 && ftruncate(p.fd, 4096) == 0, "memfd_create failed");
    expect(me, dk.mem_import(&p) == DK_EINVAL && !p.mem, "a file without seals was imported");
    close(p.fd);
  }
  free_memory(me, 0); /* as free(NULL) */
}

static void more_than_shared(struct rank *me) {
  dk_mem_alloc_params owned = allocate(me, 4096);
  struct sharing s = share_with_self(me, &owned);
  dk_mem_import_params p = {
      .size = sizeof p, .device = seat_device(me->seat), .bytes = owned.out_bytes * 16, .kind = s.out.kind};
  p.fd = s.out.fd;
  memcpy(p.blob, s.out.blob, sizeof p.blob);
  expect(me, dk.mem_import(&p) != DK_OK && !p.mem, "16 times the shared memory was mapped");
  if (s.out.fd >= 0) close(s.out.fd);
  free_memory(me, s.in.mem);
  free_memory(me, owned.mem);
}

/* Copies between host and device at odd addresses, and of zero bytes. */
static void copies(struct rank *me) {
  uint64_t at;
  uint8_t *words = host_words(me, 8192, 64, &at);
  for (int i = 0; i < 8192; i++) words[i] = (uint8_t)(i * 7 + 1);
  struct tensor t = tensor(me, "target", 8192);
  copy(me, t.at + 1, at + 3, 5001);
  copy(me, t.at + 7000, t.at + 1, 999);
  copy(me, t.at, at, 0);
  fetch_tensor(me, t);
  finish(me);
  const uint8_t *got = t.host;
  for (int i = 0; i < 8192; i++) {
    uint8_t wanted = i >= 1 && i < 5002 ? words[i + 2] : i >= 7000 && i < 7999 ? words[i - 7000 + 3] : 0xa5;
    expect(me, got[i] == wanted, "byte %d is 0x%02x, wanted 0x%02x", i, got[i], wanted);
  }
}

/* The ranks write into each other's blocks through dk_copy. */
static void shared_by_ranks(struct rank *me) {
  struct share *s = share(me, 1 << 16);
  struct tensor t = tensor(me, "message", 1024);
  memset(t.host, 0x40 + me->index, 1024);
  send_tensor(me, t);
  for (int i = 0; i < me->count; i++) copy(me, s->at[i] + (uint64_t)me->index * 1024, t.at, 1024);
  finish(me);
  meet(me);
  for (int i = 0; i < me->count; i++)
    expect_bytes(me, "block", s->at[me->index] + (uint64_t)i * 1024, 1024, (uint8_t)(0x40 + i));
  meet(me);
}

/* dk_host_wait: value already there, timeout, value written later, failed team. Rank 1 writes rank 0's words. */
struct words {
  uint64_t *word;
  dk_status *status;
};

static void write_words(struct rank *me, const struct words *w) {
  meet(me);
  pause_ms(30);
  __atomic_store_n(w->word, 6, __ATOMIC_RELEASE);
  meet(me);
  pause_ms(30);
  __atomic_store_n(&w->status->sticky, DK_ETIMEOUT, __ATOMIC_RELEASE);
  meet(me);
  __atomic_store_n(&w->status->sticky, 0, __ATOMIC_RELEASE);
  __atomic_store_n(&w->status->abort_word, DK_EPEERDEAD, __ATOMIC_RELEASE);
  meet(me);
}

static void host_wait(struct rank *me) {
  uint64_t at;
  struct words mine = {host_words(me, 64, 64, &at), host_words(me, DK_STATUS_BYTES, 4096, &at)}, all[MAX_SEATS];
  gather(me, &mine, sizeof mine, -1, all, NULL);
  if (me->index == 1) {
    write_words(me, &all[0]);
    return;
  }
  dk_host_wait_params p = {.size = sizeof p, .device = seat_device(me->seat)};
  p.host_word = (uintptr_t)mine.word;
  p.host_status = (uintptr_t)mine.status;
  CALL(me, host_wait, &p);
  p.at_least = 5;
  p.timeout_ns = 40000000;
  uint64_t start = now_ns();
  expect(me, dk.host_wait(&p) == DK_ETIMEOUT, "a word that nobody writes was reached");
  expect(me, now_ns() - start >= 40000000, "the slice ended early");
  p.timeout_ns = 0;
  expect(me, dk.host_wait(&p) == DK_ETIMEOUT, "asking alone should be a slice of 0");
  p.timeout_ns = limit_ns(10);
  meet(me);
  CALL(me, host_wait, &p);
  p.at_least = 7;
  meet(me);
  expect(me, dk.host_wait(&p) == DK_EABORTED, "a failed team should end the wait");
  meet(me);
  meet(me);
  expect(me, dk.host_wait(&p) == DK_EABORTED, "an abort should end the wait");
  p.at_least = 6;
  CALL(me, host_wait, &p); /* a value that is there counts, also after a failure */
}

static const struct test_case cases[] = {
    {"memory/allocation", allocation, 1, NULL, QUICK, 0, 0},
    {"memory/allocation too large", too_much, 1, NULL, QUICK, 0, 0},
    {"memory/two mappings, owner freed first", two_mappings, 1, NULL, QUICK, 0, 0},
    {"memory/bad imports", bad_imports, 1, NULL, QUICK, 0, 0},
    {"memory/import larger than the file", more_than_shared, 1, NULL, QUICK, 0, 0},
    {"memory/copies", copies, 1, NULL, QUICK, 0, 0},
    {"memory/shared by 4 ranks", shared_by_ranks, 4, NULL, QUICK, 0, 0},
    {"memory/host wait", host_wait, 2, NULL, QUICK, 0, 0},
};
GROUP(memory_cases);
