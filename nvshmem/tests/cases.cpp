// cases.cpp - the transport's contract, between processes with a GPU each. Each byte encodes its sender, so that a
// wrong byte shows where it came from.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "ranks.h"

namespace {

constexpr uint64_t kBlock = 48u << 20;
constexpr uint64_t kWords = 1u << 16;     // of a block: signal words before this offset
constexpr uint64_t kSources = 24u << 20;  // sources of puts from this offset on
constexpr int kMessages = 24;
constexpr uint64_t kMessageBytes = 1024;
constexpr double kPatienceMs = 5000;

uint8_t pattern(int sender, int receiver, uint64_t i, uint64_t salt) {
  return static_cast<uint8_t>(sender * 31 + receiver * 7 + salt * 13 + i * 3 + (i >> 8) * 5 + 1);
}

std::vector<uint8_t> patterned(int sender, int receiver, uint64_t bytes, uint64_t salt) {
  std::vector<uint8_t> data(bytes);
  for (uint64_t i = 0; i < bytes; ++i) data[i] = pattern(sender, receiver, i, salt);
  return data;
}

void look(Rank &me, uint64_t offset, void *out, uint64_t bytes) {
  check(me, cudaMemcpyAsync(out, me.block + offset, bytes, cudaMemcpyDeviceToHost, me.looks), "a look");
  check(me, cudaStreamSynchronize(me.looks), "a look");
}
void write(Rank &me, uint64_t offset, const void *from, uint64_t bytes) {
  check(me, cudaMemcpyAsync(me.block + offset, from, bytes, cudaMemcpyHostToDevice, me.looks), "a write");
  check(me, cudaStreamSynchronize(me.looks), "a write");
}

uint64_t await(Rank &me, uint64_t offset, uint64_t at_least, const char *what) {
  const double end = now_ms() + kPatienceMs;
  for (uint64_t word = 0;;) {
    look(me, offset, &word, sizeof word);
    if (word >= at_least) return word;
    if (now_ms() > end)
      fail(me, "%s: the word at %lu is %lu after %.0f s, not %lu", what, offset, word, kPatienceMs / 1e3, at_least);
  }
}

dk_transport_put_params put_params(const Rank &me, int peer, int qp, uint64_t to, uint64_t source, uint64_t bytes) {
  auto p = make_params<dk_transport_put_params>();
  p.transport = me.transport;
  p.stream = reinterpret_cast<uint64_t>(me.stream);
  p.peer = peer;
  p.qp = qp;
  p.dst_offset = to;
  p.src = reinterpret_cast<uint64_t>(me.block) + source;
  p.bytes = bytes;
  return p;
}

void quiet(Rank &me, int peer) {
  auto p = make_params<dk_transport_quiet_params>();
  p.transport = me.transport;
  p.stream = reinterpret_cast<uint64_t>(me.stream);
  p.peer = peer;
  p.qp = -1;
  must(me, me.call.quiet(&p), "dk_transport_quiet");
  check(me, cudaStreamSynchronize(me.stream), "quiet");
}

void expect_bytes(Rank &me, uint64_t offset, int sender, uint64_t bytes, uint64_t salt, const char *what) {
  std::vector<uint8_t> got(bytes);
  look(me, offset, got.data(), bytes);
  for (uint64_t i = 0; i < bytes; ++i)
    if (got[i] != pattern(sender, me.index, i, salt))
      fail(me, "%s: byte %lu of rank %d is 0x%02x, not 0x%02x", what, i, sender, got[i],
           pattern(sender, me.index, i, salt));
}

// ---- Start and end --------------------------------------------------------------------------------------------------

void open_device(Rank &me) {
  auto info = make_params<dk_info_params>();
  must(me, me.call.info(&info), "dk_info");
  if (info.num_devices < 1) fail(me, "no device: %s", info.reason);
  auto p = make_params<dk_device_open_params>();
  p.ordinal = -1;
  must(me, me.call.device_open(&p), "dk_device_open");
  me.device = p.device;
  check(me, cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking), "a stream");
  check(me, cudaStreamCreateWithFlags(&me.looks, cudaStreamNonBlocking), "a stream");
  if (me.index == 0) printf("   %s, %s, %s\n", info.build, p.name, p.isa_name);
}

