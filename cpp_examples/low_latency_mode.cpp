// Low-latency mode from C++ with the hook's two halves: send, compute something else, receive. Sums are checked.
#include <cmath>
#include <cstdint>
#include <vector>

#include "arrays.h"
#include "deepep.hpp"
#include "ranks.h"

namespace {

constexpr int kTokens = 32, kMaxTokens = 48, kHidden = 512, kTopk = 4, kExperts = 16;

float value_of(int rank, int token, int column) {
  return std::sin(0.01f * static_cast<float>(rank * 1000 + token * 31 + column));
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
  options.low_latency_mode = 1;
  options.preinitialize = 1;
  options.num_rdma_bytes = deepep::low_latency_size_hint(kMaxTokens, kHidden, size, kExperts);
  deepep::Buffer buffer(group, options);
  deepep::Event done(buffer);  // on a GPU the calls only launch: the program waits before it reads

  const int local = kExperts / size, rows = size * kMaxTokens;
  Array<uint16_t> x(kTokens * kHidden);
  Array<int64_t> topk_idx(kTokens * kTopk);
  Array<float> weights(kTokens * kTopk);
  for (int t = 0; t < kTokens; t++) {
    for (int c = 0; c < kHidden; c++) x[t * kHidden + c] = to_bf16(value_of(rank, t, c));
    for (int k = 0; k < kTopk; k++) {
      topk_idx[t * kTopk + k] = (t * 3 + k * 5 + rank) % kExperts;
      weights[t * kTopk + k] = 0.1f * static_cast<float>(k + 1);
    }
  }
  Array<uint16_t> received(static_cast<size_t>(local) * rows * kHidden), combined(kTokens * kHidden);
  Array<int32_t> counts(local), src_info(static_cast<size_t>(local) * rows);
  Array<int64_t> ranges(static_cast<size_t>(local) * size);

  auto dispatch = deepep::ll_dispatch_args();
  dispatch.phases = DEEPEP_SEND;
  dispatch.use_fp8 = 0;
  dispatch.num_tokens = kTokens;
  dispatch.num_max_tokens = kMaxTokens;
  dispatch.hidden = kHidden;
  dispatch.num_topk = kTopk;
  dispatch.num_experts = kExperts;
  dispatch.x = x.data();
  dispatch.topk_idx = topk_idx.data();
  dispatch.recv_x = received.data();
  dispatch.recv_count = counts.data();
  dispatch.src_info = src_info.data();
  dispatch.layout_range = ranges.data();
  buffer.low_latency_dispatch(dispatch);
  double other_work = 0;  // what a model would do between send and receive
  for (int i = 0; i < 100000; i++) other_work += std::sqrt(static_cast<double>(i));
  dispatch.phases = DEEPEP_RECV;
  buffer.low_latency_dispatch(dispatch);
  done.record();
  done.wait();

  int wrong = 0;
  for (int expert = 0; expert < local; expert++) {
    for (int from = 0; from < size; from++) {
      const int64_t range = ranges[expert * size + from];
      const int first = static_cast<int>(range >> 32), count = static_cast<int>(range & 0xffffffff);
      for (int row = first; row < first + count; row++) {
        const size_t at = static_cast<size_t>(expert) * rows + static_cast<size_t>(row);
        for (int c = 0; c < kHidden; c++)
          wrong += received[at * kHidden + c] != to_bf16(value_of(from, src_info[at], c));
      }
    }
  }

  auto combine = deepep::ll_combine_args();
  combine.num_tokens = kTokens;
  combine.num_max_tokens = kMaxTokens;
  combine.hidden = kHidden;
  combine.num_topk = kTopk;
  combine.num_experts = kExperts;
  combine.x = received.data();  // the experts are the identity here
  combine.topk_idx = topk_idx.data();
  combine.topk_weights = weights.data();
  combine.src_info = src_info.data();
  combine.layout_range = ranges.data();
  combine.combined_x = combined.data();
  buffer.low_latency_combine(combine);
  done.record();
  done.wait();
  for (int t = 0; t < kTokens; t++) {
    for (int c = 0; c < kHidden; c++) {
      const float expected = (0.1f + 0.2f + 0.3f + 0.4f) * from_bf16(x[t * kHidden + c]);
      wrong += std::fabs(from_bf16(combined[t * kHidden + c]) - expected) > 0.01f;
    }
  }
  int rows_received = 0;
  for (int count : counts) rows_received += count;
  std::printf("rank %d (%s): %d rows for %d local experts, other work %.0f, %d wrong values\n", rank, options.engine,
              rows_received, local, other_work, wrong);
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
