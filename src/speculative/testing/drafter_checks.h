// Drafters against recorded outputs, wherever their models run.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "gguf/gguf_file.h"
#include "model/testing/recorded_model.h"
#include "speculative/dflash_drafter.h"
#include "speculative/mtp_drafter.h"

namespace thermo {

inline std::string data(const std::string& name) {
  return std::string(THERMO_TEST_DATA) + "/" + name;
}

// Where the models of drafters are made.
struct DrafterPlace {
  bool repack = true;
  std::function<std::unique_ptr<Backend>(const ModelConfig&, Weights, const ModelOptions&, ThreadPool&)> make;
};

inline constexpr int kDrafterTestSequences = 2;

inline ModelOptions exact_drafter_options(int block) {
  return drafter_model_options({.n_ctx = 128,
                                .n_sequences = kDrafterTestSequences,
                                .k_type = KvType::F32,
                                .v_type = KvType::F32,
                                .isa = best_isa()},
                               block);
}

inline DflashDrafter make_dflash(const DrafterPlace& place, const DflashConfig& config, const GgufFile& file,
                                 const Weights& target, ThreadPool& pool) {
  return {config,
          place.make(config.model, Weights::of_drafter(config.model, file, target, place.repack, pool),
                     exact_drafter_options(config.block), pool),
          kDrafterTestSequences};
}

inline MtpDrafter make_mtp(const DrafterPlace& place, const ModelConfig& target, const Weights& weights,
                           ThreadPool& pool) {
  const ModelConfig config = nextn_network(target);
  return {target.n_layer,
          place.make(config, Weights::of_nextn(config, weights), exact_drafter_options(0), pool),
          kDrafterTestSequences};
}

// Recorded states in the memory of a drafter's model.
class Feeder {
 public:
  // `hidden`: [taps][n][n_embd]
  Feeder(Backend& model, std::span<const float> hidden, size_t n) {
    const auto width = static_cast<size_t>(model.config().n_embd), taps = hidden.size() / (n * width);
    states_ = model.make_states(static_cast<int>(n), static_cast<int>(taps));
    std::vector<float> row;
    for (size_t i = 0; i < n; ++i) {
      row.clear();
      for (size_t tap = 0; tap < taps; ++tap) {
        const auto from = hidden.subspan((tap * n + i) * width, width);
        row.insert(row.end(), from.begin(), from.end());
      }
      states_->write(static_cast<int>(i), row);
    }
  }
  StateRows view(size_t begin, size_t end) const {
    return states_->rows(static_cast<int>(begin), static_cast<int>(end - begin));
  }