void make_id(Rank &me) {
  if (me.index == 0) {
    auto p = make_params<dk_transport_unique_id_params>();
    p.num_ranks = me.ranks();
    p.num_nvl_peers = me.ranks() / me.options->hosts;
    p.num_qps_per_nic = kQueues;
    p.qp_depth = 256;
    must(me, me.call.unique_id(&p), "dk_transport_unique_id", p.reason);
    memcpy(me.page->id, p.id, sizeof p.id);
  }
  me.meet();
}

uint64_t attach_once(Rank &me) {
  auto p = make_params<dk_transport_attach_params>();
  p.device = me.device;
  p.rank = me.index;
  p.num_ranks = me.ranks();
  p.num_nvl_peers = me.ranks() / me.options->hosts;
  p.num_qps_per_nic = kQueues;
  p.qp_depth = 256;
  memcpy(p.id, me.page->id, sizeof p.id);
  const double start = now_ms();
  must(me, me.call.attach(&p), "dk_transport_attach", p.reason);
  if (me.index == 0)
    printf("   %s attached in %.1f ms%s%s\n", p.version, now_ms() - start, p.reason[0] != 0 ? ": " : "", p.reason);
  return p.attachment;
}

void attach(Rank &me) {
  make_id(me);
  me.attachment = attach_once(me);
}

// A second attachment of the same ranks shares the first one; others are refused with a reason.
void attach_again(Rank &me) {
  if (attach_once(me) != me.attachment) fail(me, "the second attachment differs from the first");
  auto p = make_params<dk_transport_attach_params>();
  p.device = me.device;
  p.rank = me.index;
  p.num_ranks = me.ranks() + 1;
  p.num_nvl_peers = 1;
  p.num_qps_per_nic = 1;
  p.qp_depth = 1;
  if (me.call.attach(&p) != DK_ESTATE || p.reason[0] == 0) fail(me, "another group was attached too: \"%s\"", p.reason);
  auto d = make_params<dk_transport_detach_params>();
  d.attachment = me.attachment;
  must(me, me.call.detach(&d), "dk_transport_detach");
}

void allocate(Rank &me) {
  me.reach.assign(static_cast<size_t>(me.ranks()), 1);
  auto p = make_params<dk_transport_alloc_params>();
  p.attachment = me.attachment;
  p.bytes = kBlock;
  p.host_peer_blocks = reinterpret_cast<uint64_t>(me.reach.data());
  must(me, me.call.alloc(&p), "dk_transport_alloc");
  me.mem = p.mem;
  me.block = reinterpret_cast<uint8_t *>(p.address);
  me.bytes = p.out_bytes;
  std::vector<uint64_t> words(kWords / 8, 1);
  look(me, 0, words.data(), kWords);
  if (std::any_of(words.begin(), words.end(), [](uint64_t word) { return word != 0; }))
    fail(me, "the block is not zero");
  for (int rank = 0; rank < me.ranks(); ++rank) {
    if (rank != me.index) me.peers.push_back(rank);
    if (me.host_of(rank) != me.host && me.reach[static_cast<size_t>(rank)] != 0)
      fail(me, "rank %d of another host is mapped", rank);
    if (rank == me.index && me.reach[static_cast<size_t>(rank)] != p.address)
      fail(me, "this rank's block is not mapped at its own address");
  }
  const auto mapped =
      std::count_if(me.reach.begin(), me.reach.end(), [](uint64_t address) { return address != 0; }) - 1;
  if (me.index == 0) printf("   loads and stores reach %ld of %zu peers\n", static_cast<long>(mapped), me.peers.size());
  me.meet();
}

void open_transport(Rank &me) {
  auto p = make_params<dk_transport_open_params>();
  std::vector<uint64_t> blocks(static_cast<size_t>(me.ranks()), 0);
  blocks[static_cast<size_t>(me.index)] = reinterpret_cast<uint64_t>(me.block);
  p.device = me.device;
  p.rank = me.index;
  p.num_ranks = me.ranks();
  p.num_qps = kQueues;
  p.qp_depth = 256;
  p.num_peers = static_cast<int32_t>(me.peers.size());
  p.host_peers = reinterpret_cast<uint64_t>(me.peers.data());
  p.host_blocks = reinterpret_cast<uint64_t>(blocks.data());
  p.block_bytes = kBlock;
  auto wrong = p;
  wrong.block_bytes = me.bytes + 1;
  if (me.call.open(&wrong) != DK_EINVAL) fail(me, "open accepts a block that is longer than its memory");
  wrong = p;
  wrong.flags = DK_TRANSPORT_LATE;
  if (me.call.open(&wrong) != DK_EUNSUPPORTED) fail(me, "DK_TRANSPORT_LATE was taken");
  must(me, me.call.open(&p), "dk_transport_open");
  me.transport = p.transport;
}

