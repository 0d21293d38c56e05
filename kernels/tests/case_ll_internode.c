/* case_ll_internode.c - reruns low-latency cases of one node with a transport between ranks, in some places one that
 * delays as much as it may. */
#include "rerun_on_nodes.h"

#define LATE DK_TRANSPORT_LATE
#define PLACE(name, ...) static const struct team_spec name = {__VA_ARGS__}
PLACE(pairs, .node = 2, .qps = 4, .seed = 1); /* two ranks per node */
PLACE(pairs_late, .node = 2, .qps = 4, .transport_flags = LATE, .seed = 2);
PLACE(trios_late, .node = 3, .qps = 2, .transport_flags = LATE, .seed = 3);
PLACE(fours, .node = 4, .qps = 2, .seed = 4);
PLACE(fours_late, .node = 4, .qps = 3, .transport_flags = LATE, .seed = 5);
PLACE(singles, .node = 1, .qps = 3, .seed = 6);
PLACE(singles_late, .node = 1, .qps = 5, .transport_flags = LATE, .seed = 7);
PLACE(shallow, .node = 1, .qps = 1, .qp_depth = 2, .seed = 8); /* always full */
PLACE(shallow_late, .node = 2, .qps = 2, .qp_depth = 3, .transport_flags = LATE, .seed = 9);
PLACE(many_qps, .node = 1, .qps = 200, .qp_depth = 8, .seed = 10);
PLACE(unmapped, .flags = DK_TEAM_LL_TRANSPORT, .qps = 3, .seed = 11); /* one node; ranks may not use loads and stores */
PLACE(unmapped_late, .flags = DK_TEAM_LL_TRANSPORT, .qps = 4, .transport_flags = LATE, .seed = 12);

#define CASE(place, name, ranks, weight) ON_NODES("ll internode", name, place, ranks, weight)

