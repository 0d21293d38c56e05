// normal.cu - normal mode: every output against the host's reference, then times.
#include "normal_ops.h"

namespace {

__device__ uint32_t row_word(int rank, int token, int word) {
  return (static_cast<uint32_t>(rank) << 24 ^ static_cast<uint32_t>(token) << 8) +
         static_cast<uint32_t>(word) * 2654435761u;
}
__global__ void fill_words(uint32_t *x, int rank, int tokens, int words) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<int64_t>(tokens) * words;
       i += gridDim.x * blockDim.x)
    x[i] = row_word(rank, i / words, i % words);
}
__global__ void count_wrong_words(const uint32_t *x, const int32_t *ranks, const int32_t *tokens, int rows, int words,
                                  uint32_t *wrong) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<int64_t>(rows) * words;
       i += gridDim.x * blockDim.x)
    if (x[i] != row_word(ranks[i / words], tokens[i / words], i % words)) atomicAdd(wrong, 1u);
}
__device__ float value_at(int rank, int token, int h) {
  return static_cast<float>((rank * 7 + token * 3 + h) % 61 - 30);
}
__device__ uint16_t bf16_of(float v) {
  const uint32_t bits = __float_as_uint(v);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__global__ void fill_bf16(uint16_t *x, const int32_t *ranks, const int32_t *tokens, int rank, int rows, int hidden) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<int64_t>(rows) * hidden;
       i += gridDim.x * blockDim.x) {
    const int row = i / hidden;
    x[i] = bf16_of(value_at(ranks == nullptr ? rank : ranks[row], tokens == nullptr ? row : tokens[row], i % hidden) +
                   rank % 2);
  }
}
// A token's sum: from each rank r that it went to, its value + r % 2.
__global__ void count_wrong_sums(const uint16_t *y, const int32_t *heads, int rank, int tokens, int hidden, int ranks,
                                 uint32_t *wrong) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<int64_t>(tokens) * hidden;
       i += gridDim.x * blockDim.x) {
    float sum = 0;
    for (int r = 0; r < ranks; ++r)
      if (heads[i / hidden * ranks + r] >= 0) sum += value_at(rank, i / hidden, i % hidden) + r % 2;
    if (y[i] != bf16_of(sum)) atomicAdd(wrong, 1u);
  }
}

int g_errors = 0;
#define EXPECT(condition, ...)                                                                      \
  do {                                                                                              \
    if (!(condition) && __atomic_fetch_add(&g_errors, 1, __ATOMIC_RELAXED) < 20) {                  \
      fprintf(stderr, "rank %d: ", rank.rank), fprintf(stderr, __VA_ARGS__), fprintf(stderr, "\n"); \
    }                                                                                               \
  } while (0)

void check_counts(Rank &rank, const Arrays &a, const Routing &routing, uint64_t call) {
  const int R = routing.ranks, L = routing.local();
  dk_host_wait_params w{};
  w.device = rank.device;
  w.host_word = as_address(&a.counts->seq);
  w.at_least = call;
  w.host_status = as_address(rank.status);
  w.timeout_ns = rank.world->shape.timeout_ns();
  DK(host_wait, w);
  EXPECT(a.counts->num_recv_tokens == a.rows, "counts: %d rows, not %d", a.counts->num_recv_tokens, a.rows);
  std::vector<int> experts(L, 0), matrix(R * R, 0);
  for (int i = 0; i < R; ++i)
    for (int t = 0; t < routing.tokens; ++t) {
      for (int j = 0; j < R; ++j)
        for (int k = i; k < R; ++k) matrix[k * R + j] += routing.goes(i, t, j);
      for (int k = 0; k < routing.topk; ++k) {
        const int64_t e = routing.idx[i][t * routing.topk + k];
        if (e >= 0 && e / L == rank.rank) ++experts[e % L];
      }
    }
  for (int e = 0; e < L; ++e)
    EXPECT(a.counts->per_expert[e] == (experts[e] + 3) / 4 * 4, "expert %d: %d, not %d", e, a.counts->per_expert[e],
           experts[e]);
  EXPECT(to_host(a.matrix, R * R) == matrix, "rank_prefix_matrix differs");
}

