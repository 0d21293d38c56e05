// wire.cpp - the GPU executes one stream in order, so operations take effect in the order in which they are enqueued.
// That order respects queues and fences and is otherwise random, from a seed. Or a worker plays a NIC (worker.h): one
// queue pair toward each PE, in order, so a fence has nothing to do.
#include "wire.h"

#include <time.h>

#include <cstdlib>
#include <cstring>

#include "log.h"

namespace testtransport {
namespace {

constexpr size_t kPieces = 3, kMinPiece = 512;  // a longer put is copied in pieces, the last one first

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

int verdict(cudaError_t error) { return error == cudaSuccess ? 0 : complain("CUDA: %s", cudaGetErrorString(error)); }

constexpr const char *kNicForm =
    "DEEPEP_TESTTRANSPORT is nic:LATENCY_US:GB_PER_S[:POSTS_PER_US], decimal numbers, at most 100000, 10000 and 10000";

// LATENCY_US:GB_PER_S[:POSTS_PER_US]
bool parse_nic(const char *text, Settings *out) {
  constexpr double kMost[3] = {100000, 10000, 10000}, kLeast = 0.001;
  double numbers[3] = {0, 0, 0};
  int count = 0;
  for (char *end = nullptr; count < 3; text = end + 1) {
    const bool is_number = text[0] >= '0' && text[0] <= '9';  // strtod takes signs, spaces and "inf" too
    numbers[count] = is_number ? strtod(text, &end) : 0;
    if (!is_number || (*end != ':' && *end != 0)) {
      complain("DEEPEP_TESTTRANSPORT: a number is expected at \"%s\"; %s", text, kNicForm);
      return false;
    }
    const double number = numbers[count];
    if (!(number <= kMost[count]) || (number != 0 && number < kLeast)) {
      complain("DEEPEP_TESTTRANSPORT: %g is out of range; %s", number, kNicForm);
      return false;
    }
    ++count;
    if (*end == 0) {
      if (count < 2) break;
      out->nic = true;
      out->timing.latency = static_cast<uint64_t>(numbers[0] * 1e6 + 0.5);
      out->timing.byte_1024 = numbers[1] == 0 ? 0 : static_cast<uint64_t>(1024e3 / numbers[1] + 0.5);
      out->timing.post = numbers[2] == 0 ? 0 : static_cast<uint64_t>(1e6 / numbers[2] + 0.5);
      return true;
    }
  }
  complain("%s", kNicForm);
  return false;
}

Post post_of(const Work &work) {
  Post post{};
  if (work.what != What::kAtomic) {
    post.target = reinterpret_cast<uint64_t>(work.target);
    post.source = reinterpret_cast<uint64_t>(work.source);
    post.bytes = static_cast<uint32_t>(work.bytes);
    post.flags = work.what == What::kGet ? kReturns : 0;
    return post;
  }
  post.word = reinterpret_cast<uint64_t>(work.target);
  post.word_bytes = static_cast<uint8_t>(work.bytes);
  post.atomic = static_cast<uint8_t>(work.atomic);
  post.value = work.value;
  post.source = work.compare;
  if (work.result != nullptr) {
    post.target = reinterpret_cast<uint64_t>(work.result);
    post.result_flag = work.result_flag;
    post.flags = kReturns | kHasResult;
  }
  return post;
}

}  // namespace

bool parse_settings(const char *text, Settings *out) {
  *out = Settings{};
  if (text == nullptr || text[0] == 0) return true;
  if (strncmp(text, "nic", 3) == 0) return parse_nic(text + (text[3] == ':' ? 4 : 3), out);
  uint64_t numbers[3] = {0, 0, 4};
  char *end = nullptr;
  for (int i = 0; i < 3; ++i, text = end + 1) {
    numbers[i] = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
    if (end == nullptr || end == text || (*end != ':' && *end != 0)) {
      complain("DEEPEP_TESTTRANSPORT: a number is expected at \"%s\"", text);
      return false;
    }
    if (*end == 0) break;
  }
  if (*end != 0 || numbers[1] > 1000000 || numbers[2] < 1 || numbers[2] > 1024) {
    complain("DEEPEP_TESTTRANSPORT is SEED[:MICROSECONDS[:QUEUES]], at most 1000000 and 1024, or nic:...");
    return false;
  }
  out->seed = numbers[0];
  out->max_delay_ns = numbers[1] * 1000;
  out->num_queues = static_cast<int>(numbers[2]);
  return true;
}

Wire::Wire(int my_pe, int num_pes, const Settings &settings)
    : peers_(static_cast<size_t>(num_pes)),
      random_(settings.seed * 1000003 + static_cast<uint64_t>(my_pe)),
      settings_(settings),
      my_pe_(my_pe) {}

Wire::~Wire() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

int Wire::start() {
  cudaError_t error = load_wire_kernels();
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  if (error != cudaSuccess || !settings_.nic) return verdict(error);
  rings_ = std::make_unique<Rings>();
  return rings_->start(static_cast<int>(peers_.size()), settings_.timing);
}

int Wire::post(int pe, Work work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Peer &peer = peers_[static_cast<size_t>(pe)];
  testtransport_counts &c = peer.counts;
  ++(work.what == What::kGet   ? c.gets
     : work.what == What::kPut ? c.puts
     : work.source != nullptr  ? c.values
                               : c.atomics);
  c.bytes += work.bytes;
  if (peer.lost) {
    ++c.dropped;
    return 0;
  }
  if (rings_ != nullptr) return rings_->post(pe, post_of(work));
  work.fences = peer.fences;
  work.number = peer.posted++;
  const bool at_once =
      pe == my_pe_ || settings_.max_delay_ns == 0;  // NVSHMEM does not fence operations toward its own PE
  if (!at_once) {
    work.queue = static_cast<int>(random_() % static_cast<uint64_t>(settings_.num_queues));
    work.due_ns = now_ns() + random_() % settings_.max_delay_ns;
  }
  peer.waiting.push_back(work);
  return at_once ? go(&peer, peer.waiting.size() - 1) : 0;
}

// No operation from before the last fence, and no earlier one of the same queue, is still waiting.
bool Wire::may_go(const Peer &peer, size_t at) const {
  const Work &work = peer.waiting[at];
  for (size_t i = 0; i < at; ++i)
    if (peer.waiting[i].fences != work.fences || peer.waiting[i].queue == work.queue) return false;
  return true;
}

int Wire::go(Peer *peer, size_t at) {
  const Work work = peer->waiting[at];
  peer->waiting.erase(peer->waiting.begin() + static_cast<ptrdiff_t>(at));
  peer->counts.overtaken += at > 0;
  return issue(work);
}

int Wire::issue(const Work &work) {
  if (work.what == What::kAtomic) return verdict(enqueue_atomic(work, stream_));
  const size_t piece = work.bytes / kPieces < kMinPiece ? work.bytes : (work.bytes / kPieces + 15) / 16 * 16;
  size_t end = work.bytes;
  while (end > 0) {
    const size_t start = (end - 1) / piece * piece;
    const cudaError_t error =
        cudaMemcpyAsync(static_cast<char *>(work.target) + start, static_cast<const char *>(work.source) + start,
                        end - start, cudaMemcpyDefault, stream_);
    if (error != cudaSuccess) return verdict(error);
    end = start;
  }
  return 0;
}

int Wire::fence(int pe) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Peer &peer = peers_[static_cast<size_t>(pe)];
  ++peer.fences;
  ++peer.counts.fences;
  return 0;
}

