// The values a template computes with: Python's, as far as templates use them.
//
// Values are handles. Strings, tuples and ranges never change; lists, dicts and namespaces are shared by all
// handles, as in Python, which is why objects are reference counted. Objects made while rendering belong to
// a Heap that counts what is alive and stops a template that wants too much; it must outlive them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "jinja/text.h"

namespace thermo::jinja {

// Wide enough for every integer of a JSON document; overflow beyond it is an error, not a big integer.
__extension__ typedef __int128 Int;

enum class Kind : uint8_t {
  Undefined,
  None,
  Bool,
  Integer,
  Float,
  String,
  List,
  Tuple,
  Dict,
  Range,
  View,
  Generator,
  Namespace,
  Loop,
  Callable
};

// Thrown by everything below Template::parse and Template::render, which turn it into an Error.
// line 0: not known here, the interpreter adds it.
struct TemplateError {
  std::string message;
  int line = 0;
  bool for_any_input = false;  // no other messages would help
};

[[noreturn]] void fail(std::string message, int line = 0);

class Heap;
class Value;

// What all reference-counted objects share. A heap of nullptr: not counted (constants of a parsed template).
struct Object {
  explicit Object(Heap* owner) : heap(owner) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  virtual ~Object();
  // Releases the values it holds.
  virtual void drop_references() {}

  Heap* heap;
  size_t counted_bytes = 0;
  bool is_remembered = false;   // see Heap::remember_mutable
  Object* next_dead = nullptr;  // see Heap::bury
};

struct Str;
struct List;
struct Dict;
struct Range;
struct View;
struct Generator;
struct Namespace;
struct LoopState;
struct Callable;

class Value {
 public:
  Value() noexcept : int_(0) {}  // undefined without a name
  static Value none() noexcept { return Value(Kind::None, Int{0}); }
  static Value boolean(bool b) noexcept { return Value(Kind::Bool, Int{b}); }
  static Value integer(Int i) noexcept { return Value(Kind::Integer, i); }
  static Value real(double d) noexcept;
  // Undefined, with the message of the error that using it gives.
  static Value undefined(std::string why);
  Value(Kind kind, std::shared_ptr<Object> object) noexcept
      : kind_(kind), int_(0), object_(std::move(object)) {}

  Kind kind() const noexcept { return kind_; }
  bool is(Kind k) const noexcept { return kind_ == k; }
  bool is_undefined() const noexcept { return kind_ == Kind::Undefined; }
  bool is_none() const noexcept { return kind_ == Kind::None; }
  bool is_string() const noexcept { return kind_ == Kind::String; }
  bool is_integer() const noexcept {
    return kind_ == Kind::Integer || kind_ == Kind::Bool;
  }  // bool is an int
  bool is_number() const noexcept { return is_integer() || kind_ == Kind::Float; }
  bool is_sequence() const noexcept { return kind_ == Kind::List || kind_ == Kind::Tuple; }

  // REQUIRES: the matching kind.
  bool as_bool() const noexcept { return int_ != 0; }
  Int as_int() const noexcept { return int_; }  // Bool or Int
  double as_double() const noexcept { return kind_ == Kind::Float ? real_ : static_cast<double>(int_); }
  const Str& str() const noexcept;
  const Text& text() const noexcept;
  std::string_view view() const noexcept;
  List& list() const noexcept;  // List or Tuple
  Dict& dict() const noexcept;
  const Range& range() const noexcept;
  const View& dict_view() const noexcept;
  Generator& generator() const noexcept;
  Namespace& name_space() const noexcept;
  LoopState& loop() const noexcept;
  const Callable& callable() const noexcept;
  const Object* object() const noexcept { return object_.get(); }
  const std::shared_ptr<Object>& shared() const noexcept { return object_; }

  // Why this value is undefined.
  std::string undefined_reason() const;

 private:
  Value(Kind kind, Int i) noexcept : kind_(kind), int_(i) {}

  Kind kind_ = Kind::Undefined;
  union {
    Int int_;
    double real_;
  };
  std::shared_ptr<Object> object_;
};

struct Str : Object {
  Str(Heap* owner, Text t, bool is_markup);
  Text text;
  bool ascii;   // one byte per character
  bool markup;  // Markup of jinja2: `+` escapes the other side
};

struct List : Object {
  List(Heap* owner, std::vector<Value> values) : Object(owner), items(std::move(values)) {}
  void drop_references() override { items.clear(); }
  std::vector<Value> items;
  bool is_group = false;  // a tuple of groupby: has .grouper and .list
};

// Keeps the order of insertion. Keys are compared as Python does: 1, 1.0 and True are one key.
struct Dict : Object {
  explicit Dict(Heap* owner) : Object(owner) {}
  void drop_references() override { clear(); }

  Value* find(const Value& key);
  Value* find(std::string_view key);
  void set(const Value& key, Value value);
  bool erase(const Value& key);
  void clear();

  std::vector<std::pair<Value, Value>> entries;

 private:
  size_t position(const Value& key) const;
  void index_entry(size_t at);