 private:
  std::unique_ptr<StateBuffer> states_;
};

inline std::vector<float> recorded_features(const GgufFile& expected, const DflashConfig& config) {
  std::vector<float> all;
  for (const int layer : config.layers) {
    const auto rows = recorded_values<float>(expected, "feature." + std::to_string(layer));
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

inline double deviation_of(std::span<const float> values) {
  double sum = 0.0, squares = 0.0;
  for (const float v : values) {
    sum += v;
    squares += static_cast<double>(v) * v;
  }
  const double n = static_cast<double>(values.size());
  return std::sqrt(squares / n - sum / n * (sum / n));
}

inline double largest_error(std::span<const float> got, std::span<const float> want) {
  double largest = 0.0;
  for (size_t i = 0; i < want.size(); ++i)
    largest = std::max(largest, std::fabs(static_cast<double>(got[i]) - want[i]));
  return largest / deviation_of(want);
}

struct DrafterCase {
  std::string drafter, target;
};

inline const DrafterCase kDrafterCases[] = {{"dflash-qwen35moe", "qwen35moe"},
                                            {"dflash-laguna", "laguna"},
                                            {"dflash-laguna-bidirectional", "laguna"},
                                            {"dflash-qwen35", "qwen35"}};

inline void expect_recorded_blocks(const DrafterPlace& place, const DrafterCase& which) {
  SCOPED_TRACE(which.drafter);
  const GgufFile target_file(data(which.target + "-f32.gguf"));
  const GgufFile file(data(which.drafter + "-f32.gguf"));
  const GgufFile expected(data(which.drafter + "-expected.gguf"));
  const ModelConfig target = read_model_config(target_file);
  const DflashConfig config = read_dflash_config(file, target);
  ThreadPool pool({.n_threads = 2, .pin = false});
  const Weights weights = Weights::load(target, target_file, place.repack, pool, {});
  DflashDrafter drafter = make_dflash(place, config, file, weights, pool);
  const auto ids = recorded_values<TokenId>(expected, "ids");
  const Feeder feeder(drafter.model(), recorded_features(expected, config), ids.size());
  size_t done = 0;
  std::vector<float> hidden(static_cast<size_t>(config.block) * static_cast<size_t>(target.n_embd));
  for (const size_t anchor : {5u, 30u, 77u}) {
    SCOPED_TRACE(anchor);
    const std::string name = "anchor." + std::to_string(anchor);
    // Each sequence gets its features in pieces of another size.
    for (int sequence = 0; sequence < 2; ++sequence)
      for (size_t at = done; at < anchor;) {
        const size_t end = std::min(anchor, at + (sequence == 0 ? anchor : 3));
        drafter.commit(sequence, std::span(ids).subspan(at, end - at), feeder.view(at, end));
        at = end;
      }
    done = anchor;
    // Too much, and back again.
    drafter.commit(1, std::span(ids).subspan(anchor, 2), feeder.view(anchor, anchor + 2));
    drafter.truncate(1, static_cast<int>(anchor));
    const auto want = recorded_values<float>(expected, name + ".logits");
    const auto want_hidden = recorded_values<float>(expected, name + ".hidden");
    for (int sequence = 0; sequence < 2; ++sequence) {
      const StepOutput output = drafter.run_block(sequence, ids[anchor], hidden.data());
      EXPECT_LE(largest_error(logits_of(output), want), 1e-4);
      EXPECT_LE(largest_error(hidden, want_hidden), 1e-4);
    }
    // The same through the face that drafting uses.
    const DraftRequest request{
        .sequence = 0, .root = ids[anchor], .n_depths = config.block - 1, .n_ranks = 3};
    Draft draft;
    drafter.draft({&request, 1}, {&draft, 1});
    const auto n_vocab = static_cast<size_t>(target.n_vocab);
    for (int depth = 1; depth < config.block; ++depth) {
      const auto row = std::span(want).subspan(static_cast<size_t>(depth) * n_vocab, n_vocab);
      EXPECT_EQ(draft.tokens_at(depth)[0], std::max_element(row.begin(), row.end()) - row.begin());
      for (const float logprob : draft.logprobs_at(depth)) EXPECT_LE(logprob, 0.0f);
      double sum = 0.0;
      for (const float logit : row) sum += std::exp(static_cast<double>(logit));
      EXPECT_NEAR(draft.logprobs_at(depth)[0],
                  static_cast<double>(*std::max_element(row.begin(), row.end())) - std::log(sum), 1e-3);
    }
    // All at once: more than is queued.
    drafter.truncate(0, 0);
    drafter.commit(0, std::span(ids).first(anchor), feeder.view(0, anchor));
    EXPECT_LE(largest_error(logits_of(drafter.run_block(0, ids[anchor], nullptr)), want), 1e-4);
  }
}

struct Plankton {
  GgufFile file{std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf"};
  ModelConfig config = read_model_config(file);
  ThreadPool pool{{.n_threads = 2, .pin = false}};
  Weights weights;

  explicit Plankton(const DrafterPlace& place)
      : weights(Weights::load(config, file, place.repack, pool, {})) {}
};

inline std::vector<int32_t> argmax_of(std::span<const float> logits, size_t n_vocab) {
  std::vector<int32_t> best;
  for (size_t at = 0; at < logits.size(); at += n_vocab) {
    const auto row = logits.subspan(at, n_vocab);
    best.push_back(static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin()));
  }
  return best;
}

inline double rms_error(std::span<const float> got, std::span<const float> want) {
  double sum = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    sum += d * d;
  }
  return std::sqrt(sum / static_cast<double>(want.size())) / deviation_of(want);
}

inline void expect_recorded_chains(const DrafterPlace& place) {
  Plankton p(place);
  const GgufFile expected(data("plankton-mtp-expected.gguf"));
  const auto ids = recorded_values<TokenId>(expected, "ids");
  const auto hidden = recorded_values<float>(expected, "hidden");
  const auto want = recorded_values<float>(expected, "mtp.logits");
  const auto n_vocab = static_cast<size_t>(p.config.n_vocab);
  MtpDrafter drafter = make_mtp(place, p.config, p.weights, p.pool);
  const Feeder feeder(drafter.model(), hidden, ids.size());
  const std::vector<float> logits =
      drafter.run_pairs(0, std::span(ids).subspan(1), feeder.view(0, ids.size() - 1));
  EXPECT_EQ(argmax_of(logits, n_vocab), argmax_of(want, n_vocab));
  EXPECT_LE(rms_error(logits, want), 0.06);

  size_t done = 0;
  for (const size_t anchor : {12u, 30u}) {
    SCOPED_TRACE(anchor);
    drafter.commit(1, std::span(ids).subspan(done, anchor - done), feeder.view(done, anchor));
    done = anchor;
    EXPECT_EQ(drafter.snapshot(1).size() * sizeof(float), drafter.snapshot_bytes());
    const DraftRequest request{.sequence = 1, .root = ids[anchor], .n_depths = 4, .n_ranks = 2};
    Draft draft;
    for (int again = 0; again < 2; ++again) {
      drafter.draft({&request, 1}, {&draft, 1});
      const auto chain = recorded_values<TokenId>(expected, "chain." + std::to_string(anchor) + ".ids");
      for (int depth = 1; depth <= 4; ++depth)
        EXPECT_EQ(draft.tokens_at(depth)[0], chain[static_cast<size_t>(depth) - 1]) << depth;
    }
  }
}

// `largest`: the difference of log-probabilities that is allowed.
inline void expect_same_drafts_however_told(const DrafterPlace& place, double largest) {
  Plankton p(place);
  const GgufFile expected(data("plankton-mtp-expected.gguf"));
  const auto recorded = recorded_values<TokenId>(expected, "ids");
  MtpDrafter drafter = make_mtp(place, p.config, p.weights, p.pool);
  // The text three times over: more than is queued.
  std::vector<TokenId> ids;
  std::vector<float> hidden;
  for (int i = 0; i < 3; ++i) {
    const auto once = recorded_values<float>(expected, "hidden");
    ids.insert(ids.end(), recorded.begin(), recorded.end());
    hidden.insert(hidden.end(), once.begin(), once.end());
  }
  const Feeder feeder(drafter.model(), hidden, ids.size());
  const auto draft_at = [&](int sequence, size_t n) {
    const DraftRequest request{.sequence = sequence, .root = ids[n], .n_depths = 3, .n_ranks = 2};
    Draft draft;
    drafter.draft({&request, 1}, {&draft, 1});
    return draft;
  };
  const auto expect_same = [&](const Draft& got, const Draft& want) {
    if (largest == 0.0) {
      EXPECT_EQ(got.tokens, want.tokens);
      EXPECT_EQ(got.logprobs, want.logprobs);
    }
    // The best guess is among the guesses of the other; what follows it depends on a choice.
    const auto end = got.tokens.begin() + got.n_ranks;
    const auto best = std::find(got.tokens.begin(), end, want.tokens[0]);
    ASSERT_NE(best, end);
    EXPECT_NEAR(got.logprobs[static_cast<size_t>(best - got.tokens.begin())], want.logprobs[0], largest);
  };
  drafter.commit(0, std::span(ids).first(20), feeder.view(0, 20));
  const Draft want = draft_at(0, 20);
  // Round by round, with drafts between, and after a way back.
  std::vector<float> point;
  for (size_t n = 1; n <= 20; ++n) {
    drafter.commit(1, std::span(ids).subspan(n - 1, 1), feeder.view(n - 1, n));
    if (n == 10) point = drafter.snapshot(1);
    if (n % 3 == 0) draft_at(1, n);
  }
  expect_same(draft_at(1, 20), want);
  drafter.restore(1, 10, point);
  drafter.commit(1, std::span(ids).subspan(10, 10), feeder.view(10, 20));
  expect_same(draft_at(1, 20), want);
  // At once and in pieces; the last draft's root is part of one of them.
  drafter.commit(0, std::span(ids).subspan(20, 85), feeder.view(20, 105));
  for (size_t n = 20; n < 105; n += 17)
    drafter.commit(1, std::span(ids).subspan(n, 17), feeder.view(n, n + 17));
  const Draft many = draft_at(0, 105);
  expect_same(draft_at(1, 105), many);
  drafter.truncate(0, 0);
  drafter.commit(0, std::span(ids).first(105), feeder.view(0, 105));
  expect_same(draft_at(0, 105), many);
}

inline void expect_planktons_block(const DrafterPlace& place) {
  Plankton p(place);
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  const GgufFile expected(data("plankton-draft-expected.gguf"));
  const DflashConfig config = read_dflash_config(file, p.config);
  DflashDrafter drafter = make_dflash(place, config, file, p.weights, p.pool);
  const auto ids = recorded_values<TokenId>(expected, "ids");
  const size_t n = ids.size() - 1;
  const Feeder feeder(drafter.model(), recorded_features(expected, config), n);
  drafter.commit(0, std::span(ids).first(n), feeder.view(0, n));
  const std::vector<float> got = logits_of(drafter.run_block(0, ids.back(), nullptr));
  const auto want = recorded_values<float>(expected, "logits");
  const auto n_vocab = static_cast<size_t>(p.config.n_vocab);
  EXPECT_EQ(argmax_of(std::span(got).subspan(n_vocab), n_vocab),
            argmax_of(std::span(want).subspan(n_vocab), n_vocab));
  EXPECT_LE(rms_error(std::span(got).subspan(n_vocab), std::span(want).subspan(n_vocab)), 0.05);
}

}  // namespace thermo
