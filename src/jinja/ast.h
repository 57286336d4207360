// The parsed template. Nodes are plain structs; the comment at each kind says which fields it uses.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "jinja/value_ops.h"

namespace thermo::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

enum class ExprKind : uint8_t {
  Constant,    // constant
  Name,        // name
  List,        // children
  Tuple,       // children
  Dict,        // children: key, value, key, value ...
  Attribute,   // children[0] . name
  Item,        // children[0] [ children[1] ]
  Slice,       // children[0] [ start : stop : step ], parts may be null
  Call,        // children[0] ( arguments )
  Filter,      // children[0] | name ( arguments ); children[0] null in a filter block
  Test,        // children[0] is name ( arguments )
  Not,         // children[0]
  Negate,      // children[0]
  Plus,        // + children[0]
  Binary,      // children[0] op children[1]
  Concat,      // children joined by ~
  Compare,     // children[0] comparisons[0] children[1] comparisons[1] ...
  And,         // children[0], children[1]
  Or,          // children[0], children[1]
  Conditional  // children: value, condition, otherwise (may be null)
};

enum class CompareOp : uint8_t { Equal, NotEqual, Less, LessEqual, Greater, GreaterEqual, In, NotIn };

struct Arguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> keywords;
  ExprPtr star;         // *sequence
  ExprPtr double_star;  // **mapping
};

struct Expr {
  ExprKind kind;
  int line;
  int height = 1;  // of the tree below; bounded by the parser so that no walk overflows the stack
  std::string name;
  Value constant;
  std::vector<ExprPtr> children;
  Arguments arguments;
  BinaryOp op = BinaryOp::Add;
  std::vector<CompareOp> comparisons;
};

struct Stmt;
using StmtPtr = std::unique_ptr<Stmt>;
using Block = std::vector<StmtPtr>;

struct MacroParameter {
  std::string name;
  ExprPtr otherwise;  // default value or null
};

enum class StmtKind : uint8_t {
  Data,         // text
  Print,        // expr
  Do,           // expr, evaluated and dropped
  If,           // branches: condition (null: else) and block
  For,          // target in expr [if condition] body else_body
  Set,          // target = expr
  SetBlock,     // target = captured body, through filter (may be null)
  FilterBlock,  // filter, body
  Macro,        // name, parameters, body
  CallBlock,    // expr (a call), parameters, body
  With,         // targets = values, body
  Scoped,       // body in a scope of its own: generation, block, autoescape false
  Break,
  Continue
};

struct Branch {
  ExprPtr condition;
  Block body;
};

struct Stmt {
  StmtKind kind;
  int line;
  std::string text;  // Data text, macro name
  ExprPtr target;    // Name, Tuple of targets, or Attribute of a Name (namespace)
  ExprPtr expr;
  ExprPtr condition;
  ExprPtr filter;  // a chain of Filter with a null innermost child
  std::vector<Branch> branches;
  Block body, else_body;
  std::vector<MacroParameter> parameters;
  std::vector<std::pair<ExprPtr, ExprPtr>> assignments;
  bool recursive = false;
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;  // Macro and CallBlock
};

}  // namespace thermo::jinja
