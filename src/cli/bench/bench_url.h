// `bench --url`: how fast a server answers so many clients at once. Drives any server that speaks one of the
// APIs, over HTTP, with streams.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/bench_report.h"

namespace thermo {

// What the events of an API's stream look like.
struct StreamDialect {
  std::string_view name;    // "chat", "completions", "responses", "messages"
  std::string_view path;    // below the server's URL
  std::string_view marker;  // what an event with text contains; empty: nothing in particular
};
// Throws ConfigError.
const StreamDialect& stream_dialect(const std::string& name);

struct UrlTest {
  int n_clients = 1;   // at once; with a rate 0: any number
  int n_prompt = 512;  // tokens, about; the server says how many there were
  int n_gen = 128;
  double rate = 0.0;  // requests a second, at random times; 0: each client sends the next one after an answer
};

// What one request says.
struct UrlPrompt {
  std::string text = {};
  Json messages = nullptr;             // a conversation instead
  std::optional<int> max_tokens = {};  // nullopt: as the test has it
};
// A prompt for each line that is not empty: a JSON object with "prompt" or "messages", and "max_tokens" if it
// wants; any other line is the text itself. Throws ConfigError: none, or an object without them.
std::vector<UrlPrompt> read_url_prompts(const std::string& lines, const std::string& source);
// When n requests are sent, in seconds: a Poisson process, the same every time.
std::vector<double> send_times(int n, double rate);

struct UrlBenchOptions {
  std::string url;  // of the server, without a path
  std::string key;  // empty: none
  std::string dialect = "chat";
  std::string text;                // what prompts are made of
  std::string text_source;         // its name
  std::vector<UrlPrompt> prompts;  // each is sent once, in their order; empty: prompts are made of the text
  int n_rounds = 5;     // requests of each client, one after the other; with a rate and no clients: of all
  bool warm_up = true;  // some requests that are not timed
  std::function<bool()> stop;
};

// One request as its client saw it. Times are in seconds since the request was sent.
struct StreamRecord {
  double first = -1.0, last = -1.0, end = -1.0;  // text, text, the answer's end; -1: it did not come
  std::vector<double> gaps;                      // between events with text
  int n_events = 0;                              // with text
  std::optional<int> n_prompt, n_written;        // as the server counts
  bool ended = false;                            // with the event that ends a stream
  std::string model, error;
};

// Reads a stream in the pieces that come, told the time of each. Other lines than events are skipped.
class StreamReader {
 public:
  StreamReader(const StreamDialect& dialect, StreamRecord& record) : dialect_(dialect), record_(record) {}
  void take(std::string_view bytes, double time);
  // What a reply that is no stream says, as " (...)"; empty: nothing.
  std::string refusal() const;

 private:
  void take_event(std::string_view data, double time);

  const StreamDialect& dialect_;
  StreamRecord& record_;
  std::string line_, head_;  // the head: the first bytes
};

// The body of a request for n_gen tokens. Throws ConfigError: a conversation for an API without messages.
std::string stream_body(const StreamDialect& dialect, const UrlPrompt& prompt, int n_gen);
// Fields of one row, in order. `seconds`: from the first request to the end of the last answer.
Json url_fields(const UrlBenchOptions& options, const UrlTest& test, const std::vector<StreamRecord>& records,
                double seconds);
std::unique_ptr<BenchPrinter> make_url_table(BenchPrinter::Sink sink);

// Every test in turn. False: it was interrupted. Throws ThermoError: the server cannot be reached, or
// answers no request.
bool run_url_bench(const UrlBenchOptions& options, const std::vector<UrlTest>& tests,
                   const std::function<void(Json)>& emit);

}  // namespace thermo
