#include "cli/bench/bench_url_flags.h"

#include <fmt/format.h>

#include "base/error.h"
#include "cli/bench/bench_plan.h"
#include "cli/bench/stream_client.h"
#include "cli/input.h"

namespace thermo {
namespace {

constexpr double kMaxRate = 10000.0;

std::vector<int> numbers(const char* option, const std::vector<std::string>& texts, int standard) {
  std::vector<int> values = texts.empty() ? std::vector<int>{standard} : parse_int_lists(option, texts);
  for (const int value : values)
    if (value < 1 || value > 1 << 20)
      throw ConfigError(
          fmt::format("{}: {} cannot be used with --url, 1 to {} was expected", option, value, 1 << 20));
  return values;
}

}  // namespace

void add_url_options(OptionSet& set, UrlBenchFlags& flags) {
  set.section("Server");
  set.value(
         "--url", "URL", flags.options.url,
         "measure a server through its streams: tokens per second, time to first token, gaps between tokens")
      .no_environment();
  set.list("--concurrency", "LIST", flags.concurrency,
           "number of clients (default 1); each sends -r requests, one after the other")
      .no_environment();
  set.value("--rate", "R", flags.rate,
            "send this many requests per second, at random times, without waiting for answers; --concurrency "
            "then limits how many run at once (default: no limit)")
      .range(0, kMaxRate)
      .no_environment();
  set.value(
         "--prompts", "FILE", flags.prompts,
         "send the prompts of a file, each once: a line is a text, or a JSON object with prompt or messages")
      .no_environment();
  set.value("--dialect", "NAME", flags.options.dialect, "API: chat, completions, responses or messages")
      .choices({"chat", "completions", "responses", "messages"})
      .no_environment();
  set.value("--api-key", "KEY", flags.options.key, "API key of the server").secret().not_in_file();
  for (const char* name : {"--concurrency", "--rate", "--prompts", "--dialect", "--api-key"})
    set.need(name, "--url");
  for (const char* model : {"--model", "--hf-repo", "--hf-file"}) set.contradict("--url", model);
}

std::vector<UrlTest> url_tests(UrlBenchFlags& flags, const std::vector<std::string>& n_prompt,
                               const std::vector<std::string>& n_gen) {
  UrlBenchOptions& options = flags.options;
  options.url = server_root(options.url);
  if (!flags.prompts.empty()) {
    if (!n_prompt.empty()) throw ConfigError("--prompts says what is asked: leave -p out");
    options.prompts = read_url_prompts(read_text_file(flags.prompts), "--prompts " + flags.prompts);
    options.text_source = flags.prompts;
    for (const UrlPrompt& prompt : options.prompts)  // a bad one is refused at once
      stream_body(stream_dialect(options.dialect), prompt, 1);
  }
  std::vector<int> clients = numbers("--concurrency", flags.concurrency, 1);
  if (flags.rate > 0.0 && flags.concurrency.empty()) clients = {0};
  std::vector<UrlTest> tests;
  for (const int prompt : numbers("-p", n_prompt, 512))
    for (const int gen : numbers("-n", n_gen, 128))
      for (const int n : clients)
        tests.push_back({.n_clients = n, .n_prompt = prompt, .n_gen = gen, .rate = flags.rate});
  return tests;
}

}  // namespace thermo
