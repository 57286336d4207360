// The Markdown tables of `bench`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/bench_report.h"

namespace thermo {

// Writes its head with the first row, whose width the columns take. Numbers are aligned to the right.
class MarkdownTable : public BenchPrinter {
 public:
  MarkdownTable(std::vector<std::string> columns, Sink sink)
      : columns_(std::move(columns)), sink_(std::move(sink)) {}
  void row(const Json& fields) override;
  void finish() override;

 protected:
  virtual std::string value_of(const std::string& column, const Json& fields) const = 0;
  virtual bool is_text(const std::string& column) const = 0;
  virtual size_t min_width(const std::string&) const { return 0; }
  // Before the head is written: columns that depend on what was measured.
  virtual void choose_columns(const Json&) {}

  std::vector<std::string> columns_;

 private:
  std::string line(const std::vector<std::string>& values) const;

  std::vector<size_t> widths_;
  Sink sink_;
};

}  // namespace thermo
