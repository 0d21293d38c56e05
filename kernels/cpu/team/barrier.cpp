#include "cpu/team/check.h"
#include "cpu/team/exchange.h"

namespace dk {
namespace {

void run_barrier(const dk_barrier_params &p) {
  Op op(p, DK_OP_BARRIER);
  op.may_shrink = op.team.shrinks();
  Exchange exchange(op);
  if (op.failed()) return;
  exchange.post(nullptr, nullptr, 0);
  exchange.wait();
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_barrier(dk_barrier_params *p) {
  DK_ENTER(p);
  if (bad_head(*p)) return DK_EINVAL;
  return enqueue<dk_barrier_params, run_barrier>(*p);
}
