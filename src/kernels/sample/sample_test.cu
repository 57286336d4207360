// The list against its definition: everything from the floor up and nothing else, on rows that are smooth,
// tied, sorted, empty, infinite or not numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "device/buffer.h"
#include "device/testing/skip_without_gpu.h"
#include "kernels/sample/sample_cuda.h"

namespace thermo {
namespace {

struct NamedRow {
  const char* name;
  std::vector<float> logits;
  bool listed = true;  // false: so many tokens are tied that there may be no list
};

std::vector<NamedRow> rows_of(int n_vocab) {
  std::mt19937 random(static_cast<unsigned>(n_vocab));
  std::normal_distribution<float> normal(0.0f, 3.0f);
  const auto n = static_cast<size_t>(n_vocab);
  const bool small = n_vocab <= kMaxTopTokens;
  std::vector<NamedRow> rows;
  const auto add = [&](const char* name, bool listed, auto value) {
    NamedRow row{name, std::vector<float>(n), listed};
    for (size_t i = 0; i < n; ++i) row.logits[i] = value(i);
    rows.push_back(std::move(row));
  };
  const auto uniform = [&] { return static_cast<float>(random() % 1000) / 1000.0f; };
  add("normal", true, [&](size_t) { return normal(random); });
  add("near each other", true, [&](size_t) { return 100.0f + 1e-3f * normal(random); });
  add("tied", small, [&](size_t) { return std::round(normal(random)); });
  add("around zero", true, [&](size_t) { return random() % 2 == 0 ? 0.0f : -std::fabs(normal(random)); });
  rows.back().listed = small;
  add("equal", small, [&](size_t) { return -2.5f; });
  add("none", true, [&](size_t) { return -INFINITY; });
  add("one", true, [&](size_t i) { return i == n / 2 ? -7.0f : -INFINITY; });
  add("a few", true, [&](size_t i) { return i % 1000 == 3 ? normal(random) : -INFINITY; });
  add("no numbers", true,
      [&](size_t i) { return i % 3 == 0 ? std::numeric_limits<float>::quiet_NaN() : normal(random); });
  add("infinite", true, [&](size_t i) { return i % 5000 == 4 ? INFINITY : normal(random); });
  add("negative", true, [&](size_t) { return -50.0f - 10.0f * uniform() + 1e-3f * normal(random); });
  add("rising", true, [&](size_t i) { return static_cast<float>(i) * 0.01f; });
  add("falling", true, [&](size_t i) { return -static_cast<float>(i) * 0.01f; });
  return rows;
}

void check(const NamedRow& row, int n_wanted, const TopLogits& got, const TopLogits& want) {
  EXPECT_EQ(got.best, want.best);
  EXPECT_EQ(got.max, want.max);
  if (want.best >= 0 && want.max < INFINITY) EXPECT_NEAR(got.sum_exp / want.sum_exp, 1.0, 1e-5);
  if (n_wanted == 1) {
    EXPECT_EQ(got.n, TopLogits::kNotListed);
    return;
  }
  if (got.n == TopLogits::kNotListed) {
    EXPECT_FALSE(row.listed) << "no list";
    return;
  }
  ASSERT_LE(got.n, kMaxTopTokens);
  std::vector<int32_t> ids, expected;
  for (const TokenLogit& token : got.list()) {
    ids.push_back(token.id);
    ASSERT_TRUE(token.id >= 0 && static_cast<size_t>(token.id) < row.logits.size());
    EXPECT_EQ(token.logit, row.logits[static_cast<size_t>(token.id)]);
  }
  int above = 0;
  for (size_t i = 0; i < row.logits.size(); ++i) {
    above += row.logits[i] > -INFINITY;
    if (row.logits[i] >= got.floor && row.logits[i] > -INFINITY) expected.push_back(static_cast<int32_t>(i));
  }
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(ids, expected);
  EXPECT_GE(got.n, std::min(n_wanted, above));
}

TEST(SampleCuda, ListsEveryTokenFromTheFloorUp) {
  SKIP_WITHOUT_GPU();
  for (const int n_vocab :
       {1, 2, 31, 255, 256, 257, 1000, 1024, 1025, 2048, 4099, 16384, 50257, 151936, 248320}) {
    const std::vector<NamedRow> rows = rows_of(n_vocab);
    const int max_rows = static_cast<int>(rows.size()) + 1;  // the last one is not asked for
    const size_t row_bytes = static_cast<size_t>(n_vocab) * sizeof(float);
    DeviceBuffer logits(row_bytes * static_cast<size_t>(max_rows));
    for (size_t r = 0; r < rows.size(); ++r)
      cudaMemcpy(logits.data() + r * row_bytes, rows[r].logits.data(), row_bytes, cudaMemcpyHostToDevice);
    DeviceBuffer scratch(top_logits_scratch_floats() * sizeof(float) * static_cast<size_t>(max_rows));
    PinnedBuffer out(sizeof(TopLogits) * static_cast<size_t>(max_rows));
    std::vector<int32_t> values(static_cast<size_t>(max_rows) + 1);
    DeviceBuffer counts(values.size() * sizeof(int32_t));
    std::vector<TopLogits> want(1);
    constexpr int kWanted[] = {kTopTokens, 20, 2, 1, 0};
    for (int round = 0; round < 5; ++round) {  // every row wants each of them once
      values[0] = max_rows - 1;
      for (int r = 0; r < max_rows; ++r) values[static_cast<size_t>(r) + 1] = kWanted[(r + round) % 5];
      cudaMemcpy(counts.data(), values.data(), counts.size(), cudaMemcpyHostToDevice);
      std::memset(static_cast<void*>(out.data()), 0x5a, out.size());
      top_logits_cuda({.logits = logits.as<float>(),
                       .n_vocab = n_vocab,
                       .max_rows = max_rows,
                       .n_rows = counts.as<int32_t>(),
                       .n_wanted = counts.as<int32_t>() + 1,
                       .scratch = scratch.as<float>(),
                       .out = out.as<TopLogits>()},
                      {});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      for (int r = 0; r < max_rows; ++r) {
        const int n_wanted = values[static_cast<size_t>(r) + 1];
        const TopLogits& got = out.as<TopLogits>()[r];
        const std::byte* const bytes = reinterpret_cast<const std::byte*>(&got);
        size_t written = sizeof(TopLogits);
        while (written > 0 && bytes[written - 1] == std::byte{0x5a}) --written;
        if (r == max_rows - 1 || n_wanted == 0) {
          ASSERT_EQ(written, 0u) << "a row that was not asked for";
          continue;
        }
        ASSERT_LE(written, offsetof(TopLogits, tokens) + got.list().size_bytes()) << "after the list";
        SCOPED_TRACE(::testing::Message() << rows[static_cast<size_t>(r)].name << ", " << n_vocab
                                          << " tokens, " << n_wanted << " wanted");
        top_logits_ref(rows[static_cast<size_t>(r)].logits, n_wanted, want[0]);
        check(rows[static_cast<size_t>(r)], n_wanted, got, want[0]);
      }
    }
  }
}

}  // namespace
}  // namespace thermo
