// memory.h - GPU memory of other processes: its description in handles, and its mapping in this process.
#pragma once
#include "interface.h"

namespace testtransport {

// The content of a MemoryHandle. An allocation is `bytes` long; the registered part begins at `offset`.
struct Shared {
  uint32_t magic, kind;
  int64_t pid;
  uint64_t serial;  // of the registration in that process
  uint64_t address, offset, bytes;
  char runtime_handle[64];  // kRuntime: cudaIpcMemHandle_t
};
enum Kind : uint32_t { kLocalOnly = 0, kDescriptor = 1, kRuntime = 2 };

// 0, or an error after its message was printed. Both use the current context.
int share_memory(MemoryHandle *handle, void *address, size_t bytes, bool local_only);
int unshare_memory(MemoryHandle *handle);
// The address in this process of a `place` of another process; null, after a message, if it cannot be mapped.
void *reach_memory(const Place &place);
bool prepare_memory(const MemoryHandle &handle);  // maps it for later calls of reach_memory
void *start_of(const MemoryHandle &handle);       // of the registered part, in this process; null: not mapped
void forget_memory();                             // unmaps all, closes all

}  // namespace testtransport
