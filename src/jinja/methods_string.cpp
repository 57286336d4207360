// The methods of str.
#include <algorithm>

#include "jinja/builtins.h"
#include "jinja/format.h"
#include "jinja/py_string.h"

namespace thermo::jinja {

namespace {

Value make(Interpreter& vm, const Value& self, Text text) {
  return vm.heap.string(std::move(text), self.str().markup);
}

void no_arguments(std::string_view function, const CallArgs& args) {
  const BoundArgs a(function, args, {});
}

Value strip_side(Interpreter& vm, const Value& self, CallArgs& args, Side side) {
  const BoundArgs a("strip", args, {"chars"});
  const auto chars = a.has(0) ? std::optional<std::string_view>(a.text(0).view()) : std::nullopt;
  vm.heap.charge_bytes(self.view().size());
  return make(vm, self, strip(self.text(), chars, side));
}
Value str_strip(Interpreter& vm, const Value& s, CallArgs& args) {
  return strip_side(vm, s, args, Side::Both);
}
Value str_lstrip(Interpreter& vm, const Value& s, CallArgs& args) {
  return strip_side(vm, s, args, Side::Left);
}
Value str_rstrip(Interpreter& vm, const Value& s, CallArgs& args) {
  return strip_side(vm, s, args, Side::Right);
}

Value to_list(Interpreter& vm, const Value& self, std::vector<Text> parts) {
  std::vector<Value> values;
  values.reserve(parts.size());
  for (Text& part : parts) values.push_back(make(vm, self, std::move(part)));
  return vm.heap.list(std::move(values));
}

Value split_side(Interpreter& vm, const Value& self, CallArgs& args, bool from_right) {
  const BoundArgs a("split", args, {"sep", "maxsplit"});
  std::optional<std::string_view> separator;
  if (a.has(0)) {
    separator = a.text(0).view();
    if (separator->empty()) fail("'split' needs a separator that is not empty");
  }
  vm.heap.charge_bytes(self.view().size());
  const Int max_splits = a.integer(1, -1);
  return to_list(vm, self,
                 from_right ? split_from_right(self.text(), separator, max_splits)
                            : split(self.text(), separator, max_splits));
}
Value str_split(Interpreter& vm, const Value& s, CallArgs& args) {
  return split_side(vm, s, args, false);
}
Value str_rsplit(Interpreter& vm, const Value& s, CallArgs& args) {
  return split_side(vm, s, args, true);
}

Value str_splitlines(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("splitlines", args, {"keepends"});
  vm.heap.charge_bytes(self.view().size());
  return to_list(vm, self, split_lines(self.text(), a.flag(0, false)));
}

Value partition_side(Interpreter& vm, const Value& self, CallArgs& args, bool from_right) {
  const BoundArgs a("partition", args, {"sep"}, 1);
  const Text& separator = a.text(0);
  if (separator.empty()) fail("'partition' needs a separator that is not empty");
  const Text& t = self.text();
  const size_t at = from_right ? t.bytes.rfind(separator.bytes) : t.bytes.find(separator.bytes);
  if (at == std::string::npos) {
    const Value empty = vm.heap.string("");
    return from_right ? vm.heap.tuple({empty, empty, self}) : vm.heap.tuple({self, empty, empty});
  }
  const size_t after = at + separator.size();
  return vm.heap.tuple({make(vm, self, t.slice(0, at)), make(vm, self, t.slice(at, after)),
                        make(vm, self, t.slice(after, t.size()))});
}
Value str_partition(Interpreter& vm, const Value& s, CallArgs& args) {
  return partition_side(vm, s, args, false);
}
Value str_rpartition(Interpreter& vm, const Value& s, CallArgs& args) {
  return partition_side(vm, s, args, true);
}

template <Text (*kConvert)(const Text&)>
Value convert(Interpreter& vm, const Value& self, CallArgs& args) {
  no_arguments("this method", args);
  vm.heap.charge_bytes(self.view().size());
  return make(vm, self, kConvert(self.text()));
}

Value str_casefold(Interpreter& vm, const Value& self, CallArgs& args) {
  no_arguments("casefold", args);
  return make(vm, self,
              convert_chars(self.text(), [](char32_t c, std::string& out) { append_folded(out, c); }));
}

Value str_replace(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("replace", args, {"old", "new", "count"}, 2);
  return make(vm, self, replace(vm.heap, self.text(), a.text(0).view(), a.text(1), a.integer(2, -1)));
}

Value str_join(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("join", args, {"iterable"}, 1);
  Text out;
  bool first = true;
  Iter it(vm.heap, a[0]);
  for (Value item; it.next(item);) {
    if (!item.is_string())
      fail("'join' needs strings, seen " + type_name(item) + "; use '| map(\"string\")' first");
    if (!first) out.append(self.text());
    first = false;
    out.append(item.text());
    vm.heap.check_size(out.size());
  }
  return make(vm, self, std::move(out));
}

// The optional start and end of find, count, startswith as bytes, from arguments 1 and 2.
struct Window {
  size_t begin, end;
  bool exists;  // false: start is past the end, where nothing is found, not even ""
};
Window window(Interpreter& vm, const Value& self, const BoundArgs& a) {
  const std::string_view s = self.view();
  if (!a.has(1) && !a.has(2)) return {0, s.size(), true};
  vm.heap.charge_bytes(s.size());
  const auto n = static_cast<Int>(length(self));
  const auto clamp_index = [n](Int i) { return std::clamp<Int>(i < 0 ? i + n : i, 0, n); };
  const Int start = a.has(1) ? a.integer(1, 0) : 0;
  const Int begin = clamp_index(start);
  const Int end = a.has(2) ? clamp_index(a.integer(2, n)) : n;
  if (start > n || begin > end) return {0, 0, false};
  return {byte_offset(s, static_cast<size_t>(begin)), byte_offset(s, static_cast<size_t>(end)), true};
}

bool matches_end(Interpreter& vm, const Value& self, const CallArgs& args, bool at_start) {
  const BoundArgs a(at_start ? "startswith" : "endswith", args, {"affix", "start", "end"}, 1);
  const Window w = window(vm, self, a);
  if (!w.exists) return false;
  const std::string_view s = self.view().substr(w.begin, w.end - w.begin);
  const auto matches = [&](const Value& affix) {
    require_defined(affix);
    if (!affix.is_string()) fail("'startswith' and 'endswith' need a string, seen " + type_name(affix));
    return at_start ? s.starts_with(affix.view()) : s.ends_with(affix.view());
  };
  if (!a[0].is(Kind::Tuple)) return matches(a[0]);
  const auto& choices = a[0].list().items;
  return std::any_of(choices.begin(), choices.end(), matches);
}
Value str_startswith(Interpreter& vm, const Value& s, CallArgs& args) {
  return Value::boolean(matches_end(vm, s, args, true));
}
Value str_endswith(Interpreter& vm, const Value& s, CallArgs& args) {
  return Value::boolean(matches_end(vm, s, args, false));
}

Value remove_affix(Interpreter& vm, const Value& self, CallArgs& args, bool prefix) {
  const BoundArgs a(prefix ? "removeprefix" : "removesuffix", args, {"affix"}, 1);
  const Text& t = self.text();
  const Text& affix = a.text(0);
  if (affix.empty() || !(prefix ? t.view().starts_with(affix.view()) : t.view().ends_with(affix.view())))
    return self;
  return make(vm, self, prefix ? t.slice(affix.size(), t.size()) : t.slice(0, t.size() - affix.size()));
}
Value str_removeprefix(Interpreter& vm, const Value& s, CallArgs& args) {
  return remove_affix(vm, s, args, true);
}
Value str_removesuffix(Interpreter& vm, const Value& s, CallArgs& args) {
  return remove_affix(vm, s, args, false);
}

Value find_text(Interpreter& vm, const Value& self, CallArgs& args, bool from_right, bool must_exist) {
  const BoundArgs a(from_right ? "rfind" : "find", args, {"sub", "start", "end"}, 1);
  const std::string_view sub = a.text(0).view();
  const Window w = window(vm, self, a);
  vm.heap.charge_bytes(self.view().size());
  const std::string_view s = self.view().substr(w.begin, w.end - w.begin);
  const size_t at = !w.exists ? std::string_view::npos : from_right ? s.rfind(sub) : s.find(sub);
  if (at == std::string_view::npos) {
    if (must_exist) fail("'index' did not find '" + std::string(sub) + "'");
    return Value::integer(-1);
  }
  return Value::integer(static_cast<Int>(count_code_points(self.view().substr(0, w.begin + at))));
}
Value str_find(Interpreter& vm, const Value& s, CallArgs& args) {
  return find_text(vm, s, args, false, false);
}
Value str_rfind(Interpreter& vm, const Value& s, CallArgs& args) {
  return find_text(vm, s, args, true, false);
}
Value str_index(Interpreter& vm, const Value& s, CallArgs& args) {
  return find_text(vm, s, args, false, true);
}
Value str_rindex(Interpreter& vm, const Value& s, CallArgs& args) {
  return find_text(vm, s, args, true, true);
}

Value str_count(Interpreter& vm, const Value& self, CallArgs& args) {
  const BoundArgs a("count", args, {"sub", "start", "end"}, 1);
  const std::string_view sub = a.text(0).view();
  const Window w = window(vm, self, a);
  if (!w.exists) return Value::integer(0);
  vm.heap.charge_bytes(self.view().size());
  const std::string_view s = self.view().substr(w.begin, w.end - w.begin);
  if (sub.empty()) return Value::integer(static_cast<Int>(count_code_points(s)) + 1);
  Int n = 0;
  for (size_t at = s.find(sub); at != std::string_view::npos; at = s.find(sub, at + sub.size())) ++n;
  return Value::integer(n);
}

Value pad(Interpreter& vm, const Value& self, CallArgs& args, char align) {
  const BoundArgs a("this method", args, {"width", "fillchar"}, 1);
  const size_t width = a.count(0, 0);
  const Text fill = a.has(1) ? a.text(1) : Text(align == '0' ? "0" : " ");
  if (count_code_points(fill.bytes) != 1) fail("'fillchar' must be one character");
  const size_t n = length(self);
  const size_t missing = width > n ? width - n : 0;
  vm.heap.check_size(missing * fill.size());
  const Text& t = self.text();
  const bool has_sign = align == '0' && !t.empty() && (t.bytes[0] == '-' || t.bytes[0] == '+');
  const size_t sign = has_sign ? 1 : 0;
  const size_t left = align == '<' ? 0 : align == '^' ? missing / 2 + (missing & width & 1) : missing;
  Text out = t.slice(0, sign);
  for (size_t i = 0; i < left; ++i) out.append(fill);
  out.append_slice(t, sign, t.size());
  for (size_t i = left; i < missing; ++i) out.append(fill);
  return make(vm, self, std::move(out));
}
Value str_center(Interpreter& vm, const Value& s, CallArgs& args) {
  return pad(vm, s, args, '^');
}
Value str_ljust(Interpreter& vm, const Value& s, CallArgs& args) {
  return pad(vm, s, args, '<');
}
Value str_rjust(Interpreter& vm, const Value& s, CallArgs& args) {
  return pad(vm, s, args, '>');
}
Value str_zfill(Interpreter& vm, const Value& s, CallArgs& args) {
  return pad(vm, s, args, '0');
}

Value str_format(Interpreter& vm, const Value& self, CallArgs& args) {
  return make(vm, self, format_braces(vm.heap, self.text(), args));
}

template <bool (*kPredicate)(char32_t)>
Value all_chars(Interpreter& vm, const Value& self, CallArgs& args) {
  no_arguments("this method", args);
  const std::string_view s = self.view();
  vm.heap.charge_bytes(s.size());
  for (size_t pos = 0; pos < s.size();) {
    if (!kPredicate(decode_utf8(s, pos))) return Value::boolean(false);
  }
  return Value::boolean(!s.empty());
}

Value str_isascii(Interpreter&, const Value& self, CallArgs& args) {
  no_arguments("isascii", args);
  return Value::boolean(self.str().ascii);
}

Value str_isprintable(Interpreter& vm, const Value& self, CallArgs& args) {
  return self.view().empty() ? Value::boolean(true) : all_chars<is_printable>(vm, self, args);
}

Value str_isidentifier(Interpreter& vm, const Value& self, CallArgs& args) {
  const bool starts_well = !self.view().empty() && !(self.view()[0] >= '0' && self.view()[0] <= '9');
  return starts_well ? all_chars<is_word>(vm, self, args) : Value::boolean(false);
}

Value str_islower(Interpreter& vm, const Value& self, CallArgs& args) {
  no_arguments("islower", args);
  return Value::boolean(vm.apply_test("lower", self, args));
}

Value str_isupper(Interpreter& vm, const Value& self, CallArgs& args) {
  no_arguments("isupper", args);
  return Value::boolean(vm.apply_test("upper", self, args));
}

Value str_istitle(Interpreter&, const Value& self, CallArgs& args) {
  no_arguments("istitle", args);
  bool in_word = false;
  bool found = false;
  for (size_t pos = 0; pos < self.view().size();) {
    const char32_t c = decode_utf8(self.view(), pos);
    const bool starts = is_upper(c) || is_title(c);
    if ((starts && in_word) || (is_lower(c) && !in_word)) return Value::boolean(false);
    in_word = starts || is_lower(c);
    found |= in_word;
  }
  return Value::boolean(found);
}

}  // namespace

const MethodTable& string_methods() {
  static const MethodTable kTable = {
      {"strip", str_strip},
      {"lstrip", str_lstrip},
      {"rstrip", str_rstrip},
      {"split", str_split},
      {"rsplit", str_rsplit},
      {"splitlines", str_splitlines},
      {"partition", str_partition},
      {"rpartition", str_rpartition},
      {"upper", convert<to_upper>},
      {"lower", convert<to_lower>},
      {"title", convert<to_title>},
      {"capitalize", convert<capitalize>},
      {"swapcase", convert<swap_case>},
      {"casefold", str_casefold},
      {"replace", str_replace},
      {"join", str_join},
      {"format", str_format},
      {"startswith", str_startswith},
      {"endswith", str_endswith},
      {"removeprefix", str_removeprefix},
      {"removesuffix", str_removesuffix},
      {"find", str_find},
      {"rfind", str_rfind},
      {"index", str_index},
      {"rindex", str_rindex},
      {"count", str_count},
      {"center", str_center},
      {"ljust", str_ljust},
      {"rjust", str_rjust},
      {"zfill", str_zfill},
      {"isalpha", all_chars<is_alpha>},
      {"isalnum", all_chars<is_alnum>},
      {"isdigit", all_chars<is_digit>},
      {"isdecimal", all_chars<is_decimal>},
      {"isnumeric", all_chars<is_numeric>},
      {"isspace", all_chars<is_space>},
      {"isascii", str_isascii},
      {"isprintable", str_isprintable},
      {"isidentifier", str_isidentifier},
      {"islower", str_islower},
      {"isupper", str_isupper},
      {"istitle", str_istitle},
  };
  return kTable;
}

}  // namespace thermo::jinja
