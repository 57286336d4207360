// Statements. Expressions are in expression_parser.cpp.
#include "jinja/parser.h"

#include <algorithm>

#include "jinja/expression_parser.h"

namespace thermo::jinja {

namespace {

constexpr int kMaxBlockNesting = 100;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : in_(std::move(tokens)) {}

  Block parse_all() {
    Block body = parse_body({});
    if (in_.current().kind != TokenKind::End) fail_unexpected("the end of the template");
    return body;
  }

 private:
  [[noreturn]] void fail_unexpected(const std::string& expected) { in_.fail_unexpected(expected); }

  StmtPtr make(StmtKind kind, int line) {
    auto stmt = std::make_unique<Stmt>();
    stmt->kind = kind;
    stmt->line = line;
    return stmt;
  }

  // Statements up to one of `ends`, whose name is the current token afterwards.
  Block parse_body(const std::vector<std::string_view>& ends) {
    if (++nesting_ > kMaxBlockNesting) {
      fail("blocks are nested more than " + std::to_string(kMaxBlockNesting) + " deep", in_.current().line);
    }
    Block body;
    const int begin_line = in_.current().line;
    for (;;) {
      const Token& token = in_.current();
      if (token.kind == TokenKind::End) {
        if (!ends.empty()) {
          fail("the template ends inside a block, expected '{% " + std::string(ends.front()) + " %}'",
               begin_line);
        }
        break;
      }
      if (token.kind == TokenKind::Data) {
        auto stmt = make(StmtKind::Data, token.line);
        stmt->text = token.text;
        in_.advance();
        body.push_back(std::move(stmt));
      } else if (token.kind == TokenKind::VariableBegin) {
        auto stmt = make(StmtKind::Print, token.line);
        in_.advance();
        stmt->expr = parse_tuple(in_);
        in_.expect(TokenKind::VariableEnd, "'}}'");
        body.push_back(std::move(stmt));
      } else {
        in_.expect(TokenKind::BlockBegin, "'{%'");
        if (in_.current().kind != TokenKind::Name) fail_unexpected("the name of a statement");
        if (std::find(ends.begin(), ends.end(), in_.current().text) != ends.end()) break;
        if (StmtPtr stmt = parse_statement(ends)) body.push_back(std::move(stmt));
        in_.expect(TokenKind::BlockEnd, "'%}'");
      }
    }
    --nesting_;
    return body;
  }

  // "%}" of the opening tag, the body, and the name that ended it.
  Block parse_block(const std::vector<std::string_view>& ends) {
    in_.expect(TokenKind::BlockEnd, "'%}'");
    return parse_body(ends);
  }
  Block parse_block_to(std::string_view end) {
    Block body = parse_block({end});
    in_.advance();
    return body;
  }

  StmtPtr parse_statement(const std::vector<std::string_view>& ends) {
    const std::string name = in_.current().text;
    const int line = in_.current().line;
    in_.advance();
    if (name == "for") return parse_for(line);
    if (name == "if") return parse_if(line);
    if (name == "set") return parse_set(line);
    if (name == "macro") return parse_macro(line);
    if (name == "call") return parse_call_block(line);
    if (name == "filter") return parse_filter_block(line);
    if (name == "with") return parse_with(line);
    if (name == "generation") return parse_scoped(line, "endgeneration");
    if (name == "block") return parse_named_block(line);
    if (name == "autoescape") return parse_autoescape(line);
    if (name == "print" || name == "do") {
      auto stmt = make(name == "do" ? StmtKind::Do : StmtKind::Print, line);
      stmt->expr = parse_tuple(in_);
      // {% print a, b %} prints one after the other.
      if (name == "print" && stmt->expr->kind == ExprKind::Tuple) stmt->expr->kind = ExprKind::Concat;
      return stmt;
    }
    if (name == "break" || name == "continue") {
      if (loop_nesting_ == 0) fail("'" + name + "' outside of a loop", line);
      return make(name == "break" ? StmtKind::Break : StmtKind::Continue, line);
    }
    if (name == "include" || name == "import" || name == "from" || name == "extends") {
      fail("'" + name + "' needs a second template; a chat template must be complete in itself", line);
    }
    std::string expected = "a statement such as 'if', 'for' or 'set'";
    if (!ends.empty()) expected += ", or '" + std::string(ends.front()) + "' to close the block";
    fail("unknown statement '" + name + "', expected " + expected, line);
  }

  StmtPtr parse_for(int line) {
    auto stmt = make(StmtKind::For, line);
    stmt->target = parse_assign_target(in_, "in");
    in_.expect_name("in");
    stmt->expr = parse_tuple(in_, {.with_conditional = false, .end_name = "recursive"});
    if (in_.skip_name("if")) stmt->condition = parse_expression(in_);
    stmt->recursive = in_.skip_name("recursive");
    ++loop_nesting_;
    stmt->body = parse_block({"endfor", "else"});
    --loop_nesting_;
    const bool has_else = in_.current().text == "else";
    in_.advance();
    if (has_else) stmt->else_body = parse_block_to("endfor");
    return stmt;
  }

