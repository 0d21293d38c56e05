/* process.c - ranks as processes. The parent forks them before the library is opened, passes their messages and
 * descriptors, and kills those that hang. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "process.h"

enum { NOTE_GATHER = 1, NOTE_RESULT = 2, NOTE_DYING = 3 };
struct note {
  int32_t kind, verdict;
  char blob[512];
};
struct reply {
  int32_t good, has_fd[MAX_SEATS];
  char blobs[MAX_SEATS][MAX_BLOB];
};

static bool send_with_fds(int socket, const void *data, size_t bytes, const int *fds, int count) {
  char room[CMSG_SPACE(sizeof(int) * MAX_SEATS)] = {0};
  struct iovec part = {(void *)data, bytes};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  if (count > 0) {
    message.msg_control = room;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
    memcpy(CMSG_DATA(head), fds, sizeof(int) * (size_t)count);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)bytes;
}

/* Bytes received, 0 at the end; *count descriptors in fds. */
static ssize_t receive_with_fds(int socket, void *data, size_t bytes, int *fds, int *count) {
  char room[CMSG_SPACE(sizeof(int) * MAX_SEATS)];
  struct iovec part = {data, bytes};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
  ssize_t got;
  do got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  *count = 0;
  for (struct cmsghdr *head = got > 0 ? CMSG_FIRSTHDR(&message) : NULL; head; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_type != SCM_RIGHTS) continue;
    *count = (int)((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(fds, CMSG_DATA(head), sizeof(int) * (size_t)*count);
  }
  return got;
}

/* ---- The rank's side --------------------------------------------------------------------------------------------- */

bool process_gather(struct rank *me, const void *mine, size_t bytes, int fd, void *all, int *fds) {
  struct note note = {.kind = NOTE_GATHER};
  if (bytes) memcpy(note.blob, mine, bytes);
  struct reply reply;
  int came[MAX_SEATS], count = 0, next = 0;
  if (!send_with_fds(me->socket, &note, sizeof note, &fd, fd >= 0)) return false;
  if (receive_with_fds(me->socket, &reply, sizeof reply, came, &count) != sizeof reply) return false;
  for (int i = 0; i < me->count; i++) {
    if (bytes) memcpy((char *)all + (size_t)i * bytes, reply.blobs[i], bytes);
    int one = reply.has_fd[i] && next < count ? came[next++] : -1;
    if (fds && i != me->index && reply.good)
      fds[i] = one;
    else {
      if (one >= 0) close(one);
      if (fds) fds[i] = -1;
    }
  }
  return reply.good;
}

void process_settle(struct rank *me) {
  if (me->verdict != FAILED) process_gather(me, NULL, 0, -1, NULL, NULL);
}

void process_die(struct rank *me) {
  struct note note = {.kind = NOTE_DYING};
  send_with_fds(me->socket, &note, sizeof note, NULL, 0);
  raise(SIGKILL);
  abort();
}

static _Noreturn void be_rank(const struct test_case *test, int index, int socket) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  struct note note = {.kind = NOTE_RESULT, .verdict = FAILED};
  struct world *w = new_world(test, index, 1);
  struct rank *me = rank_of(w, 0);
  me->socket = socket;
  if (library_open(settings.library_path, note.blob, sizeof note.blob)) {
    run_rank(me);
    note.verdict = me->verdict;
    memcpy(note.blob, me->message, sizeof note.blob);
    if (me->verdict == PASSED) close_seats();
  }
  send_with_fds(socket, &note, sizeof note, NULL, 0);
  drop_world(w);
  exit(0); /* not _exit: sanitizers report at exit */
}

/* ---- The parent's side ------------------------------------------------------------------------------------------- */

struct hub {
  const struct test_case *test;
  int sockets[MAX_SEATS], fds[MAX_SEATS];
  pid_t pids[MAX_SEATS];
  bool waits[MAX_SEATS], finished[MAX_SEATS], dying[MAX_SEATS], broken;
  struct note notes[MAX_SEATS];
  enum verdict verdict;
  char *why;
  size_t size;
};

static void blame(struct hub *h, enum verdict verdict, int rank, const char *text) {
  if (h->verdict == PASSED) {
    h->verdict = verdict;
    snprintf(h->why, h->size, "rank %d: %s", rank, text);
  }
  if (verdict == FAILED) h->broken = true;
}

