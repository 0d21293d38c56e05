// ranks.cpp - starts the processes, ends them after --seconds, counts failures.
#include "ranks.h"

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstring>

double now_ms() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

void fail(const Rank &me, const char *format, ...) {
  char text[700];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  printf("rank %d: %s\n", me.index, text);
  fflush(stdout);
  me.page->failed = 1;
  _exit(1);  // exit handlers of NVSHMEM would wait for the others
}

void check(const Rank &me, cudaError_t error, const char *what) {
  if (error != cudaSuccess) fail(me, "%s: %s", what, cudaGetErrorString(error));
}

void must(const Rank &me, int32_t code, const char *what, const char *reason) {
  if (code != DK_OK) fail(me, "%s returned %d%s%s", what, code, reason[0] != 0 ? ": " : "", reason);
}

void Rank::meet() {
  const int round = page->round;
  if (page->arrived.fetch_add(1) + 1 == ranks()) {
    page->arrived = 0;
    ++page->round;
  }
  while (page->round == round) {
    if (page->failed) _exit(2);  // another rank has printed why
    usleep(50);
  }
}

namespace {

template <class F>
void find(const Rank &me, void *library, F &function, const char *name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) fail(me, "%s", dlerror());
}

void load(Rank &me) {
  if (me.options->plugin != nullptr) {  // before NVSHMEM starts, which finds it by its soname
    void *plugin = dlopen(me.options->plugin, RTLD_NOW | RTLD_GLOBAL);
    if (plugin == nullptr) fail(me, "%s", dlerror());
    find(me, plugin, me.count, "testtransport_count");
    find(me, plugin, me.drop, "testtransport_lose");
  }
  void *library = dlopen(me.options->library, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(me, "%s", dlerror());
  Functions &f = me.call;
  find(me, library, f.info, "dk_info");
  find(me, library, f.device_open, "dk_device_open");
  find(me, library, f.device_close, "dk_device_close");
  find(me, library, f.unique_id, "dk_transport_unique_id");
  find(me, library, f.attach, "dk_transport_attach");
  find(me, library, f.detach, "dk_transport_detach");
  find(me, library, f.alloc, "dk_transport_alloc");
  find(me, library, f.free, "dk_transport_free");
  find(me, library, f.open, "dk_transport_open");
  find(me, library, f.close, "dk_transport_close");
  find(me, library, f.put, "dk_transport_put");
  find(me, library, f.quiet, "dk_transport_quiet");
  find(me, library, f.query, "dk_transport_query");
  find(me, library, f.lose, "dk_transport_lose");
}

// NVSHMEM takes processes with different host names for different hosts.
void move_host(const Rank &me) {
  if (me.options->hosts < 2) return;
  char name[48];
  const int length = snprintf(name, sizeof name, "dk%d-h%d", getppid(), me.host);
  if (unshare(CLONE_NEWUTS) == 0 && sethostname(name, static_cast<size_t>(length)) == 0) return;
  if (me.options->hosts != me.options->ranks)
    fail(me, "no host name of its own: unshare(CLONE_NEWUTS) and sethostname need CAP_SYS_ADMIN");
  setenv("NVSHMEM_DISABLE_P2P", "1", 1);  // has the effect of a host for each rank
  if (me.index == 0) printf("   no host names of their own: NVSHMEM_DISABLE_P2P=1 instead\n");
}

int run_rank(const Options &options, SharedPage *page, int index) {
  Rank me;
  me.options = &options;
  me.page = page;
  me.index = index;
  me.host = me.host_of(index);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  move_host(me);
  if (options.plugin != nullptr) setenv("NVSHMEM_REMOTE_TRANSPORT", "ibdevx", 1);
  load(me);
  check(me, cudaSetDevice(index % options.gpus), "cudaSetDevice");
  for (const Case &one : cases_of(options)) {
    const double start = now_ms();
    one.run(me);
    me.meet();
    if (index == 0) printf("ok %-28s %7.1f ms\n", one.name, now_ms() - start);
  }
  fflush(stdout);
  _exit(0);  // exit handlers would wait for a lost peer
}

bool all_ended(std::vector<pid_t> &pids, int *bad) {
  bool ended = true;
  for (pid_t &pid : pids) {
    int how = 0;
    if (pid == 0) continue;
    if (waitpid(pid, &how, WNOHANG) != pid) {
      ended = false;
      continue;
    }
    pid = 0;
    if (!WIFEXITED(how) || WEXITSTATUS(how) != 0) ++*bad;
  }
  return ended;
}

}  // namespace

int run_ranks(const Options &options) {
  auto *page = static_cast<SharedPage *>(
      mmap(nullptr, sizeof(SharedPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (page == MAP_FAILED) return 1;
  std::vector<pid_t> pids;
  for (int i = 0; i < options.ranks; ++i) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) run_rank(options, page, i);
    pids.push_back(pid);
  }
  int bad = 0;
  const double end = now_ms() + options.seconds * 1e3;
  while (!all_ended(pids, &bad)) {
    if (now_ms() > end || (bad != 0 && now_ms() > end - options.seconds * 1e3 + 5e3)) {
      for (const pid_t pid : pids)
        if (pid > 0) kill(pid, SIGKILL);
      printf("killed what was left after %d s\n", options.seconds);
      ++bad;
      while (!all_ended(pids, &bad)) usleep(10000);
      break;
    }
    usleep(10000);
  }
  return bad;
}
