// Low-latency mode from C++ with the hook's two halves: send, compute something else, receive. Sums are checked.
#include <cmath>
#include <vector>

#include "program.h"

namespace {

constexpr int kTokens = 32, kMaxTokens = 48, kHidden = 512, kTopk = 4, kExperts = 16;

float value_of(int rank, int token, int column) {
  return std::sin(0.01f * static_cast<float>(rank * 1000 + token * 31 + column));
}

deepep_buffer_options options_of(int rank, int size) {
  auto options = deepep::buffer_options();
  options.engine = arrays_open(rank, &options.device);
  options.low_latency_mode = 1;
  options.preinitialize = 1;
  options.num_rdma_bytes = deepep::low_latency_size_hint(kMaxTokens, kHidden, size, kExperts);
  return options;
}

// One decoding step on one rank. The methods are called in the order in which they stand here.
class Step {
 public:
  Step(deepep::Buffer &buffer, int rank, int size) : buffer_(buffer), done_(buffer), size_(size) {
    for (int t = 0; t < kTokens; t++) {
      for (int c = 0; c < kHidden; c++) x_[t * kHidden + c] = to_bf16(value_of(rank, t, c));
      for (int k = 0; k < kTopk; k++) {
        topk_idx_[t * kTopk + k] = (t * 3 + k * 5 + rank) % kExperts;
        weights_[t * kTopk + k] = 0.1f * static_cast<float>(k + 1);
      }
    }
  }

  // Sends, then receives; returns what was computed in between.
  double dispatch() {
    auto dispatch = deepep::ll_dispatch_args();
    dispatch.phases = DEEPEP_SEND;
    dispatch.use_fp8 = 0;
    dispatch.num_tokens = kTokens;
    dispatch.num_max_tokens = kMaxTokens;
    dispatch.hidden = kHidden;
    dispatch.num_topk = kTopk;
    dispatch.num_experts = kExperts;
    dispatch.x = x_.data();
    dispatch.topk_idx = topk_idx_.data();
    dispatch.recv_x = received_.data();
    dispatch.recv_count = counts_.data();
    dispatch.src_info = src_info_.data();
    dispatch.layout_range = ranges_.data();
    buffer_.low_latency_dispatch(dispatch);
    double other_work = 0;  // what a model would do between send and receive
    for (int i = 0; i < 100000; i++) other_work += std::sqrt(static_cast<double>(i));
    dispatch.phases = DEEPEP_RECV;
    buffer_.low_latency_dispatch(dispatch);
    wait_for_calls(done_);
    return other_work;
  }

  // Rows of an expert stand by source rank; ranges_ has the first one and their number.
  int wrong_rows() const {
    int wrong = 0;
    for (int pair = 0; pair < local_ * size_; pair++) {
      const int first = static_cast<int>(ranges_[pair] >> 32), count = static_cast<int>(ranges_[pair] & 0xffffffff);
      for (int row = first; row < first + count; row++) {
        const size_t at = static_cast<size_t>(pair / size_) * rows_ + static_cast<size_t>(row);
        for (int c = 0; c < kHidden; c++) {
          wrong += received_[at * kHidden + c] != to_bf16(value_of(pair % size_, src_info_[at], c));
        }
      }
    }
    return wrong;
  }

  void combine() {
    auto combine = deepep::ll_combine_args();
    combine.num_tokens = kTokens;
    combine.num_max_tokens = kMaxTokens;
    combine.hidden = kHidden;
    combine.num_topk = kTopk;
    combine.num_experts = kExperts;
    combine.x = received_.data();  // the experts are the identity here
    combine.topk_idx = topk_idx_.data();
    combine.topk_weights = weights_.data();
    combine.src_info = src_info_.data();
    combine.layout_range = ranges_.data();
    combine.combined_x = combined_.data();
    buffer_.low_latency_combine(combine);
    wait_for_calls(done_);
  }

  int wrong_sums() const {
    int wrong = 0;
    for (int i = 0; i < kTokens * kHidden; i++) {
      const float expected = (0.1f + 0.2f + 0.3f + 0.4f) * from_bf16(x_[i]);
      wrong += std::fabs(from_bf16(combined_[i]) - expected) > 0.01f;
    }
    return wrong;
  }

  int rows() const {
    int rows = 0;
    for (int count : counts_) rows += count;
    return rows;
  }
  int local() const { return local_; }

 private:
  deepep::Buffer &buffer_;
  deepep::Event done_;
  const int size_, local_ = kExperts / size_, rows_ = size_ * kMaxTokens;  // of each local expert
  const size_t all_rows_ = static_cast<size_t>(local_) * rows_;
  Array<uint16_t> x_ = Array<uint16_t>(kTokens * kHidden), received_ = Array<uint16_t>(all_rows_ * kHidden);
  Array<uint16_t> combined_ = Array<uint16_t>(kTokens * kHidden);
  Array<int64_t> topk_idx_ = Array<int64_t>(kTokens * kTopk), ranges_ = Array<int64_t>(local_ * size_);
  Array<float> weights_ = Array<float>(kTokens * kTopk);
  Array<int32_t> counts_ = Array<int32_t>(local_), src_info_ = Array<int32_t>(all_rows_);
};

int one_rank(int rank, int size, const char *directory) {
  deepep::Group group(meet(rank, size, directory));
  const auto options = options_of(rank, size);
  deepep::Buffer buffer(group, options);
  buffer.warmup();  // the shape is that of the size hint
  Step step(buffer, rank, size);
  const double other_work = step.dispatch();
  int wrong = step.wrong_rows();
  step.combine();
  wrong += step.wrong_sums();
  std::printf("rank %d (%s): %d rows for %d local experts, other work %.0f, %d wrong values\n", rank, options.engine,
              step.rows(), step.local(), other_work, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) { return run_program<one_rank>(argc, argv); }
