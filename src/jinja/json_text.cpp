#include "jinja/json_text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "jinja/value_ops.h"

namespace thermo::jinja {

namespace {

constexpr int kMaxNesting = 200;

class JsonWriter {
 public:
  JsonWriter(Heap& heap, const JsonStyle& style) : heap_(heap), style_(style) {}

  void write(const Value& v, int depth) {
    if (depth > kMaxNesting)
      fail("'tojson' met a value nested more than " + std::to_string(kMaxNesting) + " deep");
    heap_.step();
    heap_.check_size(out.size());
    switch (v.kind()) {
      case Kind::None:
        out.append("null");
        return;
      case Kind::Bool:
        out.append(v.as_bool() ? "true" : "false");
        return;
      case Kind::Integer:
        out.append(int_to_string(v.as_int()));
        return;
      case Kind::Float:
        out.append(number(v.as_double()));
        return;
      case Kind::String:
        write_string(v.text());
        return;
      case Kind::List:
      case Kind::Tuple:
        write_list(v.list(), depth);
        return;
      case Kind::Dict:
        write_dict(v.dict(), depth);
        return;
      case Kind::Undefined:
        fail(v.undefined_reason() + ", so 'tojson' cannot write it");
      default:
        fail("'tojson' cannot write a value of type " + type_name(v));
    }
  }

  Text out;

 private:
  static std::string number(double d) {
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d < 0 ? "-Infinity" : "Infinity";
    return float_repr(d);
  }

  void write_string(const Text& t) {
    heap_.charge_bytes(t.size());
    const auto put_escape = [](unsigned unit, std::string& to) {
      char buffer[16];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", unit);
      to += buffer;
    };
    out.append("\"");
    out.append(convert_chars(t, [&](char32_t c, std::string& to) {
      static constexpr std::string_view kNamed = "\"\\\n\r\t\f\b";
      static constexpr std::string_view kLetters = "\"\\nrtfb";
      const size_t named = c < 0x80 ? kNamed.find(static_cast<char>(c)) : std::string_view::npos;
      if (named != std::string_view::npos) {
        to += '\\';
        to += kLetters[named];
      } else if (c < 0x20 || (style_.ensure_ascii && c >= 0x7F && c < 0x10000)) {
        if (c == 0x7F) {
          to += static_cast<char>(c);
        } else {
          put_escape(static_cast<unsigned>(c), to);
        }
      } else if (style_.ensure_ascii && c >= 0x10000 && c < kStrayByte) {
        put_escape(0xD800 + (static_cast<unsigned>(c - 0x10000) >> 10), to);
        put_escape(0xDC00 + (static_cast<unsigned>(c) & 0x3FF), to);
      } else {
        append_utf8(to, c);
      }
    }));
    out.append("\"");
  }

  void new_line(int depth) {
    if (!style_.indent) return;
    out.append("\n");
    for (int i = 0; i < depth; ++i) out.append(*style_.indent);
  }

  void write_list(const List& list, int depth) {
    out.append("[");
    for (size_t i = 0; i < list.items.size(); ++i) {
      if (i > 0) out.append(style_.item_separator);
      new_line(depth + 1);
      write(list.items[i], depth + 1);
    }
    if (!list.items.empty()) new_line(depth);
    out.append("]");
  }

  void write_key(const Value& key) {
    switch (key.kind()) {
      case Kind::String:
        return write_string(key.text());
      case Kind::None:
        return out.append("\"null\"");
      case Kind::Bool:
        return out.append(key.as_bool() ? "\"true\"" : "\"false\"");
      case Kind::Integer:
        return out.append("\"" + int_to_string(key.as_int()) + "\"");
      case Kind::Float:
        return out.append("\"" + number(key.as_double()) + "\"");
      default:
        fail("'tojson' cannot write a key of type " + type_name(key));
    }
  }

  void write_dict(const Dict& dict, int depth) {
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (style_.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(),
                       [](const auto* a, const auto* b) { return less(a->first, b->first); });
    }
    out.append("{");
    bool first = true;
    for (const auto* entry : entries) {
      if (!first) out.append(style_.item_separator);
      first = false;
      new_line(depth + 1);
      write_key(entry->first);
      out.append(style_.key_separator);
      write(entry->second, depth + 1);
    }
    if (!first) new_line(depth);
    out.append("}");
  }

  Heap& heap_;
  const JsonStyle& style_;
};

}  // namespace

Text to_json(Heap& heap, const Value& v, const JsonStyle& style) {
  JsonWriter writer(heap, style);
  writer.write(v, 0);
  return std::move(writer.out);
}

}  // namespace thermo::jinja
