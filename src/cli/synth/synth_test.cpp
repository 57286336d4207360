#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/thread_pool.h"
#include "cli/synth/synth_fill.h"
#include "cli/synth/synth_shape.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/route_topk/route_topk.h"

namespace thermo {
namespace {

SynthOptions options_for(std::string_view shape, std::string_view quant = "Q4_K_M") {
  SynthOptions options;
  for (const SynthShape& s : synth_shapes())
    if (s.name == shape) options.shape = &s;
  for (const SynthQuant& q : synth_quants())
    if (q.name == quant) options.quant = &q;
  return options;
}

uint64_t total_bytes(const std::vector<SynthTensor>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), uint64_t{0},
                         [](uint64_t sum, const SynthTensor& t) { return sum + t.n_bytes(); });
}

const SynthTensor& find(const std::vector<SynthTensor>& tensors, std::string_view name) {
  return *std::find_if(tensors.begin(), tensors.end(), [&](const SynthTensor& t) { return t.name == name; });
}

std::vector<float> values_of(const SynthFiller& filler, const SynthTensor& tensor) {
  const uint64_t step = SynthFiller::rows_per_chunk(tensor), row = row_bytes(tensor.dtype, tensor.dims[0]);
  std::vector<std::byte> bytes(tensor.n_bytes());
  for (uint64_t at = 0; at < tensor.n_rows(); at += step)
    filler.fill(tensor, at, std::min(step, tensor.n_rows() - at), bytes.data() + at * row);
  std::vector<float> values(tensor.n_elements());
  dequantize_row(tensor.dtype, bytes.data(), static_cast<int64_t>(values.size()), values.data());
  return values;
}

double deviation(const std::vector<float>& values) {
  double sum = 0, squares = 0;
  for (const float v : values) {
    sum += v;
    squares += static_cast<double>(v) * v;
  }
  const double n = static_cast<double>(values.size());
  return std::sqrt(squares / n - sum / n * (sum / n));
}

