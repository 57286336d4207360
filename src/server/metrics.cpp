#include "server/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/check.h"

namespace thermo {
namespace {

constexpr double kFirstToken[] = {.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640};
constexpr double kPerToken[] = {.002, .004, .006, .008, .01, .015, .02, .03, .05, .075, .1, .2, .5, 1, 2.5};
constexpr double kDuration[] = {.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800};
constexpr double kQueue[] = {.001, .01, .1, .5, 1, 5, 10, 30, 60, 300};
constexpr double kTokens[] = {16,   32,   64,    128,   256,   512,    1024,  2048,
                              4096, 8192, 16384, 32768, 65536, 131072, 262144};
constexpr double kAccepted[] = {0, 1, 2, 3, 4, 6, 8, 12, 16};
constexpr double kCancel[] = {.001, .01, .05, .1, .25, .5, 1, 2};

constexpr double kGrammar[] = {1e-5, 2.5e-5, 5e-5,   1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3,
                               5e-3, 1e-2,   2.5e-2, 5e-2, .1,     .25,  .5,   1};

struct Family {
  std::string_view name;
  std::string_view help;
  std::span<const double> buckets = {};  // empty: a counter
  bool labelled = true;                  // false: shown as 0 before anything was counted
};

const Family kFamilies[] = {
    {"thermocline_http_requests_total", "HTTP requests answered."},
    {"thermocline_requests_total", "Generation requests that ended."},
    {"thermocline_request_errors_total", "Requests refused or failed, by error code."},
    {"thermocline_ignored_fields_total", "Members of bodies that had no effect.", {}, false},
    {"thermocline_cancelled_total", "Requests whose client went away or that were cancelled."},
    {"thermocline_prompt_tokens_total", "Prompt tokens, computed or found in the cache."},
    {"thermocline_generated_tokens_total", "Tokens written."},
    {"thermocline_prefill_seconds_total", "Time requests spent reading prompts.", {}, false},
    {"thermocline_decode_seconds_total", "Time requests spent writing.", {}, false},
    {"thermocline_reasoning_closed_total", "How reasoning ended."},
    {"thermocline_tool_calls_total", "Tool calls written."},
    {"thermocline_tool_call_repairs_total", "What was repaired in damaged tool calls."},
    {"thermocline_structured_outputs_total", "Answers that had to have a format."},
    {"thermocline_prefix_cache_lookups_total", "Prompts by how much of them was in the cache."},
    {"thermocline_prompt_divergence_tokens_total",
     "Tokens computed again although they were known.",
     {},
     false},
    {"thermocline_turn_store_splices_total", "Answers in prompts whose tokens were known.", {}, false},
    {"thermocline_time_to_first_token_seconds", "From the request to its first token.", kFirstToken},
    {"thermocline_time_per_output_token_seconds", "Mean time between tokens of an answer.", kPerToken, false},
    {"thermocline_inter_token_seconds", "Time between events of a stream.", kPerToken, false},
    {"thermocline_request_duration_seconds", "From the request to its last byte.", kDuration},
    {"thermocline_queue_wait_seconds", "Time until a request got a slot.", kQueue, false},
    {"thermocline_prefill_duration_seconds", "Time to read a prompt.", kFirstToken, false},
    {"thermocline_decode_duration_seconds", "Time to write an answer.", kDuration, false},
    {"thermocline_request_prompt_tokens", "Tokens of a prompt.", kTokens, false},
    {"thermocline_request_generated_tokens", "Tokens of an answer.", kTokens, false},
    {"thermocline_spec_accepted_length", "Mean number of accepted tokens of a request's drafts.", kAccepted},
    {"thermocline_cancel_latency_seconds", "From a cancellation to the end of the work.", kCancel},
    {"thermocline_grammar_compile_seconds", "Time to make the rules of an answer.", kGrammar, false},
    {"thermocline_grammar_mask_seconds", "Mean time of a request's masks of allowed tokens.", kGrammar,
     false},
};

const Family& family_of(std::string_view name) {
  const auto* found = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                   [&](const Family& family) { return family.name == name; });
  THERMO_CHECK(found != std::end(kFamilies), "a metric that is not in the table");
  return *found;
}

std::string with(const std::string& labels, const std::string& more) {
  return labels.empty() ? more : labels + "," + more;
}

std::string sample(std::string_view name, const std::string& labels, double value) {
  return labels.empty() ? fmt::format("{} {}\n", name, value)
                        : fmt::format("{}{{{}}} {}\n", name, labels, value);
}

void head(std::string& text, std::string_view name, std::string_view type, std::string_view help) {
  text += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
}

}  // namespace

