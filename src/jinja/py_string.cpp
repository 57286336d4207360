#include "jinja/py_string.h"

#include <algorithm>

namespace thermo::jinja {

namespace {

// str.splitlines: \n \r \r\n \v \f \x1c-\x1e \x85 U+2028 U+2029.
bool is_line_break(char32_t c) {
  return (c >= '\n' && c <= '\r') || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

bool is_cased(char32_t c) {
  return is_lower(c) || is_upper(c) || is_title(c);
}

std::vector<ByteRange> split_on_space(std::string_view s, Int max_splits) {
  std::vector<ByteRange> parts;
  size_t pos = 0;
  const auto skip = [&](bool spaces) {
    while (pos < s.size()) {
      size_t next = pos;
      if (is_space(decode_utf8(s, next)) != spaces) return;
      pos = next;
    }
  };
  for (skip(true); pos < s.size(); skip(true)) {
    const size_t begin = pos;
    if (max_splits >= 0 && static_cast<Int>(parts.size()) >= max_splits) {
      parts.push_back({begin, s.size()});
      return parts;
    }
    skip(false);
    parts.push_back({begin, pos});
  }
  return parts;
}

std::vector<ByteRange> rsplit_on_space(std::string_view s, Int max_splits) {
  std::vector<ByteRange> parts;
  size_t end = s.size();
  const auto skip = [&](bool spaces) {
    while (end > 0) {
      const size_t begin = previous_code_point(s, end);
      size_t at = begin;
      if (is_space(decode_utf8(s, at)) != spaces) return;
      end = begin;
    }
  };
  for (skip(true); end > 0; skip(true)) {
    const size_t past = end;
    if (max_splits >= 0 && static_cast<Int>(parts.size()) >= max_splits) {
      parts.push_back({0, past});
      break;
    }
    skip(false);
    parts.push_back({end, past});
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<Text> cut(const Text& t, const std::vector<ByteRange>& parts) {
  std::vector<Text> out;
  out.reserve(parts.size());
  for (const ByteRange& part : parts) out.push_back(t.slice(part.begin, part.end));
  return out;
}

}  // namespace

ByteRange strip_bounds(std::string_view s, std::optional<std::string_view> chars, Side side) {
  const auto strippable = [&](char32_t c) {
    if (!chars) return is_space(c);
    for (size_t pos = 0; pos < chars->size();) {
      if (decode_utf8(*chars, pos) == c) return true;
    }
    return false;
  };
  size_t begin = 0;
  size_t end = s.size();
  while (side != Side::Right && begin < end) {
    size_t next = begin;
    if (!strippable(decode_utf8(s, next))) break;
    begin = next;
  }
  while (side != Side::Left && begin < end) {
    const size_t last = previous_code_point(s, end);
    size_t at = last;
    if (!strippable(decode_utf8(s, at))) break;
    end = last;
  }
  return {begin, end};
}

Text strip(const Text& t, std::optional<std::string_view> chars, Side side) {
  const ByteRange kept = strip_bounds(t.bytes, chars, side);
  return t.slice(kept.begin, kept.end);
}

std::vector<Text> split(const Text& t, std::optional<std::string_view> separator, Int max_splits) {
  if (!separator) return cut(t, split_on_space(t.bytes, max_splits));
  std::vector<ByteRange> parts;
  size_t begin = 0;
  while (max_splits < 0 || static_cast<Int>(parts.size()) < max_splits) {
    const size_t found = t.bytes.find(*separator, begin);
    if (found == std::string::npos) break;
    parts.push_back({begin, found});
    begin = found + separator->size();
  }
  parts.push_back({begin, t.size()});
  return cut(t, parts);
}

std::vector<Text> split_from_right(const Text& t, std::optional<std::string_view> separator, Int max_splits) {
  if (!separator) return cut(t, rsplit_on_space(t.bytes, max_splits));
  std::vector<ByteRange> parts;
  size_t end = t.size();
  while ((max_splits < 0 || static_cast<Int>(parts.size()) < max_splits) && end >= separator->size()) {
    const size_t found = t.bytes.rfind(*separator, end - separator->size());
    if (found == std::string::npos) break;
    parts.push_back({found + separator->size(), end});
    end = found;
  }
  parts.push_back({0, end});
  std::reverse(parts.begin(), parts.end());
  return cut(t, parts);
}

std::vector<Text> split_lines(const Text& t, bool keep_ends) {
  std::vector<ByteRange> parts;
  size_t begin = 0;
  for (size_t pos = 0; pos < t.size();) {
    const size_t at = pos;
    const char32_t c = decode_utf8(t.bytes, pos);
    if (!is_line_break(c)) continue;
    if (c == '\r' && pos < t.size() && t.bytes[pos] == '\n') ++pos;
    parts.push_back({begin, keep_ends ? pos : at});
    begin = pos;
  }
  if (begin < t.size()) parts.push_back({begin, t.size()});
  return cut(t, parts);
}

Text replace(Heap& heap, const Text& t, std::string_view old_text, const Text& new_text, Int count) {
  Text out;
  size_t pos = 0;
  for (Int done = 0; count < 0 || done < count; ++done) {
    heap.step();
    heap.check_size(out.size());
    if (old_text.empty()) {
      // Python puts the new text before every character and at the end.
      out.append(new_text);
      if (pos >= t.size()) return out;
      const size_t begin = pos;
      decode_utf8(t.bytes, pos);
      out.append_slice(t, begin, pos);
      continue;
    }
    const size_t found = t.bytes.find(old_text, pos);
    if (found == std::string::npos) break;
    out.append_slice(t, pos, found);
    out.append(new_text);
    pos = found + old_text.size();
  }
  out.append_slice(t, pos, t.size());
  return out;
}

Text to_upper(const Text& t) {
  return convert_chars(t, [](char32_t c, std::string& out) { append_upper(out, c); });
}

Text to_lower(const Text& t) {
  constexpr char32_t kSigma = 0x3A3;
  bool cased_before = false;
  size_t pos = 0;  // of the character after the current one
  return convert_chars(t, [&](char32_t c, std::string& out) {
    decode_utf8(t.bytes, pos);
    if (c == kSigma) {
      size_t at = pos;
      const bool cased_after = pos < t.size() && is_cased(decode_utf8(t.bytes, at));
      append_utf8(out, cased_before && !cased_after ? 0x3C2 : 0x3C3);
    } else {
      append_lower(out, c);
    }
    cased_before = is_cased(c);
  });
}

Text to_title(const Text& t) {
  bool in_word = false;
  return convert_chars(t, [&](char32_t c, std::string& out) {
    in_word ? append_lower(out, c) : append_title(out, c);
    in_word = is_cased(c);
  });
}

Text capitalize(const Text& t) {
  bool first = true;
  return convert_chars(t, [&](char32_t c, std::string& out) {
    first ? append_title(out, c) : append_lower(out, c);
    first = false;
  });
}

Text swap_case(const Text& t) {
  return convert_chars(t, [](char32_t c, std::string& out) {
    is_upper(c) ? append_lower(out, c) : is_lower(c) ? append_upper(out, c) : append_utf8(out, c);
  });
}

size_t byte_offset(std::string_view s, size_t index) {
  size_t pos = 0;
  while (index-- > 0 && pos < s.size()) decode_utf8(s, pos);
  return pos;
}

}  // namespace thermo::jinja
