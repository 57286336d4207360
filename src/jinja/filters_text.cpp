// Filters that make text from text.
#include <algorithm>

#include "jinja/builtins.h"
#include "jinja/format.h"
#include "jinja/json_text.h"
#include "jinja/py_string.h"

namespace thermo::jinja {

namespace {

// Applies `convert` to str(input); markup stays markup.
template <class Convert>
Value convert_text(Interpreter& vm, const Value& input, Convert&& convert) {
  const Value s = soft_string(vm, input);
  vm.heap.charge_bytes(s.view().size());
  return vm.heap.string(convert(s.text()), s.str().markup);
}

void no_arguments(std::string_view function, const CallArgs& args) {
  const BoundArgs a(function, args, {});
}

Value filter_trim(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("trim", args, {"chars"});
  const auto chars = a.has(0) ? std::optional<std::string_view>(a.text(0).view()) : std::nullopt;
  return convert_text(vm, input, [&](const Text& t) { return strip(t, chars, Side::Both); });
}

Value filter_upper(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("upper", args);
  return convert_text(vm, input, to_upper);
}

Value filter_lower(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("lower", args);
  return convert_text(vm, input, to_lower);
}

Value filter_capitalize(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("capitalize", args);
  return convert_text(vm, input, capitalize);
}

// Unlike str.title, words begin only after spaces, "-" and opening brackets.
Value filter_title(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("title", args);
  bool in_word = false;
  return convert_text(vm, input, [&](const Text& t) {
    return convert_chars(t, [&](char32_t c, std::string& out) {
      const bool separates = is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
      in_word ? append_lower(out, c) : append_upper(out, c);
      in_word = !separates;
    });
  });
}

Value filter_replace(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("replace", args, {"old", "new", "count"}, 2);
  const Text old_text = to_text(a[0]);
  return vm.heap.string(
      replace(vm.heap, to_text(input), old_text.bytes, to_text(a[1]), a.has(2) ? a.integer(2, -1) : -1));
}

Value filter_string(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("string", args);
  return soft_string(vm, input);
}

Value filter_safe(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("safe", args);
  return vm.heap.string(to_text(input), true);
}

Value filter_escape(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("escape", args);
  if (input.is_string() && input.str().markup) return input;
  return vm.heap.string(escape_html(to_text(input)), true);
}

Value filter_forceescape(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("forceescape", args);
  return vm.heap.string(escape_html(to_text(input)), true);
}

Value filter_indent(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("indent", args, {"width", "first", "blank"});
  const Text margin(a[0].is_string() ? a[0].text() : Text(std::string(a.count(0, 4), ' ')));
  const bool blank = a.flag(2, false);
  require_defined(input);
  if (!input.is_string()) fail("'indent' needs a string, seen " + type_name(input));
  Text source = input.text();
  source.append("\n");  // splitlines then keeps an empty last line, as in jinja2
  const std::vector<Text> lines = split_lines(source, false);
  Text out;
  if (a.flag(1, false)) out.append(margin);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) {
      out.append("\n");
      if (blank || !lines[i].empty()) out.append(margin);
    }
    out.append(lines[i]);
    vm.heap.check_size(out.size());
    vm.heap.step();
  }
  return vm.heap.string(std::move(out));
}

Value filter_center(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("center", args, {"width"});
  const size_t width = a.count(0, 80);
  const Text t = to_text(input);
  const size_t n = count_code_points(t.bytes);
  const size_t missing = width > n ? width - n : 0;
  // CPython puts the odd space on the left when both the gap and the width are odd.
  const size_t left = missing / 2 + (missing & width & 1);
  Text out(std::string(left, ' '));
  out.append(t);
  out.append(std::string(missing - left, ' '));
  return vm.heap.string(std::move(out));
}

Value filter_truncate(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("truncate", args, {"length", "killwords", "end", "leeway"});
  const size_t limit = a.count(0, 255);
  const std::string end = a.string_or(2, "...");
  const size_t end_length = count_code_points(end);
  if (limit < end_length)
    fail("'truncate' needs a length of at least that of its end, " + std::to_string(end_length));
  const Value s = soft_string(vm, input);
  if (length(s) <= limit + a.count(3, 5)) return s;
  Text kept = s.text().slice(0, byte_offset(s.view(), limit - end_length));
  if (!a.flag(1, false)) {
    const size_t space = kept.bytes.rfind(' ');
    if (space != std::string::npos) kept = kept.slice(0, space);
  }
  kept.append(end);
  return vm.heap.string(std::move(kept));
}