void end(Rank &me) {
  auto c = make_params<dk_transport_close_params>();
  c.transport = me.transport;
  must(me, me.call.close(&c), "dk_transport_close");
  auto d = make_params<dk_transport_detach_params>();
  d.attachment = me.attachment;
  if (me.call.detach(&d) != DK_ESTATE) fail(me, "detach succeeds although memory was not freed");
  auto f = make_params<dk_transport_free_params>();
  f.mem = me.mem;
  must(me, me.call.free(&f), "dk_transport_free");
  const double start = now_ms();
  must(me, me.call.detach(&d), "dk_transport_detach");
  if (me.index == 0) printf("   ended in %.1f ms\n", now_ms() - start);
  me.peers.clear();
}

// ---- Operations -----------------------------------------------------------------------------------------------------

void refuse(Rank &me) {
  const int peer = me.peers[0];
  const auto code = [&](const std::function<void(dk_transport_put_params &)> &change) {
    auto p = put_params(me, peer, 0, kWords, kSources, 64);
    change(p);
    return me.call.put(&p);
  };
  const struct {
    const char *what;
    int32_t wanted, got;
  } tries[] = {
      {"peer is this rank", DK_EINVAL, code([&](auto &p) { p.peer = me.index; })},
      {"a queue pair that does not exist", DK_EINVAL, code([](auto &p) { p.qp = kQueues; })},
      {"bytes past the block", DK_EINVAL, code([](auto &p) { p.dst_offset = kBlock - 63; })},
      {"a source outside the heap", DK_EINVAL, code([](auto &p) { p.src = 4096; })},
      {"a signal that is not aligned", DK_EINVAL, code([](auto &p) {
         p.signal_op = DK_SIGNAL_SET;
         p.signal_offset = 4;
       })},
      {"neither bytes nor signal", DK_EINVAL, code([](auto &p) { p.bytes = 0; })},
      {"DK_TRANSPORT_NOWAIT", DK_EUNSUPPORTED, code([](auto &p) { p.flags = DK_TRANSPORT_NOWAIT; })},
  };
  for (const auto &one : tries)
    if (one.got != one.wanted) fail(me, "%s: %d instead of %d", one.what, one.got, one.wanted);
  me.meet();
}

// Every rank to every rank, several sizes; the signal word of sender s and size k is at line s * 8 + k.
void put_signal(Rank &me) {
  const uint64_t sizes[] = {1, 13, 4096, 1u << 20};
  uint64_t at[5] = {kWords};
  for (int k = 0; k < 4; ++k) at[k + 1] = at[k] + kMaxRanks * ((sizes[k] + 255) / 256 * 256);
  for (int k = 0; k < 4; ++k) {
    const uint64_t place = (sizes[k] + 255) / 256 * 256;
    for (const int peer : me.peers) {
      const uint64_t source = kSources + static_cast<uint64_t>(peer) * (1u << 20);
      write(me, source, patterned(me.index, peer, sizes[k], sizes[k]).data(), sizes[k]);
      auto p = put_params(me, peer, k, at[k] + place * static_cast<uint64_t>(me.index), source, sizes[k]);
      p.signal_offset = 64 * static_cast<uint64_t>(me.index * 8 + k);
      p.signal_op = DK_SIGNAL_SET;
      p.signal_value = static_cast<uint64_t>(k) + 7;
      must(me, me.call.put(&p), "dk_transport_put");
    }
    quiet(me, -1);  // the sources are overwritten next
    for (const int peer : me.peers) {
      await(me, 64 * static_cast<uint64_t>(peer * 8 + k), static_cast<uint64_t>(k) + 7, "put with signal");
      expect_bytes(me, at[k] + place * static_cast<uint64_t>(peer), peer, sizes[k], sizes[k], "put with signal");
    }
  }
  me.meet();
}

