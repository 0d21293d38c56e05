// Expanded rows and redundant experts from C++: the weight of a busy expert is copied to another rank, tokens are
// dispatched with a row for each expert that they chose, half of the busy expert's to the copy, combined, and the
// copy's gradient is added to the expert's. Every result is checked.
#include <vector>

#include "program.h"

namespace {

constexpr int kTokens = 32, kHidden = 64, kTopk = 2, kExperts = 2;  // experts that a rank owns
constexpr int kSlots = 1, kPlaces = kExperts + kSlots;              // of a rank: its experts, and a slot for a copy
constexpr int kAlignment = 4;

// An expert multiplies by its weight.
float weight_of(int expert) { return static_cast<float>(1 + expert % 4); }

class Step {
 public:
  Step(deepep::Buffer &buffer, int rank, int size) : buffer_(buffer), done_(buffer), rank_(rank), size_(size) {
    for (int r = 0; r < size; r++) mapping_[r] = (r + 1) % size * kExperts;  // the next rank's first expert is busy
    for (int e = 0; e < kExperts; e++)
      for (int c = 0; c < 4; c++) weights_[e * 4 + c] = weight_of(rank * kExperts + e);
    for (int t = 0; t < kTokens; t++) {
      for (int h = 0; h < kHidden; h++) x_[t * kHidden + h] = to_bf16(static_cast<float>(1 + t % 8));
      topk_idx_[t * kTopk] = place_of((rank + t) % size * kExperts, t);
      topk_idx_[t * kTopk + 1] = place_of((rank + t + 1) % size * kExperts + 1, t);
    }
  }

  // The copies, at every rank by the same call.
  void prefetch() {
    auto args = balance(weights_.data(), copies_.data(), false);
    buffer_.prefetch_weights(args);
    wait_for_calls(done_);
  }
  int wrong_copies() const { return copies_[0] != weight_of(mapping_[rank_]); }

  void dispatch() {
    handle_.rank_prefix_matrix = matrix_.data();
    handle_.send_head = head_.data();
    handle_.dst_slot = slot_.data();
    handle_.psum_recv_tokens_per_rank = by_rank_.data();
    handle_.psum_recv_tokens_per_expert = by_place_.data();
    handle_.num_recv_tokens_per_expert = num_.data();
    auto notify = deepep::notify_args();
    notify.num_tokens = notify.num_max_tokens = kTokens;
    notify.num_topk = kTopk;
    notify.num_experts = kPlaces * size_;
    notify.expert_alignment = kAlignment;
    notify.hidden = kHidden;
    notify.routing = DEEPEP_ROUTING_EXPANDED;
    notify.topk_idx = topk_idx_.data();
    notify.handle = &handle_;
    const uint64_t token = buffer_.notify(notify);
    std::vector<int32_t> counts;
    handle_.num_recv_tokens = buffer_.wait_counts(token, kPlaces, &counts);
    for (const int32_t count : counts) handle_.num_expanded_tokens += count;
    metadata_.resize(static_cast<size_t>(handle_.num_recv_tokens) * (kTopk + 2));
    rows_.resize(static_cast<size_t>(handle_.num_expanded_tokens) * kHidden);
    handle_.recv_src_metadata = metadata_.data();
    auto dispatch = deepep::dispatch_args();
    dispatch.token = token;
    dispatch.num_tokens = kTokens;
    dispatch.hidden = kHidden;
    dispatch.x = x_.data();
    dispatch.handle = &handle_;
    dispatch.recv_x = rows_.data();
    dispatch.do_zero_padding = 1;
    buffer_.dispatch(dispatch);
    wait_for_calls(done_);
  }

  // Rows stand by expert; psum_recv_tokens_per_expert says where each one's end. The gradient counts the rows.
  void run_experts() {
    int row = 0;
    for (int place = 0; place < kPlaces; place++) {
      row = (row + kAlignment - 1) / kAlignment * kAlignment;
      const bool copy = place >= kExperts;
      const float weight = copy ? copies_[0] : weights_[place * 4];
      for (; row < by_place_[place]; row++) {
        (copy ? copy_grads_[0] : grads_[place * 4]) += 1;
        for (int h = 0; h < kHidden; h++)
          rows_[row * kHidden + h] = to_bf16(weight * from_bf16(rows_[row * kHidden + h]));
      }
    }
  }

