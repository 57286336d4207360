// Many requests over HTTP at once, on one thread, each with its answer's bytes as they come. For `bench`.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace thermo {

struct StreamRequest {
  std::string url;
  std::string key;   // sent as a bearer token; empty: none
  std::string body;  // JSON, sent with POST; empty: GET
  std::function<void(std::string_view)> on_bytes;
  // The last call: the status (0: no answer came), and what broke, empty where the answer is complete.
  std::function<void(int status, const std::string& error)> on_end;
};

// The URL of a server without the path of its APIs: people write it with /v1 and without. Throws ConfigError:
// no URL.
std::string server_root(std::string url);

// What a server says in a reply that is no stream; empty: nothing that can be read.
std::string refusal_in(std::string_view reply);

// One thread at a time.
class StreamClient {
 public:
  StreamClient();
  ~StreamClient();
  StreamClient(const StreamClient&) = delete;
  StreamClient& operator=(const StreamClient&) = delete;

  // Also from within on_end(): connections are used again.
  void start(StreamRequest request);
  // Until every request has ended. False: `stop`, which is asked several times a second, said so; what ran
  // is cut off without a last call. `start_due`: starts what is due and says how long the next one has time;
  // nullopt: none is left, or the end of another comes first.
  using StartDue = std::function<std::optional<std::chrono::milliseconds>()>;
  bool run(const std::function<bool()>& stop, const StartDue& start_due = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
