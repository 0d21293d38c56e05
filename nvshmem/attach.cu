// attach.cu - NVSHMEM's start and end. The buffers of a process share one NVSHMEM; the last one to detach ends it.
#include <cstdio>
#include <cstring>

#include "network.h"

namespace deepep {

Network &network() {
  static auto *one = new Network;  // never destroyed: exit without detach must not race with other threads
  return *one;
}

namespace {

static_assert(sizeof(nvshmemx_uniqueid_t) == DK_TRANSPORT_ID_BYTES, "the id is copied unchanged");

template <class P>
Wanted wanted_of(const P *p) {
  return {p->num_ranks,
          p->num_nvl_peers,
          p->num_qps_per_nic,
          p->qp_depth,
          (p->flags & DK_TRANSPORT_MNNVL) != 0,
          pointer<const char>(p->host_settings)};
}

// A buffer of this process is attached already: one with the same rank, ranks, id and device shares its NVSHMEM.
int32_t share(const dk_transport_attach_params *p, const Network &net, Report *report) {
  if (p->rank == net.rank && p->num_ranks == net.num_ranks && memcmp(p->id, &net.id, sizeof net.id) == 0 &&
      handle_of<Device>(p->device)->ordinal == net.device.ordinal)
    return DK_OK;
  report->add(
      "NVSHMEM runs in this process as rank %d of %d on device %d: a process can use one group and one device at a "
      "time",
      net.rank, net.num_ranks, net.device.ordinal);
  return DK_ESTATE;
}

int32_t start(const dk_transport_attach_params *p, Report *report) {
  nvshmemx_uniqueid_t id;
  memcpy(&id, p->id, sizeof id);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  int failed = nvshmemx_set_attr_uniqueid_args(p->rank, p->num_ranks, &id, &attributes);
  // nvshmemx_init_attr returns 0 even if it failed; the status shows it.
  if (failed == 0) failed = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
  if (failed != 0 || nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED) {
    report->add(
        "NVSHMEM did not start on rank %d of %d (error %d, status %d): see its messages on stderr; "
        "NVSHMEM_DEBUG=INFO prints more",
        p->rank, p->num_ranks, failed, nvshmemx_init_status());
    return DK_ESYSTEM;
  }
  if (nvshmem_my_pe() != p->rank || nvshmem_n_pes() != p->num_ranks) {
    report->add("other code of this process has started NVSHMEM as PE %d of %d: rank %d of %d cannot use it",
                nvshmem_my_pe(), nvshmem_n_pes(), p->rank, p->num_ranks);
    nvshmem_finalize();
    return DK_ESTATE;
  }
  return DK_OK;
}

int32_t attach_first(dk_transport_attach_params *p, Network *net, Report *report) {
  int32_t code = apply_settings(wanted_of(p), report);
  if (code == DK_OK) code = start(p, report);
  if (code != DK_OK) return code;
  net->device.ordinal = handle_of<Device>(p->device)->ordinal;
  cudaError_t error = load_transport_kernels();
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&net->device.service, cudaStreamNonBlocking);
  if (error != cudaSuccess) {
    nvshmem_finalize();
    report->add("cannot load the transport's kernels: %s", cudaGetErrorString(error));
    return device_failure(p, error);
  }
  net->rank = p->rank;
  net->num_ranks = p->num_ranks;
  memcpy(&net->id, p->id, sizeof net->id);
  return DK_OK;
}

}  // namespace
}  // namespace deepep

using namespace deepep;

DK_EXPORT int32_t dk_transport_unique_id(dk_transport_unique_id_params *p) {
  DK_ENTER(p);
  Report report(p->reason, sizeof p->reason);
  int32_t code = check_versions(&report);
  if (code != DK_OK) return code;
  Network &net = network();
  const std::lock_guard<std::mutex> lock(net.mutex);
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (net.users > 0) {
    id = net.id;
  } else {
    code = apply_settings(wanted_of(p), &report);
    if (code != DK_OK) return code;
    const int failed = nvshmemx_get_uniqueid(&id);
    if (failed != 0) {
      report.add("NVSHMEM returned no unique id (error %d): see its messages on stderr", failed);
      return DK_ESYSTEM;
    }
  }
  memcpy(p->id, &id, sizeof id);
  return DK_OK;
}

DK_EXPORT int32_t dk_transport_attach(dk_transport_attach_params *p) {
  DK_ENTER(p);
  p->attachment = 0;
  Report report(p->reason, sizeof p->reason);
  const Version loaded = loaded_version();
  snprintf(p->version, sizeof p->version, "NVSHMEM %d.%d.%d", loaded.major, loaded.minor, loaded.patch);
  int32_t code = check_versions(&report);
  if (code != DK_OK) return code;
  if (p->device == 0 || p->rank < 0 || p->rank >= p->num_ranks) {
    report.add("device = %s, rank = %d, num_ranks = %d: a device and a rank below num_ranks are needed",
               p->device != 0 ? "given" : "0", p->rank, p->num_ranks);
    return DK_EINVAL;
  }
  Network &net = network();
  const std::lock_guard<std::mutex> lock(net.mutex);
  const OnDevice on(handle_of<Device>(p->device));
  if (on.error() != cudaSuccess) return device_failure(p, on.error());
  code = net.users > 0 ? share(p, net, &report) : attach_first(p, &net, &report);
  if (code != DK_OK) return code;
  ++net.users;
  p->attachment = handle_to(&net);
  return DK_OK;
}

DK_EXPORT int32_t dk_transport_detach(dk_transport_detach_params *p) {
  DK_ENTER(p);
  Network &net = network();
  if (p->attachment != handle_to(&net)) return DK_EINVAL;
  const std::lock_guard<std::mutex> lock(net.mutex);
  if (net.users == 0 || (net.users == 1 && !net.blocks.empty())) return DK_ESTATE;
  if (net.users > 1) {
    --net.users;
    return DK_OK;
  }
  const OnDevice on(&net.device);
  if (on.error() != cudaSuccess) return device_failure(p, on.error());
  nvshmem_finalize();
  (void)cudaStreamDestroy(net.device.service);
  (void)cudaGetLastError();
  net.users = 0;
  return DK_OK;
}
