// Seeded inputs for kernel tests. Spiky on purpose: uniform noise hides faults of softmax and of
// quantisation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace thermo::testing {

class Inputs {
 public:
  explicit Inputs(uint64_t seed) : engine_(seed) {}

  float uniform(float lo, float hi) { return std::uniform_real_distribution<float>(lo, hi)(engine_); }
  float normal() { return normal_(engine_); }
  // [0, n)
  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(engine_); }
  bool chance(double p) { return std::bernoulli_distribution(p)(engine_); }

  // Normal with the given deviation; one in 64 elements is `spike` times larger, and one in 16 is exactly
  // zero.
  std::vector<float> spiky(size_t n, float scale = 1.0f, float spike = 8.0f) {
    std::vector<float> x(n);
    for (float& value : x) {
      value = scale * normal();
      if (chance(1.0 / 64)) value *= spike;
      if (chance(1.0 / 16)) value = 0.0f;
    }
    return x;
  }
  std::vector<float> normal(size_t n, float scale = 1.0f) {
    std::vector<float> x(n);
    for (float& value : x) value = scale * normal();
    return x;
  }
  std::vector<float> uniform(size_t n, float lo, float hi) {
    std::vector<float> x(n);
    for (float& value : x) value = uniform(lo, hi);
    return x;
  }
  // Row i's parent, for rows in topological order; row 0 is the root (-1). Branchy: half of the rows extend
  // the row before them.
  std::vector<int32_t> tree(int n) {
    std::vector<int32_t> parents(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i)
      parents[static_cast<size_t>(i)] = i == 0 ? -1 : chance(0.5) ? i - 1 : below(i);
    return parents;
  }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

// Ancestor words (AncestorBits) of a tree given by parents.
inline std::vector<uint64_t> ancestor_words(const std::vector<int32_t>& parents, int words_per_row) {
  std::vector<uint64_t> words(parents.size() * static_cast<size_t>(words_per_row));
  for (size_t i = 0; i < parents.size(); ++i)
    for (int32_t j = static_cast<int32_t>(i); j >= 0; j = parents[static_cast<size_t>(j)])
      words[i * static_cast<size_t>(words_per_row) + static_cast<size_t>(j >> 6)] |= uint64_t{1} << (j & 63);
  return words;
}

// The rows from the root to `row`.
inline std::vector<int32_t> path_to(const std::vector<int32_t>& parents, int32_t row) {
  std::vector<int32_t> path;
  for (; row >= 0; row = parents[static_cast<size_t>(row)]) path.insert(path.begin(), row);
  return path;
}

}  // namespace thermo::testing
