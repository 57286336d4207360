#include "cli/synth/synth_fill.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numbers>
#include <string_view>

#include "base/thread_pool.h"
#include "base/units.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {
namespace {

constexpr size_t kPoolElements = 1 << 20;
constexpr size_t kRunElements = 1024;  // copied from the pool at once
constexpr size_t kHeadElements = 256;  // the beginning of an embedding row that holds the constant channels
constexpr uint64_t kDrawnElements = 1 << 18;  // tensors up to this size are drawn afresh
constexpr uint64_t kChunkBytes = 256 * KiB;

constexpr float kConstant = 2.0F;         // value of the constant channels
constexpr float kRouterDeviation = 1.5F;  // of the router's logits
// What a layer adds to the variance of the residual stream: measured, 0.16 for qwen35moe and 0.22 for laguna.
constexpr float kLayerVariance = 0.17F;

// FNV-1a: the same on every machine, unlike std::hash.
uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

uint64_t mix(uint64_t a, uint64_t b) {
  return SynthRandom(a ^ (b * 0xD6E8FEB86659FD93)).next();
}

size_t bytes_of(DType dtype, size_t n_elements) {
  return static_cast<size_t>(row_bytes(dtype, n_elements));
}

}  // namespace

void SynthRandom::normal(std::span<float> out, float deviation) noexcept {
  // Box and Muller: two at a time.
  for (size_t i = 0; i < out.size(); i += 2) {
    const float radius = deviation * std::sqrt(-2.0F * std::log(static_cast<float>(uniform())));
    const float angle = 2.0F * std::numbers::pi_v<float> * static_cast<float>(uniform());
    out[i] = radius * std::cos(angle);
    if (i + 1 < out.size()) out[i + 1] = radius * std::sin(angle);
  }
}

SynthFiller::SynthFiller(const SynthOptions& options, std::span<const SynthTensor> tensors,
                         ThreadPool& threads)
    : options_(options), n_constant_(options.skew > 0.0 ? options.shape->config.n_embd / 32 : 0) {
  for (const SynthTensor& tensor : tensors)
    if (is_pooled(tensor)) pools_.try_emplace({tensor.dtype, tensor.scale});
  if (pools_.empty()) return;

  constexpr int kPieces = 64;
  constexpr size_t kPiece = kPoolElements / kPieces;
  std::vector<float> values(kPoolElements);
  threads.run(kPieces, [&](int piece, int) {
    SynthRandom random(mix(options_.seed, static_cast<uint64_t>(piece)));
    random.normal(std::span(values).subspan(static_cast<size_t>(piece) * kPiece, kPiece), 1.0F);
  });
  for (auto& [key, pool] : pools_) {
    const auto& [dtype, scale] = key;
    pool.body.resize(bytes_of(dtype, kPoolElements));
    pool.heads.resize(n_constant_ > 0 ? pool.body.size() : 0);
    threads.run(kPieces, [&, dtype = dtype, scale = scale, pool = &pool](int piece, int) {
      const size_t at = static_cast<size_t>(piece) * kPiece;
      std::vector<float> scaled(kPiece);
      std::transform(values.begin() + static_cast<ptrdiff_t>(at),
                     values.begin() + static_cast<ptrdiff_t>(at + kPiece), scaled.begin(),
                     [scale](float v) { return v * scale; });
      quantize_row(dtype, scaled.data(), static_cast<int64_t>(kPiece),
                   pool->body.data() + bytes_of(dtype, at));
      if (n_constant_ == 0) return;
      for (size_t head = 0; head < kPiece; head += kHeadElements)
        std::fill_n(scaled.begin() + static_cast<ptrdiff_t>(head), n_constant_, kConstant * scale);
      quantize_row(dtype, scaled.data(), static_cast<int64_t>(kPiece),
                   pool->heads.data() + bytes_of(dtype, at));
    });
  }
}

bool SynthFiller::is_pooled(const SynthTensor& tensor) const {
  const bool is_matrix =
      tensor.fill == SynthFill::Matrix || (tensor.fill == SynthFill::Embedding && options_.locality == 0.0);
  return is_matrix && tensor.n_elements() > kDrawnElements && tensor.dims[0] % kHeadElements == 0;
}

uint64_t SynthFiller::rows_per_chunk(const SynthTensor& tensor) {
  return std::max<uint64_t>(1, kChunkBytes / row_bytes(tensor.dtype, tensor.dims[0]));
}

