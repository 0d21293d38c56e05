/* rerun_on_nodes.c - see rerun_on_nodes.h. */
#include "rerun_on_nodes.h"

#include <string.h>

extern const struct group notify_cases, dispatch_cases, worst_cases, combine_cases, ll_dispatch_cases, ll_combine_cases,
    ll_order_cases, mask_cases, mismatch_cases, failure_cases, team_cases, statistics_cases, random_cases,
    process_cases, refusal_cases, expand_cases, mask_normal_cases;
static const struct group *const groups[] = {
    &notify_cases,   &dispatch_cases, &worst_cases,    &combine_cases, &ll_dispatch_cases, &ll_combine_cases,
    &ll_order_cases, &mask_cases,     &mismatch_cases, &failure_cases, &team_cases,        &statistics_cases,
    &random_cases,   &process_cases,  &refusal_cases,  &expand_cases,  &mask_normal_cases};

static const struct test_case *find_case(struct rank *me, const char *name) {
  for (int g = 0; g < COUNT(groups); g++)
    for (int i = 0; i < groups[g]->count; i++)
      if (!strcmp(groups[g]->cases[i].name, name)) return &groups[g]->cases[i];
  fail(me, "there is no case \"%s\"", name);
}

void rerun_on_nodes(struct rank *me) {
  const struct rerun *what = me->test->arg;
  struct team_spec *place = scratch(me, sizeof *place);
  *place = *what->place;
  place->seed = hash(settings.seed, place->seed, 0, 0);
  me->split = place;
  me->test = find_case(me, what->name);
  me->test->run(me);
}
