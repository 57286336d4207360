// Runs a parsed template. One interpreter renders once, on one thread; the parsed template is only read.
//
// Names are looked up when they are used, innermost scope first. `for`, macros, `with`, set and filter
// blocks open a scope; `if` does not.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "jinja/ast.h"
#include "jinja/value_ops.h"

namespace thermo::jinja {

struct Scope : Object {
  Scope(Heap* owner, std::shared_ptr<Scope> outer) : Object(owner), parent(std::move(outer)) {}
  void drop_references() override;
  Value* find(std::string_view name);
  void set(const std::string& name, Value value);

  std::shared_ptr<Scope> parent;
  std::vector<std::pair<std::string, Value>> names;
};

class Interpreter {
 public:
  explicit Interpreter(const Limits& limits);

  Heap heap;                                                 // first: outlives every value below
  int line = 0;                                              // of the node evaluated last, for messages
  std::optional<std::chrono::system_clock::time_point> now;  // for strftime_now; none: the clock

  // Makes a name visible to the template. Call before run.
  void define(const std::string& name, Value value) { scope_->set(name, std::move(value)); }
  Text run(const Block& body);

  Value call(const Value& callee, CallArgs& args);
  // x.name and x[key]; undefined when there is none.
  Value get_attribute(const Value& object, const std::string& name);
  Value get_subscript(const Value& object, const Value& key);
  Value apply_filter(const std::string& name, const Value& input, CallArgs& args);
  bool apply_test(const std::string& name, const Value& input, CallArgs& args);

 private:
  friend class DepthGuard;
  enum class Flow : uint8_t { Next, Break, Continue };

  // Statements.
  Flow run_block(const Block& body);
  Flow run_statement(const Stmt& stmt);
  Flow run_if(const Stmt& stmt);
  void run_for(const Stmt& stmt);
  void run_loop(const Stmt& stmt, const Value& iterable, std::shared_ptr<Scope> outer, int depth0);
  void run_call_block(const Stmt& stmt);
  Flow run_with(const Stmt& stmt);
  Text capture(const Block& body);
  Text capture_in_scope(const Block& body);
  void emit(const Text& text);
  void emit_value(const Value& value);
  void assign(const Expr& target, const Value& value);
  Value make_macro(const Stmt& stmt);
  Value call_macro(const Stmt& stmt, const std::shared_ptr<Scope>& scope, CallArgs& args);
  void bind_parameters(const Stmt& stmt, CallArgs& args);
  Value apply_filter_chain(const Expr* filter, Value input);

  // Expressions.
  Value eval(const Expr& e);
  Value eval_name(const Expr& e);
  Value eval_dict(const Expr& e);
  Value eval_slice(const Expr& e);
  Value eval_call(const Expr& e);
  Value eval_filter(const Expr& e, const Value& input);
  Value eval_concat(const Expr& e);
  bool eval_compare(const Expr& e);
  Value eval_conditional(const Expr& e);
  std::vector<Value> eval_all(const std::vector<ExprPtr>& list);
  CallArgs eval_arguments(const Arguments& arguments);
  std::shared_ptr<Scope> new_scope(std::shared_ptr<Scope> parent);
  std::optional<Value> find_attribute(const Value& object, const std::string& name);

  std::shared_ptr<Scope> scope_;
  Text* out_ = nullptr;
  int depth_ = 0;
};

}  // namespace thermo::jinja
