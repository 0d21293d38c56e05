// Normal mode from C++: layout, counts, dispatch into our own memory, combine. Every row is checked.
#include <cmath>
#include <cstdint>
#include <vector>

#include "arrays.h"
#include "deepep.hpp"
#include "ranks.h"

namespace {

constexpr int kTokens = 64, kHidden = 256, kTopk = 4, kExperts = 16;

// Token t of rank r carries this value in column c, so that a wrong row names its source. Exact in BF16 for 4 ranks,
// and never zero: the sum of two -0 is one or the other zero.
float value_of(int rank, int token, int column) {
  const float value = static_cast<float>(1 + rank * 64 + token % 64);
  return column % 2 == 0 ? value : -value;
}

int one_rank(int rank, int size, const char *directory) {
  auto where = deepep::group_options();
  where.bootstrap = DEEPEP_BOOTSTRAP_FILE;
  where.directory = directory;
  where.rank = rank;
  where.size = size;
  deepep::Group group(where);
  auto options = deepep::buffer_options();
  options.engine = arrays_open(rank, &options.device);
  options.num_nvl_bytes = deepep::nvl_size_hint(deepep::default_config(0, size), kHidden * 2, size);
  options.num_rdma_bytes = deepep::rdma_size_hint(deepep::default_config(0, size), kHidden * 2, size);  // 0 on one node
  deepep::Buffer buffer(group, options);
  deepep::Event done(buffer);  // on a GPU the calls only launch: the program waits before it reads

  Array<uint16_t> x(kTokens * kHidden);
  Array<int64_t> topk_idx(kTokens * kTopk);
  Array<float> weights(kTokens * kTopk, 1.0f / kTopk);
  for (int t = 0; t < kTokens; t++) {
    for (int c = 0; c < kHidden; c++) x[t * kHidden + c] = to_bf16(value_of(rank, t, c));
    for (int k = 0; k < kTopk; k++) topk_idx[t * kTopk + k] = (t * 7 + k * 5 + rank) % kExperts;
  }

  Array<int32_t> per_rank(size), per_expert(kExperts), matrix(size * size), head(kTokens * size);
  Array<uint8_t> in_rank(kTokens * size);
  auto layout = deepep::layout_args();
  layout.num_tokens = kTokens;
  layout.num_topk = kTopk;
  layout.num_experts = kExperts;
  layout.topk_idx = topk_idx.data();
  layout.num_tokens_per_rank = per_rank.data();
  layout.num_tokens_per_expert = per_expert.data();
  layout.is_token_in_rank = in_rank.data();
  buffer.layout(layout);

  auto handle = deepep::handle();
  handle.rank_prefix_matrix = matrix.data();
  handle.send_head = head.data();
  auto notify = deepep::notify_args();
  notify.num_tokens = kTokens;
  notify.num_topk = kTopk;
  notify.num_experts = kExperts;
  notify.hidden = kHidden;
  notify.num_tokens_per_rank = per_rank.data();
  notify.num_tokens_per_expert = per_expert.data();
  notify.is_token_in_rank = in_rank.data();
  notify.handle = &handle;
  const uint64_t token = buffer.notify(notify);
  std::vector<int32_t> local_counts;
  const int rows = buffer.wait_counts(token, kExperts / size, &local_counts);

  Array<uint16_t> received(rows * kHidden), combined(kTokens * kHidden);
  Array<int64_t> received_idx(rows * kTopk);
  Array<float> received_weights(rows * kTopk), combined_weights(kTokens * kTopk);
  Array<int32_t> source(rows);
  handle.recv_src_idx = source.data();
  handle.num_recv_tokens = rows;
  auto dispatch = deepep::dispatch_args();
  dispatch.token = token;
  dispatch.hidden = kHidden;
  dispatch.num_tokens = kTokens;
  dispatch.num_topk = kTopk;
  dispatch.num_experts = kExperts;
  dispatch.x = x.data();
  dispatch.topk_idx = topk_idx.data();
  dispatch.topk_weights = weights.data();
  dispatch.handle = &handle;
  dispatch.recv_x = received.data();
  dispatch.recv_topk_idx = received_idx.data();
  dispatch.recv_topk_weights = received_weights.data();
  buffer.dispatch(dispatch);
  done.record();
  done.wait();

  int wrong = 0, row = 0;
  for (int from = 0; from < size; from++) {
    for (; row < matrix[from * size + rank]; row++) {
      for (int c = 0; c < kHidden; c++) wrong += received[row * kHidden + c] != to_bf16(value_of(from, source[row], c));
    }
  }

  auto combine = deepep::combine_args();
  combine.num_topk = kTopk;
  combine.hidden = kHidden;
  combine.x = received.data();
  combine.topk_weights = received_weights.data();
  combine.handle = &handle;
  combine.combined_x = combined.data();
  combine.combined_topk_weights = combined_weights.data();
  buffer.combine(combine);
  done.record();
  done.wait();
  for (int t = 0; t < kTokens; t++) {
    int copies = 0;
    for (int r = 0; r < size; r++) copies += in_rank[t * size + r];
    for (int c = 0; c < kHidden; c++) {
      wrong += combined[t * kHidden + c] != to_bf16(static_cast<float>(copies) * value_of(rank, t, c));
    }
    for (int k = 0; k < kTopk; k++)
      wrong += std::fabs(combined_weights[t * kTopk + k] - weights[t * kTopk + k]) > 1e-6f;
  }
  std::printf("rank %d (%s): %d tokens sent, %d rows received, %d wrong values\n", rank, options.engine, kTokens, rows,
              wrong);
  return wrong == 0 ? 0 : 1;
}

int guarded(int rank, int size, const char *directory) {
  try {
    return one_rank(rank, size, directory);
  } catch (const deepep::Error &error) {
    std::fprintf(stderr, "rank %d: %s: %s\n", rank, deepep_status_name(error.status()), error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char **argv) { return run_ranks(argc, argv, 4, guarded); }
