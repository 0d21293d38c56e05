// The only device of this library: the processor, with the instruction set chosen for it.
#pragma once
#include "cpu/rows/rows.h"
#include "cpu/runtime/base.h"

namespace dk {

struct Device {
  const RowKernels *rows;
  uint64_t cached_bytes;  // larger outputs are stored with streaming stores
  int32_t cores;          // that this process may run on
};

}  // namespace dk
