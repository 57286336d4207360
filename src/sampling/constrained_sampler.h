// A sampler and what constrains it, used as one. Without a constraint it is the sampler.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "sampling/sampler.h"
#include "sampling/token_constraint.h"

namespace thermo {

class ConstrainedSampler {
 public:
  // The constraint is shared with whoever follows the answer; nullptr: none.
  ConstrainedSampler(Sampler sampler, std::shared_ptr<TokenConstraint> constraint)
      : sampler_(std::move(sampler)), constraint_(std::move(constraint)) {}

  // As those of the sampler. A forced token needs nothing of the row.
  int32_t sample(std::span<const float> logits, int64_t position);
  std::optional<int32_t> sample(const TopLogits& top, int64_t position);
  LogitsNeed need() const;
  // The token that sample() gave.
  void accept(int32_t token);

  uint64_t seed() const noexcept { return sampler_.seed(); }

 private:
  TokenFilter filter() const;
  int32_t settle(int32_t chosen);

  Sampler sampler_;
  std::shared_ptr<TokenConstraint> constraint_;
  bool forced_ = false;  // what sample() gave last was not chosen
};

}  // namespace thermo
