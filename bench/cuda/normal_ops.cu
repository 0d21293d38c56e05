// normal_ops.cu - normal mode's calls through the kernel interface.
#include "normal_ops.h"

Arrays prepare(Rank &rank, const Routing &routing, int hidden, int num_scales) {
  const Shape &s = rank.world->shape;
  Arrays a{};
  a.hidden = hidden;
  a.idx = to_device(routing.idx[rank.rank]);
  a.weights = to_device(routing.weights[rank.rank]);
  a.per_rank = device_array<int32_t>(s.ranks);
  a.per_expert = device_array<int32_t>(s.experts);
  a.matrix = device_array<int32_t>(s.ranks * s.ranks);
  a.heads = device_array<int32_t>(routing.tokens * s.ranks);
  a.in_rank = device_array<uint8_t>(routing.tokens * s.ranks);
  for (int r = 0; r < s.ranks; ++r)
    for (int t = 0; t < routing.tokens; ++t)
      if (routing.goes(r, t, rank.rank)) {
        a.ranks.push_back(r);
        a.tokens.push_back(t);
      }
  a.rows = static_cast<int>(a.ranks.size());
  a.capacity = s.ranks * routing.tokens;
  a.ranks_device = to_device(a.ranks);
  a.tokens_device = to_device(a.tokens);
  a.src_idx = device_array<int32_t>(a.capacity);
  a.scales = device_array<uint32_t>(static_cast<size_t>(routing.tokens) * num_scales);
  a.recv_scales = device_array<uint32_t>(static_cast<size_t>(a.capacity) * num_scales);
  a.recv_idx = device_array<int64_t>(a.capacity * s.topk);
  a.recv_weights = device_array<float>(a.capacity * s.topk);
  a.combined_weights = device_array<float>(routing.tokens * s.topk);
  a.x = device_array<uint8_t>(2ull * routing.tokens * hidden);
  a.recv_x = device_array<uint8_t>(2ull * a.capacity * hidden);
  a.y = device_array<uint16_t>(static_cast<size_t>(std::max(a.rows, 1)) * hidden);
  a.combined = device_array<uint16_t>(static_cast<size_t>(routing.tokens) * hidden);
  a.wrong = device_array<uint32_t>(1);
  void *host = aligned_alloc(4096, 1 << 20);
  memset(host, 0, 1 << 20);
  dk_host_register_params h{};
  h.device = rank.device;
  h.host = as_address(host);
  h.bytes = 1 << 20;
  DK(host_register, h);
  a.counts = static_cast<dk_counts *>(host);
  a.counts_address = h.address;
  return a;
}

void release(Rank &rank, Arrays &a) {
  for (void *p : {static_cast<void *>(a.idx),
                  static_cast<void *>(a.weights),
                  static_cast<void *>(a.per_rank),
                  static_cast<void *>(a.per_expert),
                  static_cast<void *>(a.matrix),
                  static_cast<void *>(a.heads),
                  static_cast<void *>(a.src_idx),
                  static_cast<void *>(a.in_rank),
                  static_cast<void *>(a.scales),
                  static_cast<void *>(a.recv_scales),
                  static_cast<void *>(a.recv_idx),
                  static_cast<void *>(a.recv_weights),
                  static_cast<void *>(a.combined_weights),
                  static_cast<void *>(a.x),
                  static_cast<void *>(a.recv_x),
                  static_cast<void *>(a.y),
                  static_cast<void *>(a.combined),
                  static_cast<void *>(a.wrong),
                  static_cast<void *>(a.ranks_device),
                  static_cast<void *>(a.tokens_device)})
    CHECK_CUDA(cudaFree(p));
  dk_host_unregister_params h{};
  h.device = rank.device;
  h.host = as_address(a.counts);
  DK(host_unregister, h);
  free(a.counts);
  a = {};
}

Arrays prepare_counted(Rank &rank, const Routing &routing, int hidden) {
  Arrays a = prepare(rank, routing, hidden, hidden / 128);
  rank.meet();
  layout(rank, a, routing);
  notify(rank, a, routing, hidden, hidden / 128);
  rank.sync();
  rank.meet();
  return a;
}

void layout(Rank &rank, const Arrays &a, const Routing &routing) {
  dk_layout_params p{};
  rank.header(p);
  p.topk_idx = as_address(a.idx);
  p.index_bytes = 8;
  p.num_tokens = routing.tokens;
  p.num_topk = routing.topk;
  p.num_experts = routing.experts;
  p.tokens_per_rank = as_address(a.per_rank);
  p.tokens_per_expert = as_address(a.per_expert);
  p.token_in_rank = as_address(a.in_rank);
  DK(layout, p);
}
uint64_t notify(Rank &rank, const Arrays &a, const Routing &routing, uint64_t hidden_bytes, int num_scales) {
  dk_notify_params p{};
  rank.header(p);
  p.tokens_per_rank = as_address(a.per_rank);
  p.tokens_per_expert = as_address(a.per_expert);
  p.token_in_rank = as_address(a.in_rank);
  p.num_tokens = routing.tokens;
  p.num_topk = routing.topk;
  p.num_experts = routing.experts;
  p.expert_alignment = 4;
  p.num_scales = num_scales;
  p.hidden_bytes = hidden_bytes;
  p.rank_prefix_matrix = as_address(a.matrix);
  p.send_head = as_address(a.heads);
  p.host_counts = as_address(a.counts);
  p.counts = a.counts_address;
  DK(notify, p);
  return p.call;
}
void dispatch(Rank &rank, const Arrays &a, const Routing &routing, uint64_t hidden_bytes, int num_scales, int rows,
              int worst, int sms, bool direct) {
  dk_dispatch_params p{};
  rank.header(p, sms);
  p.x = as_address(a.x);
  p.scales = num_scales > 0 ? as_address(a.scales) : 0;
  p.scale_token_stride = num_scales;
  p.scale_stride = 1;
  p.topk_idx = as_address(a.idx);
  p.topk_weights = as_address(a.weights);
  p.rank_prefix_matrix = as_address(a.matrix);
  p.send_head = as_address(a.heads);
  p.hidden_bytes = hidden_bytes;
  p.num_tokens = routing.tokens;
  p.num_scales = num_scales;
  p.num_topk = routing.topk;
  p.index_bytes = 8;
  p.num_experts = routing.experts;
  p.num_recv_tokens = rows;
  p.num_worst_tokens = worst;
  p.recv_segment = direct ? 0 : -1;
  p.recv_x = direct ? rank.segment : as_address(a.recv_x);
  p.recv_scales = num_scales > 0 ? as_address(a.recv_scales) : 0;
  p.recv_topk_idx = as_address(a.recv_idx);
  p.recv_topk_weights = as_address(a.recv_weights);
  p.recv_src_idx = as_address(a.src_idx);
  DK(dispatch, p);
}
void combine(Rank &rank, const Arrays &a, const Routing &routing, int sms, bool weights) {
  dk_combine_params p{};
  rank.header(p, sms);
  p.x = as_address(a.y);
  p.topk_weights = weights ? as_address(a.recv_weights) : 0;
  p.x_segment = -1;
  p.rank_prefix_matrix = as_address(a.matrix);
  p.send_head = as_address(a.heads);
  p.recv_src_idx = as_address(a.src_idx);
  p.num_tokens = routing.tokens;
  p.num_recv_tokens = a.rows;
  p.hidden = a.hidden;
  p.num_topk = weights ? routing.topk : 0;
  p.combined_x = as_address(a.combined);
  p.combined_topk_weights = weights ? as_address(a.combined_weights) : 0;
  DK(combine, p);
}
