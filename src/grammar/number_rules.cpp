// Numbers between bounds, digit by digit. A number is a sign, an integer part of up to 16 digits without
// leading zeros, and (not for integers) digits after the point. Bounds are decimal texts; comparing decimals
// is comparing their digits, so nothing is rounded.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "grammar/json_rules.h"

namespace thermo {
namespace {

constexpr int kFractionDigits = 10;       // beyond those of a bound
constexpr double kMaxInteger = 1e16 - 2;  // a double below 10^16

// A number that is not negative.
struct Decimal {
  std::string integer = "0";
  std::string fraction;  // without zeros at its end
  bool excluded = false;
};

Decimal decimal_of(double magnitude, bool excluded) {
  std::string text = fmt::format("{:.17f}", magnitude);
  // The shortest text that reads back as the same number, without an exponent.
  for (int digits = 0; digits < 17; ++digits)
    if (std::string shorter = fmt::format("{:.{}f}", magnitude, digits); std::stod(shorter) == magnitude) {
      text = std::move(shorter);
      break;
    }
  const size_t point = std::min(text.find('.'), text.size());
  Decimal d{.integer = text.substr(0, point), .fraction = "", .excluded = excluded};
  if (point < text.size()) d.fraction = text.substr(point + 1);
  d.fraction.resize(d.fraction.find_last_not_of('0') + 1);  // npos + 1 is 0
  return d;
}

class DigitRules {
 public:
  explicit DigitRules(RuleSet& rules) : rules_(rules) {}

  ExprId digits(char first, char last) {
    return rules_.chars({{static_cast<char32_t>(first), static_cast<char32_t>(last)}});
  }
  ExprId any(int least, int most) { return rules_.repeat(digits('0', '9'), least, most); }

  // Texts of the same length between two of them.
  ExprId between(const std::string& low, const std::string& high) {
    if (low.empty()) return rules_.text("");
    if (low[0] == high[0])
      return rules_.sequence({rules_.text(low.substr(0, 1)), between(low.substr(1), high.substr(1))});
    const auto n = static_cast<int>(low.size()) - 1;
    const std::string zeros(low.size() - 1, '0'), nines(low.size() - 1, '9');
    std::vector<ExprId> parts;
    char first = low[0], last = high[0];
    if (low.substr(1) != zeros) {
      parts.push_back(rules_.sequence({rules_.text(low.substr(0, 1)), between(low.substr(1), nines)}));
      ++first;
    }
    if (high.substr(1) != nines) {
      parts.push_back(rules_.sequence({rules_.text(high.substr(0, 1)), between(zeros, high.substr(1))}));
      --last;
    }
    if (first <= last) parts.push_back(rules_.sequence({digits(first, last), any(n, n)}));
    return rules_.choice(std::move(parts));
  }

  // Integers between two that are not negative, without leading zeros.
  ExprId integers(const std::string& low, const std::string& high) {
    std::vector<ExprId> parts;
    for (size_t n = low.size(); n <= high.size(); ++n) {
      const std::string first = n == low.size() ? low : "1" + std::string(n - 1, '0');
      const std::string last = n == high.size() ? high : std::string(n, '9');
      parts.push_back(between(first, last));
    }
    return rules_.choice(std::move(parts));
  }

  // Fractions: the digits after a point, or nothing at all, which is zero.
  ExprId any_fraction() {
    return rules_.optional(rules_.sequence({rules_.text("."), any(1, kFractionDigits)}));
  }
  ExprId fraction_from(const std::string& low, bool excluded) {
    if (low.empty() && !excluded) return any_fraction();
    return rules_.sequence({rules_.text("."), tail_from(low, excluded)});
  }
  ExprId fraction_to(const std::string& high, bool excluded) {
    if (high.empty() && excluded) return rules_.choice({});
    return rules_.optional(rules_.sequence({rules_.text("."), tail_to(high, excluded, true)}));
  }
  ExprId fraction_between(const std::string& low, bool low_excluded, const std::string& high,
                          bool high_excluded) {
    const ExprId with_point =
        rules_.sequence({rules_.text("."), tail_between(low, low_excluded, high, high_excluded)});
    const bool zero = low.empty() && !low_excluded && !(high.empty() && high_excluded);
    return zero ? rules_.optional(with_point) : with_point;
  }