void check_rows(Rank &rank, const Arrays &a, const Routing &routing, uint64_t hidden_bytes, int num_scales, int worst,
                const void *rows, const char *what) {
  const int words = static_cast<int>(hidden_bytes / 4), K = routing.topk, L = routing.local();
  CHECK_CUDA(cudaMemset(a.wrong, 0, 4));
  if (a.rows > 0)
    count_wrong_words<<<256, 256>>>(static_cast<const uint32_t *>(rows), a.ranks_device, a.tokens_device, a.rows, words,
                                    a.wrong);
  const uint32_t wrong = to_host(a.wrong, 1)[0];
  EXPECT(wrong == 0, "%s: %u wrong words of %lld", what, wrong, (long long)a.rows * words);
  EXPECT(to_host(a.src_idx, a.rows) == a.tokens, "%s: recv_src_idx differs", what);
  const int end = worst > 0 ? worst : a.rows;
  const auto idx = to_host(a.recv_idx, static_cast<size_t>(end) * K);
  const auto weights = to_host(a.recv_weights, static_cast<size_t>(end) * K);
  const auto scales = to_host(a.recv_scales, static_cast<size_t>(a.rows) * num_scales);
  for (int i = 0; i < end; ++i)
    for (int k = 0; k < K; ++k) {
      int64_t expected = -1;
      float weight = 0;
      if (i < a.rows) {
        const int64_t e = routing.idx[a.ranks[i]][a.tokens[i] * K + k];
        if (e >= 0 && e / L == rank.rank) {
          expected = e % L;
          weight = routing.weights[a.ranks[i]][a.tokens[i] * K + k];
        }
      }
      EXPECT(idx[i * K + k] == expected && weights[i * K + k] == weight,
             "%s: row %d of %d, entry %d: %lld %g, not %lld %g", what, i, a.rows, k, (long long)idx[i * K + k],
             weights[i * K + k], (long long)expected, weight);
    }
  for (int i = 0; i < a.rows * num_scales; ++i) {
    const uint32_t expected = (a.ranks[i / num_scales] << 20) + a.tokens[i / num_scales] * 64 + i % num_scales;
    EXPECT(scales[i] == expected, "%s: scale %d of row %d differs", what, i % num_scales, i / num_scales);
  }
}

void round_trip(Rank &rank, const Routing &routing, uint64_t hidden_bytes, int num_scales, int sms, bool direct,
                bool worst_case, const char *what) {
  const Shape &s = rank.world->shape;
  Arrays a = prepare(rank, routing, s.hidden, num_scales);
  std::vector<uint32_t> scales(static_cast<size_t>(routing.tokens) * num_scales);
  for (size_t i = 0; i < scales.size(); ++i)
    scales[i] = (rank.rank << 20) + static_cast<uint32_t>(i / num_scales) * 64 + i % num_scales;
  if (!scales.empty()) CHECK_CUDA(cudaMemcpy(a.scales, scales.data(), scales.size() * 4, cudaMemcpyHostToDevice));
  fill_words<<<256, 256>>>(reinterpret_cast<uint32_t *>(a.x), rank.rank, routing.tokens,
                           static_cast<int>(hidden_bytes / 4));
  if (direct) CHECK_CUDA(cudaMemset(reinterpret_cast<void *>(rank.segment), 0xee, rank.segment_bytes));
  CHECK_CUDA(cudaDeviceSynchronize());
  rank.meet();
  const int worst = worst_case ? a.capacity : 0;
  layout(rank, a, routing);
  const uint64_t call = notify(rank, a, routing, hidden_bytes, num_scales);
  dispatch(rank, a, routing, hidden_bytes, num_scales, worst_case ? worst : -1, worst, sms, direct);
  rank.sync();
  rank.meet();
  check_counts(rank, a, routing, call);
  check_rows(rank, a, routing, hidden_bytes, num_scales, worst,
             direct ? reinterpret_cast<void *>(rank.segment) : a.recv_x, what);
  if (a.rows > 0) fill_bf16<<<256, 256>>>(a.y, a.ranks_device, a.tokens_device, rank.rank, a.rows, s.hidden);
  CHECK_CUDA(cudaDeviceSynchronize());
  rank.meet();  // waiting for a device waits for all ranks on it
  combine(rank, a, routing, sms, true);
  combine(rank, a, routing, sms, false);
  rank.sync();
  rank.meet();
  CHECK_CUDA(cudaMemset(a.wrong, 0, 4));
  count_wrong_sums<<<256, 256>>>(a.combined, a.heads, rank.rank, routing.tokens, s.hidden, s.ranks, a.wrong);
  const uint32_t wrong = to_host(a.wrong, 1)[0];
  EXPECT(wrong == 0, "%s: %u wrong sums", what, wrong);
  const auto weights = to_host(a.combined_weights, routing.tokens * routing.topk);
  for (int i = 0; i < routing.tokens * routing.topk; ++i) {
    const float expected = routing.idx[rank.rank][i] >= 0 ? routing.weights[rank.rank][i] : 0;
    EXPECT(std::fabs(weights[i] - expected) < 1e-6, "%s: combined weight %d: %g, not %g", what, i, weights[i],
           expected);
  }
  rank.meet();
  if (rank.rank == 0) {
    printf("%-44s rows %6d  errors so far %d\n", what, a.rows, g_errors);
    fflush(stdout);
  }
  release(rank, a);
}

}  // namespace

void check_normal(Rank &rank) {
  const Shape &s = rank.world->shape;
  if (s.nodes == 1) rank.register_segment(2ull * s.ranks * s.tokens * s.hidden);
  const Routing routing(s, s.tokens, 1, true), other(s, std::max(1, s.tokens / 7), 2, false);
  for (int sms : {2, 7, 16}) {
    round_trip(rank, routing, 2 * s.hidden, 0, sms, false, false, "BF16 staged");
    round_trip(rank, routing, s.hidden, s.hidden / 128, sms, false, false, "FP8 staged");
    if (s.nodes == 1) round_trip(rank, routing, 2 * s.hidden, 3, sms, true, false, "BF16 direct");
    if (s.nodes == 1) round_trip(rank, other, s.hidden, s.hidden / 128, sms, true, true, "FP8 direct, worst case");
    round_trip(rank, other, s.hidden, 0, sms, false, true, "FP8 staged, worst case");
  }
  const Routing none(s, 0, 3, false);
  round_trip(rank, none, 2 * s.hidden, 0, 4, false, false, "no tokens");
  if (g_errors != 0) _exit(5);
}

