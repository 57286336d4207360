#include "cli/bench/bench_url.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <sstream>

#include "base/error.h"
#include "cli/bench/bench_table.h"
#include "cli/bench/stream_client.h"
#include "cli/version.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr StreamDialect kDialects[] = {{"chat", "/v1/chat/completions", ""},
                                       {"completions", "/v1/completions", ""},
                                       {"responses", "/v1/responses", ".delta\""},
                                       {"messages", "/v1/messages", "content_block_delta"}};
constexpr double kBytesPerToken = 4.0;    // before the server has counted
constexpr size_t kMostOfARefusal = 4096;  // bytes

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Whether a member of this name is a text that is not empty. Events are searched and not parsed: a client
// that shares its cores with the server must not take them.
bool has_text(std::string_view data, std::string_view name) {
  for (size_t at = data.find(name); at != std::string_view::npos; at = data.find(name, at + 1)) {
    size_t next = at + name.size();
    if (at == 0 || data[at - 1] != '"' || !data.substr(next).starts_with("\":")) continue;
    next = data.find_first_not_of(' ', next + 2);
    if (next != std::string_view::npos && data[next] == '"' && next + 1 < data.size() &&
        data[next + 1] != '"')
      return true;
  }
  return false;
}

bool carries_text(std::string_view data, const StreamDialect& dialect) {
  if (!dialect.marker.empty() && data.find(dialect.marker) == std::string_view::npos) return false;
  for (const char* name : {"content", "reasoning_content", "reasoning", "text", "delta", "thinking",
                           "arguments", "partial_json"})
    if (has_text(data, name)) return true;
  return false;
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0.0;
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

void add_percentiles(Json& f, const std::string& name, const std::vector<double>& seconds) {
  for (const int p : {50, 90, 99})
    f[fmt::format("{}_ms_p{}", name, p)] =
        seconds.empty() ? Json(nullptr) : Json(1e3 * percentile(seconds, p / 100.0));
}

class UrlTable : public MarkdownTable {
 public:
  explicit UrlTable(Sink sink)
      : MarkdownTable({"model", "api", "test", "clients", "rate/s", "requests", "errors", "t/s", "stream t/s",
                       "first p50 ms", "first p99 ms", "gap p50 ms", "gap p99 ms", "whole p50 s"},
                      std::move(sink)) {}

 private:
  void choose_columns(const Json& first) override {
    if (first.contains("ratio")) columns_.emplace_back("ratio");
  }
  bool is_text(const std::string& column) const override { return column == "model" || column == "api"; }
  size_t min_width(const std::string& column) const override { return column == "t/s" ? 8 : 0; }
  std::string value_of(const std::string& column, const Json& f) const override {
    const auto number = [&](const char* name, double scale, int digits) {
      return f[name].is_null() ? "" : fmt::format("{:.{}f}", f[name].get<double>() * scale, digits);
    };
    if (column == "model") return f["model"];
    if (column == "api") return f["dialect"];
    if (column == "test")
      return f["n_prompt"].is_null()
                 ? fmt::format("file+tg{}", f["n_gen"].get<int>())
                 : fmt::format("pp{}+tg{}", f["n_prompt"].get<int>(), f["n_gen"].get<int>());
    if (column == "clients") return f["concurrency"].is_null() ? "any" : f["concurrency"].dump();
    if (column == "rate/s") return f["rate"].is_null() ? "" : number("rate", 1, 1);
    if (column == "requests") return f["n_requests"].dump();
    if (column == "errors") return f["errors"].dump();
    if (column == "t/s") return number("out_ts", 1, 2);
    if (column == "stream t/s") return number("stream_ts", 1, 2);
    if (column == "first p50 ms") return number("ttft_ms_p50", 1, 1);
    if (column == "first p99 ms") return number("ttft_ms_p99", 1, 1);
    if (column == "gap p50 ms") return number("itl_ms_p50", 1, 2);
    if (column == "gap p99 ms") return number("itl_ms_p99", 1, 2);
    if (column == "ratio") return number("ratio", 1, 3);
    return number("e2e_ms_p50", 1e-3, 2);
  }
};

// The clients of one test. Each sends its next request when it has an answer; with a rate, requests are sent
// when their time has come and a client is free.
class Clients {
 public:
  Clients(const UrlBenchOptions& options, const StreamDialect& dialect, double bytes_per_token)
      : options_(options), dialect_(dialect), bytes_per_token_(bytes_per_token) {}

  // Empty when it was interrupted.
  std::vector<StreamRecord> run(const UrlTest& test, int n_requests, double* seconds) {
    test_ = test;
    records_.assign(static_cast<size_t>(n_requests), {});
    next_ = 0;
    n_open_ = 0;
    StreamClient client;
    const std::vector<double> times =
        test.rate > 0.0 ? send_times(n_requests, test.rate) : std::vector<double>(records_.size(), 0.0);
    const Clock::time_point start = Clock::now();
    const auto start_due = [&]() -> std::optional<std::chrono::milliseconds> {
      while (next_ < times.size() && (test.n_clients == 0 || n_open_ < test.n_clients)) {
        const double wait = times[next_] - seconds_since(start);
        if (wait > 0.0) return std::chrono::milliseconds(static_cast<int64_t>(wait * 1e3) + 1);
        send_next(client);
      }
      return std::nullopt;
    };
    if (!client.run(options_.stop, start_due)) return {};
    *seconds = seconds_since(start);
    return std::move(records_);
  }

 private:
  void send_next(StreamClient& client) {
    const UrlPrompt prompt = options_.prompts.empty() ? UrlPrompt{.text = text()}
                                                      : options_.prompts[next_ % options_.prompts.size()];
    StreamRecord& record = records_[next_++];
    ++n_open_;
    const auto reader = std::make_shared<StreamReader>(dialect_, record);
    const Clock::time_point sent = Clock::now();
    client.start(
        {.url = options_.url + std::string(dialect_.path),
         .key = options_.key,
         .body = stream_body(dialect_, prompt, prompt.max_tokens.value_or(test_.n_gen)),
         .on_bytes = [reader, sent](std::string_view bytes) { reader->take(bytes, seconds_since(sent)); },
         .on_end =
             [this, &record, reader, sent](int status, const std::string& error) {
               --n_open_;
               record.end = seconds_since(sent);
               if (!error.empty()) record.error = error;
               if (status == 0) record.error = "the server cannot be reached: " + error;
               if (status != 0 && status != 200)
                 record.error = fmt::format("status {}{}", status, reader->refusal());
               if (record.error.empty() && !record.ended) record.error = "the stream ended early";
             }});
  }

  // Another one for each request of a run, so that no server has read it before.
  std::string text() {
    std::string text = fmt::format("Note {}: ", ++n_prompts_);
    const std::string& source = options_.text;
    const auto size = static_cast<size_t>(bytes_per_token_ * test_.n_prompt);
    size_t at = n_prompts_ * 7919 % source.size();
    while (text.size() < size) {
      const size_t end = std::min(source.size(), at + size - text.size());
      text.append(source, at, end - at);
      at = end == source.size() ? 0 : end;
    }
    // Bytes of a character that was cut.
    while (!text.empty() && (text.back() & 0x80) != 0) text.pop_back();
    std::erase_if(text, [](char c) { return (c & 0x80) != 0; });
    return text;
  }

  const UrlBenchOptions& options_;
  const StreamDialect& dialect_;
  const double bytes_per_token_;
  UrlTest test_;
  std::vector<StreamRecord> records_;
  size_t next_ = 0, n_prompts_ = 0;
  int n_open_ = 0;  // requests without an answer
};

}  // namespace

