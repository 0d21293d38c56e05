// A ring of staged rows in a rank's wire region, with a record of extras beside each row.
#pragma once
#include "cpu/team/team.h"

namespace dk {

// A row and its extras as one piece, which one put carries to another node.
struct Record {
  uint64_t row_bytes, extra_bytes;

  uint64_t extra_at() const { return round_up(row_bytes, 16); }
  uint64_t bytes() const { return extra_at() + extra_bytes; }
  uint64_t stride() const { return round_up(bytes(), kLine); }
};

// On one node, rows and extras are separate arrays, so that rows stay aligned; among nodes they are stored together as
// records.
class Ring {
 public:
  // Ring number `which` of `parts` equal ones in `owner`'s wire region. More rows than keep all readers busy would only
  // evict each other from the caches.
  Ring(const Team &team, int owner, const Record &record, int parts, int32_t max_rows, int which = 0)
      : records_(team.spans_nodes()), parts_(static_cast<uint64_t>(parts)) {
    stride_ = records_ ? record.stride() : round_up(record.row_bytes, kLine);
    extra_stride_ = records_ ? 0 : round_up(record.extra_bytes, kLine);
    extra_at_ = record.extra_at();
    uint64_t wanted =
        max<uint64_t>(max_rows > 0 ? static_cast<uint64_t>(max_rows) : 0, kCachedBytes / parts_ / stride_ + 1);
    slots_ = min(wanted, rows_room(team) / stride_);
    if (extra_stride_) slots_ = min(slots_, extras_room(team) / extra_stride_);
    locate(team, owner, which);
  }
  // A peer's ring with the slots and stride of its message (bounded by its region), rows of the same shape as `mine`.
  Ring(const Team &team, int owner, uint64_t slots, uint64_t stride, const Ring &mine, int which = 0)
      : records_(mine.records_),
        stride_(max(stride, mine.stride_)),
        extra_stride_(mine.extra_stride_),
        extra_at_(mine.extra_at_),
        parts_(mine.parts_) {
    slots_ = max<uint64_t>(1, min(slots, rows_room(team) / stride_));
    locate(team, owner, which);
  }

  uint64_t slots() const { return slots_; }
  uint64_t stride() const { return stride_; }
  uint8_t *row(uint64_t slot) const { return at<uint8_t>(rows_ + slot * stride_); }
  template <class T>
  T *extra(uint64_t slot) const {
    return at<T>(extras_ + slot * extra_stride_);
  }
  // Rows between two updates of a cursor.
  int64_t batch(int32_t wanted) const {
    int64_t rows = max<int64_t>(wanted, static_cast<int64_t>(kBatchBytes / stride_));
    return max<int64_t>(1, min(rows, static_cast<int64_t>(slots_ / 2)));
  }
  // Wakes readers only each half ring: a wake for every batch costs more than it gains.
  bool worth_a_wake(int64_t rows) {
    bool worth = rows - woken_at_ >= static_cast<int64_t>(slots_ / 2);
    if (worth) woken_at_ = rows;
    return worth;
  }

 private:
  static constexpr uint64_t kCachedBytes = 2 << 20;
  static constexpr uint64_t kBatchBytes = 64 << 10;

  uint64_t rows_room(const Team &team) const {
    return (team.wire.rows_bytes + (records_ && team.wire.rows_bytes ? team.wire.extras_bytes : 0)) / parts_ / kLine *
           kLine;
  }
  uint64_t extras_room(const Team &team) const { return team.wire.extras_bytes / parts_ / kLine * kLine; }
  void locate(const Team &team, int owner, int which) {
    uint64_t wire = team.peers[owner].wire, part = static_cast<uint64_t>(which);
    rows_ = wire + team.wire.rows_offset + part * rows_room(team);
    extras_ = records_ ? rows_ + extra_at_ : wire + team.wire.extras_offset + part * extras_room(team);
    if (records_) extra_stride_ = stride_;
  }

  bool records_;
  uint64_t stride_, extra_stride_, extra_at_, parts_, slots_ = 0, rows_ = 0, extras_ = 0;
  int64_t woken_at_ = 0;
};

}  // namespace dk
