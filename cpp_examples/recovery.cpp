// Low-latency mode with a rank that fails, from C++: masks, the clean after them, rows that are combined in place, raw
// regions, segments, and the library's log. Sums are checked at each step.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>

#include "program.h"

namespace {

constexpr int kTokens = 16, kHidden = 256, kTopk = 2, kExperts = 12;
constexpr auto kPatience = std::chrono::seconds(20);

class Step {
 public:
  Step(deepep::Buffer &buffer, int rank, int size) : buffer_(buffer), done_(buffer), rank_(rank), size_(size) {
    for (int t = 0; t < kTokens; t++) {
      for (int c = 0; c < kHidden; c++) x_[t * kHidden + c] = to_bf16(static_cast<float>((t * 7 + c + rank) % 64));
      for (int k = 0; k < kTopk; k++) {
        topk_idx_[t * kTopk + k] = (t + k * kExperts / kTopk + rank) % kExperts;
        weights_[t * kTopk + k] = 0.5f * static_cast<float>(k + 1);
      }
    }
  }

  // A round trip. Values that are wrong where rank `masked` gets and sends nothing; -1: every rank takes part.
  int wrong_values(int masked) {
    dispatch();
    combine();
    int wrong = 0;
    for (int t = 0; t < kTokens; t++) {
      float weight = 0;
      for (int k = 0; k < kTopk; k++) {
        const int owner = static_cast<int>(topk_idx_[t * kTopk + k]) / local_;
        const bool reached = masked < 0 || (owner == masked) == (rank_ == masked);
        weight += reached ? weights_[t * kTopk + k] : 0;
      }
      for (int c = 0; c < kHidden; c++)
        wrong += std::fabs(from_bf16(combined_[t * kHidden + c]) - weight * from_bf16(x_[t * kHidden + c])) > 0.5f;
    }
    return wrong;
  }

  // Ranks that are masked here, by the library.
  int num_masked() {
    buffer_.query_mask(masks_.data());
    wait_for_calls(done_);
    int masked = 0;
    for (int mask : masks_) masked += mask;
    return masked;
  }

 private:
  void dispatch() {
    auto args = deepep::ll_dispatch_args();
    args.use_fp8 = 0;
    args.num_tokens = args.num_max_tokens = kTokens;
    args.hidden = kHidden;
    args.num_topk = kTopk;
    args.num_experts = kExperts;
    args.x = x_.data();
    args.topk_idx = topk_idx_.data();
    args.recv_x = received_.data();
    args.recv_count = counts_.data();
    args.src_info = src_info_.data();
    args.layout_range = ranges_.data();
    buffer_.low_latency_dispatch(args);
    wait_for_calls(done_);
  }

  // The experts (the identity here) write their rows where peers read them.
  void combine() {
    const auto rows = buffer_.next_combine_rows(kTokens, kHidden, kExperts);
    for (int expert = 0; expert < local_; expert++)
      for (int row = 0; row < counts_[expert]; row++) {
        const size_t at = static_cast<size_t>(expert) * rows_ + static_cast<size_t>(row);
        array_copy(static_cast<char *>(rows.address) + at * rows.row_stride, &received_[at * kHidden],
                   kHidden * sizeof(uint16_t));
      }
    auto args = deepep::ll_combine_args();
    args.flags = DEEPEP_LL_ZERO_COPY;
    args.num_tokens = args.num_max_tokens = kTokens;
    args.hidden = kHidden;
    args.num_topk = kTopk;
    args.num_experts = kExperts;
    args.topk_idx = topk_idx_.data();
    args.topk_weights = weights_.data();
    args.src_info = src_info_.data();
    args.layout_range = ranges_.data();
    args.combined_x = combined_.data();
    buffer_.low_latency_combine(args);
    wait_for_calls(done_);
  }

