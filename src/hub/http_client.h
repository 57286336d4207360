// GET over HTTP and HTTPS, for the hub. Follows redirects; a token goes to the first host only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace thermo {

// A download that failed, with one sentence that says what was tried, what came and what to do.
class DownloadError : public ThermoError {
 public:
  explicit DownloadError(const std::string& message) : ThermoError(ExitCode::Download, message) {}
};

struct GetRequest {
  std::string url;
  std::string token = {};  // empty: none
  uint64_t offset = 0;     // of the first byte wanted
  // The next piece of a 200 or 206 answer; false ends the transfer.
  std::function<bool(std::span<const std::byte>)> on_body = {};
  // Before the first piece: where in the file it begins (0 when the server ignored the offset), and how many
  // bytes it says will come, -1 when it does not say; false ends the transfer.
  std::function<bool(uint64_t begin, int64_t n_bytes)> on_begin = {};
  std::function<bool()> cancelled = {};  // asked several times a second
};

struct GetReply {
  int status = 0;        // 0: no answer came
  std::string error;     // what broke, empty when the transfer was complete
  bool stopped = false;  // by on_body, on_begin or cancelled
  bool is_ok() const { return error.empty() && !stopped && (status == 200 || status == 206); }
};

// One thread at a time.
class HttpClient {
 public:
  HttpClient();
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  GetReply get(const GetRequest& request);

 private:
  struct Impl;
  Impl* impl_;
};

// "host:port" of a URL; for messages.
std::string host_of(std::string_view url);

}  // namespace thermo
