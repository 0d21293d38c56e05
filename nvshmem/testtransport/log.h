// log.h - prints an error to stderr. NVSHMEM then ends the process.
#pragma once
#include <cstdarg>
#include <cstdio>

namespace testtransport {

__attribute__((format(printf, 1, 2))) inline int complain(const char *format, ...) {
  char text[256];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  fprintf(stderr, "testtransport: %s\n", text);
  return 1;
}

}  // namespace testtransport
