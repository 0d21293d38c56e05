// Compiled with -mavx2 -mfma -mf16c; chosen at run time.
#define DK_ROWS_WIDTH 32
#include "cpu/rows/impl.h"

const dk::RowKernels dk::kRowsAvx2 = DK_ROW_KERNELS("avx2");
