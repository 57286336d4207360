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
  constexpr ptrdiff_t kMany = 16;
  if (parts.size() == 1) return parts[0];
  const auto is_text = [this](ExprId id) { return this->is_text(id); };
  if (std::count_if(parts.begin(), parts.end(), is_text) >= kMany) {
    std::vector<std::string> texts;
    for (const ExprId id : parts)
      if (is_text(id)) texts.push_back(exprs_[id].bytes);
    std::erase_if(parts, is_text);
    std::sort(texts.begin(), texts.end());
    texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
    parts.push_back(one_of(texts, 0, 0));
  }
  return add({.kind = Expr::Kind::Choice, .parts = std::move(parts)});
}

bool RuleSet::is_text(ExprId id) const {
  const Expr& expr = exprs_[id];
  return expr.kind == Expr::Kind::Bytes && !expr.bytes.starts_with(static_cast<char>(kTokenByte));
}

// The rest of one of these texts, which are sorted and begin with the same bytes that were read.
ExprId RuleSet::one_of(std::span<const std::string> texts, size_t n_read, int depth) {
  constexpr int kMaxDepth = 32;
  const std::string &first = texts.front(), &last = texts.back();
  if (texts.size() == 1) return text(std::string_view(first).substr(n_read));
  size_t n_same = n_read;
  while (n_same < first.size() && n_same < last.size() && first[n_same] == last[n_same]) ++n_same;
  const ExprId same = text(std::string_view(first).substr(n_read, n_same - n_read));
  std::vector<ExprId> parts;
  for (size_t begin = 0, end = 0; begin < texts.size(); begin = end) {
    // One text is over, or those that have the next byte in common too.
    for (end = begin + 1; end < texts.size() && texts[begin].size() > n_same && depth < kMaxDepth &&
                          texts[end][n_same] == texts[begin][n_same];)
      ++end;
    parts.push_back(one_of(texts.subspan(begin, end - begin), n_same, depth + 1));
  }
  return sequence({same, add({.kind = Expr::Kind::Choice, .parts = std::move(parts)})});
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
