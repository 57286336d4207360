// Statements. Expressions are in interpreter_expr.cpp.
#include "jinja/interpreter.h"

#include <algorithm>

#include "jinja/builtins.h"
#include "jinja/depth_guard.h"
#include "jinja/loop_state.h"

namespace thermo::jinja {

namespace {

// Restores a variable when the block ends, even by an exception.
template <class T>
class Restore {
 public:
  explicit Restore(T& variable) : variable_(variable), saved_(variable) {}
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;
  ~Restore() { variable_ = std::move(saved_); }

 private:
  T& variable_;
  T saved_;
};

}  // namespace

void Scope::drop_references() {
  names.clear();
  parent.reset();
}

Value* Scope::find(std::string_view name) {
  for (Scope* scope = this; scope != nullptr; scope = scope->parent.get()) {
    heap->step(scope->names.size() / 16);
    for (auto& [known, value] : scope->names) {
      if (known == name) return &value;
    }
  }
  return nullptr;
}

void Scope::set(const std::string& name, Value value) {
  heap->step(names.size() / 16);
  for (auto& [known, old] : names) {
    if (known == name) {
      old = std::move(value);
      return;
    }
  }
  names.emplace_back(name, std::move(value));
}

Interpreter::Interpreter(const Limits& limits) : heap(limits), scope_(new_scope(nullptr)) {
  define_globals(*this);
}

std::shared_ptr<Scope> Interpreter::new_scope(std::shared_ptr<Scope> parent) {
  return heap.make<Scope>(sizeof(Scope), std::move(parent));
}

Text Interpreter::run(const Block& body) {
  Text out;
  out_ = &out;
  run_block(body);
  out_ = nullptr;
  return out;
}

void Interpreter::emit(const Text& text) {
  if (text.size() > heap.limits().max_output_bytes - std::min(out_->size(), heap.limits().max_output_bytes)) {
    fail("the output is over the limit of " + std::to_string(heap.limits().max_output_bytes) + " bytes");
  }
  heap.charge_bytes(text.size());
  heap.add_live(text.size());
  out_->append(text);
}

void Interpreter::emit_value(const Value& value) {
  if (value.is_string()) return emit(value.text());
  emit(to_text(value));
}

Text Interpreter::capture(const Block& body) {
  Text text;
  const Restore<Text*> restore(out_);
  out_ = &text;
  run_block(body);
  heap.remove_live(text.size());
  return text;
}

Text Interpreter::capture_in_scope(const Block& body) {
  const Restore<std::shared_ptr<Scope>> restore(scope_);
  scope_ = new_scope(scope_);
  return capture(body);
}

Interpreter::Flow Interpreter::run_block(const Block& body) {
  for (const StmtPtr& stmt : body) {
    const Flow flow = run_statement(*stmt);
    if (flow != Flow::Next) return flow;
  }
  return Flow::Next;
}

Interpreter::Flow Interpreter::run_statement(const Stmt& stmt) {
  const DepthGuard guard(*this, stmt.line);
  switch (stmt.kind) {
    case StmtKind::Data: {
      heap.charge_bytes(stmt.text.size());
      emit(Text(stmt.text));
      return Flow::Next;
    }
    case StmtKind::Print:
      emit_value(eval(*stmt.expr));
      return Flow::Next;
    case StmtKind::Do:
      eval(*stmt.expr);
      return Flow::Next;
    case StmtKind::If:
      return run_if(stmt);
    case StmtKind::For:
      run_for(stmt);
      return Flow::Next;
    case StmtKind::Set:
      assign(*stmt.target, eval(*stmt.expr));
      return Flow::Next;
    case StmtKind::SetBlock:
      assign(*stmt.target, apply_filter_chain(stmt.filter.get(), heap.string(capture_in_scope(stmt.body))));
      return Flow::Next;
    case StmtKind::FilterBlock:
      emit_value(apply_filter_chain(stmt.filter.get(), heap.string(capture_in_scope(stmt.body))));
      return Flow::Next;
    case StmtKind::Macro:
      scope_->set(stmt.text, make_macro(stmt));
      return Flow::Next;
    case StmtKind::CallBlock:
      run_call_block(stmt);
      return Flow::Next;
    case StmtKind::With:
      return run_with(stmt);
    case StmtKind::Scoped: {
      const Restore<std::shared_ptr<Scope>> restore(scope_);
      scope_ = new_scope(scope_);
      return run_block(stmt.body);
    }
    case StmtKind::Break:
      return Flow::Break;
    case StmtKind::Continue:
      return Flow::Continue;
  }
  return Flow::Next;
}

Interpreter::Flow Interpreter::run_if(const Stmt& stmt) {
  for (const Branch& branch : stmt.branches) {
    if (branch.condition == nullptr || truthy(eval(*branch.condition))) return run_block(branch.body);
  }
  return Flow::Next;
}

void Interpreter::run_for(const Stmt& stmt) {
  const Value iterable = eval(*stmt.expr);
  run_loop(stmt, iterable, scope_, 0);
}

void Interpreter::run_loop(const Stmt& stmt, const Value& iterable, std::shared_ptr<Scope> outer,
                           int depth0) {
  const Restore<std::shared_ptr<Scope>> restore(scope_);
  scope_ = outer;
  auto items = std::make_shared<Iter>(heap, iterable);
  // The template may keep the loop object beyond the loop, so it owns what it pulls from.
  std::function<bool(Value&)> pull = [items](Value& item) { return items->next(item); };
  if (stmt.condition != nullptr) {
    pull = [this, items, &stmt, outer](Value& item) {
      while (items->next(item)) {
        const Restore<std::shared_ptr<Scope>> back(scope_);
        scope_ = new_scope(outer);
        assign(*stmt.target, item);
        if (truthy(eval(*stmt.condition))) return true;
      }
      return false;
    };
  }
  const auto loop = heap.make<LoopState>(sizeof(LoopState), iterable, std::move(pull), depth0);
  loop->is_filtered = stmt.condition != nullptr;
  if (stmt.recursive) {
    loop->call_again = [&stmt, outer, depth0](Interpreter& vm, CallArgs& args) {
      if (args.positional.size() != 1) fail("loop() of a recursive loop takes one value");
      Text text;
      const Restore<Text*> back(vm.out_);
      vm.out_ = &text;
      vm.run_loop(stmt, args.positional[0], outer, depth0 + 1);
      vm.heap.remove_live(text.size());
      return vm.heap.string(std::move(text));
    };
  }
  const Value loop_value(Kind::Loop, loop);
  // As jinja2 compiles it: `else` also runs when no iteration reached its end (break or continue in all).
  bool completed_one = false;
  std::shared_ptr<Scope> inner;
  while (loop->advance()) {
    if (inner != nullptr && inner.use_count() == 1) {
      inner->names.clear();
    } else {
      inner = new_scope(outer);  // a macro kept the last one
    }
    inner->set("loop", loop_value);
    scope_ = inner;
    assign(*stmt.target, loop->current);
    const Flow flow = run_block(stmt.body);
    scope_ = outer;
    if (flow == Flow::Break) break;
    if (flow == Flow::Next) completed_one = true;
  }
  if (!completed_one && !stmt.else_body.empty()) {
    scope_ = new_scope(outer);
    run_block(stmt.else_body);
  }
}

Interpreter::Flow Interpreter::run_with(const Stmt& stmt) {
  std::vector<Value> values;
  for (const auto& assignment : stmt.assignments) values.push_back(eval(*assignment.second));
  const Restore<std::shared_ptr<Scope>> restore(scope_);
  scope_ = new_scope(scope_);
  for (size_t i = 0; i < values.size(); ++i) assign(*stmt.assignments[i].first, values[i]);
  return run_block(stmt.body);
}

void Interpreter::assign(const Expr& target, const Value& value) {
  if (target.kind == ExprKind::Name) {
    scope_->set(target.name, value);
    return;
  }
  if (target.kind == ExprKind::Attribute) {
    const Value object = eval(*target.children[0]);
    if (!object.is(Kind::Namespace)) {
      fail("cannot set the attribute '" + target.name + "' of a value of type " + type_name(object) +
               ", expected a namespace; make one with 'namespace()'",
           target.line);
    }
    object.name_space().attributes.set(heap.string(target.name), value);
    return;
  }
  const std::vector<Value> items = to_vector(heap, value);
  if (items.size() != target.children.size()) {
    fail("cannot unpack " + std::to_string(items.size()) + " values into " +
             std::to_string(target.children.size()) + " names",
         target.line);
  }
  for (size_t i = 0; i < items.size(); ++i) assign(*target.children[i], items[i]);
}

Value Interpreter::make_macro(const Stmt& stmt) {
  // The macro is kept in the scope that it keeps.
  heap.remember_mutable(scope_);
  return heap.callable(stmt.text, [&stmt, scope = scope_](Interpreter& vm, CallArgs& args) {
    return vm.call_macro(stmt, scope, args);
  });
}

Value Interpreter::call_macro(const Stmt& stmt, const std::shared_ptr<Scope>& scope, CallArgs& args) {
  const Restore<std::shared_ptr<Scope>> restore(scope_);
  scope_ = new_scope(scope);
  bind_parameters(stmt, args);
  return heap.string(capture(stmt.body));
}

void Interpreter::bind_parameters(const Stmt& stmt, CallArgs& args) {
  const auto take_keyword = [&](const std::string& name) -> std::optional<Value> {
    const auto it = std::find_if(args.keywords.begin(), args.keywords.end(),
                                 [&](const auto& keyword) { return keyword.first == name; });
    if (it == args.keywords.end()) return std::nullopt;
    Value value = std::move(it->second);
    args.keywords.erase(it);
    return value;
  };
  std::vector<const MacroParameter*> missing;
  bool has_caller_parameter = false;
  for (size_t i = 0; i < stmt.parameters.size(); ++i) {
    const MacroParameter& parameter = stmt.parameters[i];
    has_caller_parameter |= parameter.name == "caller";
    std::optional<Value> value;
    if (i < args.positional.size()) {
      value = args.positional[i];
    } else {
      value = take_keyword(parameter.name);
    }
    if (!value) {
      missing.push_back(&parameter);
      value = Value::undefined("parameter '" + parameter.name + "' was not provided");
    }
    scope_->set(parameter.name, *value);
  }
  for (const MacroParameter* parameter : missing) {
    if (parameter->otherwise != nullptr) scope_->set(parameter->name, eval(*parameter->otherwise));
  }
  if (stmt.uses_caller && !has_caller_parameter) {
    scope_->set("caller", take_keyword("caller").value_or(Value::undefined("No caller defined")));
  }
  if (stmt.uses_kwargs) {
    const Value kwargs = heap.dict();
    for (auto& [name, value] : args.keywords) kwargs.dict().set(heap.string(name), value);
    scope_->set("kwargs", kwargs);
  } else if (!args.keywords.empty()) {
    fail("macro '" + stmt.text + "' has no parameter named '" + args.keywords[0].first + "'");
  }
  const size_t n_parameters = stmt.parameters.size();
  if (stmt.uses_varargs) {
    const auto rest =
        args.positional.begin() + static_cast<std::ptrdiff_t>(std::min(n_parameters, args.positional.size()));
    scope_->set("varargs", heap.tuple({rest, args.positional.end()}));
  } else if (args.positional.size() > n_parameters) {
    fail("macro '" + stmt.text + "' takes " + std::to_string(n_parameters) + " values, seen " +
         std::to_string(args.positional.size()));
  }
}

void Interpreter::run_call_block(const Stmt& stmt) {
  const Value callee = eval(*stmt.expr->children[0]);
  CallArgs args = eval_arguments(stmt.expr->arguments);
  args.keywords.emplace_back("caller", make_macro(stmt));
  emit_value(call(callee, args));
}

Value Interpreter::apply_filter_chain(const Expr* filter, Value input) {
  if (filter == nullptr) return input;
  return eval_filter(*filter, apply_filter_chain(filter->children[0].get(), std::move(input)));
}

}  // namespace thermo::jinja
