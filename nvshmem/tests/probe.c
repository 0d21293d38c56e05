/* probe.c - calls libdeepep_nvshmem.so and the test transport without a GPU and prints each result as "name: value".
 *   probe LIBRARY info|start [QPS DEPTH PEERS RANKS [FLAGS [SETTINGS [SETTINGS OF A SECOND START]]]]
 *   probe LIBRARY layout RANKS PEERS TOKENS HIDDEN EXPERTS RDMA
 *   probe PLUGIN interface NUMBER */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi/kernels.h"

static void *library;

static void *find(const char *name) {
  void *function = dlsym(library, name);
  if (function) return function;
  printf("error: %s\n", dlerror());
  exit(1);
}

#define CALL(name, p) ((int32_t (*)(void *))find(#name))(p)

static int info(void) {
  dk_info_params p = {.size = sizeof p};
  printf("code: %d\n", CALL(dk_info, &p));
  printf("version: %u\nkind: %s\nbuild: %s\ndevices: %d\nreason: %s\n", p.abi_version, p.kind, p.build, p.num_devices,
         p.reason);
  printf("low-latency limits: %d %d %d\n", p.max_ll_topk, p.max_ll_tokens, p.max_ll_local_experts);
  dk_device_open_params open = {.size = sizeof open, .ordinal = -1};
  printf("open: %d\n", CALL(dk_device_open, &open));
  dk_transport_attach_params old = {.size = sizeof old - 8};
  printf("old struct: %d\n", CALL(dk_transport_attach, &old));
  return 0;
}

static void show_variable(const char *name) {
  const char *value = getenv(name);
  printf("%s: %s\n", name, value ? value : "(none)");
}

static int start(char **numbers) {
  dk_transport_unique_id_params p = {.size = sizeof p,
                                     .num_qps_per_nic = atoi(numbers[0]),
                                     .qp_depth = atoi(numbers[1]),
                                     .num_nvl_peers = atoi(numbers[2]),
                                     .num_ranks = atoi(numbers[3]),
                                     .flags = numbers[4] ? (uint32_t)atoi(numbers[4]) : 0};
  if (numbers[4] && numbers[5]) p.host_settings = (uintptr_t)numbers[5];
  printf("id: %d\nreason: %s\n", CALL(dk_transport_unique_id, &p), p.reason);
  int some = 0;
  for (size_t i = 0; i < sizeof p.id; i++) some += p.id[i] != 0;
  printf("bytes of the id that are set: %s\n", some > 4 ? "some" : "none");
  const char *const names[] = {"NVSHMEM_REMOTE_TRANSPORT",
                               "NVSHMEM_IB_ENABLE_IBGDA",
                               "NVSHMEM_IBGDA_NUM_RC_PER_PE",
                               "NVSHMEM_QP_DEPTH",
                               "NVSHMEM_IBGDA_RC_MAP_BY",
                               "NVSHMEM_DISABLE_NCCL",
                               "NVSHMEM_DISABLE_NVLS",
                               "CUDA_MODULE_LOADING",
                               "NVSHMEM_DISABLE_MNNVL",
                               "NVSHMEM_IB_SL",
                               "NVSHMEM_HCA_LIST",
                               "NVSHMEM_IB_TRAFFIC_CLASS"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) show_variable(names[i]);
  if (numbers[4] && numbers[5] && numbers[6]) {
    p.host_settings = (uintptr_t)numbers[6];
    printf("second id: %d\nsecond reason: %s\n", CALL(dk_transport_unique_id, &p), p.reason);
    printf("second ");
    show_variable("NVSHMEM_IB_SL");
    printf("second ");
    show_variable("NVSHMEM_HCA_LIST");
  }
  dk_transport_attach_params a = {
      .size = sizeof a, .num_ranks = 2, .num_nvl_peers = 1, .num_qps_per_nic = 1, .qp_depth = 1};
  printf("attach: %d\nattach says: %s\n", CALL(dk_transport_attach, &a), a.reason);
  uint64_t reach[2] = {0};
  dk_transport_alloc_params m = {
      .size = sizeof m, .attachment = a.attachment, .bytes = 4096, .host_peer_blocks = (uintptr_t)reach};
  printf("alloc: %d\n", CALL(dk_transport_alloc, &m));
  dk_transport_open_params o = {.size = sizeof o, .num_qps = 1, .qp_depth = 1, .num_ranks = 2};
  printf("open: %d\n", CALL(dk_transport_open, &o));
  dk_transport_detach_params d = {.size = sizeof d};
  printf("detach: %d\n", CALL(dk_transport_detach, &d));
  dk_transport_free_params f = {.size = sizeof f};
  printf("free nothing: %d\n", CALL(dk_transport_free, &f));
  return 0;
}

/* Whether the wire region of a buffer holds low-latency calls of a shape. */
static int layout(char **numbers) {
  int n[5];
  for (int i = 0; i < 5; i++) n[i] = atoi(numbers[i]);
  dk_ll_layout_params l = {.size = sizeof l,
                           .num_ranks = n[0],
                           .num_nvl_peers = n[1],
                           .num_max_tokens = n[2],
                           .hidden = n[3],
                           .num_experts = n[4]};
  dk_block_sizes_params b = {
      .size = sizeof b, .num_ranks = n[0], .num_nvl_peers = n[1], .rdma_bytes = strtoull(numbers[5], NULL, 10)};
  printf("layout: %d\nsizes: %d\n", CALL(dk_ll_layout, &l), CALL(dk_block_sizes, &b));
  printf("control: %llu\n", (unsigned long long)b.control_bytes);
  printf("wire: %llu of %llu\nrdma: %llu\n", (unsigned long long)l.wire_bytes, (unsigned long long)b.wire_bytes,
         (unsigned long long)l.rdma_bytes);
  return 0;
}

static int interface(const char *number) {
  void *made = NULL;
  int (*init)(void **, void *, int) = (int (*)(void **, void *, int))find("nvshmemt_init");
  int failed = init(&made, NULL, atoi(number));
  printf("init: %d\n", failed);
  if (!failed) printf("says version: %d\n", *(int *)made);
  return 0;
}

int main(int argc, char **argv) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (argc < 3) return 2;
  library = dlopen(argv[1], RTLD_NOW);
  if (!library) {
    printf("error: %s\n", dlerror());
    return 1;
  }
  if (strcmp(argv[2], "info") == 0) return info();
  if (strcmp(argv[2], "start") == 0 && argc >= 7) return start(argv + 3);
  if (strcmp(argv[2], "layout") == 0 && argc == 9) return layout(argv + 3);
  if (strcmp(argv[2], "interface") == 0 && argc == 4) return interface(argv[3]);
  return 2;
}
