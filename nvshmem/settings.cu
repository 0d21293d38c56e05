// settings.cu - sets the environment variables that NVSHMEM reads when it starts. docs/internode.md lists them.
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "network.h"

namespace deepep {
namespace {

constexpr int kShallowest = 128, kDeepest = 32768;  // of NVSHMEM_QP_DEPTH

int power_of_two(int at_least) {
  int depth = kShallowest;
  while (depth < at_least) depth *= 2;
  return depth;
}

// The values that this library has set, which it may replace before the next start.
std::map<std::string, std::string> &own_values() {
  static std::map<std::string, std::string> values;
  return values;
}

bool is_users(const char *name) {
  const char *now = getenv(name);
  const auto own = own_values().find(name);
  return now != nullptr && (own == own_values().end() || own->second != now);
}

void set(const char *name, const std::string &value, Report *report) {
  if (is_users(name)) {
    if (value != getenv(name))
      report->add("%s=%s is set, %s is wanted: the value that is set stays", name, getenv(name), value.c_str());
    return;
  }
  if (setenv(name, value.c_str(), 1) == 0) own_values()[name] = value;
}

void forget(const char *name) {
  if (is_users(name)) return;
  unsetenv(name);
  own_values().erase(name);
}

void set_queue_pairs(const Wanted &wanted, Report *report) {
  // NVSHMEM chooses the queue pair by block index; an operation on queue pair n runs in block n.
  set("NVSHMEM_IBGDA_RC_MAP_BY", "cta", report);
  set("NVSHMEM_IBGDA_NUM_RC_PER_PE", std::to_string(wanted.num_qps_per_nic), report);
  set("NVSHMEM_QP_DEPTH", std::to_string(power_of_two(wanted.qp_depth)), report);
  if (const char *misnamed = getenv("NVSHMEM_IBGDA_QP_DEPTH"))
    report->add("NVSHMEM_IBGDA_QP_DEPTH=%s has no effect, NVSHMEM has no such variable: NVSHMEM_QP_DEPTH=%s applies",
                misnamed, getenv("NVSHMEM_QP_DEPTH"));
}

// Those of the last start that this one does not ask for go.
void set_lines(const std::string &lines, Report *report) {
  static std::set<std::string> *const last = new std::set<std::string>;
  std::set<std::string> names;
  for (size_t at = 0, end; at < lines.size(); at = end + 1) {
    end = min(lines.find('\n', at), lines.size());
    const std::string line = lines.substr(at, end - at);
    const size_t equals = line.find('=');
    if (equals == std::string::npos || equals == 0) continue;
    names.insert(line.substr(0, equals));
    set(line.substr(0, equals).c_str(), line.substr(equals + 1), report);
  }
  for (const std::string &name : *last)
    if (names.count(name) == 0) forget(name.c_str());
  *last = names;
}

}  // namespace

void Report::add(const char *format, ...) {
  const size_t start = used_;
  if (used_ > 0 && used_ + 2 < bytes_) {
    memcpy(text_ + used_, "; ", 3);
    used_ += 2;
  }
  va_list list;
  va_start(list, format);
  const int length = vsnprintf(text_ + used_, bytes_ - used_, format, list);
  va_end(list);
  used_ = length < 0 ? start : min<size_t>(used_ + static_cast<size_t>(length), bytes_ - 1);
  text_[used_] = 0;
}

int32_t apply_settings(const Wanted &wanted, Report *report) {
  if (wanted.num_ranks < 1 || wanted.num_nvl_peers < 1 || wanted.num_qps_per_nic < 1 || wanted.qp_depth < 1) {
    report->add("num_ranks = %d, num_nvl_peers = %d, num_qps_per_nic = %d, qp_depth = %d: each must be at least 1",
                wanted.num_ranks, wanted.num_nvl_peers, wanted.num_qps_per_nic, wanted.qp_depth);
    return DK_EINVAL;
  }
  if (wanted.qp_depth > kDeepest) {
    report->add("qp_depth = %d: NVSHMEM_QP_DEPTH must be at most %d", wanted.qp_depth, kDeepest);
    return DK_EINVAL;
  }
  // CUDA does not load a kernel while another one runs, and that one may be waiting for a peer.
  set("CUDA_MODULE_LOADING", "EAGER", report);
  // No collective of NVSHMEM is used: it needs no second NCCL in the process and no multicast groups.
  set("NVSHMEM_DISABLE_NCCL", "1", report);
  set("NVSHMEM_DISABLE_NVLS", "1", report);
  if (wanted.num_ranks <= wanted.num_nvl_peers) {
    set("NVSHMEM_REMOTE_TRANSPORT", "none", report);
    return DK_OK;
  }
  forget("NVSHMEM_REMOTE_TRANSPORT");
  set("NVSHMEM_DISABLE_MNNVL", wanted.mnnvl ? "0" : "1", report);
  if (getenv("NVSHMEM_REMOTE_TRANSPORT") == nullptr) set("NVSHMEM_IB_ENABLE_IBGDA", "1", report);
  set_queue_pairs(wanted, report);
  set_lines(wanted.settings != nullptr ? wanted.settings : "", report);
  return DK_OK;
}

}  // namespace deepep