  deepep::Buffer &buffer_;
  deepep::Event done_;
  const int rank_, size_, local_ = kExperts / size_, rows_ = size_ * kTokens;
  Array<uint16_t> x_ = Array<uint16_t>(kTokens * kHidden), combined_ = Array<uint16_t>(kTokens * kHidden);
  Array<uint16_t> received_ = Array<uint16_t>(static_cast<size_t>(local_) * rows_ * kHidden);
  Array<int64_t> topk_idx_ = Array<int64_t>(kTokens * kTopk), ranges_ = Array<int64_t>(local_ * size_);
  Array<float> weights_ = Array<float>(kTokens * kTopk);
  Array<int32_t> counts_ = Array<int32_t>(local_), src_info_ = Array<int32_t>(local_ * rows_);
  Array<int32_t> masks_ = Array<int32_t>(size_);
};

// A segment's memory can be written and read; an engine without segments says so.
int wrong_segments(deepep::Buffer &buffer) {
  constexpr char kText[] = "rows that peers write here need no copy";
  try {
    deepep::Segment made(buffer, 1 << 20), segment = std::move(made);
    char read[sizeof kText] = "";
    array_copy(segment.address(), kText, sizeof kText);
    array_copy(read, segment.address(), sizeof kText);
    return segment.number() < 1 || made.address() != nullptr || std::strcmp(read, kText) != 0;
  } catch (const deepep::Error &error) {
    return buffer.info().peer_rows != 0 || error.status() != DEEPEP_ERROR_UNSUPPORTED;
  }
}

// Regions that belong to the caller between calls: as large as asked for, here for low latency alone.
int wrong_regions(deepep::Buffer &buffer, uint64_t rdma_bytes) {
  const auto rdma = buffer.rdma_region(), nvl = buffer.nvl_region();
  const Array<char> zeros(kHidden);
  array_copy(rdma.address, zeros.data(), zeros.size());
  return (rdma.bytes < rdma_bytes) + (nvl.bytes != 0);
}

// The last rank dies without a word once the others have gone as far; they are told by the log.
int end_by_death(int rank, int size, const std::string &directory, const std::atomic<int> &warnings) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  const auto pause = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return std::chrono::steady_clock::now() < until;
  };
  const auto name = [&](int of) { return directory + "/passed-" + std::to_string(of); };
  if (rank < size - 1) {
    std::fclose(std::fopen(name(rank).c_str(), "w"));
    while (warnings == 0 && pause()) {
    }
    return warnings == 0;
  }
  for (int other = 0; other < size - 1; other++)
    while (std::remove(name(other).c_str()) != 0 && pause()) {
    }
  std::_Exit(0);
}

int one_rank(int rank, int size, const char *directory) {
  static std::atomic<int> warnings{0};
  deepep::set_log([](int32_t level, const char *) { warnings += level >= 2; });
  deepep::Group group(meet(rank, size, directory));
  auto options = deepep::buffer_options();
  options.engine = arrays_open(rank, &options.device);
  options.low_latency_mode = 1;
  options.enable_shrink = 1;
  options.num_rdma_bytes = deepep::low_latency_size_hint(kTokens, kHidden, size, kExperts);
  deepep::Buffer buffer(group, options);
  const auto engine = deepep::engine_query(options.engine);
  int wrong = engine.available != 1 || std::string(engine.name) != options.engine;
  auto config = deepep::default_config(0, size);
  deepep::check_config(config);
  wrong += deepep::version() / 100 != DEEPEP_VERSION_MAJOR * 100 + DEEPEP_VERSION_MINOR;
  wrong += wrong_regions(buffer, options.num_rdma_bytes) + wrong_segments(buffer);

  Step step(buffer, rank, size);
  wrong += step.wrong_values(-1);
  buffer.barrier();
  if (size > 1) {  // each rank masks for itself: the others the last one, and that one the others
    for (int other = 0; other < size; other++)
      if ((other == size - 1) != (rank == size - 1)) buffer.update_mask(other, true);
    wrong += step.num_masked() != (rank == size - 1 ? size - 1 : 1);
    wrong += step.wrong_values(size - 1);
    buffer.clean_mask();
  }
  wrong += step.num_masked() != 0;
  buffer.barrier();  // what a masked rank sends is ignored, so all ranks lift their masks before any goes on
  buffer.clean_low_latency(kTokens, kHidden, kExperts);
  wrong += step.wrong_values(-1);
  std::printf("rank %d (%s): %d wrong values\n", rank, engine.name, wrong);
  std::fflush(stdout);
  if (size > 1) wrong += end_by_death(rank, size, directory, warnings);
  deepep::set_log(nullptr);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) { return run_program<one_rank>(argc, argv); }
