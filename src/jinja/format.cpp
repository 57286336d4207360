#include "jinja/format.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "jinja/value_ops.h"

namespace thermo::jinja {

namespace {

constexpr int kMaxWidth = 10'000;

struct Spec {
  std::string fill = " ";
  char align = 0;  // < > ^ =
  char sign = '-';
  bool alternate = false;
  bool comma = false;
  int width = 0;
  int precision = -1;
  char type = 0;
};

int read_number(std::string_view s, size_t& pos) {
  int n = 0;
  while (pos < s.size() && s[pos] >= '0' && s[pos] <= '9') {
    n = n * 10 + (s[pos++] - '0');
    if (n > kMaxWidth) fail("a width or precision in a format is over " + std::to_string(kMaxWidth));
  }
  return n;
}

std::string printf_double(double d, char type, int precision, bool alternate) {
  if (!std::isfinite(d)) {
    const std::string shown = std::isnan(d) ? "nan" : d < 0 ? "-inf" : "inf";
    return type >= 'A' && type <= 'Z' ? (std::isnan(d) ? "NAN" : d < 0 ? "-INF" : "INF") : shown;
  }
  const char format[] = {
      '%', alternate ? '#' : '.', alternate ? '.' : '*', alternate ? '*' : type, alternate ? type : '\0',
      '\0'};
  std::string out(static_cast<size_t>(std::snprintf(nullptr, 0, format, precision, d)) + 1, '\0');
  std::snprintf(out.data(), out.size(), format, precision, d);
  out.pop_back();
  return out;
}

std::string int_in_base(Int i, char type) {
  if (type != 'x' && type != 'X' && type != 'o' && type != 'b') return int_to_string(i);
  const int base = type == 'o' ? 8 : type == 'b' ? 2 : 16;
  const char* digits = type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
  std::string out;
  const bool negative = i < 0;
  do {
    const int digit = static_cast<int>(i % base);
    out.insert(out.begin(), digits[digit < 0 ? -digit : digit]);
    i /= base;
  } while (i != 0);
  return negative ? "-" + out : out;
}

void group_thousands(std::string& s) {
  const size_t begin = s[0] == '-' ? 1 : 0;
  const size_t digits_end = std::min(s.find_first_not_of("0123456789", begin), s.size());
  for (size_t at = digits_end; at > begin + 3;) {
    at -= 3;
    s.insert(at, ",");
  }
}

Text padded(const Text& t, const Spec& spec, char default_align) {
  const auto n = static_cast<int>(count_code_points(t.bytes));
  if (n >= spec.width) return t;
  const int missing = spec.width - n;
  const char align = spec.align != 0 ? spec.align : default_align;
  const auto fill = [&](int times) {
    std::string s;
    for (int i = 0; i < times; ++i) s += spec.fill;
    return s;
  };
  Text out;
  if (align == '=') {  // between the sign and the digits
    const size_t sign = !t.empty() && (t.bytes[0] == '-' || t.bytes[0] == '+' || t.bytes[0] == ' ') ? 1 : 0;
    out.append_slice(t, 0, sign);
    out.append(fill(missing));
    out.append_slice(t, sign, t.size());
    return out;
  }
  const int left = align == '>' ? missing : align == '^' ? missing / 2 : 0;
  out.append(fill(left));
  out.append(t);
  out.append(fill(missing - left));
  return out;
}

Text cut_to(const Text& t, int precision) {
  if (precision < 0) return t;
  size_t pos = 0;
  for (int i = 0; i < precision && pos < t.size(); ++i) decode_utf8(t.bytes, pos);
  return t.slice(0, pos);
}

std::string with_sign(std::string s, char sign) {
  return s[0] != '-' && sign != '-' ? sign + s : s;
}

Text format_number(const Value& v, const Spec& spec) {
  std::string shown;
  const bool as_float = v.is(Kind::Float) || (spec.type != 0 && std::string_view("eEfFgG%").find(spec.type) !=
                                                                    std::string_view::npos);
  if (as_float) {
    if (spec.type != 0 && std::string_view("eEfFgG%").find(spec.type) == std::string_view::npos) {
      fail(std::string("the format type '") + spec.type + "' does not fit a float");
    }
    const double d = v.as_double();
    if (spec.type == 0 && spec.precision < 0) {
      shown = float_repr(d);
    } else if (spec.type == '%') {
      shown = printf_double(d * 100, 'f', spec.precision < 0 ? 6 : spec.precision, false) + "%";
    } else {
      shown = printf_double(d, spec.type == 0 ? 'g' : spec.type, spec.precision < 0 ? 6 : spec.precision,
                            spec.alternate);
    }
  } else {
    if (spec.type != 0 && std::string_view("dxXobn").find(spec.type) == std::string_view::npos) {
      fail(std::string("the format type '") + spec.type + "' does not fit an integer");
    }
    shown = int_in_base(v.as_int(), spec.type);
    if (spec.alternate && (spec.type == 'x' || spec.type == 'X' || spec.type == 'o' || spec.type == 'b')) {
      shown.insert(shown[0] == '-' ? 1 : 0, std::string("0") + spec.type);
    }
  }
  if (spec.comma) group_thousands(shown);
  return Text(with_sign(std::move(shown), spec.sign));
}

Spec parse_spec(std::string_view s) {
  Spec spec;
  size_t pos = 0;
  const auto is_align = [](char c) { return c == '<' || c == '>' || c == '^' || c == '='; };
  if (!s.empty()) {
    size_t second = 0;
    decode_utf8(s, second);
    if (second < s.size() && is_align(s[second])) {
      spec.fill = s.substr(0, second);
      spec.align = s[second];
      pos = second + 1;
    } else if (is_align(s[0])) {
      spec.align = s[0];
      pos = 1;
    }
  }
  if (pos < s.size() && (s[pos] == '+' || s[pos] == '-' || s[pos] == ' ')) spec.sign = s[pos++];
  if (pos < s.size() && s[pos] == '#') spec.alternate = s[pos++] == '#';
  if (pos < s.size() && s[pos] == '0') {
    if (spec.align == 0) {
      spec.fill = "0";
      spec.align = '=';
    }
    ++pos;
  }
  spec.width = read_number(s, pos);
  if (pos < s.size() && (s[pos] == ',' || s[pos] == '_')) spec.comma = s[pos++] == ',';
  if (pos < s.size() && s[pos] == '.') {
    ++pos;
    spec.precision = read_number(s, pos);
  }
  if (pos < s.size()) spec.type = s[pos++];
  if (pos != s.size()) fail("the format '" + std::string(s) + "' is not understood");
  return spec;
}

Text format_value(const Value& v, const Spec& spec, std::string_view shown_spec) {
  if (v.is_number() && !(v.is(Kind::Bool) && shown_spec.empty()))
    return padded(format_number(v, spec), spec, '>');
  if (!v.is_string() && !shown_spec.empty()) {
    fail("a value of type " + type_name(v) + " takes no format, seen '" + std::string(shown_spec) + "'");
  }
  if (spec.type != 0 && spec.type != 's')
    fail(std::string("the format type '") + spec.type + "' does not fit text");
  return padded(cut_to(to_text(v), spec.precision), spec, '<');
}

// What comes before ':' and '!' in {...}: a name or number, then .attribute and [key].
Value look_up_field(Heap& heap, std::string_view field, const CallArgs& args, size_t& next_auto) {
  const size_t end = std::min(field.find_first_of(".["), field.size());
  const std::string_view name = field.substr(0, end);
  Value value;
  const auto number = name.empty() ? std::optional<Int>(static_cast<Int>(next_auto++)) : parse_int(name);
  if (number) {
    if (*number < 0 || *number >= static_cast<Int>(args.positional.size())) {
      fail("format() has no argument number " + int_to_string(*number) + ", seen " +
           std::to_string(args.positional.size()) + " arguments");
    }
    value = args.positional[static_cast<size_t>(*number)];
  } else {
    const auto it = std::find_if(args.keywords.begin(), args.keywords.end(),
                                 [&](const auto& k) { return k.first == name; });
    if (it == args.keywords.end()) fail("format() has no argument named '" + std::string(name) + "'");
    value = it->second;
  }
  for (size_t pos = end; pos < field.size();) {
    const bool bracket = field[pos] == '[';
    const size_t stop =
        bracket ? field.find(']', pos) : std::min(field.find_first_of(".[", pos + 1), field.size());
    if (stop == std::string_view::npos) fail("a '[' in a format has no ']'");
    const std::string_view key = field.substr(pos + 1, stop - pos - 1);
    const auto index = bracket ? parse_int(key) : std::nullopt;
    const auto found = get_item(heap, value, index ? Value::integer(*index) : heap.string(key));
    if (!found) fail("format() found nothing at '" + std::string(field) + "'");
    value = *found;
    pos = stop + (bracket ? 1 : 0);
  }
  return value;
}

// The next value of a % format.
class PercentArgs {
 public:
  PercentArgs(Heap& heap, const Value& values) : heap_(heap), values_(values) {}

