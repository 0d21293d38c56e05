// routing.h - which rank sends which tokens where, computed on the host: the reference for every check.
#pragma once
#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include "library.h"

struct Routing {
  int ranks, tokens, topk, experts;
  std::vector<std::vector<int64_t>> idx;  // [rank][T*K]
  std::vector<std::vector<float>> weights;

  int local() const { return experts / ranks; }
  bool goes(int from, int token, int to) const {
    for (int k = 0; k < topk; ++k) {
      const int64_t e = idx[from][token * topk + k];
      if (e >= 0 && e / local() == to) return true;
    }
    return false;
  }
  // Tokens of `from` that have an expert at a rank of the node.
  int64_t rows_to_node(int from, int node, int peers) const {
    int64_t rows = 0;
    for (int t = 0; t < tokens; ++t) {
      bool there = false;
      for (int r = node * peers; !there && r < (node + 1) * peers; ++r) there = goes(from, t, r);
      rows += there;
    }
    return rows;
  }
  // Every token has this expert among its own: one rank gets all tokens.
  void send_all_to(int64_t expert) {
    for (auto &of_rank : idx)
      for (int t = 0; t < tokens; ++t) {
        const auto first = of_rank.begin() + t * topk;
        if (std::find(first, first + topk, expert) == first + topk) *first = expert;
      }
  }
  // Uniform choice without repetition, or by Zipf's law; some entries -1.
  Routing(const Shape &s, int num_tokens, uint32_t seed, bool holes)
      : ranks(s.ranks), tokens(num_tokens), topk(s.topk), experts(s.experts), idx(s.ranks), weights(s.ranks) {
    std::vector<double> mass(experts);
    for (int e = 0; e < experts; ++e) mass[e] = std::pow(e + 1, -s.zipf);
    for (int r = 0; r < ranks; ++r) {
      std::mt19937 random(seed * 131 + r);
      std::discrete_distribution<int> pick(mass.begin(), mass.end());
      std::uniform_real_distribution<float> unit(0.1f, 1.0f);
      for (int t = 0; t < tokens; ++t) {
        std::set<int> chosen;
        for (int k = 0; k < topk; ++k) {
          int e = pick(random);
          while (chosen.count(e)) e = s.zipf > 0 ? (e + 1) % experts : pick(random);
          chosen.insert(e);
          idx[r].push_back(holes && random() % 11 == 0 ? -1 : e);
          weights[r].push_back(unit(random));
        }
      }
    }
  }
};