  void combine() {
    auto combine = deepep::combine_args();
    combine.hidden = kHidden;
    combine.x = rows_.data();
    combine.num_x_rows = handle_.num_expanded_tokens;
    combine.handle = &handle_;
    combine.combined_x = combined_.data();
    buffer_.combine(combine);
    wait_for_calls(done_);
  }
  int wrong_sums() const {
    int wrong = 0;
    for (int t = 0; t < kTokens; t++) {
      const float weights =
          weight_of((rank_ + t) % size_ * kExperts) + weight_of((rank_ + t + 1) % size_ * kExperts + 1);
      for (int h = 0; h < kHidden; h++)
        wrong += combined_[t * kHidden + h] != to_bf16(weights * static_cast<float>(1 + t % 8));
    }
    return wrong;
  }

  void reduce() {
    auto args = balance(grads_.data(), copy_grads_.data(), true);
    buffer_.reduce_grads(args);
    wait_for_calls(done_);
  }
  // Wherever its rows were computed: each rank sends an expert kTokens / size of its tokens.
  int wrong_grads() const {
    return grads_[0] != static_cast<float>(kTokens) || grads_[4] != static_cast<float>(kTokens);
  }
  int copied() const { return static_cast<int>(copy_grads_[0]); }

 private:
  // The place of an expert, or for every second token that of its copy, where it has one.
  int64_t place_of(int expert, int token) const {
    for (int r = 0; r < size_ && token % 2 == 1; r++)
      if (mapping_[r] == expert) return r * kPlaces + kExperts;
    return expert / kExperts * kPlaces + expert % kExperts;
  }

  deepep_balance_args balance(float *experts, float *copies, bool reduce) {
    auto args = deepep::balance_args();
    args.num_tensors = 1;
    args.num_slots = kSlots;
    args.num_local_experts = kExperts;
    args.mapping = mapping_.data();
    args.expert_bytes[0] = 16;
    args.experts[0] = experts;
    args.copies[0] = copies;
    args.workspace_bytes = buffer_.balance_workspace(args, reduce);
    workspace_.resize(args.workspace_bytes);
    args.workspace = workspace_.data();
    return args;
  }

  deepep::Buffer &buffer_;
  deepep::Event done_;
  const int rank_, size_;
  Array<int32_t> mapping_ = Array<int32_t>(size_);
  Array<float> weights_ = Array<float>(kExperts * 4), grads_ = Array<float>(kExperts * 4);
  Array<float> copies_ = Array<float>(kSlots * 4), copy_grads_ = Array<float>(kSlots * 4);
  Array<char> workspace_;
  Array<uint16_t> x_ = Array<uint16_t>(kTokens * kHidden), rows_, combined_ = Array<uint16_t>(kTokens * kHidden);
  Array<int64_t> topk_idx_ = Array<int64_t>(kTokens * kTopk);
  Array<int32_t> matrix_ = Array<int32_t>(size_ * size_), head_ = Array<int32_t>(kTokens * size_);
  Array<int32_t> slot_ = Array<int32_t>(kTokens * kTopk), by_rank_ = Array<int32_t>(size_);
  Array<int32_t> by_place_ = Array<int32_t>(kPlaces), num_ = Array<int32_t>(kPlaces), metadata_;
  deepep_handle handle_ = deepep::handle();
};

int one_rank(int rank, int size, const char *directory) {
  auto options = deepep::buffer_options();
  options.engine = arrays_open(rank, &options.device);
  options.num_nvl_bytes = deepep::nvl_size_hint(deepep::default_config(0, size), 4096, size);
  options.num_rdma_bytes = deepep::rdma_size_hint(deepep::default_config(0, size), 4096, size);
  deepep::Group group(meet(rank, size, directory));
  deepep::Buffer buffer(group, options);
  Step step(buffer, rank, size);
  step.prefetch();
  step.dispatch();
  step.run_experts();
  step.combine();
  step.reduce();
  const int wrong = step.wrong_copies() + step.wrong_sums() + step.wrong_grads();
  if (rank == 0) std::printf("%d rows went to a copy, %d wrong values\n", step.copied(), wrong);
  return wrong == 0 && step.copied() > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) { return run_program<one_rank>(argc, argv); }
