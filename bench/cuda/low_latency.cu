// low_latency.cu - low-latency mode: the calls, and every output against the host's reference.
#include "low_latency.h"

namespace {

__device__ __host__ float bf16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}
// Row of (rank, token): no round numbers; some words are 0 and some all ones (a NaN payload that BF16 rows may hold).
float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

}  // namespace

std::vector<uint16_t> make_rows(int rank, int tokens, int hidden, bool odd) {
  std::vector<uint16_t> x(static_cast<size_t>(tokens) * hidden);
  std::mt19937 random(rank * 7919 + 17);
  std::normal_distribution<float> normal(0, 1);
  for (size_t i = 0; i < x.size(); ++i) {
    const float value = i % 97 == 5 ? 0.0f : normal(random);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    x[i] = bits >> 16;
  }
  if (odd)
    for (int t = 0; t < tokens; ++t) {
      x[static_cast<size_t>(t) * hidden + 2] = 0xffff;
      x[static_cast<size_t>(t) * hidden + 3] = 0xffff;
    }
  return x;
}

LowLatency prepare(const Shape &s, int rank, const Routing &routing, bool odd) {
  LowLatency a{};
  a.R = s.ranks;
  a.B = s.max_tokens;
  a.H = s.hidden;
  a.E = s.experts;
  a.L = s.experts / s.ranks;
  a.K = s.topk;
  a.tokens = routing.tokens;
  const size_t rows = static_cast<size_t>(a.L) * a.R * a.B;
  a.idx = to_device(routing.idx[rank]);
  a.weights = to_device(routing.weights[rank]);
  a.x = to_device(make_rows(rank, routing.tokens, a.H, odd));
  a.recv_x = device_array<uint8_t>(rows * a.H * 2);
  a.y = device_array<uint16_t>(rows * a.H);
  a.combined = device_array<uint16_t>(static_cast<size_t>(a.B) * a.H);
  a.scales = device_array<uint32_t>(rows * a.H / 128);
  a.count = device_array<int32_t>(a.L);
  a.src_info = device_array<int32_t>(rows);
  a.range = device_array<int64_t>(a.L * a.R);
  a.stats = to_device(std::vector<int32_t>(a.L, 0));
  a.wait_stats = to_device(std::vector<int64_t>(a.R, 0));
  return a;
}

void dispatch(Rank &rank, const LowLatency &a, int format, uint32_t flags, bool weights, uint32_t phases,
              uint32_t ticket) {
  dk_ll_dispatch_params p{};
  rank.header(p, a.num_sms);
  p.flags = flags;
  p.phases = phases;
  p.ticket = ticket;
  p.x = as_address(a.x);
  p.topk_idx = as_address(a.idx);
  p.topk_weights = weights ? as_address(a.weights) : 0;
  p.num_tokens = a.tokens;
  p.num_topk = a.K;
  p.index_bytes = 8;
  p.format = format;
  p.num_max_tokens = a.B;
  p.hidden = a.H;
  p.num_experts = a.E;
  p.recv_x = as_address(a.recv_x);
  p.recv_scales = as_address(a.scales);
  p.recv_count = as_address(a.count);
  p.src_info = as_address(a.src_info);
  p.layout_range = as_address(a.range);
  p.cumulative_stats = as_address(a.stats);
  p.wait_stats = as_address(a.wait_stats);
  DK(ll_dispatch, p);
}
void combine(Rank &rank, const LowLatency &a, uint32_t flags, const void *x, uint32_t phases, uint32_t ticket) {
  dk_ll_combine_params p{};
  rank.header(p, a.num_sms);
  p.flags = flags;
  p.phases = phases;
  p.ticket = ticket;
  p.x = as_address(x);
  p.x_row_stride = 2ull * a.H;
  p.topk_idx = as_address(a.idx);
  p.topk_weights = as_address(a.weights);
  p.src_info = as_address(a.src_info);
  p.layout_range = as_address(a.range);
  p.num_tokens = a.tokens;
  p.num_topk = a.K;
  p.index_bytes = 8;
  p.num_max_tokens = a.B;
  p.hidden = a.H;
  p.num_experts = a.E;
  p.combined_x = as_address(a.combined);
  p.wait_stats = as_address(a.wait_stats);
  DK(ll_combine, p);
}