static const struct test_case cases[] = {
    CASE(pairs, "ll dispatch/BF16, 2 ranks", 4, QUICK),
    CASE(pairs_late, "ll dispatch/BF16, 2 ranks", 6, QUICK),
    CASE(pairs_late, "ll dispatch/BF16, 3 ranks", 8, USUAL),
    CASE(fours_late, "ll dispatch/BF16, 8 ranks", 8, USUAL),
    CASE(singles, "ll dispatch/T = B, int32 indices", 4, USUAL),
    CASE(many_qps, "ll dispatch/top-32", 4, USUAL),
    CASE(singles_late, "ll dispatch/one token, one expert", 4, USUAL),
    CASE(pairs_late, "ll dispatch/everything -1", 4, QUICK),
    CASE(shallow, "ll dispatch/one hot expert", 4, QUICK),
    CASE(shallow_late, "ll dispatch/skewed", 4, USUAL),
    CASE(pairs_late, "ll dispatch/duplicates", 4, QUICK),
    CASE(singles_late, "ll dispatch/a rank without tokens, one without rows", 4, QUICK),
    CASE(unmapped_late, "ll dispatch/no tokens at all", 4, QUICK),
    CASE(unmapped, "ll dispatch/with weights", 3, QUICK),
    CASE(pairs, "ll dispatch/index E", 4, QUICK),
    CASE(pairs_late, "ll FP8/512 channels, 4 ranks", 4, QUICK),
    CASE(unmapped_late, "ll FP8/NaN and infinity", 3, QUICK),
    CASE(pairs_late, "ll FP4/2432 channels", 4, QUICK),
    CASE(unmapped_late, "ll FP4/cast, NaN and infinity, duplicates", 4, QUICK),
    CASE(fours, "ll FP8/rounded scales", 8, USUAL),
    CASE(singles_late, "ll FP8/UE8M0", 4, QUICK),
    CASE(pairs_late, "ll FP8/UE8M0, 7168 channels", 4, HEAVY),
    CASE(pairs, "ll combine/2 ranks", 4, QUICK),
    CASE(fours_late, "ll combine/8 ranks", 8, USUAL),
    CASE(pairs_late, "ll combine/8 ranks", 8, HEAVY),
    CASE(pairs_late, "ll combine/4 ranks", 6, USUAL),
    CASE(singles_late, "ll combine/8 channels", 4, USUAL),
    CASE(many_qps, "ll combine/top-32", 4, USUAL),
    CASE(pairs_late, "ll combine/duplicates", 4, QUICK),
    CASE(shallow_late, "ll combine/one hot expert", 4, USUAL),
    CASE(singles, "ll combine/a rank without tokens, one without rows", 4, QUICK),
    CASE(pairs_late, "ll combine/no tokens at all", 4, QUICK),
    CASE(pairs_late, "ll combine/weights sent along, FP8", 4, USUAL),
    CASE(pairs_late, "ll combine/LogFMT", 4, QUICK),
    CASE(unmapped_late, "ll combine/LogFMT, duplicates", 3, USUAL),
    CASE(pairs_late, "ll combine/zero copy", 4, QUICK),
    CASE(unmapped_late, "ll combine/zero copy, a rank without tokens", 4, USUAL),
    CASE(singles_late, "ll combine/one handle, five times", 4, QUICK),
    CASE(pairs_late, "ll combine/the same bits every time", 4, USUAL),
    CASE(pairs_late, "ll combine/NaN stays with its token", 4, USUAL),
    CASE(pairs_late, "ll order/halves", 4, QUICK),
    CASE(trios_late, "ll order/two sends, first in, first out", 6, USUAL),
    CASE(pairs_late, "ll order/two sends, received the other way round", 4, QUICK),
    CASE(singles_late, "ll order/two sends, received the other way round", 3, QUICK),
    CASE(pairs_late, "ll order/two micro-batches", 4, USUAL),
    CASE(pairs_late, "ll order/thirty calls, slow ranks", 4, USUAL),
    CASE(unmapped_late, "ll order/forty calls enqueued at once", 4, USUAL),
    CASE(shallow_late, "ll order/forty calls enqueued at once", 4, USUAL),
    CASE(pairs_late, "ll order/shapes in turn", 4, USUAL),
    CASE(singles_late, "ll order/shapes in turn, cleaned", 4, USUAL),
    CASE(pairs_late, "ll order/region overwritten between calls", 4, QUICK),
    CASE(pairs, "ll order/third send", 4, QUICK),
    CASE(pairs_late, "ll order/waits are counted", 4, QUICK),
    CASE(pairs_late, "mask/update, query, clean", 4, QUICK),
    CASE(pairs_late, "mask/a masked rank gets nothing", 4, QUICK),
    CASE(unmapped_late, "mask/a masked rank gets nothing", 3, QUICK),
    CASE(pairs_late, "mask/masks are per rank", 4, QUICK),
    CASE(pairs_late, "mask/lifted by update", 4, QUICK),
    CASE(pairs_late, "shrink/a rank never calls", 4, QUICK),
    CASE(pairs_late, "shrink/a rank leaves between the halves", 4, QUICK),
    CASE(pairs, "shrink/a rank known to be dead", 4, QUICK),
    CASE(singles_late, "shrink/a death during the wait", 3, QUICK),
    CASE(pairs_late, "shrink/a rank misses a clean", 4, QUICK),
    CASE(pairs_late, "shrink/a late rank, masks lifted", 4, QUICK),
    CASE(singles_late, "shrink/a late rank, cleaned", 4, QUICK),
    CASE(pairs_late, "shrink/a rank that missed calls, masks lifted", 4, QUICK),
    CASE(singles_late, "shrink/a rank that missed calls, cleaned", 4, QUICK),
    CASE(pairs_late, "mismatch/low latency, hidden", 4, QUICK),
    CASE(singles_late, "mismatch/low latency, number of experts", 3, QUICK),
    CASE(pairs, "mismatch/low latency, B", 4, QUICK),
    CASE(unmapped_late, "mismatch/low latency, format", 2, QUICK),
    CASE(pairs_late, "timeout/low-latency dispatch", 6, QUICK),
    CASE(unmapped, "timeout/clean", 3, QUICK),
    CASE(singles_late, "abort/low-latency dispatch", 3, QUICK),
    CASE(pairs, "abort/low-latency combine", 6, QUICK),
    CASE(unmapped_late, "abort/clean", 3, QUICK),
    CASE(unmapped_late, "random/both modes, 7 ranks", 7, HEAVY),
};
GROUP(ll_internode_cases);

static const struct test_case process_reruns[] = {
    CASE(pairs_late, "process/both modes, 4 ranks", 4, USUAL),
    CASE(unmapped, "process/both modes, 2 ranks", 3, USUAL),
    CASE(singles, "process/a rank dies before the call", 3, USUAL),
    CASE(pairs_late, "process/a rank dies, the others shrink", 4, USUAL),
};
const struct group ll_internode_process_cases = {process_reruns, COUNT(process_reruns)};
