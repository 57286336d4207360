// What the tests of the models on the processor and on a GPU share: the small models with the recorded
// outputs of the reference implementation, and runs over their tokens.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "gguf/gguf_file.h"
#include "model/dense_parts.h"
#include "model/model_config.h"
#include "model/network.h"
#include "model/step.h"

namespace thermo {

template <class T>
std::vector<T> recorded_values(const GgufFile& file, const std::string& name) {
  const GgufTensor& tensor = file.require_tensor(name);
  std::vector<T> values(tensor.n_elements());
  std::memcpy(values.data(), tensor.data, tensor.n_bytes);
  return values;
}

// tests/data/<name>-f32.gguf and what it gives.
struct RecordedModel {
  GgufFile file, expected;
  std::vector<TokenId> ids;

  explicit RecordedModel(const std::string& name)
      : file(std::string(THERMO_TEST_DATA) + "/" + name + "-f32.gguf"),
        expected(std::string(THERMO_TEST_DATA) + "/" + name + "-expected.gguf"),
        ids(recorded_values<TokenId>(expected, "ids")) {}

  std::vector<float> reference(const std::string& name) const {
    return recorded_values<float>(expected, name);
  }
};

// The network of a file as it is split: a dense one in parts.
inline ModelConfig read_split_config(const GgufFile& file) {
  ModelConfig config = read_model_config(file);
  if (const int n_parts = dense_parts(config, file); n_parts > 0) cut_dense(config, n_parts);
  return config;
}

// Taps of the states 0 to n_layer.
inline void insert_all_taps(Network& network, int n_layer) {
  std::vector<int> states(static_cast<size_t>(n_layer) + 1);
  std::iota(states.begin(), states.end(), 0);
  insert_taps(network, n_layer, states);
}

inline std::vector<Row> chain(std::span<const TokenId> ids) {
  std::vector<Row> rows;
  for (size_t i = 0; i < ids.size(); ++i)
    rows.push_back({.token = ids[i], .parent = static_cast<int32_t>(i) - 1, .want_logits = true});
  return rows;
}

// A step of one sequence.
template <class AnyModel>
StepOutput step_rows(AnyModel& model, std::span<const Row> rows, SequenceRows group = {},
                     float* hidden = nullptr) {
  group.rows = rows;
  return model.step({.groups = {&group, 1}, .hidden = hidden});
}

// Appends the logits of the rows from `first` on, at most `n` of them.
inline void append_logits(const StepOutput& output, std::vector<float>& all, size_t first = 0,
                          size_t n = SIZE_MAX) {
  for (size_t i = first; i < output.rows.size() && i - first < n; ++i)
    all.insert(all.end(), output.rows[i].logits.begin(), output.rows[i].logits.end());
}
inline std::vector<float> logits_of(const StepOutput& output) {
  std::vector<float> all;
  append_logits(output, all);
  return all;
}

struct Outputs {
  std::vector<float> logits;               // [tokens][n_vocab]
  std::vector<std::vector<float>> hidden;  // of each layer: [tokens][n_embd]; empty unless asked for
};

// Feeds the tokens to sequence 0, `chunk` in a step.
template <class AnyModel>
Outputs run_in_chunks(AnyModel& model, std::span<const TokenId> ids, size_t chunk, bool with_hidden = false) {
  const ModelConfig& c = model.config();
  Outputs all;
  all.hidden.resize(with_hidden ? static_cast<size_t>(c.network.n_taps) : 0);
  model.clear(0);
  for (size_t begin = 0; begin < ids.size(); begin += chunk) {
    const size_t n = std::min(chunk, ids.size() - begin), layer = n * static_cast<size_t>(c.n_embd);
    const std::vector<Row> rows = chain(ids.subspan(begin, n));
    std::vector<float> hidden(with_hidden ? all.hidden.size() * layer : 0);
    append_logits(step_rows(model, rows, {}, with_hidden ? hidden.data() : nullptr), all.logits);
    for (size_t l = 0; with_hidden && l < all.hidden.size(); ++l)
      all.hidden[l].insert(all.hidden[l].end(), hidden.begin() + static_cast<std::ptrdiff_t>(l * layer),
                           hidden.begin() + static_cast<std::ptrdiff_t>((l + 1) * layer));
  }
  return all;
}

// Largest difference in units of the reference's standard deviation.
inline double error_of(std::span<const float> got, std::span<const float> want) {
  EXPECT_EQ(got.size(), want.size());
  if (got.size() != want.size()) return HUGE_VAL;
  double mean = 0, square = 0, worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    mean += want[i];
    square += static_cast<double>(want[i]) * want[i];
    const double difference = std::fabs(static_cast<double>(got[i]) - want[i]);
    worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
  }
  mean /= static_cast<double>(want.size());
  return worst / std::sqrt(square / static_cast<double>(want.size()) - mean * mean);
}

// The error of the typical row.
inline double median_error_of_rows(std::span<const float> got, std::span<const float> want, size_t n_vocab) {
  EXPECT_EQ(got.size(), want.size());
  if (got.size() != want.size() || want.empty()) return HUGE_VAL;
  std::vector<double> errors;
  for (size_t begin = 0; begin < want.size(); begin += n_vocab)
    errors.push_back(error_of(got.subspan(begin, n_vocab), want.subspan(begin, n_vocab)));
  const auto middle = errors.begin() + static_cast<std::ptrdiff_t>(errors.size() / 2);
  std::nth_element(errors.begin(), middle, errors.end());
  return *middle;
}

}  // namespace thermo
