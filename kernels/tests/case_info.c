/* case_info.c - what a library reports about itself, its devices, and the memory that it needs. */
#include <string.h>

#include "suite.h"

static void facts(struct rank *me) {
  dk_info_params p = {.size = sizeof p};
  CALL(me, info, &p);
  expect(me, p.max_ll_topk >= 8 && p.max_ll_tokens >= 1024 && p.max_ll_local_experts >= 256,
         "low-latency limits: top-k %d, %d tokens, %d local experts", p.max_ll_topk, p.max_ll_tokens,
         p.max_ll_local_experts);
  expect(me, p.abi_version == DK_ABI_VERSION, "abi_version is %u, the header's is %u", p.abi_version, DK_ABI_VERSION);
  expect(me, p.kind[0] && memchr(p.kind, 0, sizeof p.kind), "kind is empty or not ended");
  expect(me, p.build[0] && memchr(p.build, 0, sizeof p.build), "build is empty or not ended");
  expect(me, p.num_devices > 0 && !p.reason[0], "%d devices, and yet the reason \"%.255s\"", p.num_devices, p.reason);
}

/* Every function refuses a struct that is one byte too small, and leaves the bytes after `size` alone. */
static void short_structs(struct rank *me) {
  static const struct {
    const char *name;
    size_t function, size;
  } all[] = {
#define ENTRY(name) {"dk_" #name, offsetof(struct library, name), sizeof(dk_##name##_params)},
      SUITE_FUNCTIONS(ENTRY)
#undef ENTRY
  };
  for (int i = 0; i < COUNT(all); i++) {
    _Alignas(16) uint8_t room[2048];
    memset(room, 0, sizeof room);
    uint32_t size = (uint32_t)all[i].size - 1;
    memcpy(room, &size, sizeof size);
    memset(room + size, 0x77, 64);
    int32_t (*function)(void *);
    memcpy(&function, (const char *)&dk + all[i].function, sizeof function);
    int32_t code = function(room);
    expect(me, code == DK_EVERSION, "%s with a struct of %u bytes returned %s", all[i].name, size, code_name(code));
    for (int b = 0; b < 64; b++)
      expect(me, room[size + (uint32_t)b] == 0x77, "%s wrote behind a struct of %u bytes", all[i].name, size);
  }
}

static void longer_struct(struct rank *me) {
  struct {
    dk_info_params p;
    char later[64];
  } newer = {.p = {.size = sizeof newer}};
  CALL(me, info, &newer.p);
  expect(me, newer.p.abi_version == DK_ABI_VERSION, "a struct of a newer header is not filled");
}

static void devices(struct rank *me) {
  uint8_t uuid[16] = {0};
  for (int round = 0; round < 3; round++) {
    dk_device_open_params p = {.size = sizeof p, .ordinal = round == 2 ? -1 : seat_ordinal(me->seat)};
    CALL(me, device_open, &p);
    expect(me, p.device && p.num_sms >= 1 && p.name[0] && p.isa_name[0],
           "device %d: handle, num_sms, name or isa_name is missing", p.ordinal);
    expect(me, p.total_bytes >= p.free_bytes && p.free_bytes > 0, "device %d: free and total bytes make no sense",
           p.ordinal);
    expect(me, p.out_ordinal >= 0 && p.out_ordinal < library.num_devices, "out_ordinal is %d", p.out_ordinal);
    if (round == 1) expect(me, memcmp(uuid, p.uuid, sizeof uuid) == 0, "the uuid of a device changes");
    memcpy(uuid, p.uuid, sizeof uuid);
    dk_device_close_params closing = {.size = sizeof closing, .device = p.device};
    CALL(me, device_close, &closing);
  }
  static const uint8_t none[16];
  expect(me, memcmp(uuid, none, sizeof uuid) != 0, "the uuid is zero");
}

static void bad_devices(struct rank *me) {
  const int ordinals[] = {library.num_devices, 1 << 20, -2};
  for (int i = 0; i < COUNT(ordinals); i++) {
    dk_device_open_params p = {.size = sizeof p, .ordinal = ordinals[i]};
    expect(me, dk.device_open(&p) != DK_OK && !p.device, "device %d was opened", ordinals[i]);
  }
  dk_device_open_params p = {.size = sizeof p, .ordinal = seat_ordinal(me->seat), .isa = 77777};
  expect(me, dk.device_open(&p) != DK_OK, "instruction set 77777 was accepted");
}