namespace {

// The limit: every rank pushes the same number of bytes to all others at once with 16-byte stores, tickets of 8 KB.
__global__ void push_all(uint8_t *const *peers, const uint8_t *from, uint64_t bytes_each, int rank, int ranks,
                         unsigned long long *ticket) {
  constexpr uint64_t kPiece = 16384;
  const uint64_t pieces = bytes_each / kPiece * (ranks - 1);
  __shared__ unsigned long long mine;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) mine = atomicAdd(ticket, 1ull);
    __syncthreads();
    const uint64_t piece = mine;
    if (piece >= pieces) return;
    const int to = (rank + 1 + static_cast<int>(piece % (ranks - 1))) % ranks;
    const uint64_t at = piece / (ranks - 1) * kPiece;
    auto *out = reinterpret_cast<uint4 *>(peers[to] + rank * bytes_each + at);
    const auto *in = reinterpret_cast<const uint4 *>(from + at);
    for (uint64_t i = threadIdx.x; i < kPiece / 16; i += blockDim.x) out[i] = in[i];
  }
}

void time_limit(Rank &rank, const std::vector<uint64_t> &segments) {
  const Shape &s = rank.world->shape;
  if (s.ranks < 2) return;
  const uint64_t each = rank.segment_bytes / s.ranks / 16384 * 16384;
  uint8_t *from = device_array<uint8_t>(each);
  uint64_t *peers = to_device(segments);
  auto *ticket = device_array<unsigned long long>(1);
  rank.meet();
  cudaStream_t stream = reinterpret_cast<cudaStream_t>(rank.stream);
  for (int blocks : {32, 64, 132}) {
    const Timing t = measure(rank, 10, true, [&] {
      cudaMemsetAsync(ticket, 0, 8, stream);
      push_all<<<blocks, 1024, 0, stream>>>(reinterpret_cast<uint8_t *const *>(peers), from, each, rank.rank, s.ranks,
                                            ticket);
    });
    if (rank.rank == 0)
      printf("all-pairs push, %3d SMs: %.1f GB/s out of each GPU\n", blocks, each * (s.ranks - 1) / t.median / 1e3);
  }
}

}  // namespace

void time_normal(Rank &rank, const std::vector<int> &sms) {
  const Shape &s = rank.world->shape;
  if (rank.segment == 0) rank.register_segment(2ull * s.ranks * s.tokens * s.hidden);
  const Routing routing(s, s.tokens, 1, false);
  Arrays a = prepare_counted(rank, routing, s.hidden);
  const bool first = rank.rank == 0;
  const int rows = a.rows;
  auto timed = [&](const char *what, int num_sms, double bytes, int op, auto call) {
    const OwnTime before = own_time(rank, op);
    const Timing t = measure(rank, s.iterations, op != DK_OP_BARRIER, call);
    const double own = mean_us(before, own_time(rank, op));
    if (!first) return;
    printf("%-28s sms %3d  median %8.1f us  p99 %8.1f us  in-kernel mean %8.1f us  logical %6.1f GB/s\n", what, num_sms,
           t.median, t.p99, own, bytes / t.median / 1e3);
    fflush(stdout);
  };
  if (!rank.peer_segments.empty()) time_limit(rank, rank.peer_segments);
  timed("layout", 0, 0, DK_OP_LAYOUT, [&] { layout(rank, a, routing); });
  timed("notify", 0, 0, DK_OP_NOTIFY, [&] { notify(rank, a, routing, s.hidden, s.hidden / 128); });
  timed("barrier", 0, 0, DK_OP_BARRIER, [&] { rank.barrier(); });
  for (int n : sms) {
    auto rows_to = [&](const char *what, uint64_t row_bytes, int scales, bool direct) {
      timed(what, n, static_cast<double>(rows) * (row_bytes + 4 * scales), DK_OP_DISPATCH,
            [&] { dispatch(rank, a, routing, row_bytes, scales, -1, 0, n, direct); });
    };
    rows_to("dispatch FP8 direct", s.hidden, s.hidden / 128, true);
    rows_to("dispatch FP8 direct no scales", s.hidden, 0, true);
    rows_to("dispatch BF16 direct", 2 * s.hidden, 0, true);
    rows_to("dispatch FP8 staged", s.hidden, s.hidden / 128, false);
    rows_to("dispatch BF16 staged", 2 * s.hidden, 0, false);
    timed("combine BF16", n, 2.0 * rows * s.hidden, DK_OP_COMBINE, [&] { combine(rank, a, routing, n, false); });
  }
}
