/* process.h - ranks as processes: the interface between ranks.c and process.c. */
#ifndef DEEPEP_KERNEL_TESTS_PROCESS_H
#define DEEPEP_KERNEL_TESTS_PROCESS_H
#include "suite.h"

#define MAX_BLOB 120

struct world *new_world(const struct test_case *test, int first, int count);
struct rank *rank_of(struct world *w, int i);
void drop_world(struct world *w);

/* The exchange through the parent. False: a rank failed. */
bool process_gather(struct rank *me, const void *mine, size_t bytes, int fd, void *all, int *fds);
/* Meets the others if none has failed, else continues alone. */
void process_settle(struct rank *me);
/* Ends this process as kill -9 does. */
_Noreturn void process_die(struct rank *me);

#endif
