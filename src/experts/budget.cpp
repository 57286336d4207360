#include "experts/budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/units.h"

namespace thermo {
namespace {

Error refuse(const char* sentence) {
  return {ErrorCode::InvalidArgument, sentence};
}

}  // namespace

uint64_t ExpertBudget::resolve(uint64_t total_bytes, uint64_t auto_bytes) const {
  uint64_t wanted = bytes.value_or(auto_bytes);
  // Rounded up, so that 100 % is everything and a share that ends exactly at an expert's end includes it.
  if (share) wanted = static_cast<uint64_t>(std::ceil(*share * static_cast<double>(total_bytes)));
  return std::min(wanted, total_bytes);
}

std::string ExpertBudget::describe() const {
  if (bytes) return format_bytes(*bytes);
  if (share) return fmt::format("{:g} % of the experts", 100.0 * *share);
  return "auto";
}

Result<ExpertBudget> parse_expert_budget(std::string_view text) {
  ExpertBudget budget;
  if (text == "auto") return budget;
  if (text.ends_with('%')) {
    std::string_view digits = text.substr(0, text.size() - 1);
    while (digits.ends_with(' ')) digits.remove_suffix(1);
    double percent = 0.0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), percent);
    if (error != std::errc() || end != digits.data() + digits.size() || !(percent >= 0.0 && percent <= 100.0))
      return refuse("a share of the experts from 0% to 100% was expected");
    budget.share = percent / 100.0;
    return budget;
  }
  budget.bytes = parse_bytes(text);
  if (!budget.bytes)
    return refuse("a size (11G, 512MiB, 0), a share of the experts (60%) or auto was expected");
  return budget;
}

}  // namespace thermo
