#include "cli/bench/bench_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/units.h"
#include "cli/bench/bench_table.h"
#include "cli/input.h"

namespace thermo {
namespace {

bool is_list(const Json& value) {
  return value.is_array();
}

// A value as the text formats write it; null is empty.
std::string plain_text(const Json& value) {
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "1" : "0";
  if (value.is_number_float()) return fmt::format("{:.6f}", value.get<double>());
  return value.dump();
}

std::string quote(const std::string& text, char mark) {
  std::string out(1, mark);
  for (const char c : text) {
    if (c == mark) out += mark;
    out += c;
  }
  return out + mark;
}

std::string test_name(const Json& f) {
  return BenchTest{.n_prompt = f["n_prompt"],
                   .n_gen = f["n_gen"],
                   .n_depth = f["n_depth"],
                   .n_rows = f["n_rows"],
                   .n_parallel = f["n_parallel"]}
      .name();
}

class CsvPrinter : public BenchPrinter {
 public:
  explicit CsvPrinter(Sink sink) : sink_(std::move(sink)) {}
  void row(const Json& fields) override {
    std::vector<std::string> names, values;
    for (const auto& [name, value] : fields.items()) {
      if (is_list(value)) continue;
      names.push_back(quote(name, '"'));
      values.push_back(quote(plain_text(value), '"'));
    }
    if (!headed_) sink_(fmt::format("{}\n", fmt::join(names, ",")));
    headed_ = true;
    sink_(fmt::format("{}\n", fmt::join(values, ",")));
  }

 private:
  Sink sink_;
  bool headed_ = false;
};

class JsonPrinter : public BenchPrinter {
 public:
  explicit JsonPrinter(Sink sink) : sink_(std::move(sink)) {}
  void begin() override { sink_("["); }
  void row(const Json& fields) override {
    std::string text = fields.dump(2, ' ', false, Json::error_handler_t::replace);
    for (size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at + 3))
      text.insert(at + 1, "  ");
    sink_(fmt::format("{}\n  {}", any_ ? "," : "", text));
    any_ = true;
  }
  void finish() override { sink_("\n]\n"); }

 private:
  Sink sink_;
  bool any_ = false;
};

class JsonLinesPrinter : public BenchPrinter {
 public:
  explicit JsonLinesPrinter(Sink sink) : sink_(std::move(sink)) {}
  void row(const Json& fields) override {
    sink_(fields.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  }

 private:
  Sink sink_;
};

class SqlPrinter : public BenchPrinter {
 public:
  explicit SqlPrinter(Sink sink) : sink_(std::move(sink)) {}
  void row(const Json& fields) override {
    std::vector<std::string> columns, names, values;
    for (const auto& [name, value] : fields.items()) {
      if (is_list(value)) continue;
      columns.push_back(fmt::format("  {} {}", name, column_type(value)));
      names.push_back(name);
      const bool bare = value.is_number() || value.is_boolean();
      values.push_back(value.is_null() ? "NULL" : bare ? plain_text(value) : quote(plain_text(value), '\''));
    }
    if (!headed_)
      sink_(fmt::format("CREATE TABLE IF NOT EXISTS test (\n{}\n);\n\n", fmt::join(columns, ",\n")));
    headed_ = true;
    sink_(
        fmt::format("INSERT INTO test ({}) VALUES ({});\n", fmt::join(names, ", "), fmt::join(values, ", ")));
  }

 private:
  // What is not measured yet in the first row is a number when it comes.
  static const char* column_type(const Json& value) {
    if (value.is_string()) return "TEXT";
    return value.is_number_integer() || value.is_boolean() ? "INTEGER" : "REAL";
  }
  Sink sink_;
  bool headed_ = false;
};

class ModelTable : public MarkdownTable {
 public:
  ModelTable(const std::vector<std::string>& extra, Sink sink)
      : MarkdownTable({"model", "size", "params", "backend", "ngl"}, std::move(sink)) {
    columns_.insert(columns_.end(), extra.begin(), extra.end());
    for (const char* name : {"test", "t/s", "GB/s", "% of read bw"}) columns_.emplace_back(name);
  }

