// deepep.hpp - C++17 over deepep.h, header only: RAII for groups, buffers and events, exceptions for statuses.
//
// Arguments are the C structs, made by the functions below with their defaults set (deepep::dispatch_args() and so on);
// see deepep.h for what each field means. Nothing here allocates tensors or waits on its own. All functions of deepep.h
// are here but deepep_pool_*, which are for torch's allocator.
#ifndef DEEPEP_HPP
#define DEEPEP_HPP

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "deepep.h"

namespace deepep {

// A call failed. status() is a DEEPEP_ERROR_* code, what() names the argument or the rank.
class Error : public std::runtime_error {
 public:
  Error(deepep_status_t status, const std::string &text) : std::runtime_error(text), status_(status) {}
  deepep_status_t status() const noexcept { return status_; }
  const char *name() const noexcept { return deepep_status_name(status_); }  // "DEEPEP_ERROR_TIMEOUT"

 private:
  deepep_status_t status_;
};

// Throws Error unless `status` is DEEPEP_OK.
inline void check(deepep_status_t status) {
  if (status == DEEPEP_OK) return;
  std::string text = deepep_last_error();
  if (text.empty()) text = deepep_status_text(status);
  throw Error(status, text);
}

// A waiting call's status: true for OK, false for PENDING; throws otherwise.
inline bool done(deepep_status_t status) {
  if (status == DEEPEP_PENDING) return false;
  check(status);
  return true;
}

// The version of the library that is loaded, as deepep_version gives it.
inline int32_t version() { return deepep_version(); }

// What an engine is: "cpu", "cuda", or "auto" for the one that would be chosen. One that cannot be used is no error:
// see `available` and `reason`.
inline deepep_engine_info engine_query(const char *name = "auto") {
  deepep_engine_info info = DEEPEP_ENGINE_INFO_INIT;
  check(deepep_engine_query(name, &info));
  return info;
}

// Takes the log lines from now on, perhaps on threads of the library's own; level: 0 debug, 1 info, 2 warn, 3 error. An
// empty function: they go where DEEPEP_LOG says again. What was given is kept until the program ends, since a thread
// may be inside it. It may not throw.
inline void set_log(std::function<void(int32_t level, const char *message)> sink) {
  using Sink = std::function<void(int32_t, const char *)>;
  if (!sink) return check(deepep_set_log_callback(nullptr, nullptr));
  auto kept = std::make_unique<Sink>(std::move(sink));
  check(deepep_set_log_callback(
      [](int32_t level, const char *message, void *user) noexcept { (*static_cast<Sink *>(user))(level, message); },
      kept.get()));
  kept.release();
}

// ---- Argument structs with their defaults ----

inline deepep_group_options group_options() { return DEEPEP_GROUP_OPTIONS_INIT; }
inline deepep_buffer_options buffer_options() { return DEEPEP_BUFFER_OPTIONS_INIT; }
inline deepep_warmup_options warmup_options() { return DEEPEP_WARMUP_OPTIONS_INIT; }
inline deepep_startup_report startup_report() { return DEEPEP_STARTUP_REPORT_INIT; }
inline deepep_call call() { return DEEPEP_CALL_INIT; }
inline deepep_layout layout_args() { return DEEPEP_LAYOUT_INIT; }
inline deepep_handle handle() { return DEEPEP_HANDLE_INIT; }
inline deepep_notify notify_args() { return DEEPEP_NOTIFY_INIT; }
inline deepep_dispatch_args dispatch_args() { return DEEPEP_DISPATCH_INIT; }
inline deepep_combine_args combine_args() { return DEEPEP_COMBINE_INIT; }
inline deepep_balance_args balance_args() { return DEEPEP_BALANCE_INIT; }
inline deepep_ll_dispatch_args ll_dispatch_args() { return DEEPEP_LL_DISPATCH_INIT; }
inline deepep_ll_combine_args ll_combine_args() { return DEEPEP_LL_COMBINE_INIT; }

// ---- Sizes and configs ----

// The config for `num_ranks` ranks, of dispatch (kind 0) or combine (kind 1).
inline deepep_config default_config(int32_t kind, int32_t num_ranks) {
  deepep_config config = DEEPEP_CONFIG_INIT;
  check(deepep_config_default(kind, num_ranks, &config));
  return config;
}

// Rounds rdma_recv_chunk up to what calls take; the Error of a config that no call takes names the field.
inline void check_config(deepep_config &config) { check(deepep_config_check(&config)); }

// Bytes of num_nvl_bytes that serve rows of `hidden_bytes` with this config.
inline uint64_t nvl_size_hint(const deepep_config &config, int64_t hidden_bytes, int32_t num_ranks) {
  uint64_t bytes = 0;
  check(deepep_config_size_hint(&config, hidden_bytes, num_ranks, 0, &bytes));
  return bytes;
}

// Bytes of num_rdma_bytes that serve such rows between nodes; 0 where the ranks are one node.
inline uint64_t rdma_size_hint(const deepep_config &config, int64_t hidden_bytes, int32_t num_ranks) {
  uint64_t bytes = 0;
  check(deepep_config_size_hint(&config, hidden_bytes, num_ranks, 1, &bytes));
  return bytes;
}

// Bytes of num_rdma_bytes for low-latency calls of this shape.
inline uint64_t low_latency_size_hint(int32_t num_max_tokens, int32_t hidden, int32_t num_ranks, int32_t num_experts) {
  uint64_t bytes = 0;
  check(deepep_low_latency_size_hint(num_max_tokens, hidden, num_ranks, num_experts, &bytes));
  return bytes;
}

inline deepep_elastic_options elastic_options() { return DEEPEP_ELASTIC_OPTIONS_INIT; }

// How large a buffer of V2 is, how it is divided, and what its calls take.
inline deepep_elastic_info elastic_sizes(const deepep_elastic_options &options) {
  deepep_elastic_info info = DEEPEP_ELASTIC_INFO_INIT;
  check(deepep_elastic_sizes(&options, &info));
  return info;
}

inline deepep_plan_options plan_options() { return DEEPEP_PLAN_OPTIONS_INIT; }

// What a buffer would be; needs neither a GPU nor peers.
inline deepep_plan_info plan(const deepep_plan_options &options) {
  deepep_plan_info info = DEEPEP_PLAN_INFO_INIT;
  check(deepep_plan(&options, &info, nullptr));
  return info;
}

// Owns one handle of the C API; movable, not copyable.
template <typename Handle, deepep_status_t (*Destroy)(Handle)>
class Owner {
 public:
  Owner() = default;
  explicit Owner(Handle handle) : handle_(handle) {}
  Owner(Owner &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owner &operator=(Owner &&other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Owner(const Owner &) = delete;
  Owner &operator=(const Owner &) = delete;
  ~Owner() { reset(); }

  // Frees now; twice is fine.
  void reset() noexcept {
    if (handle_ != nullptr) Destroy(std::exchange(handle_, nullptr));
  }
  Handle get() const noexcept { return handle_; }

 private:
  Handle handle_ = nullptr;
};

// The ranks that communicate. Collective to make.
class Group : public Owner<deepep_group_t, deepep_group_destroy> {
 public:
  explicit Group(const deepep_group_options &options) : Owner(create(options)) {}

 private:
  static deepep_group_t create(const deepep_group_options &options) {
    deepep_group_t group = nullptr;
    check(deepep_group_create(&options, &group));
    return group;
  }
};

class Buffer;

// A raw region of this rank, which the caller may overwrite while no call is in flight.
struct Region {
  void *address = nullptr;
  uint64_t bytes = 0;
};

// Where the rows of the next combine may be written: row r of local expert l at address + (l * R * B + r) * row_stride.
struct CombineRows {
  void *address = nullptr;
  uint64_t row_stride = 0;
};

// Memory that every rank of the node maps: rows in it are received and read in place. Collective to make (the buffer's
// info().peer_rows is 0 where the engine has none), local to destroy, also after its buffer.
class Segment : public Owner<void *, deepep_segment_release> {
 public:
  inline Segment(const Buffer &buffer, uint64_t bytes);
  void *address() const noexcept { return get(); }
  // For recv_segment and x_segment.
  int32_t number() const noexcept { return number_; }

 private:
  int32_t number_ = 0;
};

// A point in a stream of a buffer.
class Event : public Owner<deepep_event_t, deepep_event_destroy> {
 public:
  inline explicit Event(const Buffer &buffer);
  void record(void *stream = nullptr) { check(deepep_event_record(get(), stream)); }
  void stream_wait(void *stream = nullptr) { check(deepep_event_stream_wait(get(), stream)); }
  // Waits on the host, at most slice_ms (< 0: until done). False: not yet.
  bool wait(int64_t slice_ms = -1) { return done(deepep_event_wait(get(), slice_ms)); }
};

// Expert-parallel communication of one group. Collective to make, local to destroy.
class Buffer : public Owner<deepep_buffer_t, deepep_buffer_destroy> {
 public:
  Buffer(const Group &group, const deepep_buffer_options &options) : Owner(create(group, options)) {}

  deepep_buffer_info info() const {
    deepep_buffer_info info = DEEPEP_BUFFER_INFO_INIT;
    check(deepep_buffer_info_get(get(), &info));
    return info;
  }
  bool wait_ready(int64_t slice_ms = -1) { return done(deepep_buffer_wait_ready(get(), slice_ms)); }
  // Gives the memory back and has it again at the same addresses. False: not done within slice_ms, call again.
  bool release_memory(int64_t slice_ms = -1) { return done(deepep_buffer_release(get(), slice_ms)); }
  bool restore(int64_t slice_ms = -1) { return done(deepep_buffer_restore(get(), slice_ms)); }
  void check_failure() { check(deepep_buffer_check(get())); }
  // Warms every mode that the buffer allows, or the shapes that are given; the result says what was done.
  deepep_startup_report warmup(const deepep_warmup_options &options = warmup_options()) {
    check(deepep_buffer_warmup(get(), &options));
    return startup_report();
  }
  // Where the time of construction, of warm-ups and of first calls went.
  deepep_startup_report startup_report() {
    deepep_startup_report report = deepep::startup_report();
    check(deepep_buffer_startup_report(get(), &report));
    return report;
  }

  // By which processes find the buffer that want to join it: options of their Group with DEEPEP_BOOTSTRAP_JOIN.
  std::string join_key() const {
    char key[DEEPEP_JOIN_KEY_BYTES];
    check(deepep_buffer_join_key(get(), key, sizeof key));
    return key;
  }
  // The lost rank that each process asks for which waits to join, -1 for any; agreed: collective, the same on all
  // ranks.
  std::vector<int32_t> pending_joins(bool agreed = false) const {
    std::vector<int32_t> ranks(64);
    int32_t count = 0;
    check(deepep_buffer_pending_joins(get(), agreed ? 1 : 0, static_cast<int32_t>(ranks.size()), ranks.data(), &count));
    ranks.resize(std::min(ranks.size(), static_cast<size_t>(count)));
    return ranks;
  }
  // Ranks that have died or left, as far as this one has heard.
  std::vector<int32_t> lost_ranks() const {
    int32_t count = 0;
    check(deepep_buffer_lost_ranks(get(), 0, nullptr, &count));
    std::vector<int32_t> ranks(static_cast<size_t>(count));
    check(deepep_buffer_lost_ranks(get(), count, ranks.data(), &count));
    ranks.resize(std::min(ranks.size(), static_cast<size_t>(count)));
    return ranks;
  }
  // Moves the buffer into a group of these members: without those that are lost, with processes in their places.
  void regroup(const std::vector<int32_t> &members, bool renumber = false, int64_t timeout_ms = 0) {
    deepep_regroup_options options = DEEPEP_REGROUP_OPTIONS_INIT;
    options.num_members = static_cast<int32_t>(members.size());
    options.members = members.data();
    options.renumber = renumber ? 1 : 0;
    options.timeout_ms = timeout_ms;
    check(deepep_buffer_regroup(get(), &options));
  }

  void layout(const deepep_layout &args, const deepep_call &how = deepep::call()) {
    check(deepep_get_layout(get(), &args, &how));
  }
  // First step of a dispatch; the result names the exchange for wait_counts() and dispatch_args.token.
  uint64_t notify(const deepep_notify &args, const deepep_call &how = deepep::call()) {
    uint64_t token = 0;
    check(deepep_notify_counts(get(), &args, &how, &token));
    return token;
  }
  // Rows that arrive; per_expert gets one count for each of the num_local_experts, rounded up to the alignment.
  int32_t wait_counts(uint64_t token, int32_t num_local_experts, std::vector<int32_t> *per_expert = nullptr) {
    int32_t rows = 0;
    if (per_expert != nullptr) per_expert->assign(static_cast<size_t>(num_local_experts), 0);
    check(deepep_wait_counts(get(), token, -1, &rows, per_expert != nullptr ? per_expert->data() : nullptr));
    return rows;
  }
  void dispatch(const deepep_dispatch_args &args, const deepep_call &how = deepep::call()) {
    check(deepep_dispatch(get(), &args, &how));
  }
  /// Both steps of a dispatch whose outputs have room for any routing; the handle is the notify's.
  void dispatch_at_once(const deepep_notify &notify, const deepep_dispatch_args &args,
                        const deepep_call &how = deepep::call()) {
    check(deepep_dispatch_at_once(get(), &notify, &args, &how));
  }
  // In place of dispatch() on a rank that cannot go on: the others refuse that dispatch and name `reason`.
  void cancel_dispatch(uint64_t token, deepep_status_t reason, const deepep_call &how = deepep::call()) {
    check(deepep_cancel_dispatch(get(), token, reason, &how));
  }
  void combine(const deepep_combine_args &args, const deepep_call &how = deepep::call()) {
    check(deepep_combine(get(), &args, &how));
  }

  // Bytes of workspace for prefetch_weights(), or with `reduce` for reduce_grads().
  uint64_t balance_workspace(const deepep_balance_args &args, bool reduce) const {
    uint64_t bytes = 0;
    check(deepep_balance_workspace(get(), &args, reduce ? 1 : 0, &bytes));
    return bytes;
  }
  // Every slot gets its expert's bytes.
  void prefetch_weights(const deepep_balance_args &args, const deepep_call &how = deepep::call()) {
    check(deepep_prefetch_weights(get(), &args, &how));
  }
  // Adds the copies' gradients to their experts'.
  void reduce_grads(const deepep_balance_args &args, const deepep_call &how = deepep::call()) {
    check(deepep_reduce_grads(get(), &args, &how));
  }

  void low_latency_dispatch(deepep_ll_dispatch_args &args, const deepep_call &how = deepep::call()) {
    check(deepep_low_latency_dispatch(get(), &args, &how));
  }
  void low_latency_combine(deepep_ll_combine_args &args, const deepep_call &how = deepep::call()) {
    check(deepep_low_latency_combine(get(), &args, &how));
  }
  void clean_low_latency(int32_t num_max_tokens, int32_t hidden, int32_t num_experts,
                         const deepep_call &how = deepep::call()) {
    check(deepep_clean_low_latency_buffer(get(), num_max_tokens, hidden, num_experts, &how));
  }
  void barrier(const deepep_call &how = deepep::call()) { check(deepep_barrier(get(), &how)); }
  // Of the next low-latency combine with DEEPEP_LL_ZERO_COPY, of this shape.
  CombineRows next_combine_rows(int32_t num_max_tokens, int32_t hidden, int32_t num_experts) {
    CombineRows rows;
    check(deepep_next_low_latency_combine_buffer(get(), num_max_tokens, hidden, num_experts, &rows.address,
                                                 &rows.row_stride));
    return rows;
  }

  // The masks need enable_shrink. A masked rank is sent nothing and not waited for.
  void update_mask(int32_t rank, bool masked, const deepep_call &how = deepep::call()) {
    check(deepep_update_mask(get(), rank, masked ? 1 : 0, &how));
  }
  // mask_status: [out] [R] 1: masked; memory that the engine reaches.
  void query_mask(int32_t *mask_status, const deepep_call &how = deepep::call()) {
    check(deepep_query_mask(get(), mask_status, &how));
  }
  void clean_mask(const deepep_call &how = deepep::call()) { check(deepep_clean_mask(get(), &how)); }

  Region nvl_region() const { return region(0); }
  Region rdma_region() const { return region(1); }

  // Statistics of one DEEPEP_OP_*.
  deepep_op_stats stats(int32_t op, std::vector<uint64_t> *bytes_to_peer = nullptr,
                        std::vector<uint64_t> *wait_ns = nullptr) const {
    deepep_op_stats result = DEEPEP_OP_STATS_INIT;
    result.op = op;
    const auto size = static_cast<size_t>(info().size);
    if (bytes_to_peer != nullptr) bytes_to_peer->assign(size, 0);
    if (wait_ns != nullptr) wait_ns->assign(size, 0);
    check(deepep_stats(get(), &result, bytes_to_peer != nullptr ? bytes_to_peer->data() : nullptr,
                       wait_ns != nullptr ? wait_ns->data() : nullptr));
    return result;
  }

 private:
  Region region(int32_t rdma) const {
    Region result;
    check(deepep_buffer_region(get(), rdma, &result.address, &result.bytes));
    return result;
  }
  static deepep_buffer_t create(const Group &group, const deepep_buffer_options &options) {
    deepep_buffer_t buffer = nullptr;
    check(deepep_buffer_create(group.get(), &options, &buffer));
    return buffer;
  }
};

inline Event::Event(const Buffer &buffer) {
  deepep_event_t event = nullptr;
  check(deepep_event_create(buffer.get(), &event));
  static_cast<Owner &>(*this) = Owner(event);
}

inline Segment::Segment(const Buffer &buffer, uint64_t bytes) {
  void *address = nullptr;
  check(deepep_segment_create(buffer.get(), bytes, &number_, &address));
  static_cast<Owner &>(*this) = Owner(address);
}

}  // namespace deepep

#endif  // DEEPEP_HPP