const StreamDialect& stream_dialect(const std::string& name) {
  for (const StreamDialect& dialect : kDialects)
    if (dialect.name == name) return dialect;
  throw ConfigError(
      fmt::format("--dialect: '{}' is not known; use chat, completions, responses or messages", name));
}

std::string StreamReader::refusal() const {
  const std::string why = refusal_in(head_);
  return why.empty() ? why : fmt::format(" ({})", why);
}

void StreamReader::take(std::string_view bytes, double time) {
  if (head_.size() < kMostOfARefusal) head_ += bytes;
  for (;;) {
    const size_t end = bytes.find('\n');
    if (end == std::string_view::npos) break;
    line_.append(bytes.substr(0, end));
    bytes.remove_prefix(end + 1);
    std::string_view line = line_;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.starts_with("data:")) {
      line.remove_prefix(5);
      if (line.starts_with(' ')) line.remove_prefix(1);
      take_event(line, time);
    }
    line_.clear();
  }
  line_.append(bytes);
}

void StreamReader::take_event(std::string_view data, double time) {
  StreamRecord& r = record_;
  if (data == "[DONE]" || data.find("\"message_stop\"") != std::string_view::npos ||
      data.find("\"response.completed\"") != std::string_view::npos ||
      data.find("\"response.incomplete\"") != std::string_view::npos)
    r.ended = true;
  if (carries_text(data, dialect_)) {
    if (r.n_events++ == 0)
      r.first = time;
    else
      r.gaps.push_back(time - r.last);
    r.last = time;
  }
  const bool counts = data.find("\"usage\":{") != std::string_view::npos ||
                      data.find("\"usage\": {") != std::string_view::npos;
  if (!counts && data.find("\"error\":") == std::string_view::npos && !r.model.empty()) return;
  const Json event = Json::parse(data, nullptr, false);
  if (!event.is_object()) return;
  const auto part = [&](const char* outer, const char* name) -> const Json* {
    const Json* const holder = outer == nullptr ? &event : event.contains(outer) ? &event[outer] : nullptr;
    return holder != nullptr && holder->is_object() && holder->contains(name) ? &(*holder)[name] : nullptr;
  };
  for (const char* outer : {static_cast<const char*>(nullptr), "message", "response"}) {
    if (const Json* model = part(outer, "model"); model != nullptr && model->is_string()) r.model = *model;
    if (const Json* error = part(outer, "error"); error != nullptr && error->is_object())
      r.error = error->value("message", "an error");
    const Json* usage = part(outer, "usage");
    if (usage == nullptr || !usage->is_object()) continue;
    const auto number = [&](const char* name) -> std::optional<int> {
      if (!usage->contains(name) || !(*usage)[name].is_number()) return std::nullopt;
      return (*usage)[name].get<int>();
    };
    for (const char* name : {"prompt_tokens", "input_tokens"})
      if (const auto n = number(name)) r.n_prompt = *n + number("cache_read_input_tokens").value_or(0);
    for (const char* name : {"completion_tokens", "output_tokens"})
      if (const auto n = number(name)) r.n_written = n;
  }
}

