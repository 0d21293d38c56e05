// push_rows.cuh - libdeepep_nvshmem.so: a row with a routing, pushed to the ranks of a node (normal/push_rows.cuh).
// Payloads of expanded rows go into the rings of other ranks once, however many choices of the row are there, and are
// stored at the places of this rank's own choices.
#pragma once
#include "internode/normal/push_rows.cuh"
#include "internode/routed/dispatch.cuh"

namespace deepep::internode {

template <bool kExpand>
__device__ inline bool has_places(const RoutedDispatchParams<kExpand> &, int segment) {
  return !kExpand && segment >= 0;
}

// Of a row: its number among all ranks'; lane i: its number at the turn's rank i, or -1; lane k: choice k.
struct RoutedMeta {
  int32_t token;
  int number;
  RowChoice choice;
};
// Of one of this rank's tokens.
struct OwnRow {
  int token;
  template <bool kExpand>
  __device__ RoutedMeta load(const RoutedDispatchParams<kExpand> &p, const PushTurn &turn) const {
    return {p.d.session.team.rank * p.d.num_max_tokens + token, own_number(p, turn, token),
            load_choice<kExpand>(p.d, token)};
  }
  template <bool kExpand>
  __device__ uint32_t scale(const RoutedDispatchParams<kExpand> &p, int i) const {
    return p.d.scales()[token * p.d.scale_token_stride + i * p.d.scale_stride];
  }
};
// Of a row that a partner has sent: its words.
struct ArrivedRow {
  const uint32_t *words;
  template <bool kExpand>
  __device__ RoutedMeta load(const RoutedDispatchParams<kExpand> &p, const PushTurn &turn) const {
    const RoutedWords<kExpand> at(p.d, p.internode.num_peers);
    return {static_cast<int32_t>(ptx::ld_relaxed_sys(words)), arrived_number(turn, words),
            arrived_choice(p.d, at, words)};
  }
  template <bool kExpand>
  __device__ uint32_t scale(const RoutedDispatchParams<kExpand> &p, int i) const {
    return ptx::ld_relaxed_sys(words + RoutedWords<kExpand>(p.d, p.internode.num_peers).scales + i);
  }
};

// As push_row() without a routing.
template <bool kExpand, class Row>
__device__ inline int push_row(const RoutedDispatchParams<kExpand> &p, PushTurn &turn, const uint8_t *payload,
                               const Row &from) {
  const DispatchParams &d = p.d;
  const RoutedWords<kExpand> at(d, p.internode.num_peers);
  const int i = lane_id();
  const RoutedMeta meta = from.load(p, turn);
  int own;
  if (!find_own(p, turn, meta.number, own)) return -1;
  uint8_t *slot = nullptr, *place = nullptr;
  if (meta.number >= 0 && i != turn.self) {
    slot = turn.next_slot(p);
    place = turn.place(p, meta.number, slot);
  }
  const int64_t row = own + turn.before_own,
                to = own < 0 ? -1 : row_of_lane<kExpand>(d, meta.choice, row, p.internode.partner(turn.node));
  const uint32_t slots = __ballot_sync(kAllLanes, slot != nullptr),
                 rows = d.recv_scales() == nullptr ? 0 : __ballot_sync(kAllLanes, to >= 0);
#pragma unroll 1
  for (uint32_t left = slots; left != 0; left &= left - 1) {
    auto *words = reinterpret_cast<uint32_t *>(from_lane(slot, __ffs(static_cast<int>(left)) - 1));
    if (i == 0) words[0] = static_cast<uint32_t>(meta.token);
    if (turn.ring != nullptr) words[1 + turn.base + i] = static_cast<uint32_t>(meta.number);
    store_choice_words(d, at, words, meta.choice);
  }
  if (own >= 0) store_choice<kExpand>(d, row, to, meta.choice, meta.token);
#pragma unroll 1
  for (int first = 0; first < d.num_scales; first += kWarp) {
    const uint32_t scale = first + i < d.num_scales ? from.scale(p, first + i) : 0;
#pragma unroll 1
    for (uint32_t left = slots; left != 0; left &= left - 1) {
      auto *words = reinterpret_cast<uint32_t *>(from_lane(slot, __ffs(static_cast<int>(left)) - 1));
      if (first + i < d.num_scales) words[at.scales + first + i] = scale;
    }
    store_scale(d, to, rows, first + i, scale);
  }
  uint8_t *own_place = to < 0 ? nullptr : d.recv_x() + to * d.row_bytes;
  copy_to_places({place, own_place}, payload, d.row_bytes);
  return __popc(__ballot_sync(kAllLanes, meta.number >= 0));
}
template <bool kExpand>
__device__ inline int push_own(const RoutedDispatchParams<kExpand> &p, PushTurn &turn, int token) {
  return push_row(p, turn, p.d.x() + static_cast<uint64_t>(token) * p.d.row_bytes, OwnRow{token});
}
template <bool kExpand>
__device__ inline int push_arrived(const RoutedDispatchParams<kExpand> &p, PushTurn &turn, const uint8_t *row) {
  return push_row(p, turn, row, ArrivedRow{reinterpret_cast<const uint32_t *>(row + p.d.row_bytes)});
}
template <bool kExpand>
__device__ inline void take_pushed(const RoutedDispatchParams<kExpand> &p, const uint8_t *slot, bool staged,
                                   int64_t row) {
  take_row(p, staged ? slot + payload_at(p) : nullptr, reinterpret_cast<const uint32_t *>(slot), row);
}

}  // namespace deepep::internode
