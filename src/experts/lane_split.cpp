#include "experts/lane_split.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace thermo {
namespace {

constexpr float kMemory = 16.0f;         // samples that an average remembers
constexpr float kHalfLife = 16.0f;       // of an average that gets no samples: tokens
constexpr float kOutlier = 3.0f;         // a sample counts at most this many times the estimate
constexpr uint64_t kFirstSamples = 32;   // each of them moves the line; later it is drawn once a token
constexpr float kHalfLifeFills = 64.0f;  // of a whole layer's average that gets no samples: tokens
// What it costs, beyond the slower lane alone, when both lanes work; a starting value (measured with an H200:
// 24 to 32 us), and how many samples it remembers.
constexpr float kStartBothUs = 25.0f, kBothMemory = 64.0f;
// Both lanes together must promise at most this share of the better lane's time: times jump with what other
// programs do.
constexpr float kWorthSharing = 0.93f;
// The processor alone is tried often if it is expected to take at most this much longer.
constexpr float kWorthTrying = 2.0f;
// With a busy link: fetching all must promise at most this share of the processor's time.
constexpr float kSlowerByFar = 0.6f;

}  // namespace

LaneSplit::Lane::Lane(int max_experts, float base_us, float slope_us, float trust_base, float trust_slope)
    : counts_(static_cast<size_t>(max_experts) + 1),
      start_base_us_(base_us),
      start_slope_us_(slope_us),
      trust_base_(trust_base),
      trust_slope_(trust_slope),
      base_us_(base_us),
      slope_us_(slope_us) {
  us_.resize(counts_.size());
  fit();
}

float LaneSplit::Lane::weight(const Count& count) const noexcept {
  if (count.weight == 0.0f) return 0.0f;
  return count.weight * std::exp2(-static_cast<float>(now_ - count.at) / kHalfLife);
}

float LaneSplit::Lane::estimate(int n) const noexcept {
  const Count& count = counts_[static_cast<size_t>(n)];
  const float line = base_us_ + slope_us_ * static_cast<float>(n);
  const float w = weight(count);
  return line + w / (w + 1.0f) * (count.mean_us - line);
}

void LaneSplit::Lane::took(int n, float us_taken) noexcept {
  const int n_most = static_cast<int>(counts_.size()) - 1;
  if (n < 0 || !std::isfinite(us_taken) || us_taken < 0.0f) return;
  if (n > n_most) {
    us_taken *= static_cast<float>(n_most) / static_cast<float>(n);
    n = n_most;
  }
  // A lane that lost its core for a millisecond says nothing about the next time; a lane that really is slow
  // gets there in a few samples.
  us_taken = std::min(us_taken, kOutlier * us(n));
  Count& count = counts_[static_cast<size_t>(n)];
  const float w = weight(count);
  count.mean_us += (us_taken - count.mean_us) / (std::min(w, kMemory - 1.0f) + 1.0f);
  count.weight = std::min(w + 1.0f, kMemory);
  count.at = now_;
  ++n_samples_;
  if (n_samples_ < kFirstSamples)
    fit();
  else
    us_[static_cast<size_t>(n)] = estimate(n);
}

// Least squares over the averages, pulled towards the start line by as many samples as it is trusted. If only
// one number of experts was measured, many lines go through it; this picks the one that keeps what is known
// better (the processor's hand-off, the link's time for an expert).
void LaneSplit::Lane::fit() noexcept {
  double sw = trust_base_, sn = 0.0, snn = trust_slope_;
  double st = static_cast<double>(trust_base_) * start_base_us_;
  double snt = static_cast<double>(trust_slope_) * start_slope_us_;
  for (size_t n = 0; n < counts_.size(); ++n) {
    const double w = weight(counts_[n]);
    const auto x = static_cast<double>(n);
    const double t = counts_[n].mean_us;
    sw += w;
    sn += w * x;
    snn += w * x * x;
    st += w * t;
    snt += w * x * t;
  }
  const double determinant = sw * snn - sn * sn;  // positive: both trusts are
  double slope = (sw * snt - sn * st) / determinant;
  double base = (snn * st - sn * snt) / determinant;
  // More experts never take less time, and nothing takes less than none.
  if (base < 0.0) {
    base = 0.0;
    slope = snt / snn;
  }
  if (slope < 0.0) {
    slope = 0.0;
    base = st / sw;
  }
  base_us_ = static_cast<float>(base);
  slope_us_ = static_cast<float>(slope);
  for (size_t n = 0; n < us_.size(); ++n) us_[n] = estimate(static_cast<int>(n));
}

