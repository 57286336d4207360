// Values as text and back: str(), repr(), int(), float(), HTML escapes.
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "jinja/loop_state.h"
#include "jinja/value_ops.h"

namespace thermo::jinja {

namespace {

constexpr int kMaxNesting = 200;

bool is_ascii_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

std::string_view trimmed(std::string_view s) {
  while (!s.empty() && is_ascii_space(s.front())) s.remove_prefix(1);
  while (!s.empty() && is_ascii_space(s.back())) s.remove_suffix(1);
  return s;
}

Text repr_string(const Text& t) {
  const bool has_single = t.bytes.find('\'') != std::string::npos;
  const char quote = has_single && t.bytes.find('"') == std::string::npos ? '"' : '\'';
  Text out(std::string(1, quote));
  out.append(convert_chars(t, [quote](char32_t c, std::string& to) {
    char buffer[16];
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      to += '\\';
      to += static_cast<char>(c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      to += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (c >= kStrayByte) {
      std::snprintf(buffer, sizeof buffer, "\\x%02x", static_cast<unsigned>(c - kStrayByte));
      to += buffer;
    } else if (!is_printable(c)) {
      std::snprintf(buffer, sizeof buffer,
                    c < 0x100     ? "\\x%02x"
                    : c < 0x10000 ? "\\u%04x"
                                  : "\\U%08x",
                    static_cast<unsigned>(c));
      to += buffer;
    } else {
      append_utf8(to, c);
    }
  }));
  out.append(std::string_view(&quote, 1));
  return out;
}

// Appends the repr of `item`. Checked after every item: one value may be held a million times.
void append_repr(Text& out, const Value& item, int depth, Heap* heap) {
  const size_t before = out.size();
  out.append(repr(item, depth));
  if (heap != nullptr) {
    heap->step(1 + (out.size() - before) / 32);
    heap->check_size(out.size());
  }
}

void append_items(Text& out, const List& list, int depth) {
  for (size_t i = 0; i < list.items.size(); ++i) {
    if (i > 0) out.append(", ");
    append_repr(out, list.items[i], depth, list.heap);
  }
}

void append_dict(Text& out, const Dict& dict, int depth) {
  out.append("{");
  for (size_t i = 0; i < dict.entries.size(); ++i) {
    if (i > 0) out.append(", ");
    append_repr(out, dict.entries[i].first, depth, dict.heap);
    out.append(": ");
    append_repr(out, dict.entries[i].second, depth, dict.heap);
  }
  out.append("}");
}

void append_view(Text& out, const View& view, int depth) {
  bool first = true;
  out.append("([");
  for (const auto& [key, value] : view.dict.dict().entries) {
    if (!first) out.append(", ");
    first = false;
    if (view.view_kind == ViewKind::Items) out.append("(");
    if (view.view_kind != ViewKind::Values) append_repr(out, key, depth, view.heap);
    if (view.view_kind == ViewKind::Items) out.append(", ");
    if (view.view_kind != ViewKind::Keys) append_repr(out, value, depth, view.heap);
    if (view.view_kind == ViewKind::Items) out.append(")");
  }
  out.append("])");
}

}  // namespace

std::string int_to_string(Int i) {
  __extension__ typedef unsigned __int128 UInt;
  UInt u = i < 0 ? UInt{0} - static_cast<UInt>(i) : static_cast<UInt>(i);
  std::string digits;
  do {
    digits.insert(digits.begin(), static_cast<char>('0' + static_cast<int>(u % 10)));
    u /= 10;
  } while (u != 0);
  return i < 0 ? "-" + digits : digits;
}

std::string float_repr(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d < 0 ? "-inf" : "inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, d, std::chars_format::scientific).ptr;
  std::string_view shown(buffer, static_cast<size_t>(end - buffer));
  std::string out;
  if (shown.front() == '-') {
    out = "-";
    shown.remove_prefix(1);
  }
  const size_t e = shown.find('e');
  const int exponent = std::atoi(std::string(shown.substr(e + 1)).c_str());
  std::string digits(1, shown[0]);
  if (e > 2) digits += shown.substr(2, e - 2);
  const int n = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (n > 1) out += "." + digits.substr(1);
    char tail[16];
    std::snprintf(tail, sizeof tail, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
    return out + tail;
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (n <= exponent + 1) return out + digits + std::string(static_cast<size_t>(exponent + 1 - n), '0') + ".0";
  return out + digits.substr(0, static_cast<size_t>(exponent) + 1) + "." +
         digits.substr(static_cast<size_t>(exponent) + 1);
}

std::optional<Int> parse_int(std::string_view s, int base) {
  s = trimmed(s);
  bool negative = false;
  if (!s.empty() && (s[0] == '+' || s[0] == '-')) {
    negative = s[0] == '-';
    s.remove_prefix(1);
  }
  if (s.size() > 2 && s[0] == '0') {
    const char mark = static_cast<char>(s[1] | 0x20);
    const int marked_base = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
    if (marked_base != 0 && (base == marked_base || base == 0)) {
      base = marked_base;
      s.remove_prefix(2);
      if (s[0] == '_') s.remove_prefix(1);
    }
  }
  if (base == 0) base = 10;
  Int value = 0;
  bool digit_before = false;
  for (const char c : s) {
    if (c == '_' && digit_before) {
      digit_before = false;
      continue;
    }
    const int digit = c >= '0' && c <= '9'                     ? c - '0'
                      : (c | 0x20) >= 'a' && (c | 0x20) <= 'z' ? (c | 0x20) - 'a' + 10
                                                               : 99;
    if (digit >= base) return std::nullopt;
    if (__builtin_mul_overflow(value, Int{base}, &value) ||
        __builtin_add_overflow(value, Int{digit}, &value)) {
      fail("the integer '" + std::string(s.substr(0, 60)) + "' is too large");
    }
    digit_before = true;
  }
  if (!digit_before) return std::nullopt;
  return negative ? -value : value;
}

std::optional<double> parse_float(std::string_view s) {
  s = trimmed(s);
  std::string plain;
  for (size_t i = 0; i < s.size(); ++i) {
    const auto is_digit_at = [&](size_t k) { return k < s.size() && s[k] >= '0' && s[k] <= '9'; };
    if (s[i] == '_') {
      if (i == 0 || !is_digit_at(i - 1) || !is_digit_at(i + 1)) return std::nullopt;
      continue;
    }
    plain += s[i];
  }
  // strtod also takes hexadecimal and "nan(...)", Python does not.
  if (plain.empty() || plain.find_first_of("xX(pP") != std::string::npos) return std::nullopt;
  char* end = nullptr;
  const double d = std::strtod(plain.c_str(), &end);
  if (end != plain.c_str() + plain.size()) return std::nullopt;
  return d;
}

Text to_text(const Value& v) {
  if (v.is_string()) return v.text();
  if (v.is_undefined()) return Text();
  return repr(v);
}

Text repr(const Value& v, int depth) {
  if (depth > kMaxNesting)
    fail("a value is nested more than " + std::to_string(kMaxNesting) + " levels deep");
  switch (v.kind()) {
    case Kind::Undefined:
      return Text("Undefined");
    case Kind::None:
      return Text("None");
    case Kind::Bool:
      return Text(v.as_bool() ? "True" : "False");
    case Kind::Integer:
      return Text(int_to_string(v.as_int()));
    case Kind::Float:
      return Text(float_repr(v.as_double()));
    case Kind::String: {
      Text t = repr_string(v.text());
      if (!v.str().markup) return t;
      Text out("Markup(");
      out.append(t);
      out.append(")");
      return out;
    }
    case Kind::List:
    case Kind::Tuple: {
      Text out(v.is(Kind::List) ? "[" : "(");
      append_items(out, v.list(), depth + 1);
      out.append(v.is(Kind::List) ? "]" : v.list().items.size() == 1 ? ",)" : ")");
      return out;
    }
    case Kind::Dict: {
      Text out;
      append_dict(out, v.dict(), depth + 1);
      return out;
    }
    case Kind::Namespace: {
      Text out("<Namespace ");
      append_dict(out, v.name_space().attributes, depth + 1);
      out.append(">");
      return out;
    }
    case Kind::View: {
      Text out(type_name(v));
      append_view(out, v.dict_view(), depth + 1);
      return out;
    }
    case Kind::Range: {
      const Range& r = v.range();
      std::string out = "range(" + int_to_string(r.start) + ", " + int_to_string(r.stop);
      if (r.step != 1) out += ", " + int_to_string(r.step);
      return Text(out + ")");
    }
    case Kind::Loop: {
      LoopState& loop = v.loop();
      return Text("<LoopContext " + std::to_string(loop.index0 + 1) + "/" + std::to_string(loop.length()) +
                  ">");
    }
    case Kind::Generator:
      return Text("<generator object>");
    case Kind::Callable:
      return Text("<function " + v.callable().name + ">");
  }
  return Text();
}

Text escape_html(const Text& t) {
  return convert_chars(t, [](char32_t c, std::string& out) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        append_utf8(out, c);
    }
  });
}

}  // namespace thermo::jinja
