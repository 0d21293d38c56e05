// The transport functions of kernels.h: they check arguments and hand over to the NIC. With a stream they run, and
// wait, on its thread.
#include "cpu/rdma/rdma.h"
#include "cpu/runtime/stream.h"

namespace dk {
namespace {

constexpr int32_t kMaxQps = 65536, kDeepest = 1 << 20;  // limits of kernels.h
constexpr int64_t kMaxOfAll = 1 << 18;

uint64_t deadline(uint64_t timeout_ns) {
  uint64_t now = now_ns();
  return timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
}

bool bad_peers(const dk_transport_open_params &p) {
  const int32_t *peers = at<const int32_t>(p.host_peers);
  const uint64_t *blocks = at<const uint64_t>(p.host_blocks);
  bool taken[DK_MAX_RANKS] = {};
  for (int32_t i = 0; i < p.num_peers; i++) {
    if (peers[i] < 0 || peers[i] >= p.num_ranks || peers[i] == p.rank || taken[peers[i]]) return true;
    taken[peers[i]] = true;
    if (!blocks[peers[i]] || blocks[peers[i]] % 8) return true;
  }
  return false;
}

bool bad_open(const dk_transport_open_params &p) {
  if (!p.device || p.num_ranks < 1 || p.num_ranks > DK_MAX_RANKS || p.rank < 0 || p.rank >= p.num_ranks) return true;
  if (p.num_qps < 1 || p.num_qps > kMaxQps || p.qp_depth < 1 || p.qp_depth > kDeepest) return true;
  if (p.num_peers < 0 || p.num_peers >= p.num_ranks || (p.num_peers && !p.host_peers) || !p.host_blocks) return true;
  if (int64_t{p.num_peers} * p.num_qps > kMaxOfAll) return true;
  uint64_t own = at<const uint64_t>(p.host_blocks)[p.rank];
  return !own || own % 8 || !p.block_bytes || p.flags & ~uint32_t{DK_TRANSPORT_LATE} || bad_peers(p);
}

bool outside(const Nic &nic, uint64_t offset, uint64_t bytes) {
  return bytes > nic.block_bytes() || offset > nic.block_bytes() - bytes;
}

bool bad_put(const Nic &nic, const dk_transport_put_params &p) {
  if (!nic.reaches(p.peer) || p.qp < 0 || p.qp >= nic.num_qps()) return true;
  if (p.bytes && (!p.src || outside(nic, p.dst_offset, p.bytes))) return true;
  if (p.signal_op > DK_SIGNAL_ADD || p.flags & ~uint32_t{DK_TRANSPORT_NOWAIT}) return true;
  if (p.signal_op == DK_SIGNAL_NONE) return p.bytes == 0;
  return p.signal_offset % 8 || outside(nic, p.signal_offset, 8);
}

// Why the QP drops operations; DK_OK: it does not.
int32_t trouble(const Nic &nic, int peer, int qp) { return nic.lost(peer) ? DK_EPEERDEAD : nic.broken(peer, qp); }

int32_t post(Nic &nic, const dk_transport_put_params &p) {
  char *block = static_cast<char *>(nic.block());
  Signal signal;
  if (p.signal_op != DK_SIGNAL_NONE) signal = {block + p.signal_offset, p.signal_value, p.signal_op};
  uint64_t until = deadline(p.timeout_ns);
  for (;;) {
    int32_t code = trouble(nic, p.peer, p.qp);
    if (code != DK_OK) return code;
    if (nic.put(p.peer, p.qp, block + (p.bytes ? p.dst_offset : 0), at<const void>(p.src), p.bytes, signal))
      return trouble(nic, p.peer, p.qp);
    if (p.flags & DK_TRANSPORT_NOWAIT) return DK_EAGAIN;
    if (!nic.wait_for_room(p.peer, p.qp, until)) return DK_ETIMEOUT;
  }
}

void run_put(void *argument) {
  const auto &p = *static_cast<dk_transport_put_params *>(argument);
  Nic &nic = *at<Nic>(p.transport);
  int32_t code = post(nic, p);
  if (code == DK_ETIMEOUT) nic.break_qp(p.peer, p.qp, code);
}

// Calls act(peer, qp) for each QP that p.peer and p.qp select, until it returns a code other than DK_OK.
template <class P, class Act>
int32_t for_each_qp(const Nic &nic, const P &p, Act act) {
  for (int peer = 0; peer < nic.num_ranks(); peer++) {
    if (!nic.reaches(peer) || (p.peer >= 0 && p.peer != peer)) continue;
    for (int qp = 0; qp < nic.num_qps(); qp++) {
      int32_t code = p.qp >= 0 && p.qp != qp ? DK_OK : act(peer, qp);
      if (code != DK_OK) return code;
    }
  }
  return DK_OK;
}

template <class P>
bool bad_choice(const Nic &nic, const P &p) {
  return p.peer < -1 || p.qp < -1 || p.qp >= nic.num_qps() || (p.peer >= 0 && !nic.reaches(p.peer));
}

int32_t quiet(Nic &nic, const dk_transport_quiet_params &p, bool enqueued) {
  uint64_t until = deadline(p.timeout_ns);
  int32_t worst = DK_OK;
  int32_t code = for_each_qp(nic, p, [&](int peer, int qp) -> int32_t {
    if (!nic.wait_until_completed(peer, qp, nic.posted(peer, qp), until)) {
      if (!enqueued) return DK_ETIMEOUT;
      nic.break_qp(peer, qp, DK_ETIMEOUT);
    }
    int32_t here = trouble(nic, peer, qp);
    // A quiet of all peers goes on without those that are lost.
    if (worst == DK_OK && (here != DK_EPEERDEAD || p.peer == peer)) worst = here;
    return DK_OK;
  });
  return code != DK_OK ? code : worst;
}

void run_quiet(void *argument) {
  const auto &p = *static_cast<dk_transport_quiet_params *>(argument);
  quiet(*at<Nic>(p.transport), p, true);
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_transport_open(dk_transport_open_params *p) {
  DK_ENTER(p);
  p->transport = 0;
  if (bad_open(*p)) return DK_EINVAL;
  Nic *nic = nullptr;
  int32_t code = Nic::open(*p, &nic, &p->device_error);
  p->transport = address_of(nic);
  return code;
}

DK_EXPORT int32_t dk_transport_close(dk_transport_close_params *p) {
  DK_ENTER(p);
  Nic *nic = at<Nic>(p->transport);
  p->transport = 0;
  if (nic) Nic::close(nic);
  return DK_OK;
}

DK_EXPORT int32_t dk_transport_put(dk_transport_put_params *p) {
  DK_ENTER(p);
  Nic *nic = at<Nic>(p->transport);
  if (!nic || bad_put(*nic, *p)) return DK_EINVAL;
  if (nic->forked()) return DK_ESTATE;
  if (!p->stream) return post(*nic, *p);
  if (p->flags & DK_TRANSPORT_NOWAIT) return DK_EINVAL;
  int32_t code = trouble(*nic, p->peer, p->qp);
  return code != DK_OK ? code : push(at<Stream>(p->stream), run_put, *p);
}

DK_EXPORT int32_t dk_transport_quiet(dk_transport_quiet_params *p) {
  DK_ENTER(p);
  Nic *nic = at<Nic>(p->transport);
  if (!nic || bad_choice(*nic, *p)) return DK_EINVAL;
  if (nic->forked()) return DK_ESTATE;
  return p->stream ? push(at<Stream>(p->stream), run_quiet, *p) : quiet(*nic, *p, false);
}

DK_EXPORT int32_t dk_transport_query(dk_transport_query_params *p) {
  DK_ENTER(p);
  const Nic *nic = at<const Nic>(p->transport);
  if (!nic || bad_choice(*nic, *p)) return DK_EINVAL;
  bool one = p->peer >= 0 && p->qp >= 0;
  p->posted = p->completed = p->bytes = p->max_queued = 0;
  p->created = -1;
  p->lost = 0;
  return for_each_qp(*nic, *p, [&](int peer, int qp) -> int32_t {
    QueueCounts counts = nic->counts(peer, qp);
    p->posted += counts.posted;
    p->completed += counts.completed;
    p->bytes += counts.bytes;
    p->max_queued = max(p->max_queued, counts.max_queued);
    if (one) p->created = counts.created;
    if (!p->lost) p->lost = nic->lost(peer) ? 1 : nic->broken(peer, qp);
    return DK_OK;
  });
}

DK_EXPORT int32_t dk_transport_lose(dk_transport_lose_params *p) {
  DK_ENTER(p);
  Nic *nic = at<Nic>(p->transport);
  if (!nic || !nic->reaches(p->peer)) return DK_EINVAL;
  if (nic->forked()) return DK_ESTATE;
  nic->lose(p->peer);
  return DK_OK;
}