static void close_rank(struct hub *h, int i) {
  close(h->sockets[i]);
  h->sockets[i] = -1;
  h->waits[i] = false;
}

static void hear(struct hub *h, int i) {
  int fds[MAX_SEATS], count;
  ssize_t got = receive_with_fds(h->sockets[i], &h->notes[i], sizeof h->notes[i], fds, &count);
  struct note *note = &h->notes[i];
  if (got != sizeof *note) {
    if (!h->finished[i] && !h->dying[i]) blame(h, FAILED, i, "its process ended before the case did");
    close_rank(h, i);
  } else if (note->kind == NOTE_GATHER) {
    h->fds[i] = count ? fds[0] : -1;
    h->waits[i] = true;
  } else if (note->kind == NOTE_DYING) {
    h->dying[i] = true;
  } else {
    h->finished[i] = true;
    if (note->verdict != PASSED) blame(h, (enum verdict)note->verdict, i, note->blob);
    close_rank(h, i);
  }
}

/* Replies when all remaining ranks wait, or at once when the case has failed. */
static void answer(struct hub *h) {
  struct reply reply = {.good = !h->broken};
  int fds[MAX_SEATS], count = 0;
  bool all = true;
  for (int i = 0; i < h->test->ranks; i++) {
    all = all && (h->sockets[i] < 0 || h->waits[i]);
    if (!h->waits[i]) continue;
    memcpy(reply.blobs[i], h->notes[i].blob, MAX_BLOB);
    reply.has_fd[i] = h->fds[i] >= 0;
    if (h->fds[i] >= 0) fds[count++] = h->fds[i];
  }
  if (!all && !h->broken) return;
  for (int i = 0; i < h->test->ranks; i++) {
    if (h->waits[i]) send_with_fds(h->sockets[i], &reply, sizeof reply, fds, count);
    h->waits[i] = false;
  }
  for (int i = 0; i < count; i++) close(fds[i]);
}

static bool serve(struct hub *h, uint64_t end) {
  for (;;) {
    struct pollfd polls[MAX_SEATS];
    int open = 0;
    for (int i = 0; i < h->test->ranks; i++) {
      polls[i] = (struct pollfd){.fd = h->sockets[i], .events = POLLIN};
      open += h->sockets[i] >= 0;
    }
    if (open == 0) return true;
    if (now_ns() > end) return false;
    poll(polls, (nfds_t)h->test->ranks, 200);
    for (int i = 0; i < h->test->ranks; i++)
      if (polls[i].revents) hear(h, i);
    answer(h);
  }
}

static void start(struct hub *h, int i) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) abort();
  fflush(stdout);
  h->pids[i] = fork();
  if (h->pids[i] < 0) abort();
  if (h->pids[i] == 0) {
    for (int k = 0; k < i; k++) close(h->sockets[k]);
    close(pair[0]);
    be_rank(h->test, i, pair[1]);
  }
  close(pair[1]);
  h->sockets[i] = pair[0];
  h->fds[i] = -1;
}

static void reap(struct hub *h, int i) {
  int status = 0;
  if (h->sockets[i] >= 0) close_rank(h, i);
  while (waitpid(h->pids[i], &status, 0) < 0 && errno == EINTR) {
  }
  char text[64];
  snprintf(text, sizeof text,
           WIFSIGNALED(status) ? "its process ended by signal %d" : "its process ended with status %d",
           WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  if (status != 0 && !h->dying[i]) blame(h, FAILED, i, text);
}

enum verdict run_processes(const struct test_case *test, char *why, size_t size) {
  struct hub h = {.test = test, .why = why, .size = size};
  why[0] = 0;
  for (int i = 0; i < test->ranks; i++) start(&h, i);
  if (!serve(&h, now_ns() + limit_ns(30)))
    for (int i = 0; i < test->ranks; i++) {
      if (h.sockets[i] < 0) continue;
      blame(&h, FAILED, i, "it does not come to an end");
      kill(h.pids[i], SIGKILL);
    }
  for (int i = 0; i < test->ranks; i++) reap(&h, i);
  return h.verdict;
}
