// The one device of this library: the processor, with the instruction set that was chosen for it.
#pragma once
#include "cpu/rows/rows.h"
#include "cpu/runtime/base.h"

namespace dk {

struct Device {
  const RowKernels *rows;
  uint64_t cached_bytes;  // outputs larger than this are stored past the caches
  int32_t cores;          // that this process may run on
};

}  // namespace dk
