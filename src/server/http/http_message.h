// A request as it came, a reply as it goes. Plain data.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace thermo {

struct HttpRequest {
  std::string method;
  std::string path;   // without the query, with at most a slash that is not at its end
  std::string query;  // after the question mark
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;
  bool http11 = true;
  bool keep_alive = true;
  bool loopback = true;  // it came to a listener that only this machine reaches
  bool unix_socket = false;
  std::string id;  // set by the handler

  // The first of that name (lower case); empty: there is none.
  std::string_view header(std::string_view name) const;
  // The value of "name=value" in the query.
  std::string query_value(std::string_view name, std::string_view otherwise = {}) const;
};

struct HttpReply {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string body = {};
  bool close = false;  // the connection ends after it
};

// The head of a stream of events that nobody on the way may keep or hold back.
HttpReply stream_head(std::vector<std::pair<std::string, std::string>> headers);
const char* status_text(int status);
// The bytes before the body. `chunked`: a stream whose length nobody knows.
std::string reply_head(const HttpReply& reply, const HttpRequest& request, bool chunked);
// One chunk of a stream.
std::string chunk_of(std::string_view bytes);

// "/v1/messages?beta=true" to path and query; "http://name/..." also to the header "host".
void split_target(std::string_view target, HttpRequest& request);
std::string http_date();
// Names with commas, as many as a header should have; other characters than visible ASCII become "_".
std::string header_list(const std::vector<std::string>& names);

}  // namespace thermo