Value filter_wordcount(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("wordcount", args);
  const Text t = to_text(input);
  vm.heap.charge_bytes(t.size());
  Int words = 0;
  bool in_word = false;
  for (size_t pos = 0; pos < t.size();) {
    const bool word = is_word(decode_utf8(t.bytes, pos));
    if (word && !in_word) ++words;
    in_word = word;
  }
  return Value::integer(words);
}

void append_quoted(Text& out, const Text& t, std::string_view also_safe, bool plus_for_space) {
  for (size_t i = 0; i < t.size(); ++i) {
    const char c = t.bytes[i];
    const bool plain = (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') ||
                       std::string_view("_.-~").find(c) != std::string_view::npos ||
                       also_safe.find(c) != std::string_view::npos;
    if (plain) {
      out.append_slice(t, i, i + 1);
    } else if (c == ' ' && plus_for_space) {
      out.append("+");
    } else {
      constexpr char kHex[] = "0123456789ABCDEF";
      const char escaped[] = {'%', kHex[static_cast<unsigned char>(c) >> 4], kHex[c & 15]};
      out.append(std::string_view(escaped, 3));
    }
  }
}

Value filter_urlencode(Interpreter& vm, const Value& input, CallArgs& args) {
  no_arguments("urlencode", args);
  Text out;
  const bool has_pairs = !input.is_string() && Iter::can_iterate(input) && !input.is_undefined();
  if (!has_pairs) {
    append_quoted(out, to_text(input), "/", false);
    return vm.heap.string(std::move(out));
  }
  const Value pairs = input.is(Kind::Dict) ? vm.heap.view(ViewKind::Items, input) : input;
  Iter it(vm.heap, pairs);
  for (Value pair; it.next(pair);) {
    const std::vector<Value> items = to_vector(vm.heap, pair);
    if (items.size() != 2) fail("'urlencode' needs pairs, seen " + std::to_string(items.size()) + " values");
    if (!out.empty()) out.append("&");
    append_quoted(out, to_text(items[0]), "", true);
    out.append("=");
    append_quoted(out, to_text(items[1]), "", true);
    vm.heap.check_size(out.size());
  }
  return vm.heap.string(std::move(out));
}

Value filter_format(Interpreter& vm, const Value& input, CallArgs& args) {
  if (!args.positional.empty() && !args.keywords.empty()) {
    fail("'format' takes positional or keyword values, not both");
  }
  const Value format = soft_string(vm, input);
  Value values = vm.heap.tuple(args.positional);
  if (!args.keywords.empty()) {
    values = vm.heap.dict();
    for (const auto& [name, value] : args.keywords) values.dict().set(vm.heap.string(name), value);
  }
  return vm.heap.string(format_percent(vm.heap, format.text(), values), format.str().markup);
}

// json.dumps with the arguments that transformers gives to templates; no HTML escapes.
Value filter_tojson(Interpreter& vm, const Value& input, CallArgs& args) {
  const BoundArgs a("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  // tojson(2) and tojson(indent=2) of jinja2 proper and of transformers disagree on the position; a number
  // other than a bool can only mean the indentation.
  const bool number_first = a.has(0) && a[0].is(Kind::Integer);
  JsonStyle style;
  style.ensure_ascii = !number_first && a.flag(0, false);
  style.sort_keys = a.flag(3, false);
  if (a.has(1) || number_first) {
    const size_t at = a.has(1) ? 1 : 0;
    style.indent =
        a[at].is_string() ? a.text(at).bytes : std::string(std::min<size_t>(a.count(at, 0), 1000), ' ');
    style.item_separator = ",";
  }
  if (a.has(2)) {
    const std::vector<Value> parts = to_vector(vm.heap, a[2]);
    if (parts.size() != 2 || !parts[0].is_string() || !parts[1].is_string()) {
      fail("'separators' of 'tojson' must be two strings");
    }
    style.item_separator = parts[0].view();
    style.key_separator = parts[1].view();
  }
  return vm.heap.string(to_json(vm.heap, input, style));
}

}  // namespace

const FilterTable& text_filters() {
  static const FilterTable kTable = {
      {"trim", filter_trim},     {"upper", filter_upper},
      {"lower", filter_lower},   {"capitalize", filter_capitalize},
      {"title", filter_title},   {"replace", filter_replace},
      {"string", filter_string}, {"safe", filter_safe},
      {"escape", filter_escape}, {"e", filter_escape},
      {"indent", filter_indent}, {"forceescape", filter_forceescape},
      {"center", filter_center}, {"truncate", filter_truncate},
      {"format", filter_format}, {"wordcount", filter_wordcount},
      {"tojson", filter_tojson}, {"urlencode", filter_urlencode},
  };
  return kTable;
}

}  // namespace thermo::jinja