// Tensors and bytes of the published Q4_K_M files.
TEST(SynthShape, HasTheSizesOfTheRealFiles) {
  const auto moe = synth_tensors(options_for("qwen35moe-35b-a3b"));
  EXPECT_EQ(moe.size(), 733u);
  EXPECT_EQ(total_bytes(moe), 21'155'768'832u);
  const auto laguna = synth_tensors(options_for("laguna-xs2"));
  EXPECT_EQ(laguna.size(), 678u);
  EXPECT_EQ(total_bytes(laguna), 20'270'574'592u);
  const auto qwen3 = synth_tensors(options_for("qwen3moe-30b-a3b"));
  EXPECT_EQ(qwen3.size(), 579u);
  EXPECT_EQ(total_bytes(qwen3), 18'550'716'416u);
  EXPECT_EQ(synth_tensors(options_for("qwen3moe-235b-a22b")).size(), 1131u);
  EXPECT_EQ(total_bytes(synth_tensors(options_for("qwen3moe-235b-a22b"))), 142'148'069'376u);
  EXPECT_EQ(synth_tensors(options_for("qwen3moe-480b-a35b")).size(), 747u);
  EXPECT_EQ(total_bytes(synth_tensors(options_for("qwen3moe-480b-a35b"))), 290'052'841'472u);
  const auto drafter = synth_tensors(options_for("dflash-35b-a3b", "Q8_0"));
  EXPECT_EQ(drafter.size(), 8 * 11 + 3u);
  EXPECT_EQ(total_bytes(drafter), 503'734'272u);
  EXPECT_EQ(synth_tensors(options_for("dflash-27b", "Q8_0")).size(), 5 * 11 + 3u);
  SynthOptions with_nextn = options_for("qwen35moe-35b-a3b");
  with_nextn.nextn = true;
  EXPECT_EQ(synth_tensors(with_nextn).size(), 753u);
}

TEST(SynthShape, KeepsTheTypesOfTheWholeModelInItsFirstLayers) {
  SynthOptions options = options_for("qwen35moe-35b-a3b");
  options.n_layer = 8;
  const auto tensors = synth_tensors(options);
  std::set<int> more;
  for (const SynthTensor& t : tensors)
    if (t.name.ends_with("ffn_down_exps.weight") && t.dtype == DType::Q6_K) more.insert(t.layer);
  EXPECT_EQ(more, (std::set<int>{0, 1, 2, 3, 4, 7}));
}

TEST(SynthShape, GivesEveryRowAWholeNumberOfBlocks) {
  for (const SynthShape& shape : synth_shapes())
    for (const SynthQuant& quant : synth_quants())
      for (const SynthTensor& t : synth_tensors(options_for(shape.name, quant.name)))
        EXPECT_EQ(t.dims[0] % static_cast<uint64_t>(dtype_info(t.dtype).block_elements), 0u)
            << shape.name << " " << quant.name << " " << t.name;
}

TEST(SynthFill, GivesMatricesTheDeviationTheyAskFor) {
  ThreadPool threads({.n_threads = 2, .pin = false});
  SynthOptions options = options_for("qwen35moe-35b-a3b");
  options.n_layer = 1;
  options.n_vocab = 4096;
  const auto tensors = synth_tensors(options);
  const SynthFiller filler(options, tensors, threads);
  for (const char* name :
       {"token_embd.weight", "output.weight", "blk.0.attn_qkv.weight", "blk.0.ssm_alpha.weight"}) {
    const SynthTensor& tensor = find(tensors, name);
    EXPECT_NEAR(deviation(values_of(filler, tensor)) / tensor.scale, 1.0, 0.03) << name;
  }
}

TEST(SynthFill, DoesNotDependOnTheNumberOfThreads) {
  const SynthOptions options = options_for("qwen35moe-tiny", "Q4_0");
  const auto tensors = synth_tensors(options);
  ThreadPool one({.n_threads = 1, .pin = false}), three({.n_threads = 3, .pin = false});
  const SynthFiller a(options, tensors, one), b(options, tensors, three);
  for (const SynthTensor& t : tensors) EXPECT_EQ(values_of(a, t), values_of(b, t)) << t.name;
}

TEST(SynthFill, GivesTokensDistinctRows) {
  SynthOptions options = options_for("qwen35moe-35b-a3b");
  options.n_layer = 1;
  options.n_vocab = 8192;
  const auto tensors = synth_tensors(options);
  ThreadPool threads({.n_threads = 2, .pin = false});
  const SynthFiller filler(options, tensors, threads);
  const std::vector<float> values = values_of(filler, find(tensors, "output.weight"));
  std::set<std::vector<float>> rows;
  for (size_t at = 0; at < values.size(); at += 2048)
    rows.emplace(values.begin() + static_cast<ptrdiff_t>(at),
                 values.begin() + static_cast<ptrdiff_t>(at) + 32);
  EXPECT_GT(rows.size(), 2000u);  // their first runs come from 4093 places
}

// What a router chooses when it sees the embeddings of the first 1024 tokens: [tokens][experts used].
struct Choices {
  size_t n_expert = 0, n_used = 0;
  std::vector<int32_t> ids;
};

Choices choices_of(std::string_view shape, double skew, double locality) {
  SynthOptions options = options_for(shape);
  options.n_layer = std::min(2, options.shape->config.n_layer);
  options.n_vocab = 1024;
  options.skew = skew;
  options.locality = locality;
  const auto tensors = synth_tensors(options);
  ThreadPool threads({.n_threads = 2, .pin = false});
  const SynthFiller filler(options, tensors, threads);
  const std::vector<float> embeddings = values_of(filler, find(tensors, "token_embd.weight"));
  const std::vector<float> router = values_of(filler, find(tensors, "blk.1.ffn_gate_inp.weight"));
  const auto n_embd = static_cast<size_t>(options.shape->config.n_embd);
  const RouteConfig route{.n_expert = options.shape->config.route.n_expert,
                          .n_expert_used = options.shape->config.route.n_expert_used};
  Choices choices{.n_expert = static_cast<size_t>(route.n_expert),
                  .n_used = static_cast<size_t>(route.n_expert_used),
                  .ids = {}};
  std::vector<float> logits(choices.n_expert), weights(choices.n_expert);
  std::vector<int32_t> ids(choices.n_expert);
  for (size_t token = 0; token < 1024; ++token) {
    const float* x = embeddings.data() + token * n_embd;
    const double scale =
        1.0 / std::sqrt(std::inner_product(x, x + n_embd, x, 0.0) / static_cast<double>(n_embd));
    for (size_t e = 0; e < choices.n_expert; ++e)
      logits[e] =
          static_cast<float>(scale * std::inner_product(x, x + n_embd, router.data() + e * n_embd, 0.0));
    route_topk(route, logits.data(), nullptr, ids.data(), weights.data());
    choices.ids.insert(choices.ids.end(), ids.begin(), ids.begin() + static_cast<ptrdiff_t>(choices.n_used));
  }
  return choices;
}

// Share of the choices that go to the most used quarter of the experts.
double top_quarter_share(std::string_view shape, double skew) {
  const Choices choices = choices_of(shape, skew, 0.0);
  std::vector<int> uses(choices.n_expert, 0);
  for (const int32_t id : choices.ids) ++uses[static_cast<size_t>(id)];
  std::sort(uses.rbegin(), uses.rend());
  const int all = std::accumulate(uses.begin(), uses.end(), 0);
  return static_cast<double>(
             std::accumulate(uses.begin(), uses.begin() + static_cast<ptrdiff_t>(choices.n_expert / 4), 0)) /
         all;
}

// How many experts four tokens in a row use, times those of one.
double experts_of_four(std::string_view shape, double locality) {
  const Choices choices = choices_of(shape, 0.0, locality);
  const size_t four = 4 * choices.n_used;
  double sum = 0.0;
  for (size_t at = 0; at < choices.ids.size(); at += four)
    sum += static_cast<double>(std::set<int32_t>(choices.ids.begin() + static_cast<ptrdiff_t>(at),
                                                 choices.ids.begin() + static_cast<ptrdiff_t>(at + four))
                                   .size());
  return sum / (static_cast<double>(choices.ids.size()) / 4.0);
}

TEST(SynthSkew, MakesSomeExpertsMoreUsed) {
  for (const char* shape : {"qwen35moe-tiny", "qwen35moe-35b-a3b", "laguna-tiny", "qwen3moe-tiny"}) {
    const double none = top_quarter_share(shape, 0.0), some = top_quarter_share(shape, 0.35),
                 much = top_quarter_share(shape, 0.7);
    EXPECT_LT(none, 0.40) << shape;
    EXPECT_GT(some, none + 0.1) << shape;
    EXPECT_GT(much, some + 0.1) << shape;
    EXPECT_LT(much, 0.999) << shape;
  }
}

TEST(SynthLocality, MakesNeighboursShareExperts) {
  const double none = experts_of_four("qwen35moe-35b-a3b", 0.0),
               some = experts_of_four("qwen35moe-35b-a3b", 0.5),
               much = experts_of_four("qwen35moe-35b-a3b", 0.8),
               most = experts_of_four("qwen35moe-35b-a3b", 0.95);
  EXPECT_GT(none, 3.7);
  EXPECT_LT(some, none - 0.1);
  EXPECT_LT(much, some - 0.4);
  EXPECT_LT(most, 2.0);
  RecordProperty("experts_of_four", std::to_string(much));
}
}  // namespace
}  // namespace thermo