std::string label_value(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\n' ? std::string("\\n") : std::string(1, c);
  }
  return out;
}

std::string open_metrics(std::string_view text) {
  constexpr std::string_view kTotal = "_total", kBound = "le=\"";
  std::string out;
  while (!text.empty()) {
    std::string line(text.substr(0, text.find('\n') + 1));
    text.remove_prefix(line.size());
    if (line.starts_with('#')) {  // "# TYPE name ..."
      const size_t name = line.find(' ', 2) + 1, end = line.find(' ', name);
      if (std::string_view(line).substr(name, end - name).ends_with(kTotal))
        line.erase(end - kTotal.size(), kTotal.size());
    } else if (const size_t bound = line.find(kBound); bound != std::string::npos) {
      const size_t end = line.find('"', bound + kBound.size());
      const std::string_view number(line.data() + bound + kBound.size(), end - bound - kBound.size());
      if (number.find_first_not_of("0123456789") == std::string_view::npos) line.insert(end, ".0");
    }
    out += line;
  }
  return out + "# EOF\n";
}

void write_family(std::string& text, std::string_view name, std::string_view type, std::string_view help,
                  const std::vector<Sample>& samples) {
  head(text, name, type, help);
  for (const Sample& one : samples) text += sample(name, one.labels, one.value);
}

void Metrics::count(std::string_view name, const std::string& labels, double amount) {
  const Family& family = family_of(name);
  const std::lock_guard lock(mutex_);
  counters_[std::string(family.name)][labels] += amount;
}

void Metrics::observe(std::string_view name, double value, const std::string& labels) {
  const Family& family = family_of(name);
  const std::lock_guard lock(mutex_);
  Histogram& histogram = histograms_[std::string(family.name)][labels];
  histogram.buckets.resize(family.buckets.size() + 1);
  const auto place =
      std::lower_bound(family.buckets.begin(), family.buckets.end(), value) - family.buckets.begin();
  ++histogram.buckets[static_cast<size_t>(place)];
  histogram.sum += value;
}

std::string Metrics::text() const {
  const std::lock_guard lock(mutex_);
  std::string out;
  for (const Family& family : kFamilies) {
    head(out, family.name, family.buckets.empty() ? "counter" : "histogram", family.help);
    if (family.buckets.empty()) {
      const auto found = counters_.find(family.name);
      if (found != counters_.end())
        for (const auto& [labels, value] : found->second) out += sample(family.name, labels, value);
      else if (!family.labelled)
        out += sample(family.name, "", 0.0);
      continue;
    }
    const auto found = histograms_.find(family.name);
    if (found == histograms_.end()) continue;
    for (const auto& [labels, histogram] : found->second)
      write_samples(out, family.name, labels, family.buckets, histogram);
  }
  return out;
}

void Metrics::write_samples(std::string& out, std::string_view name, const std::string& labels,
                            std::span<const double> bounds, const Histogram& histogram) {
  const std::string bucket = fmt::format("{}_bucket", name);
  uint64_t below = 0;
  for (size_t i = 0; i < bounds.size(); ++i) {
    below += histogram.buckets[i];
    out += sample(bucket, with(labels, fmt::format("le=\"{}\"", bounds[i])), static_cast<double>(below));
  }
  below += histogram.buckets.back();
  out += sample(bucket, with(labels, "le=\"+Inf\""), static_cast<double>(below));
  out += sample(fmt::format("{}_sum", name), labels, histogram.sum);
  out += sample(fmt::format("{}_count", name), labels, static_cast<double>(below));
}

double Metrics::sum(std::string_view name, std::string_view part) const {
  family_of(name);
  const std::lock_guard lock(mutex_);
  double all = 0.0;
  if (const auto found = counters_.find(name); found != counters_.end())
    for (const auto& [labels, value] : found->second)
      if (labels.find(part) != std::string::npos) all += value;
  return all;
}

void Metrics::write_histogram(std::string& out, std::string_view name, std::string_view as,
                              std::string_view help, const std::string& labels) const {
  const Family& family = family_of(name);
  Histogram all{.buckets = std::vector<uint64_t>(family.buckets.size() + 1)};
  const std::lock_guard lock(mutex_);
  if (const auto found = histograms_.find(name); found != histograms_.end())
    for (const auto& [unused, one] : found->second) {
      for (size_t i = 0; i < one.buckets.size(); ++i) all.buckets[i] += one.buckets[i];
      all.sum += one.sum;
    }
  head(out, as, "histogram", help);
  write_samples(out, as, labels, family.buckets, all);
}

}  // namespace thermo
