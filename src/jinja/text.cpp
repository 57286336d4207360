#include "jinja/text.h"

#include <algorithm>

namespace thermo::jinja {

Text Text::all_marked(std::string s) {
  Text t(std::move(s));
  t.mark(0, t.size());
  return t;
}

void Text::mark(size_t begin, size_t end) {
  if (begin >= end) return;
  if (!marks.empty() && marks.back().end >= begin) {
    marks.back().end = std::max(marks.back().end, end);
  } else {
    marks.push_back({begin, end});
  }
}

void Text::append_slice(const Text& t, size_t begin, size_t end) {
  const size_t base = bytes.size();
  bytes.append(t.bytes, begin, end - begin);
  for (const ByteRange& m : t.marks) {
    const size_t from = std::max(m.begin, begin);
    const size_t to = std::min(m.end, end);
    if (from < to) mark(base + from - begin, base + to - begin);
  }
}

Text Text::slice(size_t begin, size_t end) const {
  Text out;
  out.append_slice(*this, begin, end);
  return out;
}

}  // namespace thermo::jinja
