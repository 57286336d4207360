#include "sampling/constrained_sampler.h"

namespace thermo {

TokenFilter ConstrainedSampler::filter() const {
  if (!constraint_ || !constraint_->constrains()) return {};
  TokenFilter filter([constraint = constraint_.get()](int32_t token) { return constraint->allows(token); });
  filter.mask = [constraint = constraint_.get()] { return constraint->mask(); };
  return filter;
}

int32_t ConstrainedSampler::settle(int32_t chosen) {
  const int32_t token = constraint_ ? constraint_->instead_of(chosen) : chosen;
  forced_ = token != chosen;
  return token;
}

int32_t ConstrainedSampler::sample(std::span<const float> logits, int64_t position) {
  const std::optional<int32_t> forced = constraint_ ? constraint_->forced() : std::nullopt;
  if (!forced) return settle(sampler_.sample(logits, position, filter()));
  forced_ = true;
  return *forced;
}

std::optional<int32_t> ConstrainedSampler::sample(const TopLogits& top, int64_t position) {
  const std::optional<int32_t> forced = constraint_ ? constraint_->forced() : std::nullopt;
  if (forced) {
    forced_ = true;
    return forced;
  }
  const std::optional<int32_t> chosen = sampler_.sample(top, position, filter());
  return chosen ? std::optional(settle(*chosen)) : std::nullopt;
}

LogitsNeed ConstrainedSampler::need() const {
  const LogitsNeed need = sampler_.need();
  // The best token may not be allowed. What is constrained may begin or end within the rows of one step.
  return constraint_ && need == LogitsNeed::Best ? LogitsNeed::Top : need;
}

void ConstrainedSampler::accept(int32_t token) {
  sampler_.accept(token, forced_);
  forced_ = false;
  if (constraint_) constraint_->accept(token);
}

}  // namespace thermo