 private:
  // One digit at least of a fraction that is not below `low` (above it, if excluded).
  ExprId tail_from(const std::string& low, bool excluded) {
    if (low.empty()) {
      if (!excluded) return any(0, kFractionDigits);
      // Some digit that is not zero.
      return rules_.sequence(
          {rules_.repeat(rules_.text("0"), 0, kFractionDigits), digits('1', '9'), any(0, kFractionDigits)});
    }
    std::vector<ExprId> parts{
        rules_.sequence({rules_.text(low.substr(0, 1)), tail_from(low.substr(1), excluded)})};
    if (low[0] < '9')
      parts.push_back(rules_.sequence({digits(static_cast<char>(low[0] + 1), '9'), any(0, kFractionDigits)}));
    return rules_.choice(std::move(parts));
  }

  // Digits of a fraction that is not above `high`; `some`: one at least.
  ExprId tail_to(const std::string& high, bool excluded, bool some) {
    if (high.empty()) {
      // Equal so far.
      if (excluded) return rules_.choice({});
      return rules_.repeat(rules_.text("0"), some ? 1 : 0, kFractionDigits);
    }
    std::vector<ExprId> parts{
        rules_.sequence({rules_.text(high.substr(0, 1)), tail_to(high.substr(1), excluded, false)})};
    if (high[0] > '0')
      parts.push_back(
          rules_.sequence({digits('0', static_cast<char>(high[0] - 1)), any(0, kFractionDigits)}));
    // `high` has no zeros at its end, so what ends here is below it.
    if (!some) parts.push_back(rules_.text(""));
    return rules_.choice(std::move(parts));
  }

  ExprId tail_between(const std::string& low, bool low_excluded, const std::string& high,
                      bool high_excluded) {
    if (low.empty()) {
      if (!low_excluded) return tail_to(high, high_excluded, true);
      return tail_above_zero_to(high, high_excluded);
    }
    if (high.empty()) return rules_.choice({});
    if (low[0] == high[0])
      return rules_.sequence(
          {rules_.text(low.substr(0, 1)),
           low.size() == 1 && !low_excluded
               ? tail_to(high.substr(1), high_excluded, false)
               : tail_between(low.substr(1), low_excluded, high.substr(1), high_excluded)});
    std::vector<ExprId> parts{
        rules_.sequence({rules_.text(low.substr(0, 1)), tail_from(low.substr(1), low_excluded)}),
        rules_.sequence({rules_.text(high.substr(0, 1)), tail_to(high.substr(1), high_excluded, false)})};
    if (high[0] - low[0] > 1)
      parts.push_back(rules_.sequence(
          {digits(static_cast<char>(low[0] + 1), static_cast<char>(high[0] - 1)), any(0, kFractionDigits)}));
    return rules_.choice(std::move(parts));
  }

  // Above zero and not above `high`.
  ExprId tail_above_zero_to(const std::string& high, bool excluded) {
    if (high.empty()) return rules_.choice({});
    if (high[0] == '0')
      return rules_.sequence({rules_.text("0"), tail_above_zero_to(high.substr(1), excluded)});
    std::vector<ExprId> parts{
        rules_.sequence({rules_.text(high.substr(0, 1)), tail_to(high.substr(1), excluded, false)}),
        rules_.sequence({rules_.text("0"), tail_from("", true)})};
    if (high[0] > '1')
      parts.push_back(
          rules_.sequence({digits('1', static_cast<char>(high[0] - 1)), any(0, kFractionDigits)}));
    return rules_.choice(std::move(parts));
  }

