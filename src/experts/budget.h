// How much memory experts may take, as a person writes it: "11G", "60%", "auto".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace thermo {

struct ExpertBudget {
  std::optional<uint64_t> bytes;  // given as a size
  std::optional<double> share;    // given as a share of the experts' bytes, 0 to 1; neither: auto

  bool is_auto() const { return !bytes && !share; }
  // In bytes, at most `total_bytes` (of all experts); `auto_bytes`: what auto means.
  uint64_t resolve(uint64_t total_bytes, uint64_t auto_bytes) const;
  // "60 % of the experts", "11.00 GiB", "auto".
  std::string describe() const;
};

// Refused with what was expected: anything else, a negative size, more than 100 %.
Result<ExpertBudget> parse_expert_budget(std::string_view text);

}  // namespace thermo
