// Normal mode from C++: layout, counts, dispatch into our own memory, combine. Every row is checked.
#include <cmath>
#include <vector>

#include "program.h"

namespace {

constexpr int kTokens = 64, kHidden = 256, kTopk = 4, kExperts = 16;

// Token t of rank r carries this value in column c, so that a wrong row names its source. Exact in BF16 for 4 ranks,
// and never zero: the sum of two -0 is one or the other zero.
float value_of(int rank, int token, int column) {
  const float value = static_cast<float>(1 + rank * 64 + token % 64);
  return column % 2 == 0 ? value : -value;
}

deepep_buffer_options options_of(int rank, int size) {
  auto options = deepep::buffer_options();
  options.engine = arrays_open(rank, &options.device);
  options.num_nvl_bytes = deepep::nvl_size_hint(deepep::default_config(0, size), kHidden * 2, size);
  options.num_rdma_bytes = deepep::rdma_size_hint(deepep::default_config(0, size), kHidden * 2, size);  // 0 on one node
  return options;
}

// One step of a model on one rank. The methods are called in the order in which they stand here.
class Step {
 public:
  Step(deepep::Buffer &buffer, int rank, int size) : buffer_(buffer), done_(buffer), rank_(rank), size_(size) {
    for (int t = 0; t < kTokens; t++) {
      for (int c = 0; c < kHidden; c++) x_[t * kHidden + c] = to_bf16(value_of(rank, t, c));
      for (int k = 0; k < kTopk; k++) topk_idx_[t * kTopk + k] = (t * 7 + k * 5 + rank) % kExperts;
    }
  }

  // Which token goes to which rank, and how many.
  void layout() {
    auto layout = deepep::layout_args();
    layout.num_tokens = kTokens;
    layout.num_topk = kTopk;
    layout.num_experts = kExperts;
    layout.topk_idx = topk_idx_.data();
    layout.num_tokens_per_rank = per_rank_.data();
    layout.num_tokens_per_expert = per_expert_.data();
    layout.is_token_in_rank = in_rank_.data();
    buffer_.layout(layout);
  }

  // The ranks exchange their counts; the number of rows that arrive here is rows_.
  void exchange_counts() {
    handle_.rank_prefix_matrix = matrix_.data();
    handle_.send_head = head_.data();
    auto notify = deepep::notify_args();
    notify.num_tokens = kTokens;
    notify.num_topk = kTopk;
    notify.num_experts = kExperts;
    notify.hidden = kHidden;
    notify.num_tokens_per_rank = per_rank_.data();
    notify.num_tokens_per_expert = per_expert_.data();
    notify.is_token_in_rank = in_rank_.data();
    notify.handle = &handle_;
    token_ = buffer_.notify(notify);
    std::vector<int32_t> local_counts;
    rows_ = buffer_.wait_counts(token_, kExperts / size_, &local_counts);
  }

  void dispatch() {
    received_.resize(rows_ * kHidden);
    received_idx_.resize(rows_ * kTopk);
    received_weights_.resize(rows_ * kTopk);
    source_.resize(rows_);
    handle_.recv_src_idx = source_.data();
    handle_.num_recv_tokens = rows_;
    auto dispatch = deepep::dispatch_args();
    dispatch.token = token_;
    dispatch.hidden = kHidden;
    dispatch.num_tokens = kTokens;
    dispatch.num_topk = kTopk;
    dispatch.num_experts = kExperts;
    dispatch.x = x_.data();
    dispatch.topk_idx = topk_idx_.data();
    dispatch.topk_weights = weights_.data();
    dispatch.handle = &handle_;
    dispatch.recv_x = received_.data();
    dispatch.recv_topk_idx = received_idx_.data();
    dispatch.recv_topk_weights = received_weights_.data();
    buffer_.dispatch(dispatch);
    wait_for_calls(done_);
  }

  // Rows stand by source rank; the matrix has where each rank's end.
  int wrong_rows() const {
    int wrong = 0, row = 0;
    for (int from = 0; from < size_; from++) {
      for (; row < matrix_[from * size_ + rank_]; row++) {
        for (int c = 0; c < kHidden; c++) {
          wrong += received_[row * kHidden + c] != to_bf16(value_of(from, source_[row], c));
        }
      }
    }
    return wrong;
  }

  void combine() {
    auto combine = deepep::combine_args();
    combine.num_topk = kTopk;
    combine.hidden = kHidden;
    combine.x = received_.data();  // the experts are the identity here
    combine.topk_weights = received_weights_.data();
    combine.handle = &handle_;
    combine.combined_x = combined_.data();
    combine.combined_topk_weights = combined_weights_.data();
    buffer_.combine(combine);
    wait_for_calls(done_);
  }

  // Each rank that had the token sent its row back.
  int wrong_sums() const {
    int wrong = 0;
    for (int t = 0; t < kTokens; t++) {
      int copies = 0;
      for (int r = 0; r < size_; r++) copies += in_rank_[t * size_ + r];
      for (int c = 0; c < kHidden; c++) {
        wrong += combined_[t * kHidden + c] != to_bf16(static_cast<float>(copies) * value_of(rank_, t, c));
      }
      for (int k = 0; k < kTopk; k++) {
        wrong += std::fabs(combined_weights_[t * kTopk + k] - weights_[t * kTopk + k]) > 1e-6f;
      }
    }
    return wrong;
  }

  int rows() const { return rows_; }

 private:
  deepep::Buffer &buffer_;
  deepep::Event done_;
  const int rank_, size_;
  Array<uint16_t> x_ = Array<uint16_t>(kTokens * kHidden), received_, combined_ = Array<uint16_t>(kTokens * kHidden);
  Array<int64_t> topk_idx_ = Array<int64_t>(kTokens * kTopk), received_idx_;
  Array<float> weights_ = Array<float>(kTokens * kTopk, 1.0f / kTopk), received_weights_;
  Array<float> combined_weights_ = Array<float>(kTokens * kTopk);
  Array<int32_t> per_rank_ = Array<int32_t>(size_), per_expert_ = Array<int32_t>(kExperts), source_;
  Array<int32_t> matrix_ = Array<int32_t>(size_ * size_), head_ = Array<int32_t>(kTokens * size_);
  Array<uint8_t> in_rank_ = Array<uint8_t>(kTokens * size_);
  deepep_handle handle_ = deepep::handle();
  uint64_t token_ = 0;
  int rows_ = 0;
};

int one_rank(int rank, int size, const char *directory) {
  deepep::Group group(meet(rank, size, directory));
  const auto options = options_of(rank, size);
  deepep::Buffer buffer(group, options);
  Step step(buffer, rank, size);
  step.layout();
  step.exchange_counts();
  step.dispatch();
  int wrong = step.wrong_rows();
  step.combine();
  wrong += step.wrong_sums();
  std::printf("rank %d (%s): %d tokens sent, %d rows received, %d wrong values\n", rank, options.engine, kTokens,
              step.rows(), wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) { return run_program<one_rank>(argc, argv); }
