// One running operation: its deadline, its failure, its entry in the statistics.
#pragma once
#include "cpu/runtime/stream.h"
#include "cpu/team/team.h"

namespace dk {

class Op {
 public:
  // P: a parameter struct that begins with DK_OP_HEADER.
  template <class P>
  Op(const P &p, uint32_t op, uint32_t phase = DK_PHASE_BOTH) : Op(at<Team>(p.team), op, phase, p.call, p.timeout_ns) {}
  ~Op();
  Op(const Op &) = delete;

  Team &team;
  const uint32_t op, phase;
  const uint64_t timeout_ns;
  bool may_shrink = false;  // a peer that fails or is late is masked, and the operation goes on

  bool failed() const { return failed_; }
  // The call had wrong arguments: its outputs are void, and the team goes on. Recorded once a call.
  bool refused() const { return refused_; }
  void refuse(int peer, const Refusal &why);
  // Records the team's first failure. Later failures of the team are not recorded.
  void fail(int32_t code, int peer, uint32_t field = DK_FIELD_NONE, int64_t expected = 0, int64_t seen = 0,
            uint64_t waited_ns = 0);
  // True, with the failure recorded, once the engine has set abort_word.
  bool aborted();
  // Fails with the peer's failure; false if the peer has not failed.
  bool adopt_failure_of(int peer, uint64_t waited_ns);
  // At the end of a call: false, with the failure adopted, if a peer has given up on this very call. A rank that comes
  // late finds all messages, and would else be told of success.
  bool look_for_obituaries();

  // ring() notes that the peer may sleep until a word that was just written. The peer is woken by ring_now(), or when
  // this operation begins to wait or ends.
  void ring(int peer) { team.doorbells[peer / 64] |= uint64_t{1} << (peer % 64); }
  void ring_now();

  void sent(int peer, uint64_t bytes);
  void waited(int peer, uint64_t ns);
  // A call in two halves: the send half saves its times to the ticket, the receive half resumes from it and counts the
  // call.
  void save_to(Ticket &ticket);
  void resume_from(const Ticket &ticket);

 private:
  Op(Team *team, uint32_t op, uint32_t phase, uint64_t call, uint64_t timeout_ns);
  void publish_failure(const dk_failure &failure);
  void signal_remote(const FailureRecord &failure_record);

  const uint64_t call_, start_ns_;
  uint64_t waited_ns_ = 0, bytes_ = 0, earlier_ns_ = 0;
  uint32_t blamed_for_ = 0;  // the code of the failure that a peer blames this rank for; 0: none does
  bool failed_ = false, refused_ = false, counts_ = true;
};

// Adds a finished call to a statistics page, which only this team's operations write.
void record_call(dk_stats_page &page, const dk_trace_record &trace, uint64_t total_ns, uint64_t wait_ns, uint64_t bytes,
                 bool failed, bool counts);
void add_peer_bytes(dk_stats_page &page, uint32_t op, int peer, uint64_t bytes);
void add_peer_wait(dk_stats_page &page, uint32_t op, int peer, uint64_t ns);

// Queues run(P *) on p's stream. Operations never run on the calling thread.
template <class P, void (*run)(const P &)>
int32_t enqueue(const P &p) {
  return push(at<Stream>(p.stream), [](void *argument) { run(*static_cast<const P *>(argument)); }, p);
}

}  // namespace dk