// Numbered messages on each queue pair: a put, then a put with signal. A signal value implies all earlier puts of its
// queue pair.
void order(Rank &me) {
  const auto place = [](int sender, int qp, int m) {
    return kWords + kMessageBytes * static_cast<uint64_t>((sender * kQueues + qp) * kMessages + m);
  };
  const auto word = [](int sender, int qp) { return 32768 + 64 * static_cast<uint64_t>(sender * kQueues + qp); };
  const auto source = [](int peer, int qp, int m) {
    return kSources + kMessageBytes * static_cast<uint64_t>((peer * kQueues + qp) * kMessages + m);
  };
  for (const int peer : me.peers)
    for (int qp = 0; qp < kQueues; ++qp)
      for (int m = 0; m < kMessages; ++m)
        write(me, source(peer, qp, m),
              patterned(me.index, peer, kMessageBytes, static_cast<uint64_t>(qp * 100 + m)).data(), kMessageBytes);
  me.meet();
  for (int m = 0; m < kMessages; ++m)
    for (const int peer : me.peers)
      for (int qp = 0; qp < kQueues; ++qp) {
        const uint64_t half = kMessageBytes / 2;
        auto first = put_params(me, peer, qp, place(me.index, qp, m), source(peer, qp, m), half);
        must(me, me.call.put(&first), "dk_transport_put");
        auto second = put_params(me, peer, qp, place(me.index, qp, m) + half, source(peer, qp, m) + half, half);
        second.signal_offset = word(me.index, qp);
        second.signal_op = DK_SIGNAL_SET;
        second.signal_value = static_cast<uint64_t>(m) + 1;
        must(me, me.call.put(&second), "dk_transport_put");
      }
  for (int m = 0; m < kMessages; ++m)
    for (const int peer : me.peers)
      for (int qp = 0; qp < kQueues; ++qp) {
        const auto seen = static_cast<int>(await(me, word(peer, qp), static_cast<uint64_t>(m) + 1, "order"));
        for (int known = m; known < seen; ++known)
          expect_bytes(me, place(peer, qp, known), peer, kMessageBytes, static_cast<uint64_t>(qp * 100 + known),
                       "order in a queue pair");
      }
  quiet(me, -1);
  me.meet();
}

// One DK_SIGNAL_ADD on each queue pair, then quiet: queue pairs have no order between them.
void add(Rank &me) {
  constexpr uint64_t kWord = 59968, kTimes = 40;
  for (uint64_t i = 1; i <= kTimes; ++i) {
    for (const int peer : me.peers) {
      auto p = put_params(me, peer, static_cast<int>(i % kQueues), 0, 0, 0);
      p.signal_offset = kWord;
      p.signal_op = DK_SIGNAL_ADD;
      p.signal_value = i << (8 * (me.index % 4));
      must(me, me.call.put(&p), "dk_transport_put");
    }
    if (i % kQueues == 0) quiet(me, -1);
  }
  me.meet();
  uint64_t wanted = 0, got = 0;
  for (const int peer : me.peers) wanted += (kTimes * (kTimes + 1) / 2) << (8 * (peer % 4));
  look(me, kWord, &got, sizeof got);
  if (got != wanted) fail(me, "the sum is %lx, not %lx", got, wanted);
  me.meet();
}

// After quiet, puts without a signal have arrived and are counted as completed.
void quiets(Rank &me) {
  constexpr uint64_t kBytes = 256 << 10;
  for (const int peer : me.peers) {
    const uint64_t source = kSources + kBytes * static_cast<uint64_t>(peer);
    write(me, source, patterned(me.index, peer, kBytes, 77).data(), kBytes);
    auto p = put_params(me, peer, 1, kWords + kBytes * static_cast<uint64_t>(me.index), source, kBytes);
    must(me, me.call.put(&p), "dk_transport_put");
  }
  quiet(me, -1);
  auto q = make_params<dk_transport_query_params>();
  q.transport = me.transport;
  q.peer = me.peers[0];
  q.qp = 1;
  must(me, me.call.query(&q), "dk_transport_query");
  if (q.posted == 0 || q.posted != q.completed || q.bytes < kBytes || q.lost != 0)
    fail(me, "after quiet: %lu posted, %lu completed, %lu bytes, lost %d", q.posted, q.completed, q.bytes, q.lost);
  me.meet();
  for (const int peer : me.peers)
    expect_bytes(me, kWords + kBytes * static_cast<uint64_t>(peer), peer, kBytes, 77, "quiet");
  me.meet();
}

