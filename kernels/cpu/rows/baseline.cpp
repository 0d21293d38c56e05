// What every processor of the target has (SSE2 on x86-64).
#define DK_ROWS_WIDTH 16
#include "cpu/rows/impl.h"

const dk::RowKernels dk::kRowsBaseline = DK_ROW_KERNELS("baseline");
