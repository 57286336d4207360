#include "grammar/rule_set.h"

#include <algorithm>
#include <utility>

namespace thermo {

std::string token_code(int32_t id) {
  const auto bits = static_cast<uint32_t>(id);
  return {static_cast<char>(kTokenByte), static_cast<char>(bits >> 16), static_cast<char>(bits >> 8),
          static_cast<char>(bits)};
}

ExprId RuleSet::add(Expr expr) {
  exprs_.push_back(std::move(expr));
  return static_cast<ExprId>(exprs_.size() - 1);
}

ExprId RuleSet::text(std::string_view utf8) {
  return add({.kind = Expr::Kind::Bytes, .bytes = std::string(utf8)});
}

ExprId RuleSet::token(int32_t id) {
  return add({.kind = Expr::Kind::Bytes, .bytes = token_code(id)});
}

ExprId RuleSet::chars(std::vector<CharRange> ranges, bool negated) {
  constexpr char32_t kLast = 0x10FFFF;
  std::sort(ranges.begin(), ranges.end(),
            [](const CharRange& a, const CharRange& b) { return a.first < b.first; });
  std::vector<CharRange> merged;
  for (const CharRange& range : ranges) {
    if (range.first > range.last || range.first > kLast) continue;
    if (!merged.empty() && range.first <= merged.back().last + 1)
      merged.back().last = std::max(merged.back().last, std::min(range.last, kLast));
    else
      merged.push_back({range.first, std::min(range.last, kLast)});
  }
  if (negated) {
    std::vector<CharRange> others;
    char32_t next = 0;
    for (const CharRange& range : merged) {
      if (range.first > next) others.push_back({next, range.first - 1});
      next = range.last + 1;
    }
    if (next <= kLast) others.push_back({next, kLast});
    merged = std::move(others);
  }
  return add({.kind = Expr::Kind::Chars, .chars = std::move(merged)});
}

ExprId RuleSet::sequence(std::vector<ExprId> parts) {
  if (parts.size() == 1) return parts[0];
  return add({.kind = Expr::Kind::Sequence, .parts = std::move(parts)});
}

ExprId RuleSet::choice(std::vector<ExprId> parts) {
  if (parts.size() == 1) return parts[0];
  return add({.kind = Expr::Kind::Choice, .parts = std::move(parts)});
}

ExprId RuleSet::repeat(ExprId part, int least, int most) {
  return add({.kind = Expr::Kind::Repeat, .parts = {part}, .least = least, .most = most});
}

ExprId RuleSet::rule(RuleId rule) {
  return add({.kind = Expr::Kind::Rule, .rule = rule});
}

ExprId RuleSet::text_without(ExprId part) {
  return add({.kind = Expr::Kind::TextWithout, .parts = {part}});
}

RuleId RuleSet::add_rule(std::string name) {
  rules_.push_back({.name = std::move(name)});
  return static_cast<RuleId>(rules_.size() - 1);
}

void RuleSet::define(RuleId rule, ExprId body) {
  rules_[rule].defined = true;
  rules_[rule].body = body;
}

ExprId RuleSet::named(std::string name, ExprId body) {
  const RuleId id = add_rule(std::move(name));
  define(id, body);
  return rule(id);
}

}  // namespace thermo
