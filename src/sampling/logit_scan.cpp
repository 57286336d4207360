#include "sampling/logit_scan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

namespace thermo {
namespace {

// Four floats: what every x86-64 has. Written by hand because the compiler does not vectorise comparisons
// that must respect NaN. Each loop below keeps four of these, to overlap their latencies.
typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t VecBits __attribute__((vector_size(16)));
constexpr size_t kStep = 16;  // floats per round of a loop

inline Vec load(const float* x) {
  Vec v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}

inline Vec fill(float x) {
  return Vec{x, x, x, x};
}

// Ignores NaN: the comparison is false and the old value stays.
inline Vec larger(Vec value, Vec best) {
  return value > best ? value : best;
}
inline float larger(float value, float best) {
  return value > best ? value : best;
}

float max_of(const float* x, size_t n) {
  Vec a = fill(-INFINITY), b = a, c = a, d = a;
  size_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    a = larger(load(x + i), a);
    b = larger(load(x + i + 4), b);
    c = larger(load(x + i + 8), c);
    d = larger(load(x + i + 12), d);
  }
  a = larger(larger(a, b), larger(c, d));
  float max = larger(larger(a[0], a[1]), larger(a[2], a[3]));
  for (; i < n; ++i) max = larger(x[i], max);
  return max;
}

// exp(x) for x <= 0 within a few units in the last place; about 1e-38 below -87 and for NaN, which makes no
// difference to a sum that contains exp(0) of its maximum.
inline Vec exp_nonpositive(Vec x) {
  x = larger(x, fill(-87.0f));
  const Vec shifted = x * 1.44269504f + 0x1.8p23f;  // nearest integer of x / ln 2, in the low bits
  const Vec whole = shifted - 0x1.8p23f;
  const Vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
  Vec p = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return std::bit_cast<Vec>(std::bit_cast<VecBits>(p) + (std::bit_cast<VecBits>(shifted) << 23));
}

}  // namespace

void TopTokens::start(std::span<const float> logits) {
  logits_ = logits;
  run_max_.resize((logits.size() + kRun - 1) / kRun);
  for (size_t run = 0; run < run_max_.size(); ++run)
    run_max_[run] = max_of(&logits[run * kRun], std::min(kRun, logits.size() - run * kRun));
  max_ = max_of(run_max_.data(), run_max_.size());
}

int32_t TopTokens::argmax() const noexcept {
  if (max_ == -INFINITY) return -1;
  const auto run = static_cast<size_t>(std::find(run_max_.begin(), run_max_.end(), max_) - run_max_.begin());
  return static_cast<int32_t>(
      std::find(logits_.begin() + static_cast<ptrdiff_t>(run * kRun), logits_.end(), max_) - logits_.begin());
}

void TopTokens::take(int64_t n, std::vector<Candidate>& out) {
  out.clear();
  if (n <= 0) return;
  // The n-th largest run maximum bounds the n-th largest logit from below: each of n runs holds at least one
  // logit that large.
  float threshold = -INFINITY;
  if (n < static_cast<int64_t>(run_max_.size())) {
    sorted_max_ = run_max_;
    std::nth_element(sorted_max_.begin(), sorted_max_.begin() + n - 1, sorted_max_.end(), std::greater<>());
    threshold = sorted_max_[static_cast<size_t>(n - 1)];
  }
  for (size_t run = 0; run < run_max_.size(); ++run) {
    if (run_max_[run] < threshold || run_max_[run] == -INFINITY) continue;
    const size_t end = std::min((run + 1) * kRun, logits_.size());
    for (size_t i = run * kRun; i < end; ++i)
      if (logits_[i] >= threshold && logits_[i] > -INFINITY)
        out.push_back({logits_[i], static_cast<int32_t>(i)});
  }
  if (n < static_cast<int64_t>(out.size())) {
    std::nth_element(out.begin(), out.begin() + n - 1, out.end(), comes_first);
    out.resize(static_cast<size_t>(n));
  }
  std::sort(out.begin(), out.end(), comes_first);
}

void append_from(std::span<const float> logits, float threshold, std::vector<Candidate>& out) {
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] >= threshold && logits[i] > -INFINITY) out.push_back({logits[i], static_cast<int32_t>(i)});
}

double sum_exp(std::span<const float> logits, float max) noexcept {
  constexpr size_t kChunk = 1024;  // floats are summed this far, then doubles: the error stays near 1e-7
  double total = 0.0;
  size_t start = 0;
  for (; start + kStep <= logits.size(); start += std::min(kChunk, (logits.size() - start) / kStep * kStep)) {
    const float* x = logits.data() + start;
    const size_t n = std::min(kChunk, (logits.size() - start) / kStep * kStep);
    Vec a = fill(0.0f), b = a, c = a, d = a;
    for (size_t i = 0; i < n; i += kStep) {
      a += exp_nonpositive(load(x + i) - max);
      b += exp_nonpositive(load(x + i + 4) - max);
      c += exp_nonpositive(load(x + i + 8) - max);
      d += exp_nonpositive(load(x + i + 12) - max);
    }
    a = (a + b) + (c + d);
    total += static_cast<double>(a[0]) + a[1] + a[2] + a[3];
  }
  for (; start < logits.size(); ++start)
    total += static_cast<double>(exp_nonpositive(fill(logits[start] - max))[0]);
  return total;
}

double deviation(std::span<const float> logits) noexcept {
  double sum = 0.0, count = 0.0;
  for (float x : logits) {
    const bool finite = std::fabs(x) < INFINITY;
    sum += finite ? static_cast<double>(x) : 0.0;
    count += finite ? 1.0 : 0.0;
  }
  if (count == 0.0) return 0.0;
  const double mean = sum / count;
  double squares = 0.0;
  for (float x : logits) {
    const double off = static_cast<double>(x) - mean;
    squares += std::fabs(x) < INFINITY ? off * off : 0.0;
  }
  return std::sqrt(squares / count);
}

}  // namespace thermo
