// Compiled with -mavx512f/bw/vl/dq; chosen at run time.
#define DK_ROWS_WIDTH 64
#include "cpu/rows/impl.h"

const dk::RowKernels dk::kRowsAvx512 = DK_ROW_KERNELS("avx512");
