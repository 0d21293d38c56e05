// For every processor of the target (SSE2 on x86-64).
#define DK_ROWS_WIDTH 16
#include "cpu/rows/impl.h"

const dk::RowKernels dk::kRowsBaseline = DK_ROW_KERNELS("baseline");
