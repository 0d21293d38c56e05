/* library.c - opens the library under test and finds its functions. */
#include <dlfcn.h>
#include <stdio.h>

#include "../../include/deepep.h" /* names of operations */
#include "suite.h"

struct library dk;
dk_info_params library;

static bool find(void *handle, const char *name, void *slot, char *why, size_t size) {
  *(void **)slot = dlsym(handle, name);
  if (!*(void **)slot) snprintf(why, size, "the library has no %s: %s", name, dlerror());
  return *(void **)slot != NULL;
}

bool library_open(const char *path, char *why, size_t size) {
  void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    snprintf(why, size, "%s", dlerror());
    return false;
  }
#define SUITE_FIND(name) \
  if (!find(handle, "dk_" #name, &dk.name, why, size)) return false;
  SUITE_FUNCTIONS(SUITE_FIND)
#undef SUITE_FIND
#define SUITE_FIND(name) *(void **)&dk.name = dlsym(handle, "dk_" #name);
  SUITE_OPTIONAL(SUITE_FIND)
#undef SUITE_FIND
  library = (dk_info_params){.size = sizeof library};
  int32_t code = dk.info(&library);
  if (code != DK_OK) {
    snprintf(why, size, "dk_info returned %s", code_name(code));
    return false;
  }
  if (library.num_devices < 1) {
    snprintf(why, size, "no device can be used: %.200s", library.reason);
    return false;
  }
  return true;
}

static const char *name_of(const char *const *names, int count, uint32_t number) {
  return number < (uint32_t)count && names[number] ? names[number] : "(unknown)";
}

const char *code_name(int32_t code) {
  static const char *const names[] = {
      "DK_OK",       "DK_EINVAL",    "DK_ESTATE",    "DK_EUNSUPPORTED", "DK_ENOMEM",    "DK_ESYSTEM",
      "DK_ETIMEOUT", "DK_EPEERDEAD", "DK_EMISMATCH", "DK_EABORTED",     "DK_ENOTFOUND", "DK_EVERSION",
      NULL,          NULL,           "DK_EDEVICE",   "DK_EINTERNAL",    "DK_EAGAIN"};
  return name_of(names, COUNT(names), (uint32_t)code);
}

const char *op_name(uint32_t op) {
#define X(name, value, text) [value] = text,
  static const char *const names[] = {DEEPEP_OP_MAP(X)};
#undef X
  return name_of(names, COUNT(names), op);
}

const char *field_name(uint32_t field) {
  static const char *const names[] = {[DK_FIELD_NONE] = "none",
                                      [DK_FIELD_HIDDEN_BYTES] = "hidden bytes",
                                      [DK_FIELD_NUM_EXPERTS] = "num_experts",
                                      [DK_FIELD_NUM_TOPK] = "num_topk",
                                      [DK_FIELD_NUM_SCALES] = "num_scales",
                                      [DK_FIELD_FORMAT] = "format",
                                      [DK_FIELD_MAX_TOKENS] = "max tokens",
                                      [DK_FIELD_OPERATION] = "operation",
                                      [DK_FIELD_X_TYPE] = "x_type",
                                      [DK_FIELD_EXCHANGE] = "exchange",
                                      [DK_FIELD_WORST_TOKENS] = "worst tokens",
                                      [DK_FIELD_TOPK_IDX] = "topk_idx",
                                      [DK_FIELD_TOKENS_PER_RANK] = "tokens per rank",
                                      [DK_FIELD_TOKENS_PER_EXPERT] = "tokens per expert",
                                      [DK_FIELD_PREFIX_MATRIX] = "rank_prefix_matrix",
                                      [DK_FIELD_SEND_HEAD] = "send_head",
                                      [DK_FIELD_SRC_IDX] = "recv_src_idx",
                                      [DK_FIELD_HANDLE_ROWS] = "rows of the handle",
                                      [DK_FIELD_LAYOUT_RANGE] = "layout_range",
                                      [DK_FIELD_SRC_INFO] = "src_info",
                                      [DK_FIELD_ALIGNMENT] = "expert_alignment",
                                      [DK_FIELD_ROUTING] = "routing",
                                      [DK_FIELD_WORST_EXPANDED] = "num_worst_expanded",
                                      [DK_FIELD_DST_SLOT] = "dst_slot",
                                      [DK_FIELD_SRC_METADATA] = "recv_src_metadata",
                                      [DK_FIELD_MASKED] = "masks"};
  return name_of(names, COUNT(names), field);
}
