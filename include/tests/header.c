/* Compiled as C and as C++ with the header alone: what the macros promise holds without the library. */
#include <stddef.h>
#include <stdio.h>
#include "deepep.h"

static int failures, checks;
#define EXPECT(condition)                                         \
  do {                                                            \
    checks++;                                                     \
    if (!(condition)) {                                           \
      failures++;                                                 \
      printf("FAIL %s:%d: %s\n", __FILE__, __LINE__, #condition); \
    }                                                             \
  } while (0)

int main(void) {
  deepep_engine_info engine = DEEPEP_ENGINE_INFO_INIT;
  deepep_group_options group = DEEPEP_GROUP_OPTIONS_INIT;
  deepep_buffer_options buffer = DEEPEP_BUFFER_OPTIONS_INIT;
  deepep_buffer_info info = DEEPEP_BUFFER_INFO_INIT;
  deepep_warmup_options warmup = DEEPEP_WARMUP_OPTIONS_INIT;
  deepep_startup_report startup = DEEPEP_STARTUP_REPORT_INIT;
  deepep_config config = DEEPEP_CONFIG_INIT;
  deepep_call call = DEEPEP_CALL_INIT;
  deepep_layout layout = DEEPEP_LAYOUT_INIT;
  deepep_handle handle = DEEPEP_HANDLE_INIT;
  deepep_notify notify = DEEPEP_NOTIFY_INIT;
  deepep_dispatch_args dispatch = DEEPEP_DISPATCH_INIT;
  deepep_combine_args combine = DEEPEP_COMBINE_INIT;
  deepep_balance_args balance = DEEPEP_BALANCE_INIT;
  deepep_ll_dispatch_args ll_dispatch = DEEPEP_LL_DISPATCH_INIT;
  deepep_ll_combine_args ll_combine = DEEPEP_LL_COMBINE_INIT;
  deepep_op_stats stats = DEEPEP_OP_STATS_INIT;
  size_t count = 0;

#define SIZED(s) EXPECT((s).struct_size == sizeof(s) && offsetof(__typeof__(s), struct_size) == 0)
  SIZED(engine);
  SIZED(group);
  SIZED(buffer);
  SIZED(info);
  SIZED(warmup);
  SIZED(startup);
  SIZED(call);
  SIZED(layout);
  SIZED(handle);
  SIZED(notify);
  SIZED(dispatch);
  SIZED(combine);
  SIZED(balance);
  SIZED(ll_dispatch);
  SIZED(ll_combine);
  SIZED(stats);

  /* Defaults that are not zero. */
  EXPECT(buffer.device == -1 && buffer.num_qps_per_rank == 24 && buffer.allow_nvlink_for_low_latency_mode == 1);
  EXPECT(buffer.enable_shrink == 0 && buffer.first_timeout_ms == 0);
  EXPECT(config.num_sms == 20 && config.nvl_send_chunk == 6 && config.rdma_recv_chunk == 256);
  EXPECT(layout.index_type == DEEPEP_INT64 && handle.magic == DEEPEP_HANDLE_MAGIC && handle.version == 1);
  EXPECT(notify.expert_alignment == 1 && notify.x_type == DEEPEP_BF16 && notify.handle == NULL);
  EXPECT(handle.routing == DEEPEP_ROUTING_NONE && handle.dst_slot == NULL && handle.recv_src_metadata == NULL);
  EXPECT(notify.routing == DEEPEP_ROUTING_NONE && notify.index_type == DEEPEP_INT64 && notify.topk_idx == NULL);
  EXPECT(dispatch.do_zero_padding == 0 && combine.num_x_rows == 0 && combine.unreduced == 0);
  EXPECT(dispatch.recv_segment == 0 && dispatch.index_type == DEEPEP_INT64 && dispatch.x_type == DEEPEP_BF16);
  EXPECT(combine.x_segment == 0 && combine.bias[0] == NULL && combine.bias[1] == NULL);
  EXPECT(balance.num_tensors == 0 && balance.expert_bytes[15] == 0 && balance.experts[15] == NULL);
  EXPECT(ll_dispatch.phases == DEEPEP_SEND_RECV && ll_dispatch.use_fp8 == 1 && ll_dispatch.index_type == DEEPEP_INT64);
  EXPECT(ll_combine.phases == DEEPEP_SEND_RECV && ll_combine.index_type == DEEPEP_INT64 && ll_combine.x == NULL);

  /* Codes are dense from 0, so that a table can be indexed by them. */
#define X(name, value, text) EXPECT((size_t)(value) == count++ && sizeof(text) > 1);
  DEEPEP_STATUS_MAP(X)
#undef X
  EXPECT(count == DEEPEP_STATUS_COUNT);
  printf("%d passed, %d failed\n", checks - failures, failures);
  return failures != 0;
}