void SynthFiller::fill(const SynthTensor& tensor, uint64_t first, uint64_t n, std::byte* out) const noexcept {
  SynthRandom random(mix(mix(options_.seed, hash_name(tensor.name)), first));
  if (is_pooled(tensor)) {
    copy_rows(tensor, n, random, out);
    return;
  }
  const size_t n_in = tensor.dims[0], n_bytes = bytes_of(tensor.dtype, n_in);
  std::vector<float> row(n_in), topic;
  for (uint64_t i = 0; i < n; ++i) {
    draw_row(tensor, first + i, random, row);
    if (tensor.fill == SynthFill::Embedding && options_.locality > 0.0)
      add_topic(tensor, first + i, topic, row);
    quantize_row(tensor.dtype, row.data(), static_cast<int64_t>(n_in), out + i * n_bytes);
  }
}

void SynthFiller::copy_rows(const SynthTensor& tensor, uint64_t n, SynthRandom& random,
                            std::byte* out) const noexcept {
  const Pool& pool = pools_.at({tensor.dtype, tensor.scale});
  const size_t n_in = tensor.dims[0];
  const bool has_head = tensor.fill == SynthFill::Embedding && n_constant_ > 0;
  const auto copy = [&](const std::vector<std::byte>& from, size_t at, size_t n_elements) {
    const size_t n_bytes = bytes_of(tensor.dtype, n_elements);
    std::memcpy(out, from.data() + bytes_of(tensor.dtype, at), n_bytes);
    out += n_bytes;
  };
  // Without heads rows need no attention: one long run of values.
  const uint64_t n_spans = has_head ? n : 1;
  for (uint64_t span = 0; span < n_spans; ++span) {
    size_t left = has_head ? n_in : n * n_in;
    if (has_head) {
      copy(pool.heads, random.below(kPoolElements / kHeadElements) * kHeadElements, kHeadElements);
      left -= kHeadElements;
    }
    while (left > 0) {
      const size_t run = std::min(left, kRunElements);
      copy(pool.body, random.below((kPoolElements - run) / kHeadElements + 1) * kHeadElements, run);
      left -= run;
    }
  }
}

void SynthFiller::add_topic(const SynthTensor& tensor, uint64_t row, std::vector<float>& topic,
                            std::span<float> out) const noexcept {
  const auto common = static_cast<float>(options_.locality), own = std::sqrt(1.0F - common * common);
  if (topic.empty() || row % kTopicTokens == 0) {
    topic.resize(out.size());
    SynthRandom(mix(mix(options_.seed, hash_name("topic")), row / kTopicTokens)).normal(topic, tensor.scale);
  }
  for (size_t i = static_cast<size_t>(n_constant_); i < out.size(); ++i)
    out[i] = own * out[i] + common * topic[i];
}

void SynthFiller::draw_row(const SynthTensor& tensor, uint64_t row, SynthRandom& random,
                           std::span<float> out) const noexcept {
  const auto constants = out.first(std::min(out.size(), static_cast<size_t>(n_constant_)));
  switch (tensor.fill) {
    case SynthFill::Matrix:
      random.normal(out, tensor.scale);
      break;
    case SynthFill::Embedding:
      random.normal(out, tensor.scale);
      std::fill(constants.begin(), constants.end(), kConstant * tensor.scale);
      break;
    case SynthFill::Router: {
      const auto skew = static_cast<float>(options_.skew);
      const float own = std::sqrt(1.0F - skew * skew) * kRouterDeviation;
      random.normal(out, own / std::sqrt(static_cast<float>(out.size())));
      if (n_constant_ == 0) break;
      // The router sees the normed residual stream, where the constant has become this.
      const float variance =
          1.0F + kConstant * kConstant / 32.0F + kLayerVariance * static_cast<float>(tensor.layer);
      const float seen = kConstant / std::sqrt(variance);
      float preference = 0.0F;
      SynthRandom(mix(mix(options_.seed, hash_name(tensor.name)), ~row)).normal({&preference, 1}, 1.0F);
      const float part = skew * kRouterDeviation * preference / (seen * static_cast<float>(n_constant_));
      std::fill(constants.begin(), constants.end(), part);
      break;
    }
    case SynthFill::Norm:
      random.normal(out, tensor.scale);
      for (float& value : out) value += 1.0F;
      break;
    case SynthFill::Decay:
      for (float& value : out) value = -std::exp(static_cast<float>(random.uniform()) * std::log(16.0F));
      break;
    case SynthFill::TimeStep:
      for (float& value : out) {
        const double step = 0.001 * std::pow(100.0, random.uniform());
        value = static_cast<float>(std::log(std::expm1(step)));  // softplus of it is `step`
      }
      break;
  }
}

}  // namespace thermo