namespace {

int g_errors = 0;
#define EXPECT(condition, ...)                                                                      \
  do {                                                                                              \
    if (!(condition) && __atomic_fetch_add(&g_errors, 1, __ATOMIC_RELAXED) < 20) {                  \
      fprintf(stderr, "rank %d: ", rank.rank), fprintf(stderr, __VA_ARGS__), fprintf(stderr, "\n"); \
    }                                                                                               \
  } while (0)

// Checks a dispatch and returns the values of its rows, [row of L*R*B][H], as BF16 bits in `values`.
void check_dispatch(Rank &rank, const LowLatency &a, const Routing &routing, int format, uint32_t flags, bool odd,
                    std::vector<uint16_t> &values, const char *what) {
  const int RB = a.R * a.B, S = a.H / 128;
  const bool packed = (flags & DK_LL_UE8M0) != 0, fp8 = format == DK_FORMAT_FP8;
  const auto count = to_host(a.count, a.L), src = to_host(a.src_info, static_cast<size_t>(a.L) * RB);
  const auto range = to_host(a.range, a.L * a.R);
  const auto data = to_host(a.recv_x, static_cast<size_t>(a.L) * RB * a.H * (fp8 ? 1 : 2));
  const auto scales = to_host(a.scales, static_cast<size_t>(a.L) * RB * (packed ? S / 4 : S));
  values.assign(static_cast<size_t>(a.L) * RB * a.H, 0x7fc0);
  std::vector<std::vector<uint16_t>> rows(a.R);
  for (int r = 0; r < a.R; ++r) rows[r] = make_rows(r, routing.tokens, a.H, odd);
  double worst = 0;
  for (int l = 0; l < a.L; ++l) {
    int row = 0;
    for (int r = 0; r < a.R; ++r) {
      const int first = row;
      for (int t = 0; t < routing.tokens; ++t) {
        bool here = false;
        for (int k = 0; k < a.K; ++k) here |= routing.idx[r][t * a.K + k] == rank.rank * a.L + l;
        if (!here) continue;
        const size_t at = static_cast<size_t>(l) * RB + row;
        EXPECT(src[at] == t, "%s: src_info[%d][%d] is %d, not %d", what, l, row, src[at], t);
        for (int h = 0; h < a.H; ++h) {
          const uint16_t sent = rows[r][static_cast<size_t>(t) * a.H + h];
          if (!fp8) {
            const uint16_t got = reinterpret_cast<const uint16_t *>(data.data())[at * a.H + h];
            EXPECT(got == sent, "%s: row %d of expert %d, channel %d: %04x, not %04x", what, row, l, h, got, sent);
          } else {
            float scale;
            const size_t group = h / 128;
            if (packed) {
              const uint32_t bits =
                  (scales[(l * (S / 4) + group / 4) * static_cast<size_t>(RB) + row] >> (8 * (group % 4)) & 0xff) << 23;
              memcpy(&scale, &bits, 4);
            } else {
              memcpy(&scale, &scales[(l * S + group) * static_cast<size_t>(RB) + row], 4);
            }
            const double error = std::fabs(e4m3(data[at * a.H + h]) * scale - bf16_value(sent));
            if (error > worst) worst = error;
            EXPECT(error <= 0.07 * std::fabs(bf16_value(sent)) + 0.02,
                   "%s: row %d of expert %d, channel %d: off by %g of %g", what, row, l, h, error, bf16_value(sent));
          }
          values[at * a.H + h] = sent;
        }
        ++row;
      }
      EXPECT(range[l * a.R + r] == (static_cast<int64_t>(first) << 32 | (row - first)),
             "%s: layout_range[%d][%d] is %llx", what, l, r, (unsigned long long)range[l * a.R + r]);
    }
    EXPECT(count[l] == row, "%s: recv_count[%d] is %d, not %d", what, l, count[l], row);
  }
}

// Compares `combined` with the float64 sum of weight * x, where every expert returned the token unchanged.
void check_combine(Rank &rank, const LowLatency &a, const Routing &routing, const char *what) {
  const auto got = to_host(a.combined, static_cast<size_t>(a.tokens) * a.H);
  const auto x = make_rows(rank.rank, routing.tokens, a.H, false);
  double dot = 0, squares = 0;
  for (int t = 0; t < a.tokens; ++t) {
    double weight = 0;
    for (int k = 0; k < a.K; ++k)
      if (routing.idx[rank.rank][t * a.K + k] >= 0) weight += routing.weights[rank.rank][t * a.K + k];
    for (int h = 0; h < a.H; ++h) {
      const size_t at = static_cast<size_t>(t) * a.H + h;
      const double u = weight * bf16_value(x[at]) + 1, v = static_cast<double>(bf16_value(got[at])) + 1;
      dot += 2 * u * v;
      squares += u * u + v * v;
    }
  }
  const double difference = a.tokens == 0 ? 0 : 1 - dot / squares;
  EXPECT(difference < 1e-5, "%s: calc_diff %g", what, difference);
  if (rank.rank == 0) {
    printf("%-44s calc_diff %.2e  errors so far %d\n", what, difference, g_errors);
    fflush(stdout);
  }
}

void round_trip(Rank &rank, const Routing &routing, int format, uint32_t flags, bool weights, uint32_t combine_flags,
                bool split, const char *what) {
  LowLatency a = prepare(rank.world->shape, rank.rank, routing, false);
  rank.meet();
  auto run_dispatch = [&] {
    if (split) {
      dispatch(rank, a, format, flags, weights, DK_PHASE_SEND, 1);
      dispatch(rank, a, format, flags, weights, DK_PHASE_RECV, 1);
    } else
      dispatch(rank, a, format, flags, weights);
  };
  run_dispatch();
  rank.sync();
  rank.meet();
  std::vector<uint16_t> values;
  check_dispatch(rank, a, routing, format, flags, false, values, what);
  const void *y = a.y;
  dk_ll_layout_params layout{};
  layout.num_ranks = a.R;
  layout.num_max_tokens = a.B;
  layout.hidden = a.H;
  layout.num_experts = a.E;
  DK(ll_layout, layout);
  if (combine_flags & DK_LL_ZERO_COPY)
    y = reinterpret_cast<void *>(rank.block + rank.rdma_offset() + layout.zero_copy_offset[0]);
  CHECK_CUDA(cudaMemcpy(const_cast<void *>(y), values.data(), values.size() * 2, cudaMemcpyHostToDevice));
  rank.meet();
  for (int round = 0; round < 2; ++round) {  // one handle, two combines
    if (split) {
      combine(rank, a, combine_flags, y, DK_PHASE_SEND, 2);
      combine(rank, a, combine_flags, y, DK_PHASE_RECV, 2);
    } else
      combine(rank, a, combine_flags, y);
  }
  rank.sync();
  rank.meet();
  check_combine(rank, a, routing, what);
  rank.meet();
  for (void *p : {(void *)a.x, (void *)a.recv_x, (void *)a.y, (void *)a.combined, (void *)a.scales}) cudaFree(p);
}

}  // namespace

