// The values of synthetic tensors, fast: 20 GB in the time it takes to write them.
//
// Drawing and quantising 35 billion normal values takes minutes. A large tensor is therefore a shuffle of a
// pool: about a million values, quantised once for each type and deviation, from which runs of 1024 values
// are copied to where a random number says. Small tensors (norms, routers, everything of the tiny shapes) are
// drawn afresh. What a tensor holds depends on the seed and its name only, never on the number of threads.
//
// Skew. Real routers prefer some experts. Here a share of the residual stream's channels (one in 32, the
// first ones) is constant in every embedding, and each router row has a part along these channels, drawn once
// per expert. The part is the same for every token, so that expert is more or less likely throughout. `skew`
// is the share of the logits' deviation that comes from this part: 0 none, 0.7 about half of the variance;
// the rest is reduced so that the deviation stays. Layers add to the residual stream and so dilute the
// constant; the router's part grows with the depth to make up for it.
//
// Locality. Neighbouring tokens of a text are about one thing, and their rows share experts. Here tokens
// whose ids are in one run of kTopicTokens are of one topic, and have a part of their embedding in common:
// `locality` is its share of the deviation. Routers see it in every layer, because what layers add depends on
// it, too. The file says how long the runs are (kTopicTokensKey), and `bench` then takes the words of a text
// from one topic for that many tokens. In a text that the model writes itself, topics change with every
// token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "cli/synth/synth_shape.h"

namespace thermo {

class ThreadPool;

// splitmix64: a few cycles a number, any seed is good.
class SynthRandom {
 public:
  explicit SynthRandom(uint64_t seed) : state_(seed) {}
  uint64_t next() noexcept {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  // In (0, 1].
  double uniform() noexcept { return static_cast<double>((next() >> 11) + 1) * 0x1p-53; }
  uint64_t below(uint64_t n) noexcept {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * n) >> 64);
  }
  void normal(std::span<float> out, float deviation) noexcept;

 private:
  uint64_t state_;
};

class SynthFiller {
 public:
  // Draws the pools that `tensors` need. `tensors` must outlive the filler.
  SynthFiller(const SynthOptions& options, std::span<const SynthTensor> tensors, ThreadPool& threads);

  // Writes rows [first, first + n) of a tensor. Any thread. `first` must be a multiple of rows_per_chunk()
  // and n at most that, so that a row's values do not depend on how the work is cut.
  void fill(const SynthTensor& tensor, uint64_t first, uint64_t n, std::byte* out) const noexcept;
  static uint64_t rows_per_chunk(const SynthTensor& tensor);

 private:
  struct Pool {
    std::vector<std::byte> body;   // blocks of normal values
    std::vector<std::byte> heads;  // the first 256 values of embedding rows, constant channels included
  };
  using PoolKey = std::pair<DType, float>;

  bool is_pooled(const SynthTensor& tensor) const;
  void draw_row(const SynthTensor& tensor, uint64_t row, SynthRandom& random,
                std::span<float> out) const noexcept;
  // Mixes in what the row's token has in common with its topic. `topic` is kept from row to row.
  void add_topic(const SynthTensor& tensor, uint64_t row, std::vector<float>& topic,
                 std::span<float> out) const noexcept;
  void copy_rows(const SynthTensor& tensor, uint64_t n, SynthRandom& random, std::byte* out) const noexcept;

  SynthOptions options_;
  int n_constant_;  // constant channels
  std::map<PoolKey, Pool> pools_;
};

}  // namespace thermo