std::vector<UrlPrompt> read_url_prompts(const std::string& lines, const std::string& source) {
  std::vector<UrlPrompt> prompts;
  std::istringstream in(lines);
  int n_line = 0;
  for (std::string line; std::getline(in, line);) {
    ++n_line;
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    const Json object = line.starts_with('{') ? Json::parse(line, nullptr, false) : Json();
    UrlPrompt prompt;
    if (!object.is_object()) {
      prompt.text = line;
    } else if (object.contains("messages") && object["messages"].is_array()) {
      prompt.messages = object["messages"];
    } else if (object.contains("prompt") && object["prompt"].is_string()) {
      prompt.text = object["prompt"];
    } else {
      throw ConfigError(fmt::format("{}: line {} has neither a \"prompt\" nor \"messages\"", source, n_line));
    }
    if (object.is_object() && object.contains("max_tokens") && object["max_tokens"].is_number_integer())
      prompt.max_tokens = object["max_tokens"].get<int>();
    prompts.push_back(std::move(prompt));
  }
  if (prompts.empty()) throw ConfigError(source + ": there is no prompt in it");
  return prompts;
}

std::vector<double> send_times(int n, double rate) {
  std::mt19937_64 random(1);
  std::exponential_distribution<double> gap(rate);
  std::vector<double> times;
  for (double time = 0.0; static_cast<int>(times.size()) < n; time += gap(random)) times.push_back(time);
  return times;
}

std::string stream_body(const StreamDialect& dialect, const UrlPrompt& prompt, int n_gen) {
  Json body = {{"model", "bench"}, {"stream", true}, {"temperature", 0}, {"ignore_eos", true}};
  const Json turns = prompt.messages.is_array() ? prompt.messages
                                                : Json::array({{{"role", "user"}, {"content", prompt.text}}});
  if (dialect.name == "completions" && prompt.messages.is_array())
    throw ConfigError("completions continue a text: give prompts, or use another API for messages");
  if (dialect.name == "responses") {
    body["input"] = turns;
    body["max_output_tokens"] = n_gen;
    return body.dump();
  }
  body["max_tokens"] = n_gen;
  if (dialect.name == "completions")
    body["prompt"] = prompt.text;
  else
    body["messages"] = turns;
  if (dialect.name != "messages") body["stream_options"] = {{"include_usage", true}};
  return body.dump();
}

