/* again.h - a case of one node run once more where its ranks are spread over nodes. */
#ifndef DEEPEP_KERNEL_TESTS_AGAIN_H
#define DEEPEP_KERNEL_TESTS_AGAIN_H
#include "suite.h"

struct again {
  const char *name;
  const struct team_spec *place;
};

/* Of a case whose arg is a struct again. The place's seed is drawn from the settings' and its own. */
void run_again(struct rank *me);

/* In a table of cases: "topic/place: name of the case", with as many ranks as are given here. */
#define AGAIN(topic, name, place, ranks, weight) \
  {topic "/" #place ": " name, run_again, ranks, &(const struct again){name, &place}, weight, 0, 0}

#endif
