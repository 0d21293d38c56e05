// host_part.h - NVSHMEM's host part, as this process has it.
#pragma once

namespace deepep {

// Opens the host part when first called. Null if that worked and it has every function that is called; else why not.
const char *host_part_error();
const char *host_part_file();  // its path; "" if it is not open

}  // namespace deepep