  std::unordered_multimap<size_t, size_t> index_;  // hash to position, filled once the dict is large
};

struct Range : Object {
  Range(Heap* owner, Int first, Int past, Int by);
  Int start, stop, step, length;
};

enum class ViewKind : uint8_t { Keys, Values, Items };

struct View : Object {  // dict.keys(), dict.values() and dict.items()
  View(Heap* owner, ViewKind k, Value d) : Object(owner), view_kind(k), dict(std::move(d)) {}
  ViewKind view_kind;
  Value dict;
};

// Gives its values once, like a Python generator; always true in a condition.
struct Generator : Object {
  Generator(Heap* owner, std::function<bool(Value&)> pull) : Object(owner), next(std::move(pull)) {}
  std::function<bool(Value&)> next;
};

struct Namespace : Object {
  explicit Namespace(Heap* owner) : Object(owner), attributes(owner) {}
  void drop_references() override { attributes.clear(); }
  Dict attributes;
};

class Interpreter;

struct CallArgs {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keywords;
};

struct Callable : Object {
  using Function = std::function<Value(Interpreter&, CallArgs&)>;
  Callable(Heap* owner, std::string called, Function f)
      : Object(owner), name(std::move(called)), function(std::move(f)) {}
  std::string name;
  Function function;
};

// What a template may use up. The defaults are far above what a prompt needs.
struct Limits {
  size_t max_output_bytes = size_t{64} << 20;  // of the rendered text, and of any one string
  size_t max_live_bytes = size_t{512} << 20;   // all values alive at one time
  uint64_t max_steps = 50'000'000;             // evaluated nodes, plus one per 32 bytes or item produced
  int max_depth = 400;                         // nested expressions, statements and macro calls
};

// Makes and counts the objects of one rendering. One thread.
class Heap {
 public:
  explicit Heap(const Limits& limits) : limits_(limits) {}
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;
  ~Heap();

  void step(uint64_t n = 1) {
    steps_ += n;
    if (steps_ > limits_.max_steps) fail_steps();
  }
  void charge_bytes(size_t n) { step(n / 32); }
  const Limits& limits() const noexcept { return limits_; }
  // Refuses a string that would become too long, before it is built.
  void check_size(size_t bytes) const;

  Value string(Text text, bool markup = false);
  Value string(std::string_view s) { return string(Text(std::string(s))); }
  Value list(std::vector<Value> items);
  Value tuple(std::vector<Value> items);
  Value dict();
  Value range(Int start, Int stop, Int step);
  Value view(ViewKind kind, const Value& dict);
  Value generator(std::function<bool(Value&)> next);
  Value name_space();
  Value callable(std::string name, Callable::Function function);

  void add_live(size_t bytes);
  void remove_live(size_t bytes) noexcept { live_bytes_ -= bytes; }

  // Lists and dicts changed by a method, namespaces and scopes of macros may refer to themselves. What is
  // passed here is emptied at the end, so that no cycle leaks.
  void remember_mutable(const std::shared_ptr<Object>& object);
  // Frees objects one after another instead of one inside another: a long chain must not overflow the stack.
  void bury(Object* object) noexcept;

  // Limits how deep generators pull from other generators.
  class PullGuard {
   public:
    explicit PullGuard(Heap& heap) : heap_(heap) {
      if (heap_.pull_depth_ >= kMaxPullDepth) fail("too many filters such as 'map' and 'select' are chained");
      ++heap_.pull_depth_;
    }
    PullGuard(const PullGuard&) = delete;
    PullGuard& operator=(const PullGuard&) = delete;
    ~PullGuard() { --heap_.pull_depth_; }

   private:
    static constexpr int kMaxPullDepth = 50;
    Heap& heap_;
  };

  template <class T, class... Args>
  std::shared_ptr<T> make(size_t bytes, Args&&... args) {
    charge_bytes(bytes);
    add_live(bytes);
    std::shared_ptr<T> object(new T(this, std::forward<Args>(args)...), [](T* t) { t->heap->bury(t); });
    object->counted_bytes = bytes;
    return object;
  }

 private:
  [[noreturn]] void fail_steps() const;

  Limits limits_;
  uint64_t steps_ = 0;
  size_t live_bytes_ = 0;
  std::vector<std::shared_ptr<Object>> mutable_;
  Object* dead_ = nullptr;
  bool burying_ = false;
  int pull_depth_ = 0;
};

inline const Str& Value::str() const noexcept {
  return static_cast<const Str&>(*object_);
}
inline const Text& Value::text() const noexcept {
  return str().text;
}
inline std::string_view Value::view() const noexcept {
  return str().text.bytes;
}
inline List& Value::list() const noexcept {
  return static_cast<List&>(*object_);
}
inline Dict& Value::dict() const noexcept {
  return static_cast<Dict&>(*object_);
}
inline const Range& Value::range() const noexcept {
  return static_cast<const Range&>(*object_);
}
inline const View& Value::dict_view() const noexcept {
  return static_cast<const View&>(*object_);
}
inline Generator& Value::generator() const noexcept {
  return static_cast<Generator&>(*object_);
}
inline Namespace& Value::name_space() const noexcept {
  return static_cast<Namespace&>(*object_);
}
inline const Callable& Value::callable() const noexcept {
  return static_cast<const Callable&>(*object_);
}

}  // namespace thermo::jinja