// NVSHMEM used the plugin toward ranks of other hosts and toward no other rank.
void counted(Rank &me) {
  uint64_t overtaken = 0;
  for (const int peer : me.peers) {
    testtransport_counts c{};
    if (me.count(peer, &c) != 0) fail(me, "the plugin has no counts");
    const bool remote = me.host_of(peer) != me.host;
    if (remote && (c.puts == 0 || c.atomics == 0 || c.fences == 0 || c.quiets == 0))
      fail(me, "toward rank %d: %lu puts, %lu atomics", peer, c.puts, c.atomics);
    if (!remote && c.puts != 0) fail(me, "%lu puts toward rank %d of this host went through the plugin", c.puts, peer);
    if (me.index == 0)
      printf("   to rank %d: %lu puts, %lu values, %lu atomics, %lu fences, %lu quiets, %lu bytes, %lu overtaken\n",
             peer, c.puts, c.values, c.atomics, c.fences, c.quiets, c.bytes, c.overtaken);
    overtaken += c.overtaken;
  }
  const char *settings = getenv("DEEPEP_TESTTRANSPORT");
  if (settings != nullptr && strchr(settings, ':') != nullptr && overtaken == 0)
    fail(me, "nothing overtook anything, with DEEPEP_TESTTRANSPORT=%s", settings);
}

void times(Rank &me) {
  constexpr int kTimes = 20;
  const int peer = (me.index + me.ranks() / 2) % me.ranks();
  for (const uint64_t bytes : {8ul, 1ul << 20}) {
    double first = 0, total = 0;
    for (int i = 0; i <= kTimes; ++i) {
      me.meet();
      const double start = now_ms();
      auto p = put_params(me, peer, 0, kWords, kSources, bytes);
      must(me, me.call.put(&p), "dk_transport_put");
      quiet(me, -1);
      (i == 0 ? first : total) += now_ms() - start;
    }
    if (me.index == 0)
      printf("   put of %lu bytes to rank %d, then quiet: first %.3f ms, then %.3f ms\n", bytes, peer, first,
             total / kTimes);
  }
  me.meet();
}

// The last rank is cut off from the network: puts do not reach it, the others go on, and calls that name it return
// DK_EPEERDEAD.
void lost_peer(Rank &me) {
  const int victim = me.ranks() - 1;
  const uint64_t word = 61440;
  if (me.index == 0) {
    if (me.drop(victim) != 0) fail(me, "the plugin has no peer %d", victim);
    auto p = put_params(me, victim, 0, kWords, kSources, 4096);
    p.signal_offset = word;
    p.signal_op = DK_SIGNAL_SET;
    p.signal_value = 99;
    must(me, me.call.put(&p), "dk_transport_put");
    check(me, cudaStreamSynchronize(me.stream), "put to a lost peer");
    auto l = make_params<dk_transport_lose_params>();
    l.transport = me.transport;
    l.peer = victim;
    must(me, me.call.lose(&l), "dk_transport_lose");
    if (me.call.put(&p) != DK_EPEERDEAD) fail(me, "put accepts a lost peer");
    auto q = make_params<dk_transport_quiet_params>();
    q.transport = me.transport;
    q.peer = q.qp = -1;
    if (me.call.quiet(&q) != DK_EPEERDEAD) fail(me, "quiet accepts a lost peer");
  }
  me.meet();
  if (me.index != victim) return;
  usleep(200000);
  uint64_t seen = 0;
  look(me, word, &seen, sizeof seen);
  if (seen != 0) fail(me, "the signal of a lost connection arrived: %lu", seen);
}

}  // namespace

std::vector<Case> cases_of(const Options &options) {
  std::vector<Case> all = {
      {"device", open_device},
      {"attach", attach},
      {"attach again", attach_again},
      {"allocate", allocate},
      {"open", open_transport},
      {"refused arguments", refuse},
      {"put with signal", put_signal},
      {"order in a queue pair", order},
      {"add", add},
      {"quiet", quiets},
      {"times", times},
  };
  if (options.plugin != nullptr) all.push_back({"the plugin carries remote operations", counted});
  if (options.lose) {
    all.push_back({"a lost peer", lost_peer});  // nvshmem_finalize would wait for it
    return all;
  }
  all.push_back({"end", end});
  if (!options.restart) return all;
  const Case again[] = {{"attach after the end", attach},
                        {"allocate again", allocate},
                        {"open again", open_transport},
                        {"put with signal again", put_signal},
                        {"end again", end}};
  all.insert(all.end(), std::begin(again), std::end(again));
  return all;
}
