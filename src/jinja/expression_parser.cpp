#include "jinja/expression_parser.h"

#include <algorithm>

namespace thermo::jinja {

namespace {

// Each level of brackets costs about a dozen calls here and a few in the interpreter.
constexpr int kMaxNesting = 100;
constexpr int kMaxHeight = 250;

ExprPtr make(ExprKind kind, int line) {
  auto e = std::make_unique<Expr>();
  e->kind = kind;
  e->line = line;
  return e;
}

void grow(Expr& parent, const ExprPtr& child) {
  if (child == nullptr) return;
  parent.height = std::max(parent.height, child->height + 1);
  if (parent.height > kMaxHeight) {
    fail("an expression is nested more than " + std::to_string(kMaxHeight) + " deep", parent.line);
  }
}

void add_child(Expr& parent, ExprPtr child) {
  grow(parent, child);
  parent.children.push_back(std::move(child));
}

ExprPtr make_unary(ExprKind kind, int line, ExprPtr child) {
  ExprPtr e = make(kind, line);
  add_child(*e, std::move(child));
  return e;
}

ExprPtr make_pair(ExprKind kind, int line, ExprPtr left, ExprPtr right) {
  ExprPtr e = make_unary(kind, line, std::move(left));
  add_child(*e, std::move(right));
  return e;
}

ExprPtr make_constant(Value value, int line) {
  ExprPtr e = make(ExprKind::Constant, line);
  e->constant = std::move(value);
  return e;
}

Value constant_string(std::string s) {
  return Value(Kind::String, std::make_shared<Str>(nullptr, Text(std::move(s)), false));
}

class NestingGuard {
 public:
  explicit NestingGuard(TokenStream& in) : in_(in) {
    if (++in_.nesting > kMaxNesting) {
      fail("an expression is nested more than " + std::to_string(kMaxNesting) + " deep", in_.current().line);
    }
  }
  NestingGuard(const NestingGuard&) = delete;
  NestingGuard& operator=(const NestingGuard&) = delete;
  ~NestingGuard() { --in_.nesting; }

