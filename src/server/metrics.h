// Counters and histograms in the text format that Prometheus reads. Any thread.
//
// What others measure (the engine's state, the process) is asked when somebody reads; see
// server/operations.cpp.
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace thermo {

class Metrics {
 public:
  // `labels`: `dialect="chat",outcome="ok"`, or empty. `name` must be in the table of families (metrics.cpp).
  void count(std::string_view name, const std::string& labels = {}, double amount = 1.0);
  void observe(std::string_view name, double value, const std::string& labels = {});

  // HELP, TYPE and all samples of what was counted so far.
  std::string text() const;
  // A counter, added up over its labels; `part`: over those that contain it.
  double sum(std::string_view name, std::string_view part = {}) const;
  // A histogram, added up over its labels, as the family `as` with other labels.
  void write_histogram(std::string& out, std::string_view name, std::string_view as, std::string_view help,
                       const std::string& labels) const;

 private:
  struct Histogram {
    std::vector<uint64_t> buckets;  // not cumulative; the last one has no upper bound
    double sum = 0.0;
  };
  static void write_samples(std::string& out, std::string_view name, const std::string& labels,
                            std::span<const double> bounds, const Histogram& histogram);

  mutable std::mutex mutex_;
  std::map<std::string, std::map<std::string, double>, std::less<>> counters_;
  std::map<std::string, std::map<std::string, Histogram>, std::less<>> histograms_;
};

// One family whose value is known at the moment: `text` gets HELP, TYPE and the samples (labels, value).
struct Sample {
  std::string labels;
  double value;
};
void write_family(std::string& text, std::string_view name, std::string_view type, std::string_view help,
                  const std::vector<Sample>& samples);
// The same as OpenMetrics 1.0 has it: a counter's family has no "_total", bounds of buckets have a point, and
// the end is marked.
std::string open_metrics(std::string_view text);
// A label's value, with quotes and line ends escaped.
std::string label_value(std::string_view text);

}  // namespace thermo
