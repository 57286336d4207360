// How many of a layer's cold experts the device fetches and how many the processor computes, from how long
// both took lately.
//
// Bandwidths mispredict (two lanes share main memory, handing over costs time, cores get busy), so only whole
// lane times count: from the hand-off to the processor's answer, and to the end of the device's own share.
// Each lane has an estimate for every number of experts: the recent average where there is one, else a line
// through the others. The chosen share makes the slower of the two lanes as fast as possible. Using one lane
// only is among the choices, so by its estimates the split is never slower than the better lane alone. Now
// and then a neighbouring share is tried, because a share that is never used is never measured.
//
// One thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace thermo {

class LaneSplit {
 public:
  // Distinguishes up to `max_experts` cold experts of a layer; above that, shares are in proportion.
  explicit LaneSplit(int max_experts = 64);

  // The processor computed n_experts; from the hand-off to the answer.
  void cpu_took(int n_experts, float us) noexcept;
  // The device did its hot and shared experts and n_fetched fetched ones (may be 0); from the hand-off on.
  void gpu_took(int n_fetched, float us) noexcept;

  // The whole layer, from the hand-off until both shares were there. Only here it shows what the two lanes
  // cost each other: they share main memory.
  void layer_took(int n_cold, int n_fetched, float us) noexcept;

  // Of n_cold distinct experts, how many the device fetches.
  int fetch(int n_cold) const noexcept;
  // fetch_of[n] for every n, for the device; every kExploreEvery-th call one more or one less, every
  // kAloneEvery-th none. `link_busy`: parcels are travelling, and fetched experts would hold them up. Then
  // all cold experts of a layer go to the processor unless it is slower by far; every kExploreEvery-th call
  // tries it all the same.
  void fill(std::span<int32_t> fetch_of, bool link_busy = false) noexcept;

  // Expected microseconds. cpu_us(0) is 0: nothing is handed over.
  float cpu_us(int n_experts) const noexcept;
  float gpu_us(int n_fetched) const noexcept;

  // Expected for the whole layer: the measured time if there is one, else the slower of the two lanes.
  float layer_us(int n_cold, int n_fetched) const noexcept;

  static constexpr int kExploreEvery = 64;
  // The processor alone is tried more often: it may have been slow for a moment only, and while everything is
  // fetched that is never noticed.
  static constexpr int kAloneEvery = 16;

 private:
  static constexpr int kMaxMeasured = 16;  // cold experts of a layer whose shares are measured one by one
  struct Whole {
    float beyond_us =
        0.0f;  // mean, beyond the slower lane's expected time: that follows every sample of the lane
    float weight = 0.0f;  // samples in the mean, at most kMemory, when it was last updated
    uint64_t at = 0;      // fill() number of that update
  };
  float weight(const Whole& whole) const noexcept;  // faded

  // Times of one lane by number of experts.
  class Lane {
   public:
    // The line to start from. The trust in it is in samples: how many it takes to move the base and the
    // slope.
    Lane(int max_experts, float base_us, float slope_us, float trust_base, float trust_slope);
    void took(int n, float us) noexcept;
    void pass_token() noexcept {
      ++now_;
      fit();
    }
    float us(int n) const noexcept { return us_[static_cast<size_t>(n)]; }

   private:
    struct Count {
      float mean_us = 0.0f;
      float weight = 0.0f;  // samples in the mean, at most kMemory, when it was last updated
      uint64_t at = 0;      // token of the last update
    };
    float weight(const Count& count) const noexcept;  // faded
    float estimate(int n) const noexcept;
    void fit() noexcept;

    std::vector<Count> counts_;
    std::vector<float> us_;  // estimate() of each
    uint64_t n_samples_ = 0, now_ = 0;
    float start_base_us_, start_slope_us_, trust_base_, trust_slope_;
    float base_us_, slope_us_;
  };

  int best(int n_cold) const noexcept;
  int best_alone(int n_cold) const noexcept;

  int max_experts_;
  Lane cpu_, gpu_;
  Whole whole_[kMaxMeasured + 1][kMaxMeasured + 1];  // [cold][fetched]
  float both_us_;
  uint64_t n_fills_ = 0;
};

}  // namespace thermo