 private:
  TokenStream& in_;
};

ExprPtr parse_or(TokenStream& in);
ExprPtr parse_unary(TokenStream& in, bool with_filter = true);

ExprPtr parse_list(TokenStream& in) {
  ExprPtr list = make(ExprKind::List, in.current().line);
  in.expect_operator("[");
  while (!in.at_operator("]")) {
    if (!list->children.empty()) in.expect_operator(",");
    if (in.at_operator("]")) break;
    add_child(*list, parse_expression(in));
  }
  in.expect_operator("]");
  return list;
}

ExprPtr parse_dict(TokenStream& in) {
  ExprPtr dict = make(ExprKind::Dict, in.current().line);
  in.expect_operator("{");
  while (!in.at_operator("}")) {
    if (!dict->children.empty()) in.expect_operator(",");
    if (in.at_operator("}")) break;
    add_child(*dict, parse_expression(in));
    in.expect_operator(":");
    add_child(*dict, parse_expression(in));
  }
  in.expect_operator("}");
  return dict;
}

ExprPtr parse_primary(TokenStream& in) {
  const Token token = in.current();
  switch (token.kind) {
    case TokenKind::Name: {
      in.advance();
      const std::string& name = token.text;
      if (name == "true" || name == "True") return make_constant(Value::boolean(true), token.line);
      if (name == "false" || name == "False") return make_constant(Value::boolean(false), token.line);
      if (name == "none" || name == "None") return make_constant(Value::none(), token.line);
      ExprPtr e = make(ExprKind::Name, token.line);
      e->name = name;
      return e;
    }
    case TokenKind::String: {
      std::string text;
      for (; in.current().kind == TokenKind::String; in.advance()) text += in.current().text;
      return make_constant(constant_string(std::move(text)), token.line);
    }
    case TokenKind::Integer:
      in.advance();
      return make_constant(Value::integer(token.integer), token.line);
    case TokenKind::Float:
      in.advance();
      return make_constant(Value::real(token.real), token.line);
    default:
      break;
  }
  if (in.at_operator("[")) return parse_list(in);
  if (in.at_operator("{")) return parse_dict(in);
  if (!in.skip_operator("(")) in.fail_unexpected("a value");
  ExprPtr inner = parse_tuple(in, {.in_parentheses = true});
  in.expect_operator(")");
  return inner;
}

void parse_arguments(TokenStream& in, Expr& owner) {
  Arguments& args = owner.arguments;
  in.expect_operator("(");
  bool first = true;
  while (!in.at_operator(")")) {
    if (!first) {
      in.expect_operator(",");
      if (in.at_operator(")")) break;
    }
    first = false;
    const int line = in.current().line;
    if (in.skip_operator("*")) {
      if (args.star || args.double_star) fail("a call has a second '*' or one after '**'", line);
      args.star = parse_expression(in);
      grow(owner, args.star);
    } else if (in.skip_operator("**")) {
      if (args.double_star) fail("a call has a second '**'", line);
      args.double_star = parse_expression(in);
      grow(owner, args.double_star);
    } else if (in.current().kind == TokenKind::Name && TokenStream::is_operator(in.next(), "=")) {
      if (args.double_star) fail("a keyword argument follows '**'", line);
      std::string key = in.current().text;
      in.advance();
      in.advance();
      args.keywords.emplace_back(std::move(key), parse_expression(in));
      grow(owner, args.keywords.back().second);
    } else {
      if (args.star || args.double_star || !args.keywords.empty()) {
        fail("a positional argument follows a keyword argument", line);
      }
      args.positional.push_back(parse_expression(in));
      grow(owner, args.positional.back());
    }
  }
  in.expect_operator(")");
}

// One part of a subscript; a slice when there is a ":".
ExprPtr parse_subscript_part(TokenStream& in, ExprPtr& object, int line) {
  const auto at_end = [&] { return in.at_operator("]") || in.at_operator(",") || in.at_operator(":"); };
  ExprPtr first;
  if (!in.at_operator(":")) {
    first = parse_expression(in);
    if (!in.at_operator(":")) return first;
  }
  in.expect_operator(":");
  ExprPtr slice = make(ExprKind::Slice, line);
  add_child(*slice, std::move(object));
  add_child(*slice, std::move(first));
  add_child(*slice, at_end() ? nullptr : parse_expression(in));
  add_child(*slice, in.skip_operator(":") && !at_end() ? parse_expression(in) : nullptr);
  return slice;
}

ExprPtr parse_subscript(TokenStream& in, ExprPtr object) {
  const int line = in.current().line;
  if (in.skip_operator(".")) {
    const Token token = in.current();
    if (token.kind == TokenKind::Integer) {
      in.advance();
      return make_pair(ExprKind::Item, line, std::move(object),
                       make_constant(Value::integer(token.integer), line));
    }
    ExprPtr e = make_unary(ExprKind::Attribute, line, std::move(object));
    e->name = in.expect_any_name("a name or a number after '.'");
    return e;
  }
  in.expect_operator("[");
  if (in.skip_operator("]")) {  // jinja2 looks up the empty tuple, and finds nothing
    return make_pair(ExprKind::Item, line, std::move(object), make(ExprKind::Tuple, line));
  }
  ExprPtr part = parse_subscript_part(in, object, line);
  if (part->kind == ExprKind::Slice && object == nullptr) {
    in.expect_operator("]");
    return part;
  }
  if (in.at_operator(",")) {
    ExprPtr tuple = make_unary(ExprKind::Tuple, line, std::move(part));
    while (in.skip_operator(",")) add_child(*tuple, parse_expression(in));
    part = std::move(tuple);
  }
  in.expect_operator("]");
  return make_pair(ExprKind::Item, line, std::move(object), std::move(part));
}

ExprPtr parse_call(TokenStream& in, ExprPtr callee) {
  ExprPtr e = make_unary(ExprKind::Call, in.current().line, std::move(callee));
  parse_arguments(in, *e);
  return e;
}

ExprPtr parse_postfix(TokenStream& in, ExprPtr e) {
  for (;;) {
    if (in.at_operator(".") || in.at_operator("[")) {
      e = parse_subscript(in, std::move(e));
    } else if (in.at_operator("(")) {
      e = parse_call(in, std::move(e));
    } else {
      return e;
    }
  }
}

std::string parse_dotted_name(TokenStream& in, const std::string& expected) {
  std::string name = in.expect_any_name(expected);
  while (in.skip_operator(".")) name += "." + in.expect_any_name("a name after '.'");
  return name;
}

ExprPtr parse_test(TokenStream& in, ExprPtr input) {
  const int line = in.current().line;
  in.expect_name("is");
  const bool negated = in.skip_name("not");
  ExprPtr e = make_unary(ExprKind::Test, line, std::move(input));
  e->name = parse_dotted_name(in, "the name of a test after 'is'");
  const Token& token = in.current();
  const bool has_operand =
      (token.kind == TokenKind::Name && !in.at_name("else") && !in.at_name("or") && !in.at_name("and")) ||
      token.kind == TokenKind::String || token.kind == TokenKind::Integer || token.kind == TokenKind::Float ||
      in.at_operator("[") || in.at_operator("{");
  if (in.at_operator("(")) {
    parse_arguments(in, *e);
  } else if (has_operand) {
    if (in.at_name("is")) fail("tests cannot be chained with 'is'", token.line);
    e->arguments.positional.push_back(parse_postfix(in, parse_primary(in)));
    grow(*e, e->arguments.positional.back());
  }
  return negated ? make_unary(ExprKind::Not, line, std::move(e)) : std::move(e);
}

ExprPtr parse_filters_and_tests(TokenStream& in, ExprPtr e) {
  for (;;) {
    if (in.at_operator("|")) {
      e = parse_filter_chain(in, std::move(e));
    } else if (in.at_name("is")) {
      e = parse_test(in, std::move(e));
    } else if (in.at_operator("(")) {
      e = parse_call(in, std::move(e));
    } else {
      return e;
    }
  }
}

ExprPtr parse_unary(TokenStream& in, bool with_filter) {
  const NestingGuard guard(in);
  const int line = in.current().line;
  ExprPtr e;
  if (in.skip_operator("-")) {
    e = make_unary(ExprKind::Negate, line, parse_unary(in, false));
  } else if (in.skip_operator("+")) {
    e = make_unary(ExprKind::Plus, line, parse_unary(in, false));
  } else {
    e = parse_primary(in);
  }
  e = parse_postfix(in, std::move(e));
  return with_filter ? parse_filters_and_tests(in, std::move(e)) : std::move(e);
}

ExprPtr make_binary(BinaryOp op, int line, ExprPtr left, ExprPtr right) {
  ExprPtr e = make_pair(ExprKind::Binary, line, std::move(left), std::move(right));
  e->op = op;
  return e;
}

ExprPtr parse_power(TokenStream& in) {
  ExprPtr left = parse_unary(in);
  for (int line = in.current().line; in.skip_operator("**"); line = in.current().line) {
    left = make_binary(BinaryOp::Pow, line, std::move(left), parse_unary(in));
  }
  return left;
}

ExprPtr parse_product(TokenStream& in) {
  ExprPtr left = parse_power(in);
  for (;;) {
    const int line = in.current().line;
    BinaryOp op;
    if (in.skip_operator("*")) {
      op = BinaryOp::Mul;
    } else if (in.skip_operator("/")) {
      op = BinaryOp::Div;
    } else if (in.skip_operator("//")) {
      op = BinaryOp::FloorDiv;
    } else if (in.skip_operator("%")) {
      op = BinaryOp::Mod;
    } else {
      return left;
    }
    left = make_binary(op, line, std::move(left), parse_power(in));
  }
}

ExprPtr parse_concat(TokenStream& in) {
  ExprPtr first = parse_product(in);
  if (!in.at_operator("~")) return first;
  ExprPtr e = make_unary(ExprKind::Concat, in.current().line, std::move(first));
  while (in.skip_operator("~")) add_child(*e, parse_product(in));
  return e;
}

ExprPtr parse_sum(TokenStream& in) {
  ExprPtr left = parse_concat(in);
  for (;;) {
    const int line = in.current().line;
    const bool plus = in.at_operator("+");
    if (!plus && !in.at_operator("-")) return left;
    in.advance();
    left = make_binary(plus ? BinaryOp::Add : BinaryOp::Sub, line, std::move(left), parse_concat(in));
  }
}

bool skip_comparison(TokenStream& in, CompareOp& op) {
  static constexpr std::pair<std::string_view, CompareOp> kOps[] = {
      {"==", CompareOp::Equal},     {"!=", CompareOp::NotEqual}, {"<", CompareOp::Less},
      {"<=", CompareOp::LessEqual}, {">", CompareOp::Greater},   {">=", CompareOp::GreaterEqual}};
  for (const auto& [symbol, meaning] : kOps) {
    op = meaning;
    if (in.skip_operator(symbol)) return true;
  }
  op = CompareOp::In;
  if (in.skip_name("in")) return true;
  op = CompareOp::NotIn;
  if (!in.at_name("not") || !TokenStream::is_name(in.next(), "in")) return false;
  in.advance();
  in.advance();
  return true;
}

ExprPtr parse_comparison(TokenStream& in) {
  const int line = in.current().line;
  ExprPtr first = parse_sum(in);
  CompareOp op;
  if (!skip_comparison(in, op)) return first;
  ExprPtr e = make_unary(ExprKind::Compare, line, std::move(first));
  do {
    e->comparisons.push_back(op);
    add_child(*e, parse_sum(in));
  } while (skip_comparison(in, op));
  return e;
}

ExprPtr parse_not(TokenStream& in) {
  const int line = in.current().line;
  if (!in.at_name("not")) return parse_comparison(in);
  const NestingGuard guard(in);
  in.advance();
  return make_unary(ExprKind::Not, line, parse_not(in));
}

ExprPtr parse_and(TokenStream& in) {
  ExprPtr left = parse_not(in);
  for (int line = in.current().line; in.skip_name("and"); line = in.current().line) {
    left = make_pair(ExprKind::And, line, std::move(left), parse_not(in));
  }
  return left;
}

ExprPtr parse_or(TokenStream& in) {
  ExprPtr left = parse_and(in);
  for (int line = in.current().line; in.skip_name("or"); line = in.current().line) {
    left = make_pair(ExprKind::Or, line, std::move(left), parse_and(in));
  }
  return left;
}

void check_assignable(const Expr& target) {
  if (target.kind == ExprKind::Name) return;
  if (target.kind != ExprKind::Tuple) {
    fail("cannot assign to an expression, expected a name", target.line);
  }
  for (const ExprPtr& child : target.children) check_assignable(*child);
}

}  // namespace

ExprPtr parse_expression(TokenStream& in, bool with_conditional) {
  const NestingGuard guard(in);
  ExprPtr value = parse_or(in);
  while (with_conditional && in.at_name("if")) {
    ExprPtr e = make_unary(ExprKind::Conditional, in.current().line, std::move(value));
    in.advance();
    add_child(*e, parse_or(in));
    add_child(*e, in.skip_name("else") ? parse_expression(in) : nullptr);
    value = std::move(e);
  }
  return value;
}

ExprPtr parse_tuple(TokenStream& in, const TupleRules& rules) {
  const int line = in.current().line;
  const auto at_end = [&] {
    const TokenKind kind = in.current().kind;
    return kind == TokenKind::VariableEnd || kind == TokenKind::BlockEnd || in.at_operator(")") ||
           (!rules.end_name.empty() && in.at_name(rules.end_name));
  };
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  while (!at_end()) {
    items.push_back(parse_expression(in, rules.with_conditional));
    if (!in.skip_operator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !items.empty()) return std::move(items[0]);
  if (!is_tuple && !rules.in_parentheses) in.fail_unexpected("an expression");
  ExprPtr tuple = make(ExprKind::Tuple, line);
  for (ExprPtr& item : items) add_child(*tuple, std::move(item));
  return tuple;
}

ExprPtr parse_assign_target(TokenStream& in, std::string_view end_name, bool with_namespace) {
  const int line = in.current().line;
  if (with_namespace && in.current().kind == TokenKind::Name && TokenStream::is_operator(in.next(), ".")) {
    ExprPtr name = make(ExprKind::Name, line);
    name->name = parse_assign_name(in);
    in.expect_operator(".");
    ExprPtr e = make_unary(ExprKind::Attribute, line, std::move(name));
    e->name = in.expect_any_name("an attribute after '.'");
    return e;
  }
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty() && !end_name.empty() && in.at_name(end_name)) break;
    if (is_tuple && (in.at_operator("=") || in.at_operator(")") || in.current().kind == TokenKind::BlockEnd))
      break;
    items.push_back(parse_primary(in));
    check_assignable(*items.back());
    if (!in.skip_operator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple) return std::move(items[0]);
  ExprPtr tuple = make(ExprKind::Tuple, line);
  for (ExprPtr& item : items) add_child(*tuple, std::move(item));
  return tuple;
}

std::string parse_assign_name(TokenStream& in) {
  const int line = in.current().line;
  std::string name = in.expect_any_name("a name");
  for (const std::string_view reserved : {"true", "false", "none", "True", "False", "None"}) {
    if (name == reserved) fail("cannot assign to '" + name + "', expected another name", line);
  }
  return name;
}

ExprPtr parse_filter_chain(TokenStream& in, ExprPtr input, bool inline_start) {
  ExprPtr e = std::move(input);
  while (inline_start || in.at_operator("|")) {
    if (!inline_start) in.advance();
    inline_start = false;
    const int line = in.current().line;
    ExprPtr filter = make_unary(ExprKind::Filter, line, std::move(e));
    filter->name = parse_dotted_name(in, "the name of a filter after '|'");
    if (in.at_operator("(")) parse_arguments(in, *filter);
    e = std::move(filter);
  }
  return e;
}

}  // namespace thermo::jinja
