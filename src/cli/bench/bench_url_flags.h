// The options of `bench --url`.
#pragma once

#include <string>
#include <vector>

#include "cli/bench/bench_url.h"
#include "cli/options/options.h"

namespace thermo {

struct UrlBenchFlags {
  UrlBenchOptions options;  // as far as one option says it
  std::vector<std::string> concurrency;
  double rate = 0.0;
  std::string prompts;  // a file
};

void add_url_options(OptionSet& set, UrlBenchFlags& flags);

// Every combination, with -p and -n as they were given. Reads the prompts. Throws ConfigError.
std::vector<UrlTest> url_tests(UrlBenchFlags& flags, const std::vector<std::string>& n_prompt,
                               const std::vector<std::string>& n_gen);

}  // namespace thermo