int Wire::quiet(int pe) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Peer &peer = peers_[static_cast<size_t>(pe)];
  ++peer.counts.quiets;
  if (rings_ != nullptr) return wait_for_rings(pe);
  while (!peer.waiting.empty()) {
    size_t at = random_() % peer.waiting.size();
    while (!may_go(peer, at)) --at;  // the first one always may
    if (const int failed = go(&peer, at)) return failed;
  }
  return verdict(cudaStreamSynchronize(stream_));
}

int Wire::wait_for_rings(int pe) {
  for (uint32_t looks = 1; !rings_->is_done(pe); ++looks) {
    int failed = rings_->keep_running();
    if (failed == 0 && looks % 65536 == 0) failed = rings_->check();
    if (failed != 0) return failed;
  }
  return 0;
}

int Wire::progress() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (rings_ != nullptr) return rings_->keep_running();
  for (Peer &peer : peers_) {
    if (peer.waiting.empty()) continue;
    const uint64_t now = now_ns();
    for (size_t at = 0; at < peer.waiting.size(); ++at)
      if (peer.waiting[at].due_ns <= now && may_go(peer, at)) {
        if (const int failed = go(&peer, at)) return failed;
        break;
      }
  }
  return 0;
}

int Wire::lose(int pe) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (pe < 0 || pe >= static_cast<int>(peers_.size()) || pe == my_pe_) return 1;
  Peer &peer = peers_[static_cast<size_t>(pe)];
  peer.lost = true;
  if (rings_ != nullptr) rings_->lose(pe);
  peer.counts.dropped += peer.waiting.size();
  peer.waiting.clear();
  return 0;
}

int Wire::count(int pe, testtransport_counts *out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (pe < 0 || pe >= static_cast<int>(peers_.size())) return 1;
  *out = peers_[static_cast<size_t>(pe)].counts;
  return 0;
}

int Wire::add_area(const Area &area) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rings_ == nullptr ? 0 : rings_->add_area(area);
}

int Wire::read_nic(testtransport_nic *out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rings_ == nullptr ? 1 : rings_->read(out);
}

WorkerState *Wire::worker() { return rings_ == nullptr ? nullptr : rings_->state(); }

}  // namespace testtransport
