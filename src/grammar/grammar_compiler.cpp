#include "grammar/grammar_compiler.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "grammar/utf8_automaton.h"

namespace thermo {

Result<std::shared_ptr<const Grammar>> Grammar::compile(const RuleSet& rules, RuleId root) {
  try {
    return GrammarCompiler(rules).compile(root);
  } catch (const GrammarCompiler::Refused& refused) {
    return Error{ErrorCode::InvalidArgument, refused.what()};
  }
}

std::shared_ptr<const Grammar> GrammarCompiler::compile(RuleId root) {
  rule_of(root);
  for (size_t i = 0; i < draft_rules_.size(); ++i) {
    const uint32_t start = new_state();
    draft_rules_[i].start = start;
    const uint32_t end = build(draft_rules_[i].body, start);
    draft_rules_[i].end = end;
  }
  const std::vector<bool> good = states_that_end(true);
  if (!good[draft_rules_[0].start]) throw Refused(kMatchesNothing);
  trim(good);
  std::shared_ptr<Grammar> grammar(new Grammar);
  flatten(*grammar);
  rank(*grammar);
  return grammar;
}

uint32_t GrammarCompiler::new_state() {
  if (states_.size() >= Grammar::kMaxStates)
    throw Refused(fmt::format("the grammar is too large: it needs more than {} states", Grammar::kMaxStates));
  states_.emplace_back();
  return static_cast<uint32_t>(states_.size() - 1);
}

uint32_t GrammarCompiler::rule_of(RuleId id) {
  const auto [found, added] = by_id_.try_emplace(id, static_cast<uint32_t>(draft_rules_.size()));
  if (!added) return found->second;
  if (!rules_.is_defined(id))
    throw Refused(fmt::format("rule '{}' is used but not defined", rules_.rule_name(id)));
  draft_rules_.push_back({.body = rules_.body(id), .name = rules_.rule_name(id)});
  if (draft_rules_.size() > Grammar::kMaxRules)
    throw Refused(fmt::format("the grammar is too large: it has more than {} rules", Grammar::kMaxRules));
  return found->second;
}

uint32_t GrammarCompiler::rule_of_expr(ExprId id) {
  const auto [found, added] = by_expr_.try_emplace(id, static_cast<uint32_t>(draft_rules_.size()));
  if (added) draft_rules_.push_back({.body = id, .name = "a group"});
  return found->second;
}

uint32_t GrammarCompiler::build(ExprId id, uint32_t from) {
  const Expr& expr = rules_.expr(id);
  switch (expr.kind) {
    case Expr::Kind::Bytes:
      for (const char c : expr.bytes) {
        const uint32_t to = new_state();
        const auto byte = static_cast<uint8_t>(c);
        states_[from].bytes.push_back({byte, byte, to});
        from = to;
      }
      return from;
    case Expr::Kind::Chars:
      return build_chars(expr, from);
    case Expr::Kind::Sequence:
      for (const ExprId part : expr.parts) from = build(part, from);
      return from;
    case Expr::Kind::Choice: {
      const uint32_t to = new_state();
      for (const ExprId part : expr.parts) {
        const uint32_t end = build(part, from);
        states_[end].empty.push_back(to);
      }
      return to;
    }
    case Expr::Kind::Repeat:
      return build_repeat(expr, from);
    case Expr::Kind::Rule:
      return build_call(rule_of(expr.rule), from);
    case Expr::Kind::TextWithout:
      return build_text_without(expr, from);
  }
  return from;
}

uint32_t GrammarCompiler::build_call(uint32_t rule, uint32_t from) {
  const uint32_t to = new_state();
  states_[from].calls.push_back({rule, to});
  return to;
}

// Sequences that end alike share their states.
uint32_t GrammarCompiler::build_chars(const Expr& expr, uint32_t from) {
  const uint32_t to = new_state();
  std::map<ByteSequence, uint32_t> rest_of;
  for (const ByteSequence& sequence : utf8_sequences(expr.chars)) {
    uint32_t target = to;
    for (size_t n = 1; n < sequence.size(); ++n) {
      const ByteSequence rest(sequence.end() - static_cast<ptrdiff_t>(n), sequence.end());
      const auto [found, added] = rest_of.try_emplace(rest, 0);
      if (added) {
        found->second = new_state();
        states_[found->second].bytes.push_back({rest[0].first, rest[0].last, target});
      }
      target = found->second;
    }
    states_[from].bytes.push_back({sequence[0].first, sequence[0].last, target});
  }
  return to;
}

// Whether a copy costs a state or two.
bool GrammarCompiler::is_small(ExprId id) const {
  const Expr& expr = rules_.expr(id);
  return expr.kind == Expr::Kind::Rule || (expr.kind == Expr::Kind::Bytes && expr.bytes.size() <= 2) ||
         (expr.kind == Expr::Kind::Chars && (expr.chars.empty() || expr.chars.back().last < 0x80));
}

uint32_t GrammarCompiler::build_repeat(const Expr& expr, uint32_t from) {
  const int n_copies = expr.most < 0 ? expr.least : expr.most;
  if (n_copies > Grammar::kMaxRepeats)
    throw Refused(
        fmt::format("{} repetitions are too many: at most {} are possible", n_copies, Grammar::kMaxRepeats));
  const bool call = n_copies > 1 && !is_small(expr.parts[0]);
  const auto copy = [&](uint32_t begin) {
    return call ? build_call(rule_of_expr(expr.parts[0]), begin) : build(expr.parts[0], begin);
  };
  for (int i = 0; i < expr.least; ++i) from = copy(from);
  if (expr.most < 0) {
    // Entered by an empty move, so that what comes before is not part of the loop.
    const uint32_t loop = new_state();
    states_[from].empty.push_back(loop);
    const uint32_t end = copy(loop);
    states_[end].empty.push_back(loop);
    const uint32_t to = new_state();
    states_[loop].empty.push_back(to);
    return to;
  }
  const uint32_t to = new_state();
  for (int i = expr.least; i < expr.most; ++i) {
    states_[from].empty.push_back(to);
    const uint32_t begin = new_state();
    states_[from].empty.push_back(begin);
    from = copy(begin);
  }
  states_[from].empty.push_back(to);
  return to;
}

// A deterministic automaton: beside the state of UTF-8 it knows how far each match of the forbidden
// expression has come, wherever it began.
uint32_t GrammarCompiler::build_text_without(const Expr& expr, uint32_t from) {
  const auto first = static_cast<uint32_t>(states_.size());
  const uint32_t start = new_state();
  const uint32_t end = build(expr.parts[0], start);
  const std::vector<DraftState> forbidden(states_.begin() + first, states_.end());
  states_.resize(first);

  using Subset = std::set<uint32_t>;
  const auto close = [&](Subset& subset) {
    std::vector<uint32_t> work(subset.begin(), subset.end());
    while (!work.empty()) {
      const uint32_t state = work.back();
      work.pop_back();
      THERMO_CHECK(forbidden[state - first].calls.empty(), "what a text must not have calls no rules");
      for (const uint32_t next : forbidden[state - first].empty)
        if (subset.insert(next).second) work.push_back(next);
    }
  };
  const uint32_t to = new_state();
  std::map<std::pair<uint8_t, Subset>, uint32_t> known;
  std::vector<std::pair<uint8_t, Subset>> work;
  const auto state_of = [&](uint8_t utf8, Subset subset) {
    const auto [found, added] = known.try_emplace({utf8, std::move(subset)}, 0);
    if (added) {
      found->second = new_state();
      if (utf8 == kUtf8Whole) states_[found->second].empty.push_back(to);
      work.push_back(found->first);
    }
    return found->second;
  };
  Subset begin{start};
  close(begin);
  if (begin.contains(end)) throw Refused("every text has an empty match of what it must not have");
  const uint32_t entry = state_of(kUtf8Whole, begin);
  states_[from].empty.push_back(entry);
  while (!work.empty()) {
    const auto [utf8, subset] = std::move(work.back());
    work.pop_back();
    const uint32_t state = known.at({utf8, subset});
    std::array<bool, 257> cut{true};  // this byte may lead elsewhere than the one before it
    for (const uint32_t s : subset)
      for (const Grammar::ByteEdge& edge : forbidden[s - first].bytes)
        cut[edge.first] = cut[edge.last + 1] = true;
    uint8_t next = kUtf8Broken;
    std::optional<uint32_t> target;  // nullopt: the text must not go on so
    for (int b = 0; b < 256; ++b) {
      const auto byte = static_cast<uint8_t>(b);
      if (const uint8_t before = std::exchange(next, utf8_next(utf8, byte)); cut[byte] || next != before) {
        Subset moved{start};
        for (const uint32_t s : subset)
          for (const Grammar::ByteEdge& edge : forbidden[s - first].bytes)
            if (byte >= edge.first && byte <= edge.last) moved.insert(edge.target);
        close(moved);
        target.reset();
        if (next != kUtf8Broken && !moved.contains(end)) target = state_of(next, std::move(moved));
      }
      if (!target) continue;
      std::vector<Grammar::ByteEdge>& edges = states_[state].bytes;
      if (!edges.empty() && edges.back().last + 1 == byte && edges.back().target == *target)
        edges.back().last = byte;
      else
        edges.push_back({byte, byte, *target});
    }
  }
  return to;
}

std::vector<bool> GrammarCompiler::states_that_end(bool reading) const {
  struct Before {
    uint32_t state;
    int64_t rule;  // -1: no call
  };
  std::vector<std::vector<Before>> before(states_.size());
  for (uint32_t s = 0; s < states_.size(); ++s) {
    for (const uint32_t target : states_[s].empty) before[target].push_back({s, -1});
    for (const DraftCall& call : states_[s].calls) before[call.target].push_back({s, call.rule});
    if (reading)
      for (const Grammar::ByteEdge& edge : states_[s].bytes) before[edge.target].push_back({s, -1});
  }
  std::vector<bool> good(states_.size());
  std::vector<uint32_t> work;
  std::unordered_map<uint32_t, std::vector<uint32_t>> waiting;  // by start of the called rule
  const auto mark = [&](uint32_t state) {
    if (good[state]) return;
    good[state] = true;
    work.push_back(state);
  };
  for (const DraftRule& rule : draft_rules_) mark(rule.end);
  while (!work.empty()) {
    const uint32_t state = work.back();
    work.pop_back();
    for (const Before& b : before[state]) {
      if (b.rule < 0) {
        mark(b.state);
        continue;
      }
      const uint32_t start = draft_rules_[static_cast<size_t>(b.rule)].start;
      if (good[start])
        mark(b.state);
      else
        waiting[start].push_back(b.state);
    }
    if (const auto found = waiting.find(state); found != waiting.end()) {
      for (const uint32_t s : found->second) mark(s);
      waiting.erase(found);
    }
  }
  return good;
}

void GrammarCompiler::trim(const std::vector<bool>& good) {
  for (DraftState& state : states_) {
    std::erase_if(state.empty, [&](uint32_t target) { return !good[target]; });
    std::erase_if(state.bytes, [&](const Grammar::ByteEdge& edge) { return !good[edge.target]; });
    std::erase_if(state.calls, [&](const DraftCall& call) {
      return !good[call.target] || !good[draft_rules_[call.rule].start];
    });
  }
}

void GrammarCompiler::flatten(Grammar& grammar) {
  const std::vector<bool> may_be_empty = states_that_end(false);
  for (DraftState& state : states_)
    for (const DraftCall& call : state.calls)
      if (may_be_empty[draft_rules_[call.rule].start]) state.empty.push_back(call.target);
  std::vector<bool> is_end(states_.size());
  for (const DraftRule& rule : draft_rules_) is_end[rule.end] = true;

  constexpr uint32_t kNone = UINT32_MAX;
  constexpr size_t kMaxMoves = 20'000'000;
  std::vector<uint32_t> number(states_.size(), kNone), order;
  const auto number_of = [&](uint32_t state) {
    if (number[state] == kNone) {
      number[state] = static_cast<uint32_t>(order.size());
      order.push_back(state);
    }
    return number[state];
  };
  for (const DraftRule& rule : draft_rules_) grammar.starts_.push_back(number_of(rule.start));
  std::vector<uint32_t> seen(states_.size(), kNone), work;
  size_t n_moves = 0;
  for (uint32_t i = 0; i < order.size(); ++i) {
    std::vector<Grammar::ByteEdge> bytes;
    std::vector<DraftCall> calls;
    bool final = false;
    work.assign(1, order[i]);
    seen[order[i]] = i;
    while (!work.empty()) {
      const uint32_t s = work.back();
      work.pop_back();
      final = final || is_end[s];
      if (++n_moves > kMaxMoves) throw Refused("the grammar is too large: too many parts may be left out");
      bytes.insert(bytes.end(), states_[s].bytes.begin(), states_[s].bytes.end());
      calls.insert(calls.end(), states_[s].calls.begin(), states_[s].calls.end());
      for (const uint32_t target : states_[s].empty)
        if (seen[target] != i) {
          seen[target] = i;
          work.push_back(target);
        }
    }
    const auto begin = static_cast<uint32_t>(grammar.byte_edges_.size());
    const auto calls_begin = static_cast<uint32_t>(grammar.calls_.size());
    for (const Grammar::ByteEdge& edge : bytes)
      grammar.byte_edges_.push_back({edge.first, edge.last, number_of(edge.target)});
    for (const DraftCall& call : calls) grammar.calls_.push_back({call.rule, number_of(call.target), false});
    if (grammar.byte_edges_.size() + grammar.calls_.size() > Grammar::kMaxEdges)
      throw Refused(fmt::format("the grammar is too large: it needs more than {} edges", Grammar::kMaxEdges));
    grammar.states_.push_back({begin, static_cast<uint32_t>(grammar.byte_edges_.size()), calls_begin,
                               static_cast<uint32_t>(grammar.calls_.size()), final});
  }
  for (Grammar::Call& call : grammar.calls_)
    call.tail = grammar.states_[call.target].final && !grammar.goes_on(call.target);
}

void GrammarCompiler::rank(Grammar& grammar) const {
  enum class Mark : uint8_t { New, Open, Done };
  const size_t n = draft_rules_.size();
  std::vector<Mark> marks(n, Mark::New);
  grammar.ranks_.assign(n, 0);
  auto next_rank = static_cast<uint32_t>(n);
  struct Visit {
    uint32_t rule;
    size_t next_call;
  };
  for (uint32_t root = 0; root < n; ++root) {
    if (marks[root] != Mark::New) continue;
    std::vector<Visit> path{{root, 0}};
    marks[root] = Mark::Open;
    while (!path.empty()) {
      Visit& visit = path.back();
      const auto calls = grammar.calls(grammar.starts_[visit.rule]);
      if (visit.next_call == calls.size()) {
        marks[visit.rule] = Mark::Done;
        grammar.ranks_[visit.rule] = --next_rank;
        path.pop_back();
        continue;
      }
      const uint32_t called = calls[visit.next_call++].rule;
      if (marks[called] == Mark::Open)
        throw Refused(
            fmt::format("rule '{}' calls itself before it reads anything (left recursion): "
                        "write it with a repetition, or with the recursion at its end",
                        draft_rules_[called].name));
      if (marks[called] == Mark::New) {
        marks[called] = Mark::Open;
        path.push_back({called, 0});
      }
    }
  }
}

}  // namespace thermo
