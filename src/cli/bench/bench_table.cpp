#include "cli/bench/bench_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/utf8_chars.h"
#include "cli/version.h"

namespace thermo {
namespace {

// In characters: `±` is two bytes.
size_t display_width(std::string_view text) {
  return count_utf8_chars(text);
}

}  // namespace

void MarkdownTable::row(const Json& fields) {
  if (widths_.empty()) choose_columns(fields);
  std::vector<std::string> values;
  for (const std::string& column : columns_) values.push_back(value_of(column, fields));
  if (widths_.empty()) {
    for (size_t i = 0; i < columns_.size(); ++i)
      widths_.push_back(
          std::max({display_width(columns_[i]), display_width(values[i]), min_width(columns_[i])}));
    sink_(line(columns_));
    std::vector<std::string> rule;
    for (size_t i = 0; i < columns_.size(); ++i)
      rule.push_back(is_text(columns_[i]) ? std::string(widths_[i], '-')
                                          : std::string(widths_[i] - 1, '-') + ":");
    sink_(line(rule));
  }
  sink_(line(values));
}

void MarkdownTable::finish() {
  if (!widths_.empty()) sink_(fmt::format("\nbuild: {} ({})\n", build_commit(), version_number()));
}

std::string MarkdownTable::line(const std::vector<std::string>& values) const {
  std::string out = "|";
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t width = display_width(values[i]);
    const std::string space(width < widths_[i] ? widths_[i] - width : 0, ' ');
    out += is_text(columns_[i]) ? fmt::format(" {}{} |", values[i], space)
                                : fmt::format(" {}{} |", space, values[i]);
  }
  return out + "\n";
}

}  // namespace thermo
