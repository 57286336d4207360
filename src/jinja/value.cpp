#include "jinja/value.h"

#include <algorithm>

#include "jinja/value_ops.h"

namespace thermo::jinja {

namespace {

constexpr size_t kSmallDict = 12;  // up to here a scan beats a hash table
constexpr size_t kNotFound = static_cast<size_t>(-1);

struct Reason : Object {
  explicit Reason(std::string w) : Object(nullptr), why(std::move(w)) {}
  std::string why;
};

}  // namespace

void fail(std::string message, int line) {
  throw TemplateError{std::move(message), line};
}

Object::~Object() {
  if (heap != nullptr) heap->remove_live(counted_bytes);
}

Value Value::real(double d) noexcept {
  Value v;
  v.kind_ = Kind::Float;
  v.real_ = d;
  return v;
}

Value Value::undefined(std::string why) {
  return Value(Kind::Undefined, std::make_shared<Reason>(std::move(why)));
}

std::string Value::undefined_reason() const {
  return object_ ? static_cast<const Reason&>(*object_).why : "the value is undefined";
}

Str::Str(Heap* owner, Text t, bool is_markup)
    : Object(owner), text(std::move(t)), ascii(is_ascii(text.bytes)), markup(is_markup) {}

void Dict::clear() {
  entries.clear();
  index_.clear();
}

size_t Dict::position(const Value& key) const {
  if (entries.size() <= kSmallDict) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (equals(entries[i].first, key)) return i;
    }
    return kNotFound;
  }
  const auto [first, last] = index_.equal_range(hash_value(key));
  for (auto it = first; it != last; ++it) {
    if (equals(entries[it->second].first, key)) return it->second;
  }
  return kNotFound;
}

void Dict::index_entry(size_t at) {
  if (entries.size() <= kSmallDict) return;
  if (index_.empty()) {
    for (size_t i = 0; i < entries.size(); ++i) index_.emplace(hash_value(entries[i].first), i);
  } else {
    index_.emplace(hash_value(entries[at].first), at);
  }
}

Value* Dict::find(const Value& key) {
  const size_t at = position(key);
  return at == kNotFound ? nullptr : &entries[at].second;
}

Value* Dict::find(std::string_view key) {
  if (entries.size() > kSmallDict) {
    const auto [first, last] = index_.equal_range(hash_string(key));
    for (auto it = first; it != last; ++it) {
      auto& entry = entries[it->second];
      if (entry.first.is_string() && entry.first.view() == key) return &entry.second;
    }
    return nullptr;
  }
  for (auto& [name, value] : entries) {
    if (name.is_string() && name.view() == key) return &value;
  }
  return nullptr;
}

void Dict::set(const Value& key, Value value) {
  hash_value(key);  // refuses what Python calls unhashable
  if (heap != nullptr) heap->step();
  if (Value* found = find(key)) {
    *found = std::move(value);
    return;
  }
  if (heap != nullptr) {
    heap->add_live(sizeof(entries[0]) * 2);
    counted_bytes += sizeof(entries[0]) * 2;
  }
  entries.emplace_back(key, std::move(value));
  index_entry(entries.size() - 1);
}

bool Dict::erase(const Value& key) {
  const size_t at = position(key);
  if (at == kNotFound) return false;
  if (heap != nullptr) heap->step(entries.size());
  entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(at));
  index_.clear();
  if (entries.size() > kSmallDict) index_entry(0);
  return true;
}

Range::Range(Heap* owner, Int first, Int past, Int by) : Object(owner), start(first), stop(past), step(by) {
  const Int span = by > 0 ? past - first : first - past;
  const Int stride = by > 0 ? by : -by;
  length = span <= 0 ? 0 : (span - 1) / stride + 1;
}

Heap::~Heap() {
  for (const auto& object : mutable_) object->drop_references();
  mutable_.clear();
}

void Heap::check_size(size_t bytes) const {
  if (bytes > limits_.max_output_bytes) {
    fail("a string of " + std::to_string(bytes) + " bytes is over the limit of " +
         std::to_string(limits_.max_output_bytes));
  }
}

void Heap::fail_steps() const {
  throw TemplateError{
      "the template took more than " + std::to_string(limits_.max_steps) + " steps; does a loop not end?", 0,
      true};
}

void Heap::add_live(size_t bytes) {
  if (bytes > limits_.max_live_bytes - std::min(live_bytes_, limits_.max_live_bytes)) {
    fail("the template's values need more than " + std::to_string(limits_.max_live_bytes) +
         " bytes of memory");
  }
  live_bytes_ += bytes;
}

Value Heap::string(Text text, bool markup) {
  check_size(text.size());
  const size_t bytes = sizeof(Str) + text.size() + text.marks.size() * sizeof(ByteRange);
  return Value(Kind::String, make<Str>(bytes, std::move(text), markup));
}

Value Heap::list(std::vector<Value> items) {
  const size_t bytes = sizeof(List) + items.size() * sizeof(Value);
  return Value(Kind::List, make<List>(bytes, std::move(items)));
}

Value Heap::tuple(std::vector<Value> items) {
  const size_t bytes = sizeof(List) + items.size() * sizeof(Value);
  return Value(Kind::Tuple, make<List>(bytes, std::move(items)));
}

Value Heap::dict() {
  return Value(Kind::Dict, make<Dict>(sizeof(Dict)));
}

Value Heap::range(Int start, Int stop, Int step) {
  return Value(Kind::Range, make<Range>(sizeof(Range), start, stop, step));
}

Value Heap::view(ViewKind kind, const Value& dict) {
  return Value(Kind::View, make<View>(sizeof(View), kind, dict));
}

Value Heap::generator(std::function<bool(Value&)> next) {
  return Value(Kind::Generator, make<Generator>(sizeof(Generator), std::move(next)));
}

Value Heap::name_space() {
  const Value v(Kind::Namespace, make<Namespace>(sizeof(Namespace)));
  remember_mutable(v.shared());
  return v;
}

Value Heap::callable(std::string name, Callable::Function function) {
  return Value(Kind::Callable, make<Callable>(sizeof(Callable), std::move(name), std::move(function)));
}

void Heap::remember_mutable(const std::shared_ptr<Object>& object) {
  if (object->is_remembered) return;
  object->is_remembered = true;
  mutable_.push_back(object);
}

void Heap::bury(Object* object) noexcept {
  object->next_dead = dead_;
  dead_ = object;
  if (burying_) return;
  burying_ = true;
  while (dead_ != nullptr) {
    Object* const first = dead_;
    dead_ = first->next_dead;
    delete first;
  }
  burying_ = false;
}

}  // namespace thermo::jinja