void check_low_latency(Rank &rank) {
  const Shape &s = rank.world->shape;
  if (s.rdma_bytes == 0) return;
  const Routing full(s, s.max_tokens, 11, true), some(s, std::max(1, s.max_tokens / 3), 12, false),
      none(s, 0, 13, false);
  round_trip(rank, full, DK_FORMAT_BF16, 0, false, 0, false, "LL BF16, each row");
  round_trip(rank, full, DK_FORMAT_BF16, 0, true, 0, false, "LL BF16, sums");
  round_trip(rank, some, DK_FORMAT_FP8, 0, true, DK_LL_UNREDUCED, false, "LL FP8, weights known, each row");
  round_trip(rank, some, DK_FORMAT_FP8, DK_LL_ROUND_SCALE, true, 0, true, "LL FP8 rounded, sums, halves");
  if (s.hidden % 512 == 0)
    round_trip(rank, full, DK_FORMAT_FP8, DK_LL_ROUND_SCALE | DK_LL_UE8M0, false, DK_LL_LOGFMT, false,
               "LL FP8 UE8M0, LogFMT");
  round_trip(rank, full, DK_FORMAT_BF16, 0, false, DK_LL_ZERO_COPY, true, "LL BF16, zero copy, halves");
  round_trip(rank, none, DK_FORMAT_FP8, 0, true, 0, false, "LL no tokens");
  LowLatency odd = prepare(rank.world->shape, rank.rank, some, true);
  rank.meet();
  dispatch(rank, odd, DK_FORMAT_BF16, 0, false);
  rank.sync();
  rank.meet();
  std::vector<uint16_t> values;
  check_dispatch(rank, odd, some, DK_FORMAT_BF16, 0, true, values, "LL BF16 with words of all ones");
  // A graph of one round, odd number of calls, replayed.
  LowLatency a = prepare(rank.world->shape, rank.rank, full, false);
  rank.meet();
  cudaStream_t stream = reinterpret_cast<cudaStream_t>(rank.stream);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  dispatch(rank, a, DK_FORMAT_BF16, 0, true);
  combine(rank, a, 0, a.recv_x);
  combine(rank, a, DK_LL_UNREDUCED, a.recv_x);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  rank.meet();
  for (int i = 0; i < 200; ++i) CHECK_CUDA(cudaGraphLaunch(exec, stream));
  rank.sync();
  rank.meet();
  check_combine(rank, a, full, "LL graph of 3 calls, 200 replays");
  rank.meet();
  if (g_errors != 0) _exit(6);
}
