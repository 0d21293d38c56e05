/* rerun_on_nodes.h - reruns a case of one node with its ranks spread over nodes. */
#ifndef DEEPEP_KERNEL_TESTS_RERUN_ON_NODES_H
#define DEEPEP_KERNEL_TESTS_RERUN_ON_NODES_H
#include "suite.h"

struct rerun {
  const char *name;
  const struct team_spec *place;
};

/* Runs a case whose arg is a struct rerun. The seed of `place` is combined with --seed. */
void rerun_on_nodes(struct rank *me);

/* An entry of a table of cases, named "topic/place: name of the case", with this number of ranks. */
#define ON_NODES(topic, name, place, ranks, weight) \
  {topic "/" #place ": " name, rerun_on_nodes, ranks, &(const struct rerun){name, &place}, weight, 0, 0}

#endif