LaneSplit::LaneSplit(int max_experts)
    : max_experts_(max_experts),
      cpu_(max_experts, 6.0f, 20.0f, 1.0f, 0.01f),
      gpu_(max_experts, 12.0f, 40.0f, 0.01f, 1.0f),
      both_us_(kStartBothUs) {
  THERMO_CHECK(max_experts > 0, "a table of at least one");
}

void LaneSplit::cpu_took(int n_experts, float us) noexcept {
  if (n_experts > 0) cpu_.took(n_experts, us);
}

void LaneSplit::gpu_took(int n_fetched, float us) noexcept {
  gpu_.took(n_fetched, us);
}

float LaneSplit::cpu_us(int n_experts) const noexcept {
  return n_experts == 0 ? 0.0f : cpu_.us(std::min(n_experts, max_experts_));
}

float LaneSplit::gpu_us(int n_fetched) const noexcept {
  return gpu_.us(std::min(n_fetched, max_experts_));
}

void LaneSplit::layer_took(int n_cold, int n_fetched, float us) noexcept {
  if (n_cold < 1 || n_cold > kMaxMeasured || n_fetched < 0 || n_fetched > n_cold) return;
  if (!std::isfinite(us) || us < 0.0f) return;
  Whole& whole = whole_[n_cold][n_fetched];
  const float slower = std::max(cpu_us(n_cold - n_fetched), gpu_us(n_fetched));
  const float beyond = std::min(us, kOutlier * layer_us(n_cold, n_fetched)) - slower;
  if (n_fetched > 0 && n_fetched < n_cold)
    both_us_ += (std::clamp(beyond, 0.0f, 2.0f * slower) - both_us_) / kBothMemory;
  whole.weight = std::min(weight(whole) + 1.0f, kMemory);
  whole.at = n_fills_;
  whole.beyond_us += (beyond - whole.beyond_us) / whole.weight;
}

float LaneSplit::weight(const Whole& whole) const noexcept {
  if (whole.weight == 0.0f) return 0.0f;
  return whole.weight * std::exp2(-static_cast<float>(n_fills_ - whole.at) / kHalfLifeFills);
}

float LaneSplit::layer_us(int n_cold, int n_fetched) const noexcept {
  const float slower = std::max(cpu_us(n_cold - n_fetched), gpu_us(n_fetched));
  const float usual = n_fetched > 0 && n_fetched < n_cold ? both_us_ : 0.0f;
  if (n_cold > kMaxMeasured) return slower + usual;
  const Whole& whole = whole_[n_cold][n_fetched];
  const float w = weight(whole);
  return std::max(0.0f, slower + usual + w / (w + 1.0f) * (whole.beyond_us - usual));
}

int LaneSplit::best(int n_cold) const noexcept {
  const float cpu_alone = layer_us(n_cold, 0), gpu_alone = layer_us(n_cold, n_cold);
  int best = gpu_alone < cpu_alone ? n_cold : 0;
  float best_us = kWorthSharing * std::min(cpu_alone, gpu_alone);
  for (int f = 1; f < n_cold; ++f) {
    const float us = layer_us(n_cold, f);
    if (us < best_us) {
      best = f;
      best_us = us;
    }
  }
  return best;
}

int LaneSplit::fetch(int n_cold) const noexcept {
  if (n_cold <= 0) return 0;
  if (n_cold <= max_experts_) return best(n_cold);
  const int64_t scaled = static_cast<int64_t>(n_cold) * best(max_experts_);
  return static_cast<int>((scaled + max_experts_ / 2) / max_experts_);
}

int LaneSplit::best_alone(int n_cold) const noexcept {
  const int n = std::min(n_cold, max_experts_);
  return layer_us(n, n) < kSlowerByFar * layer_us(n, 0) ? n_cold : 0;
}

void LaneSplit::fill(std::span<int32_t> fetch_of, bool link_busy) noexcept {
  ++n_fills_;
  cpu_.pass_token();
  gpu_.pass_token();
  const bool alone = n_fills_ % kAloneEvery == kAloneEvery - 1;
  const bool explore = n_fills_ % kExploreEvery == 0;
  const int step = link_busy || !explore ? 0 : n_fills_ / kExploreEvery % 2 == 1 ? 1 : -1;
  for (int n = 0; n < static_cast<int>(fetch_of.size()); ++n) {
    const int f = link_busy ? best_alone(n) : fetch(n);
    const bool try_alone = n <= max_experts_ && ((alone && layer_us(n, 0) < kWorthTrying * layer_us(n, f)) ||
                                                 (link_busy && explore));
    fetch_of[static_cast<size_t>(n)] = try_alone ? 0 : std::clamp(f + step, 0, n);
  }
}

}  // namespace thermo