  StmtPtr parse_if(int line) {
    auto stmt = make(StmtKind::If, line);
    for (;;) {
      Branch branch;
      branch.condition = parse_tuple(in_, {.with_conditional = false});
      branch.body = parse_block({"elif", "else", "endif"});
      stmt->branches.push_back(std::move(branch));
      const std::string end = in_.current().text;
      in_.advance();
      if (end == "endif") return stmt;
      if (end == "elif") continue;
      stmt->branches.push_back({nullptr, parse_block_to("endif")});
      return stmt;
    }
  }

  StmtPtr parse_set(int line) {
    ExprPtr target = parse_assign_target(in_, "", true);
    if (in_.skip_operator("=")) {
      auto stmt = make(StmtKind::Set, line);
      stmt->target = std::move(target);
      stmt->expr = parse_tuple(in_);
      return stmt;
    }
    auto stmt = make(StmtKind::SetBlock, line);
    stmt->target = std::move(target);
    stmt->filter = parse_filter_chain(in_, nullptr);
    stmt->body = parse_block_to("endset");
    return stmt;
  }

  void parse_signature(Stmt& stmt) {
    in_.expect_operator("(");
    while (!in_.at_operator(")")) {
      if (!stmt.parameters.empty()) in_.expect_operator(",");
      MacroParameter parameter;
      parameter.name = parse_assign_name(in_);
      if (in_.skip_operator("=")) {
        parameter.otherwise = parse_expression(in_);
      } else if (!stmt.parameters.empty() && stmt.parameters.back().otherwise != nullptr) {
        fail("the parameter '" + parameter.name + "' has no default value but follows one that has",
             in_.current().line);
      }
      stmt.parameters.push_back(std::move(parameter));
    }
    in_.expect_operator(")");
  }

  // The body of a macro; remembers which of the special names it reads.
  void parse_macro_body(Stmt& stmt, std::string_view end) {
    const size_t begin = in_.position();
    const int outer_loops = std::exchange(loop_nesting_, 0);
    stmt.body = parse_block_to(end);
    loop_nesting_ = outer_loops;
    stmt.uses_caller = in_.names_between(begin, in_.position(), "caller");
    stmt.uses_varargs = in_.names_between(begin, in_.position(), "varargs");
    stmt.uses_kwargs = in_.names_between(begin, in_.position(), "kwargs");
  }

  StmtPtr parse_macro(int line) {
    auto stmt = make(StmtKind::Macro, line);
    stmt->text = parse_assign_name(in_);
    parse_signature(*stmt);
    parse_macro_body(*stmt, "endmacro");
    return stmt;
  }

  StmtPtr parse_call_block(int line) {
    auto stmt = make(StmtKind::CallBlock, line);
    stmt->text = "caller";
    if (in_.at_operator("(")) parse_signature(*stmt);
    stmt->expr = parse_expression(in_);
    if (stmt->expr->kind != ExprKind::Call)
      fail("a call block needs a call, as in '{% call name() %}'", line);
    parse_macro_body(*stmt, "endcall");
    return stmt;
  }

  StmtPtr parse_filter_block(int line) {
    auto stmt = make(StmtKind::FilterBlock, line);
    stmt->filter = parse_filter_chain(in_, nullptr, true);
    stmt->body = parse_block_to("endfilter");
    return stmt;
  }

  StmtPtr parse_with(int line) {
    auto stmt = make(StmtKind::With, line);
    while (in_.current().kind != TokenKind::BlockEnd) {
      if (!stmt->assignments.empty()) in_.expect_operator(",");
      ExprPtr target = parse_assign_target(in_, "");
      in_.expect_operator("=");
      ExprPtr value = parse_expression(in_);
      stmt->assignments.emplace_back(std::move(target), std::move(value));
    }
    stmt->body = parse_block_to("endwith");
    return stmt;
  }

  StmtPtr parse_scoped(int line, std::string_view end) {
    auto stmt = make(StmtKind::Scoped, line);
    const int outer_loops = std::exchange(loop_nesting_, 0);
    stmt->body = parse_block_to(end);
    loop_nesting_ = outer_loops;
    return stmt;
  }

  StmtPtr parse_named_block(int line) {
    parse_assign_name(in_);
    in_.skip_name("scoped");
    in_.skip_name("required");
    StmtPtr stmt = parse_scoped(line, "endblock");
    if (in_.current().kind == TokenKind::Name) in_.advance();
    return stmt;
  }

  StmtPtr parse_autoescape(int line) {
    const ExprPtr value = parse_expression(in_);
    const bool is_off = value->kind == ExprKind::Constant && !truthy(value->constant);
    if (!is_off) fail("'autoescape' can only be switched off; prompts are not HTML", line);
    return parse_scoped(line, "endautoescape");
  }

  TokenStream in_;
  int nesting_ = 0;
  int loop_nesting_ = 0;
};

}  // namespace

Block parse_template(std::string_view source) {
  return Parser(tokenize(source)).parse_all();
}

}  // namespace thermo::jinja
