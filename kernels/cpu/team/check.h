// Checks of arguments that all operations share. The engine has checked them before; these protect a process that calls
// the library directly.
#pragma once
#include "cpu/team/team.h"

namespace dk {

template <class P>
bool bad_head(const P &p) {
  return !p.team || !p.stream;
}
inline bool bad_index_bytes(int32_t bytes) { return bytes != 4 && bytes != 8; }
inline bool bad_experts(const Team &team, int32_t experts) {
  return experts < 1 || experts % team.num_ranks ||
         static_cast<uint64_t>(experts / team.num_ranks) > Control::max_local_experts(team.num_ranks);
}

// Element i of a tensor of int32 or int64 indices.
inline int64_t index_at(uint64_t base, int32_t index_bytes, size_t i) {
  return index_bytes == 8 ? at<const int64_t>(base)[i] : at<const int32_t>(base)[i];
}

}  // namespace dk