static void block_sizes(struct rank *me) {
  uint64_t before = 0;
  for (int ranks = 1; ranks <= 64; ranks *= 2) {
    dk_block_sizes_params p = {
        .size = sizeof p, .num_ranks = ranks, .num_nvl_peers = 8, .nvl_bytes = 1 << 20, .rdma_bytes = 1 << 20};
    p.max_row_bytes = 1024;
    CALL(me, block_sizes, &p);
    expect(me, p.control_bytes > 0 && p.control_bytes % 4096 == 0 && p.wire_bytes % 4096 == 0,
           "%d ranks: control or wire is not in pages", ranks);
    expect(me, p.num_wire_parts <= DK_MAX_WIRE_PARTS, "%d ranks: %u parts of wire", ranks, p.num_wire_parts);
    for (uint32_t i = 0; i < p.num_wire_parts; i++)
      expect(me,
             p.wire_part[i] % 4096 == 0 && p.wire_part[i] < p.wire_bytes && (!i || p.wire_part[i] > p.wire_part[i - 1]),
             "%d ranks: part %u of wire begins at %lu", ranks, i, (unsigned long)p.wire_part[i]);
    expect(me, p.min_nvl_bytes >= before && p.min_nvl_bytes > 0,
           "%d ranks: min_nvl_bytes %lu is below that of fewer ranks", ranks, (unsigned long)p.min_nvl_bytes);
    before = p.min_nvl_bytes;
    p.max_row_bytes = 65536;
    CALL(me, block_sizes, &p);
    expect(me, p.min_nvl_bytes >= before, "larger rows need less");
  }
  dk_block_sizes_params bad = {.size = sizeof bad, .num_ranks = 0, .num_nvl_peers = 8};
  expect(me, dk.block_sizes(&bad) != DK_OK, "0 ranks were accepted");
  bad.num_ranks = DK_MAX_RANKS + 1;
  expect(me, dk.block_sizes(&bad) != DK_OK, "%d ranks were accepted", bad.num_ranks);
}

/* The bytes that V1's hint gives for a shape (two slots of sent rows, received rows and flags): the shape must fit in
 * them. */
static uint64_t upstream_hint(uint64_t tokens, uint64_t hidden, uint64_t experts) {
  uint64_t scales = hidden / 128, fp8 = hidden + 4 * scales, bf16 = 2 * hidden;
  uint64_t dispatch = 16 + (bf16 > fp8 ? bf16 : fp8), combine = bf16 + 4 * scales;
  uint64_t sent = tokens * dispatch > experts * tokens * combine ? tokens * dispatch : experts * tokens * combine;
  uint64_t received = experts * tokens * (dispatch > combine ? dispatch : combine);
  uint64_t signals = (4 * experts + 127) / 128 * 128;
  return 2 * (sent + received + signals);
}

static void ll_layout(struct rank *me) {
  static const int shapes[][4] = {{1, 1, 128, 1},    {2, 8, 512, 4},  {4, 128, 7168, 256},
                                  {8, 64, 2048, 64}, {3, 5, 2560, 9}, {8, 1, 8192, 8}};
  for (int i = 0; i < COUNT(shapes); i++) {
    const int *s = shapes[i];
    dk_ll_layout_params p = {.size = sizeof p,
                             .num_ranks = s[0],
                             .num_max_tokens = s[1],
                             .hidden = s[2],
                             .num_experts = s[3]},
                        again;
    CALL(me, ll_layout, &p);
    uint64_t rows = (uint64_t)s[3] * (uint64_t)s[1], end = rows * p.zero_copy_row_stride, hint;
    hint = upstream_hint((uint64_t)s[1], (uint64_t)s[2], (uint64_t)s[3]);
    expect(me, p.rdma_bytes <= hint, "shape %d: %lu bytes, V1's hint is %lu", i, (unsigned long)p.rdma_bytes,
           (unsigned long)hint);
    expect(me, p.zero_copy_row_stride >= 2 * (uint64_t)s[2] && p.zero_copy_row_stride % 16 == 0, "shape %d: stride %lu",
           i, (unsigned long)p.zero_copy_row_stride);
    for (int slot = 0; slot < 2; slot++)
      expect(me, p.zero_copy_offset[slot] % 16 == 0 && p.zero_copy_offset[slot] + end <= p.rdma_bytes,
             "shape %d: slot %d leaves the region", i, slot);
    uint64_t a = p.zero_copy_offset[0], b = p.zero_copy_offset[1];
    expect(me, a + end <= b || b + end <= a, "shape %d: the slots overlap", i);
    again = (dk_ll_layout_params){
        .size = sizeof p, .num_ranks = s[0], .num_max_tokens = s[1], .hidden = s[2], .num_experts = s[3]};
    CALL(me, ll_layout, &again);
    expect(me, memcmp(&p, &again, sizeof p) == 0, "shape %d: asked twice, answered differently", i);
  }
  dk_ll_layout_params bad = {.size = sizeof bad, .num_ranks = 4, .num_max_tokens = 8, .hidden = 128, .num_experts = 6};
  expect(me, dk.ll_layout(&bad) != DK_OK, "6 experts on 4 ranks were accepted");
}

static const struct test_case cases[] = {
    {"info/library", facts, 1, NULL, QUICK, 0, 0},
    {"info/short structs are refused", short_structs, 1, NULL, QUICK, 0, 0},
    {"info/longer structs are accepted", longer_struct, 1, NULL, QUICK, 0, 0},
    {"info/devices", devices, 1, NULL, QUICK, 0, 0},
    {"info/bad devices", bad_devices, 1, NULL, QUICK, 0, 0},
    {"info/block sizes", block_sizes, 1, NULL, QUICK, 0, 0},
    {"info/low-latency layout", ll_layout, 1, NULL, QUICK, 0, 0},
};
GROUP(info_cases);
