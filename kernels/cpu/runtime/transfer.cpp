// Copies and fills. On stream 0 the calling thread does them at once.
#include <string.h>

#include "cpu/runtime/stream.h"

namespace dk {
namespace {

void run_copy(void *argument) {
  const dk_copy_params &p = *static_cast<dk_copy_params *>(argument);
  memmove(at<void>(p.dst), at<void>(p.src), p.bytes);
}

void run_fill(void *argument) {
  const dk_fill_params &p = *static_cast<dk_fill_params *>(argument);
  memset(at<void>(p.dst), static_cast<int>(p.value & 0xff), p.bytes);
}

template <class P>
int32_t submit(uint64_t stream, void (*run)(void *), P &p) {
  if (stream) return push(at<Stream>(stream), run, p);
  run(&p);
  return DK_OK;
}

}  // namespace
}  // namespace dk

using namespace dk;

DK_EXPORT int32_t dk_copy(dk_copy_params *p) {
  DK_ENTER(p);
  if (!p->device || (p->bytes && (!p->dst || !p->src))) return DK_EINVAL;
  return p->bytes ? submit(p->stream, run_copy, *p) : DK_OK;
}

DK_EXPORT int32_t dk_fill(dk_fill_params *p) {
  DK_ENTER(p);
  if (!p->device || (p->bytes && !p->dst)) return DK_EINVAL;
  return p->bytes ? submit(p->stream, run_fill, *p) : DK_OK;
}