 private:
  void choose_columns(const Json& first) override {
    if (first["expert_hit_ratio"].is_null()) return;
    // After the speed, instead of the share of the bandwidth, which says little when lanes share the work.
    columns_.resize(columns_.size() - 2);
    columns_.insert(columns_.end() - 2, "heat");
    for (const char* name : {"hot %", "moved", "cpu MiB/t", "link MiB/t", "disk MiB/t", "stall us/t"})
      columns_.emplace_back(name);
  }
  bool is_text(const std::string& column) const override {
    return column == "model" || column == "backend" || column == "draft";
  }
  size_t min_width(const std::string& column) const override {
    return column == "t/s" ? 16 : column == "test" ? 12 : column == "draft" ? 6 : 0;
  }

  // What the expert machinery did; empty cells where it did nothing.
  static std::optional<std::string> expert_value(const std::string& column, const Json& f) {
    const bool split = !f["expert_hit_ratio"].is_null();
    const auto mib = [&](std::initializer_list<const char*> names) {
      double bytes = 0.0;
      for (const char* name : names) bytes += split ? f[name].get<double>() : 0.0;
      return split ? fmt::format("{:.2f}", bytes / static_cast<double>(MiB)) : std::string();
    };
    if (column == "heat") return split ? plain_text(f["heat_state"]) : std::string();
    if (column == "hot %")
      return split ? fmt::format("{:.1f}", 100.0 * f["expert_hit_ratio"].get<double>()) : std::string();
    if (column == "moved") return split ? plain_text(f["expert_moves"]) : std::string();
    if (column == "cpu MiB/t") return mib({"cpu_bytes_per_token"});
    if (column == "link MiB/t") return mib({"fetched_bytes_per_token", "streamed_bytes_per_token"});
    if (column == "disk MiB/t") return mib({"disk_bytes_per_token"});
    if (column == "stall us/t")
      return split ? fmt::format("{:.1f}", 1e-3 * f["moe_stall_ns"].get<double>()) : std::string();
    return std::nullopt;
  }

  // What drafting did; empty cells where nothing was drafted.
  static std::optional<std::string> draft_value(const std::string& column, const Json& f) {
    const bool drafted = !f["tokens_per_step"].is_null();
    const auto number = [&](double value, int digits) {
      return drafted ? fmt::format("{:.{}f}", value, digits) : std::string();
    };
    const auto seconds = [&](const char* name) { return drafted ? f[name].get<double>() : 0.0; };
    const double total =
        seconds("draft_ns") + seconds("verify_ns") + seconds("commit_ns") + seconds("plain_ns");
    if (column == "draft") return drafted ? f["drafter"].get<std::string>() : "none";
    if (column == "t/step") return number(drafted ? f["tokens_per_step"].get<double>() : 0.0, 2);
    if (column == "accepted %")
      return number(
          drafted ? 100.0 * f["draft_n_accepted"].get<double>() / std::max(1.0, f["draft_n"].get<double>())
                  : 0.0,
          1);
    if (column == "draft %") return number(100.0 * seconds("draft_ns") / std::max(1.0, total), 1);
    if (column == "verify %")
      return number(100.0 * (seconds("verify_ns") + seconds("commit_ns")) / std::max(1.0, total), 1);
    if (column == "x none")
      return f["ratio_to_plain"].is_null() ? "" : fmt::format("{:.3f}", f["ratio_to_plain"].get<double>());
    return std::nullopt;
  }