  RuleSet& rules_;
};

std::string next_integer(const std::string& text) {
  return fmt::format("{}", std::stoll(text) + 1);
}
std::string previous_integer(const std::string& text) {
  return fmt::format("{}", std::stoll(text) - 1);
}
bool is_less(const std::string& a, const std::string& b) {
  return a.size() != b.size() ? a.size() < b.size() : a < b;
}

// Numbers that are not negative, between two of them.
std::optional<ExprId> magnitudes(RuleSet& rules, const Decimal& low, const Decimal& high) {
  DigitRules d(rules);
  if (is_less(high.integer, low.integer)) return std::nullopt;
  if (low.integer == high.integer) {
    if (high.fraction < low.fraction || (high.fraction == low.fraction && (low.excluded || high.excluded)))
      return std::nullopt;
    return rules.sequence({rules.text(low.integer),
                           d.fraction_between(low.fraction, low.excluded, high.fraction, high.excluded)});
  }
  std::vector<ExprId> parts{
      rules.sequence({rules.text(low.integer), d.fraction_from(low.fraction, low.excluded)}),
      rules.sequence({rules.text(high.integer), d.fraction_to(high.fraction, high.excluded)})};
  const std::string first = next_integer(low.integer), last = previous_integer(high.integer);
  if (!is_less(last, first)) parts.push_back(rules.sequence({d.integers(first, last), d.any_fraction()}));
  return rules.choice(std::move(parts));
}

}  // namespace

std::optional<ExprId> JsonRules::integer_between(const NumberBounds& bounds) {
  double least = std::ceil(bounds.least.value_or(-kMaxInteger)),
         most = std::floor(bounds.most.value_or(kMaxInteger));
  if (bounds.above_least && bounds.least && least == *bounds.least) ++least;
  if (bounds.below_most && bounds.most && most == *bounds.most) --most;
  least = std::max(least, -kMaxInteger);
  most = std::min(most, kMaxInteger);
  if (!(least <= most)) return std::nullopt;
  DigitRules d(rules_);
  const auto text = [](double value) { return fmt::format("{}", static_cast<long long>(value)); };
  std::vector<ExprId> parts;
  if (least < 0.0)
    parts.push_back(
        rules_.sequence({rules_.text("-"), d.integers(text(most < 0.0 ? -most : 1.0), text(-least))}));
  if (most >= 0.0) parts.push_back(d.integers(text(std::max(least, 0.0)), text(most)));
  return rules_.choice(std::move(parts));
}

std::optional<ExprId> JsonRules::number_between(const NumberBounds& bounds) {
  const double least = std::clamp(bounds.least.value_or(-kMaxInteger), -kMaxInteger, kMaxInteger),
               most = std::clamp(bounds.most.value_or(kMaxInteger), -kMaxInteger, kMaxInteger);
  if (!(least <= most) || bounds.least.value_or(0.0) > kMaxInteger ||
      bounds.most.value_or(0.0) < -kMaxInteger)
    return std::nullopt;
  const Decimal low = decimal_of(std::fabs(least), bounds.above_least),
                high = decimal_of(std::fabs(most), bounds.below_most), zero;
  std::vector<ExprId> parts;
  if (least < 0.0) {
    // Zero itself belongs to the other side.
    const std::optional<ExprId> below =
        most < 0.0 ? magnitudes(rules_, high, low)
                   : magnitudes(rules_, {.integer = "0", .fraction = "", .excluded = true}, low);
    if (below) parts.push_back(rules_.sequence({rules_.text("-"), *below}));
  }
  if (most >= 0.0)
    if (const std::optional<ExprId> above = magnitudes(rules_, least < 0.0 ? zero : low, high))
      parts.push_back(*above);
  if (parts.empty()) return std::nullopt;
  return rules_.choice(std::move(parts));
}

}  // namespace thermo
