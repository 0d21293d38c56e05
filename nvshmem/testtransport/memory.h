// memory.h - GPU memory of other processes: what it is called in handles, and where it is mapped here.
#pragma once
#include "interface.h"

namespace testtransport {

// What travels in a MemoryHandle. An allocation is `bytes` long; what was registered begins `offset` into it.
struct Shared {
  uint32_t magic, kind;
  int64_t pid;
  uint64_t serial;  // of the registration in that process
  uint64_t address, offset, bytes;
  char runtime_handle[64];  // kRuntime: cudaIpcMemHandle_t
};
enum Kind : uint32_t { kLocalOnly = 0, kDescriptor = 1, kRuntime = 2 };

// 0, or an error that has been printed. The current context is the caller's.
int share_memory(MemoryHandle *handle, void *address, size_t bytes, bool local_only);
int unshare_memory(MemoryHandle *handle);
// Where `place` of the process that made its handle lies in this process; null: it cannot be reached (printed).
void *reach_memory(const Place &place);
bool prepare_memory(const MemoryHandle &handle);  // so that reach_memory has nothing to map later
void forget_memory();                             // unmaps all, closes all

}  // namespace testtransport