  std::string value_of(const std::string& column, const Json& f) const override {
    if (column == "model") return f["model_type"];
    if (column == "size") return format_bytes(f["model_size"]);
    if (column == "params") {
      const double n = f["model_n_params"];
      return n >= 1e9 ? fmt::format("{:.2f} B", n * 1e-9) : fmt::format("{:.2f} M", n * 1e-6);
    }
    if (column == "backend") return f["backends"];
    if (column == "ngl") return plain_text(f["n_gpu_layers"]);
    if (column == "test") return test_name(f);
    if (column == "t/s")
      return fmt::format("{:.2f} ± {:.2f}", f["avg_ts"].get<double>(), f["stddev_ts"].get<double>());
    if (column == "GB/s")
      return f["read_gb_s"].is_null() ? "" : fmt::format("{:.1f}", f["read_gb_s"].get<double>());
    if (column == "% of read bw")
      return f["bandwidth_share"].is_null()
                 ? ""
                 : fmt::format("{:.0f}", 100.0 * f["bandwidth_share"].get<double>());
    if (column == "ms a step")
      return f["n_prompt"] > 0 ? ""
                               : fmt::format("{:.3f}", f["avg_ns"].get<double>() * 1e-6 /
                                                           std::max(1, f["n_gen"].get<int>()));
    if (column == "experts")
      return f["distinct_experts"].is_null() ? ""
                                             : fmt::format("{:.1f}", f["distinct_experts"].get<double>());
    if (column == "x one row")
      return f["cost_of_one"].is_null() ? "" : fmt::format("{:.2f}", f["cost_of_one"].get<double>());
    if (const std::optional<std::string> value = expert_value(column, f)) return *value;
    if (const std::optional<std::string> value = draft_value(column, f)) return *value;
    if (column == "threads") return plain_text(f["n_threads"]);
    if (column == "text") return f["text_source"];
    if (column == "ratio") return f["ratio"].is_null() ? "" : fmt::format("{:.3f}", f["ratio"].get<double>());
    return plain_text(f[column]);
  }
};

}  // namespace

std::unique_ptr<BenchPrinter> make_model_table(const std::vector<std::string>& columns,
                                               BenchPrinter::Sink sink) {
  return std::make_unique<ModelTable>(columns, std::move(sink));
}

std::unique_ptr<BenchPrinter> make_bench_printer(const std::string& format, const MakeTable& make_table,
                                                 BenchPrinter::Sink sink) {
  if (format == "csv") return std::make_unique<CsvPrinter>(std::move(sink));
  if (format == "json") return std::make_unique<JsonPrinter>(std::move(sink));
  if (format == "jsonl") return std::make_unique<JsonLinesPrinter>(std::move(sink));
  if (format == "sql") return std::make_unique<SqlPrinter>(std::move(sink));
  return make_table(std::move(sink));
}

BenchBaseline::BenchBaseline(const std::string& path) {
  const std::string text = read_text_file(path, kLargestPrompt);
  try {
    const size_t first = text.find_first_not_of(" \t\r\n");
    if (first != std::string::npos && text[first] == '[') {
      const Json all = Json::parse(text);
      rows_.assign(all.begin(), all.end());
    } else {
      for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find('\n', at), text.size());
        if (end > at) rows_.push_back(Json::parse(text.substr(at, end - at)));
        at = end + 1;
      }
    }
    const auto is_result = [](const Json& row) {
      return row.is_object() && row.contains("avg_ts") && row["avg_ts"].is_number();
    };
    if (!std::all_of(rows_.begin(), rows_.end(), is_result)) rows_.clear();
  } catch (const Json::exception&) {
    rows_.clear();
  }
  if (rows_.empty())
    throw ConfigError(fmt::format(
        "--compare {}: there are no results in it; give the output of an earlier `bench -o json`", path));
}

std::optional<double> BenchBaseline::ratio(const Json& fields) const {
  constexpr const char* kKeys[] = {"model_type", "n_prompt", "n_gen",        "n_depth",      "n_rows",
                                   "n_parallel", "n_ubatch", "n_threads",    "type_k",       "type_v",
                                   "isa",        "repack",   "text_source",  "expert_cache", "heat_state",
                                   "poll",       "drafter",  "draft_budget", "oracle",       "concurrency",
                                   "dialect",    "rate"};
  for (const Json& row : rows_) {
    const bool same = std::all_of(std::begin(kKeys), std::end(kKeys), [&](const char* key) {
      // Other programs' files lack our fields.
      return !row.contains(key) || !fields.contains(key) || row[key] == fields[key];
    });
    const double before = row["avg_ts"].get<double>();
    if (same && before > 0.0) return fields["avg_ts"].get<double>() / before;
  }
  return std::nullopt;
}

}  // namespace thermo
