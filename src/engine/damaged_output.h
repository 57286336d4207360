// Damaged weights spread through a whole row of logits, so no token that is chosen from it would be an
// answer.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "base/result.h"
#include "kernels/sample/sample.h"

namespace thermo {

// Of a row of logits: its best ones where there are some, else the row.
inline bool has_numbers(const TopLogits* top, std::span<const float> row) {
  if (top != nullptr) return top->best >= 0;
  return row.empty() || std::any_of(row.begin(), row.end(), [](float logit) { return logit > -INFINITY; });
}

inline Error no_numbers_error(int n_past) {
  return {
      ErrorCode::Unsupported,
      fmt::format("after {} tokens the model's output has no numbers in it: its weights are damaged; fetch "
                  "or convert the file again",
                  n_past)};
}

}  // namespace thermo
