#include "base/units.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

namespace thermo {

std::string format_bytes(uint64_t bytes) {
  if (bytes < KiB) return fmt::format("{} B", bytes);
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = -1;
  while (value >= 1024.0 && unit < 3) {
    value /= 1024.0;
    ++unit;
  }
  return fmt::format("{:.2f} {}", value, units[unit]);
}

std::optional<uint64_t> parse_bytes(std::string_view text) {
  double value = 0.0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc{} || !std::isfinite(value) || value < 0.0) return std::nullopt;
  std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  uint64_t scale = 1;
  if (!unit.empty()) {
    switch (unit.front() | 0x20) {
      case 'k':
        scale = KiB;
        break;
      case 'm':
        scale = MiB;
        break;
      case 'g':
        scale = GiB;
        break;
      case 't':
        scale = 1024 * GiB;
        break;
      case 'b':
        return unit.size() == 1 ? std::optional<uint64_t>(static_cast<uint64_t>(value)) : std::nullopt;
      default:
        return std::nullopt;
    }
    const std::string_view rest = unit.substr(1);
    if (!(rest.empty() || rest == "B" || rest == "b" || rest == "iB" || rest == "ib")) return std::nullopt;
  }
  const double bytes = value * static_cast<double>(scale);
  if (bytes >= 9.2e18) return std::nullopt;
  return static_cast<uint64_t>(bytes);
}

}  // namespace thermo
