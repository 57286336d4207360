#include "server/http/http_message.h"

#include <fmt/format.h>

#include <ctime>

namespace thermo {

std::string_view HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (key == name) return value;
  return {};
}

std::string HttpRequest::query_value(std::string_view name, std::string_view otherwise) const {
  std::string_view rest = query;
  while (!rest.empty()) {
    const size_t end = rest.find('&');
    const std::string_view pair = rest.substr(0, end);
    const size_t equals = pair.find('=');
    if (pair.substr(0, equals) == name)
      return equals == std::string_view::npos ? std::string() : std::string(pair.substr(equals + 1));
    rest = end == std::string_view::npos ? std::string_view{} : rest.substr(end + 1);
  }
  return std::string(otherwise);
}

HttpReply stream_head(std::vector<std::pair<std::string, std::string>> headers) {
  HttpReply head;
  head.content_type = "text/event-stream; charset=utf-8";
  head.headers = std::move(headers);
  head.headers.emplace_back("Cache-Control", "no-cache");
  head.headers.emplace_back("X-Accel-Buffering", "no");
  return head;
}

const char* status_text(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    case 529:
      return "Overloaded";
    default:
      return "Unknown";
  }
}

std::string http_date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  static constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  static constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                            "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  return fmt::format("{}, {:02} {} {} {:02}:{:02}:{:02} GMT", kDays[utc.tm_wday], utc.tm_mday,
                     kMonths[utc.tm_mon], utc.tm_year + 1900, utc.tm_hour, utc.tm_min, utc.tm_sec);
}

std::string reply_head(const HttpReply& reply, const HttpRequest& request, bool chunked) {
  std::string head =
      fmt::format("HTTP/1.1 {} {}\r\nDate: {}\r\n", reply.status, status_text(reply.status), http_date());
  if (!reply.content_type.empty()) head += "Content-Type: " + reply.content_type + "\r\n";
  for (const auto& [name, value] : reply.headers) {
    head += name + ": ";
    for (const char c : value)
      head += c == '\r' || c == '\n' ? ' ' : c;  // a value never begins another header
    head += "\r\n";
  }
  const bool close = reply.close || !request.keep_alive || (chunked && !request.http11);
  if (chunked && request.http11) head += "Transfer-Encoding: chunked\r\n";
  if (!chunked && reply.status != 204) head += fmt::format("Content-Length: {}\r\n", reply.body.size());
  head += close ? "Connection: close\r\n" : "Connection: keep-alive\r\n";
  return head + "\r\n";
}

std::string chunk_of(std::string_view bytes) {
  return fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes);
}

std::string header_list(const std::vector<std::string>& names) {
  constexpr size_t kMostBytes = 1000;
  std::string text;
  for (const std::string& name : names) {
    if (text.size() + name.size() > kMostBytes) break;
    text += text.empty() ? "" : ", ";
    for (const char c : name) text += c > ' ' && c <= '~' && c != ',' ? c : '_';
  }
  return text;
}

void split_target(std::string_view target, HttpRequest& request) {
  // A proxy's form names the host as well, and counts before the header.
  if (target.starts_with("http://") || target.starts_with("https://")) {
    const size_t begin = target.find("://") + 3, slash = target.find('/', begin);
    std::erase_if(request.headers, [](const auto& header) { return header.first == "host"; });
    request.headers.emplace_back("host", target.substr(begin, slash - begin));
    target = slash == std::string_view::npos ? std::string_view("/") : target.substr(slash);
  }
  const size_t question = target.find('?');
  request.path = target.substr(0, question);
  if (question != std::string_view::npos) request.query = target.substr(question + 1);
  if (request.path.size() > 1 && request.path.ends_with('/')) request.path.pop_back();
}

}  // namespace thermo
