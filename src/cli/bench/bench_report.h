// The outputs of `bench`: Markdown, CSV, JSON, JSON lines and SQL with llama-bench's fields first, then ours.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "cli/bench/bench_run.h"

namespace thermo {

// What is the same for all tests of a setup.
struct BenchContext {
  std::string model_filename, model_type, text_source;
  std::string heat_state;  // "cold", "warm" or the heat file
  uint64_t model_size = 0, model_n_params = 0;
  BenchSetup setup;
  EngineInfo engine;
  double read_bytes_per_s = 0.0;     // measured; 0: not measured
  uint64_t device_bytes = 0;         // GPU memory taken, all of it at load
  int fit_target_mib = 0;            // GPU memory left free
  std::string draft_budget, oracle;  // as they were given
};

// The processor itself, or the processor playing a device.
bool runs_on_processor(const EngineInfo& engine);

// All fields in order; samples_ns and samples_ts among them. Not measured: null.
Json bench_fields(const BenchContext& context, const BenchResult& result);

// Writes rows as they come. finish() closes what must be closed: it is called once, also after an interrupt.
class BenchPrinter {
 public:
  using Sink = std::function<void(std::string_view)>;
  virtual ~BenchPrinter() = default;
  virtual void begin() {}
  virtual void row(const Json& fields) = 0;
  virtual void finish() {}
};

// `format`: md, csv, json, jsonl or sql. `make_table` is asked for md.
using MakeTable = std::function<std::unique_ptr<BenchPrinter>(BenchPrinter::Sink)>;
std::unique_ptr<BenchPrinter> make_bench_printer(const std::string& format, const MakeTable& make_table,
                                                 BenchPrinter::Sink sink);
// The table of what was measured in this process. `columns`: shown beside the fixed ones.
std::unique_ptr<BenchPrinter> make_model_table(const std::vector<std::string>& columns,
                                               BenchPrinter::Sink sink);

// Results of an earlier run, JSON or JSON lines.
class BenchBaseline {
 public:
  explicit BenchBaseline(const std::string& path);  // throws LoadError
  // Speed over the earlier speed of the same test and setup; nullopt when it was not measured then.
  std::optional<double> ratio(const Json& fields) const;

 private:
  std::vector<Json> rows_;
};

// From here on the peak memory of a result is counted anew.
void reset_peak_memory();

}  // namespace thermo
