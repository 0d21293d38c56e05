/* kernel_tests LIBRARY [--device N] [--ranks R] [--filter TEXT[|TEXT...]] [--seed N] [--seeds N] [--rounds N] [--isa N]
 * [--patience F] [--share I/N] [--threads] [--stop] [--list]
 *
 * --ranks leaves out the cases of more ranks; --filter those with none of the texts in their names (^TEXT: at their
 * beginning); --rounds is the most that random cases make of their shapes; --seeds is how many of them the cases that
 * draw them try, from --seed on; --isa is that of dk_device_open; --patience is a factor for all time limits; --share
 * runs every Nth of the chosen cases, beginning with the Ith (1 to N); --threads leaves out the cases whose ranks are
 * processes, which takes long where a process needs seconds to make its context; --stop ends after the first failure.
 * Runs the cases of the kernel interface against one library. The last line is "N passed, N failed, N skipped"; the
 * exit status is 1 if any failed. DEEPEP_TEST_SANITIZER (address, thread, memcheck, racecheck, synccheck) says that the
 * program runs under that tool: then the heavier cases are left out and time limits are longer. DEEPEP_TEST_FULL=1:
 * more rounds.
 */
#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"

struct settings settings = {
    .device = -1, .max_ranks = MAX_SEATS, .seed = 1, .heaviest = HEAVY, .patience = 1, .shares = 1};

/* A process for each rank: first, before the library is opened. */
extern const struct group process_cases, transport_process_cases, transport_death_cases, ll_internode_process_cases;
static const struct group *const process_groups[] = {&process_cases, &transport_process_cases, &transport_death_cases,
                                                     &ll_internode_process_cases};
#define GROUPS(X) \
  X(info)         \
  X(memory)       \
  X(stream)       \
  X(layout)       \
  X(notify)       \
  X(dispatch)     \
  X(worst)        \
  X(refusal)      \
  X(overlap)      \
  X(combine)      \
  X(expand)       \
  X(balance)      \
  X(peer_rows)    \
  X(ll_dispatch)  \
  X(ll_combine)   \
  X(isa)          \
  X(ll_order)     \
  X(mask)         \
  X(mask_normal)  \
  X(mismatch)     \
  X(failure)      \
  X(team)         \
  X(release)      \
  X(statistics)   \
  X(ll_copy)      \
  X(copy)         \
  X(random)
#define TRANSPORT_GROUPS(X) \
  X(transport)              \
  X(transport_end) X(internode) X(internode_seeds) X(ll_internode) X(ll_internode_random) X(ll_internode_edges)
#define DECLARE_GROUP(name) extern const struct group name##_cases;
GROUPS(DECLARE_GROUP)
TRANSPORT_GROUPS(DECLARE_GROUP)
#define LIST_GROUP(name) &name##_cases,
static const struct group *const groups[] = {GROUPS(LIST_GROUP)}, *const transport_groups[] = {
                                                                      TRANSPORT_GROUPS(LIST_GROUP)};

static struct {
  int count[3];
  int chosen; /* cases, of all shares */
  pthread_mutex_t lock;
  const char *name;     /* of the running case */
  uint64_t deadline_ns; /* 0: none runs */
} state = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void print_totals(void) {
  printf("%d passed, %d failed, %d skipped\n", state.count[PASSED], state.count[FAILED], state.count[SKIPPED]);
  fflush(stdout);
}

static void expect_end(const char *name, double seconds) {
  pthread_mutex_lock(&state.lock);
  state.name = name;
  state.deadline_ns = name ? now_ns() + limit_ns(seconds) : 0;
  pthread_mutex_unlock(&state.lock);
}

/* Ends the program when a case does not end. */
static void *watch(void *unused) {
  for (;;) {
    pause_ms(200);
    pthread_mutex_lock(&state.lock);
    if (state.deadline_ns && now_ns() > state.deadline_ns) {
      printf("FAILED %s: hangs\n", state.name);
      print_state();
      state.count[FAILED]++;
      print_totals();
      _exit(1);
    }
    pthread_mutex_unlock(&state.lock);
  }
  return unused;
}