  Value named(std::string_view name) {
    if (!values_.is(Kind::Dict)) fail("a %(name) format needs a mapping, seen " + type_name(values_));
    is_mapped_ = true;
    const auto found = get_item(heap_, values_, heap_.string(name));
    if (!found) fail("the format names '" + std::string(name) + "', which the mapping lacks");
    return *found;
  }
  Value next() {
    if (!values_.is(Kind::Tuple)) {
      if (used_++ > 0) fail("the format needs more values than the one given");
      return values_;
    }
    if (used_ >= values_.list().items.size()) {
      fail("the format needs more values than the " + std::to_string(used_) + " given");
    }
    return values_.list().items[used_++];
  }
  void check_all_used() const {
    // Python asks only values without items: "" % [1] is fine.
    const bool has_items =
        values_.is(Kind::Dict) || values_.is(Kind::List) || values_.is(Kind::Range) || values_.is_undefined();
    const bool is_spare = values_.is(Kind::Tuple) ? used_ < values_.list().items.size()
                                                  : used_ == 0 && !is_mapped_ && !has_items;
    if (is_spare) fail("the format does not use all values given");
  }

 private:
  Heap& heap_;
  const Value& values_;
  size_t used_ = 0;
  bool is_mapped_ = false;
};

Text percent_item(const Value& v, Spec spec) {
  switch (spec.type) {
    case 's':
      return padded(cut_to(to_text(v), spec.precision), spec, '>');
    case 'r':
    case 'a':
      return padded(cut_to(repr(v), spec.precision), spec, '>');
    case 'c':
      if (v.is_string() && length(v) == 1) return padded(v.text(), spec, '>');
      if (v.is_integer() && v.as_int() >= 0 && v.as_int() < 0x110000) {
        Text t;
        append_utf8(t.bytes, static_cast<char32_t>(v.as_int()));
        return padded(t, spec, '>');
      }
      fail("%c needs one character or its number, seen " + type_name(v));
    default:
      break;
  }
  require_defined(v);
  if (!v.is_number()) fail(std::string("%") + spec.type + " needs a number, seen " + type_name(v));
  const bool wants_int = std::string_view("diuxXo").find(spec.type) != std::string_view::npos;
  if (spec.type == 'i' || spec.type == 'u') spec.type = 'd';
  if (wants_int && v.is(Kind::Float)) {
    if (spec.type != 'd') fail(std::string("%") + spec.type + " needs an integer, seen float");
    if (!(std::fabs(v.as_double()) < 1e37)) fail("%d needs a number that fits an integer");
    return padded(format_number(Value::integer(static_cast<Int>(v.as_double())), spec), spec, '>');
  }
  return padded(format_number(v, spec), spec, '>');
}

}  // namespace

Text format_percent(Heap& heap, const Text& format, const Value& values) {
  Text out;
  PercentArgs args(heap, values);
  const std::string& f = format.bytes;
  for (size_t pos = 0; pos < f.size();) {
    const size_t percent = std::min(f.find('%', pos), f.size());
    out.append_slice(format, pos, percent);
    pos = percent + 1;
    if (percent == f.size()) break;
    heap.step();
    Spec spec;
    std::optional<Value> value;
    if (pos < f.size() && f[pos] == '(') {
      const size_t close = f.find(')', pos);
      if (close == std::string::npos) fail("a '%(' in a format has no ')'");
      value = args.named(std::string_view(f).substr(pos + 1, close - pos - 1));
      pos = close + 1;
    }
    bool zero = false;
    for (; pos < f.size() && std::string_view("-+ #0").find(f[pos]) != std::string_view::npos; ++pos) {
      if (f[pos] == '-') spec.align = '<';
      if (f[pos] == '+' || (f[pos] == ' ' && spec.sign != '+')) spec.sign = f[pos];
      if (f[pos] == '#') spec.alternate = true;
      if (f[pos] == '0') zero = true;
    }
    spec.width = read_number(f, pos);
    if (pos < f.size() && f[pos] == '.') {
      ++pos;
      spec.precision = read_number(f, pos);
    }
    if (pos >= f.size()) fail("a '%' in a format is not followed by a type");
    spec.type = f[pos++];
    if (spec.type == '%') {
      out.append("%");
      continue;
    }
    if (std::string_view("srcadiuxXoeEfFgG").find(spec.type) == std::string_view::npos) {
      fail(std::string("the format '%") + spec.type + "' is not known");
    }
    if (zero && spec.align == 0 && std::string_view("src").find(spec.type) == std::string_view::npos) {
      spec.fill = "0";
      spec.align = '=';
    }
    out.append(percent_item(value ? *value : args.next(), spec));
    heap.check_size(out.size());
    heap.charge_bytes(out.size());
  }
  args.check_all_used();
  return out;
}

Text format_braces(Heap& heap, const Text& format, const CallArgs& args) {
  Text out;
  size_t next_auto = 0;
  const std::string& f = format.bytes;
  for (size_t pos = 0; pos < f.size();) {
    const size_t brace = std::min(f.find_first_of("{}", pos), f.size());
    out.append_slice(format, pos, brace);
    if (brace == f.size()) break;
    heap.step();
    pos = brace + 1;
    if (pos < f.size() && f[pos] == f[brace]) {
      out.append(std::string_view(&f[pos++], 1));
      continue;
    }
    const size_t close = f.find('}', pos);
    if (f[brace] == '}' || close == std::string::npos)
      fail("a format has a single '{' or '}'; write it twice");
    std::string_view field = std::string_view(f).substr(pos, close - pos);
    if (field.find('{') != std::string_view::npos) fail("a format inside a format is not supported");
    pos = close + 1;
    const size_t colon = std::min(field.find(':'), field.size());
    const std::string_view shown_spec = colon < field.size() ? field.substr(colon + 1) : std::string_view();
    field = field.substr(0, colon);
    const size_t bang = field.find('!');
    const char conversion = bang != std::string_view::npos && bang + 1 < field.size() ? field[bang + 1] : 0;
    Value value = look_up_field(heap, field.substr(0, bang), args, next_auto);
    if (conversion == 'r' || conversion == 'a') value = heap.string(repr(value));
    if (conversion == 's') value = heap.string(to_text(value));
    out.append(format_value(value, parse_spec(shown_spec), shown_spec));
    heap.check_size(out.size());
    heap.charge_bytes(out.size());
  }
  return out;
}

}  // namespace thermo::jinja