Json url_fields(const UrlBenchOptions& options, const UrlTest& test, const std::vector<StreamRecord>& records,
                double seconds) {
  std::vector<double> first, gaps, whole, rates;
  int64_t n_written = 0, n_prompt = 0;
  int n_errors = 0;
  bool counted = true;
  std::string model, error;
  for (const StreamRecord& r : records) {
    if (!r.model.empty()) model = r.model;
    if (!r.error.empty()) {
      ++n_errors;
      error = r.error;
      continue;
    }
    counted = counted && r.n_written.has_value();
    const int n = r.n_written.value_or(r.n_events);
    n_written += n;
    n_prompt += r.n_prompt.value_or(0);
    if (r.first >= 0.0) first.push_back(r.first);
    whole.push_back(r.end);
    gaps.insert(gaps.end(), r.gaps.begin(), r.gaps.end());
    if (n > 1 && r.last > r.first) rates.push_back((n - 1) / (r.last - r.first));
  }
  const auto n_good = static_cast<double>(std::max<size_t>(1, whole.size()));
  Json f;
  f["build_commit"] = build_commit();
  f["url"] = options.url;
  f["dialect"] = options.dialect;
  f["model"] = model;
  f["test_time"] = time_now();
  f["text_source"] = options.text_source;
  f["n_prompt"] = options.prompts.empty() ? Json(test.n_prompt) : Json(nullptr);
  f["n_gen"] = test.n_gen;
  f["concurrency"] = test.n_clients > 0 ? Json(test.n_clients) : Json(nullptr);
  f["rate"] = test.rate > 0.0 ? Json(test.rate) : Json(nullptr);
  f["n_requests"] = records.size();
  f["errors"] = n_errors;
  f["error"] = error;
  f["seconds"] = seconds;
  f["prompt_tokens"] = static_cast<double>(n_prompt) / n_good;  // mean of a request
  f["out_tokens"] = n_written;
  f["tokens_counted_by"] = counted ? "usage" : "events";
  for (const auto& [name, values] : {std::pair("ttft", &first), {"itl", &gaps}, {"e2e", &whole}})
    add_percentiles(f, name, *values);
  f["out_ts"] = static_cast<double>(n_written) / seconds;
  // What the streams write while they write: the time until their first token is left out.
  // With a rate nobody knows how many there are at once.
  f["stream_ts"] = rates.empty() || test.rate > 0.0
                       ? Json(nullptr)
                       : Json(test.n_clients * std::accumulate(rates.begin(), rates.end(), 0.0) /
                              static_cast<double>(rates.size()));
  f["requests_per_s"] = static_cast<double>(whole.size()) / seconds;
  f["avg_ts"] = f["out_ts"];  // for --compare
  return f;
}

std::unique_ptr<BenchPrinter> make_url_table(BenchPrinter::Sink sink) {
  return std::make_unique<UrlTable>(std::move(sink));
}

bool run_url_bench(const UrlBenchOptions& options, const std::vector<UrlTest>& tests,
                   const std::function<void(Json)>& emit) {
  const StreamDialect& dialect = stream_dialect(options.dialect);
  double seconds = 0.0;
  // The first answers say how many tokens texts of known length have, and bring the server up. Four of them:
  // code has fewer bytes a token than prose.
  double bytes_per_token = kBytesPerToken;
  if (options.warm_up) {
    constexpr int kTokens = 256, kAnswer = 8, kTexts = 4;
    UrlBenchOptions own = options;
    own.prompts.clear();
    Clients first(own, dialect, kBytesPerToken);
    const auto records = first.run({.n_clients = 1, .n_prompt = kTokens, .n_gen = kAnswer}, kTexts, &seconds);
    if (records.empty()) return false;
    int n_tokens = 0;
    for (const StreamRecord& record : records) {
      if (!record.error.empty())
        throw ConfigError(fmt::format("{}{}: {}; is a server there, and does it need a key?", options.url,
                                      dialect.path, record.error));
      n_tokens += record.n_prompt.value_or(0);
    }
    if (n_tokens > 16 * kTexts) bytes_per_token = kBytesPerToken * kTexts * kTokens / n_tokens;
  }
  Clients clients(options, dialect, bytes_per_token);
  for (const UrlTest& test : tests) {
    const int n_requests = options.prompts.empty() ? std::max(1, test.n_clients) * options.n_rounds
                                                   : static_cast<int>(options.prompts.size());
    const std::vector<StreamRecord> records = clients.run(test, n_requests, &seconds);
    if (records.empty()) return false;
    emit(url_fields(options, test, records, seconds));
  }
  return true;
}

}  // namespace thermo