static const char *reason_to_skip(const struct test_case *test) {
  if (test->ranks > settings.max_ranks) return "more ranks than --ranks";
  if (test->weight > settings.heaviest) return "too slow under this tool";
  if (test->needs & ~library.caps) return "the library cannot do that";
  return NULL;
}

static void run_case(const struct test_case *test, enum verdict (*run)(const struct test_case *, char *, size_t)) {
  char why[640] = "";
  uint64_t start = now_ns();
  expect_end(run == run_threads ? test->name : NULL, settings.full || settings.seeds ? 600 : 60);
  enum verdict verdict = run(test, why, sizeof why);
  expect_end(NULL, 0);
  static const char *const words[] = {"ok    ", "FAILED", "skip  "};
  state.count[verdict]++;
  printf("%s %s%s%s (%.0f ms)\n", words[verdict], test->name, why[0] ? ": " : "", why,
         (double)(now_ns() - start) * 1e-6);
  fflush(stdout);
}

/* Runs in a child process: ranks that are processes must be forked before the library is opened. */
static bool has_transport(void) {
  pid_t child = fork();
  if (child == 0) {
    void *handle = dlopen(settings.library_path, RTLD_NOW | RTLD_LOCAL);
    _exit(handle && dlsym(handle, "dk_transport_open") ? 0 : 1);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool is_chosen(const char *name) {
  if (!settings.filter) return true;
  for (const char *text = settings.filter;; text++) {
    bool begins = *text == '^';
    size_t length = strcspn(text += begins, "|");
    if (begins ? !strncmp(name, text, length) : memmem(name, strlen(name), text, length) != NULL) return true;
    text += length;
    if (!*text) return false;
  }
}

/* all: why no case of the group can run, or NULL. */
static void run_group(const struct group *group, enum verdict (*run)(const struct test_case *, char *, size_t),
                      const char *all) {
  for (int i = 0; i < group->count && !(settings.stop && state.count[FAILED]); i++) {
    const struct test_case *test = &group->cases[i];
    if (!is_chosen(test->name) || state.chosen++ % settings.shares != settings.share) continue;
    const char *reason = all ? all : reason_to_skip(test);
    if (!reason) {
      run_case(test, run);
      continue;
    }
    state.count[SKIPPED]++;
    printf("skip   %s: %s\n", test->name, reason);
  }
}

static void list_group(const struct group *group) {
  for (int i = 0; i < group->count; i++)
    if (is_chosen(group->cases[i].name)) printf("%s (%d ranks)\n", group->cases[i].name, group->cases[i].ranks);
}

static void read_environment(void) {
  const char *full = getenv("DEEPEP_TEST_FULL");
  settings.full = full && !strcmp(full, "1");
  const char *tool = getenv("DEEPEP_TEST_SANITIZER");
  if (!tool || !*tool) return;
  bool host = !strcmp(tool, "address") || !strcmp(tool, "thread");
  settings.heaviest = host ? USUAL : QUICK;
  settings.patience = host ? 6 : 30;
  settings.one_mapping = !strcmp(tool, "thread");
}

static long number(const char *text, long least, long most) {
  char *end;
  errno = 0;
  long value = strtol(text, &end, 0);
  if (errno || *end || end == text || value < least || value > most) {
    fprintf(stderr, "kernel_tests: got %s, allowed a number from %ld to %ld\n", text, least, most);
    exit(2);
  }
  return value;
}

static void read_share(const char *text) {
  char end;
  if (sscanf(text, "%d/%d%c", &settings.share, &settings.shares, &end) == 2 && settings.share >= 1 &&
      settings.share <= settings.shares) {
    settings.share--;
    return;
  }
  fprintf(stderr, "kernel_tests: got %s, allowed a share such as 1/2\n", text);
  exit(2);
}

/* True: only list the cases. */
static bool read_options(int argc, char **argv) {
  static const struct option options[] = {{"device", 1, 0, 'd'}, {"ranks", 1, 0, 'r'},  {"filter", 1, 0, 'f'},
                                          {"seed", 1, 0, 's'},   {"isa", 1, 0, 'i'},    {"patience", 1, 0, 'p'},
                                          {"seeds", 1, 0, 'n'},  {"rounds", 1, 0, 'm'}, {"threads", 0, 0, 't'},
                                          {"share", 1, 0, 'h'},  {"stop", 0, 0, 'x'},   {"list", 0, 0, 'l'},
                                          {0, 0, 0, 0}};
  bool list = false;
  for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
    if (c == 'd')
      settings.device = (int)number(optarg, 0, 1023);
    else if (c == 'r')
      settings.max_ranks = (int)number(optarg, 1, MAX_SEATS);
    else if (c == 'f')
      settings.filter = optarg;
    else if (c == 's')
      settings.seed = (uint64_t)number(optarg, 0, INT32_MAX);
    else if (c == 'n')
      settings.seeds = (int)number(optarg, 1, 1000000);
    else if (c == 'm')
      settings.rounds = (int)number(optarg, 1, 1000000);
    else if (c == 'i')
      settings.isa = (uint32_t)number(optarg, 0, 1000);
    else if (c == 'p')
      settings.patience *= strtod(optarg, NULL);
    else if (c == 'h')
      read_share(optarg);
    else if (c == 't')
      settings.threads = true;
    else if (c == 'x')
      settings.stop = true;
    else if (c == 'l')
      list = true;
    else
      exit(2);
  }
  if (optind != argc - 1) {
    fprintf(stderr,
            "usage: kernel_tests LIBRARY [--device N] [--ranks R] [--filter TEXT[|TEXT...]] [--seed N] [--seeds N] "
            "[--rounds N] [--isa N] "
            "[--patience F] [--share I/N] [--threads] [--stop] [--list]\n");
    exit(2);
  }
  settings.library_path = argv[optind];
  return list;
}

int main(int argc, char **argv) {
  read_environment();
  if (read_options(argc, argv)) {
    for (int i = 0; i < COUNT(process_groups); i++) list_group(process_groups[i]);
    for (int i = 0; i < COUNT(groups); i++) list_group(groups[i]);
    for (int i = 0; i < COUNT(transport_groups); i++) list_group(transport_groups[i]);
    return 0;
  }
  const char *why_not = has_transport() ? NULL : "the library has no transport";
  for (int i = 0; !settings.threads && i < COUNT(process_groups); i++)
    run_group(process_groups[i], run_processes, process_groups[i] == &process_cases ? NULL : why_not);
  /* All ranks share a device, each with streams of its own: in one hardware queue a rank would wait behind another's
   * wait. */
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  char why[512];
  if (!library_open(settings.library_path, why, sizeof why)) {
    printf("FAILED opening %s: %s\n", settings.library_path, why);
    state.count[FAILED]++;
    print_totals();
    return 1;
  }
  pthread_t watchdog;
  if (pthread_create(&watchdog, NULL, watch, NULL)) abort();
  pthread_detach(watchdog);
  for (int i = 0; i < COUNT(groups); i++) run_group(groups[i], run_threads, NULL);
  for (int i = 0; i < COUNT(transport_groups); i++) run_group(transport_groups[i], run_threads, why_not);
  close_seats();
  if (state.count[PASSED] + state.count[FAILED] + state.count[SKIPPED] == 0) {
    printf("FAILED: no case has \"%s\" in its name\n", settings.filter ? settings.filter : "");
    state.count[FAILED]++;
  }
  print_totals();
  return state.count[FAILED] ? 1 : 0;
}
