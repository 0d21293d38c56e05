// Combine among nodes. For a token of another node, the forwarder (the rank of the token's index on this node) adds the
// rows of its node's ranks in FP32 by ascending rank, rounds once to BF16, and sends one row. It merges the ranks' rows
// by the token numbers that they carry, so it needs no list of which rank has which token. With a routing it adds them
// in the order of the token's last choice of each rank; or it sends each rank's row by itself (rows_apart).
#pragma once
#include "cpu/normal/link.h"
#include "cpu/normal/routed.h"

namespace dk {

constexpr int32_t kTokensAtOnce = 16;  // tokens between two updates of the cursors

// The extras of a combine row: its weights; among nodes, this before them.
struct TokenNumber {
  int32_t token, last_choice;  // the latter with a routing
};
inline uint64_t token_bytes(const Team &team) { return team.spans_nodes() ? sizeof(TokenNumber) : 0; }
// num_topk is 0 where there are no weights.
inline Record combine_record(const Team &team, int32_t hidden, int32_t num_topk) {
  return {2 * static_cast<uint64_t>(hidden), token_bytes(team) + 4u * static_cast<uint64_t>(num_topk)};
}
// What crosses between nodes: with a routing a sum has the weights of each rank of the node, for the token's rank to
// choose from.
inline Record link_record(const Team &team, const dk_combine_params &p, int32_t num_topk) {
  int32_t parts = p.routing && !rows_apart(p) ? team.node_size : 1;
  return combine_record(team, p.hidden * rows_together(p), num_topk * parts);
}
// Records of one token must be in the ring together; half of it may wait for a credit.
inline uint64_t least_link_slots(const Team &team, const dk_combine_params &p) {
  return rows_apart(p) ? 2 * static_cast<uint64_t>(team.node_size) : 1;
}
void add_weights(float *to, const float *const *rows, int count, int32_t num_topk);

class NodeSum {
 public:
  // mine: a ring of the shape of all pair rings.
  NodeSum(Op &op, const Exchange &exchange, const dk_combine_params &p, const Ring &mine, const LinkPlan &plan)
      : op_(op),
        team_(op.team),
        exchange_(exchange),
        p_(p),
        mine_(mine),
        plan_(plan),
        consumed_(team_.numbers(kConsumed)),
        head_(team_.numbers(kHead)) {}

  // Called once all messages have arrived: the number of weights of a row, also if this rank has no rows itself.
  void begin(int32_t num_topk);
  const Record &record() const { return record_; }
  // Sends sums while the node's rows for them have arrived and the link has room.
  bool add();
  bool done() const;
  bool awaits(int peer, Missing &missing) const;

 private:
  enum { kConsumed = 5, kHead = 6 };  // arrays by [node][index of the rank on my node] in Team::numbers

  struct RowStream {  // rows of one rank of my node for the source
    int rank;
    int64_t count, *consumed, *head;
  };
  bool sends_to(int node) const { return team_.has_link(node) && !exchange_.without(team_.partner(node)); }
  RowStream stream(int node, int index) const;
  bool has_arrived(int source, const RowStream &s) const;
  const uint8_t *row(int source, const RowStream &s) const;
  int32_t last_choice(int source, const RowStream &s) const;
  int32_t token_of(int source, const RowStream &s) const;
  const float *weights_of(int source, const RowStream &s) const;
  int32_t next_token(int node) const;
  void add_token(int node, int32_t token, uint8_t *to) const;
  void add_routed_token(int node, int32_t token, uint8_t *to) const;
  void copy_row(int node, int32_t token, uint8_t *to) const;
  void copy_weights(int source, const RowStream &s, float *to) const;
  void fill(int node, int32_t token, uint8_t *to) const;
  bool has(int source, const RowStream &s, int32_t token) const {
    return *s.consumed < s.count && token_of(source, s) == token;
  }
  bool add_for(int node);
  void advance(int node, int32_t token);
  LinkOut link(int node) const { return LinkOut(team_, exchange_, record_, plan_, node); }
  int64_t first_row(int source) const { return source ? team_.matrix[(source - 1) * team_.num_ranks + team_.rank] : 0; }
  Ring ring(int source, int holder) const {
    const CallMessage &message = exchange_.message(holder);
    return Ring(team_, holder, message.ring_slots, message.ring_stride, mine_, source);
  }

  Op &op_;
  Team &team_;
  const Exchange &exchange_;
  const dk_combine_params &p_;
  const Ring &mine_;
  const LinkPlan &plan_;
  int64_t *consumed_, *head_;
  int32_t num_topk_ = 0;
  Record record_ = {};
};

}  // namespace dk
