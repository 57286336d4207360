#include "hub/http_client.h"

#include <curl/curl.h>
#include <fmt/format.h>

#include <charconv>
#include <mutex>

namespace thermo {
namespace {

constexpr long kConnectSeconds = 30;
constexpr long kStallSeconds = 30;  // below a kilobyte a second for so long: the transfer is given up
constexpr long kMaxRedirects = 10;

struct Transfer {
  CURL* curl;
  const GetRequest* request;
  bool begun = false;
  bool stopped = false;
  uint64_t begin = 0;  // where the body stands in the file
};

// Headers of every answer on the way come here, those of redirects too.
size_t on_header(char* data, size_t size, size_t n, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const std::string_view line(data, size * n);
  if (line.starts_with("HTTP/")) transfer.begin = 0;
  constexpr std::string_view kRange = "content-range: bytes ";
  if (line.size() > kRange.size() && curl_strnequal(line.data(), kRange.data(), kRange.size()))
    std::from_chars(line.data() + kRange.size(), line.data() + line.size(), transfer.begin);
  return size * n;
}

size_t on_body(char* data, size_t size, size_t n, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  long status = 0;
  curl_easy_getinfo(transfer.curl, CURLINFO_RESPONSE_CODE, &status);
  if (status != 200 && status != 206) return size * n;  // an error page: nobody reads it
  const GetRequest& request = *transfer.request;
  if (!transfer.begun) {
    transfer.begun = true;
    curl_off_t length = -1;
    curl_easy_getinfo(transfer.curl, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
    if (request.on_begin && !request.on_begin(transfer.begin, length)) transfer.stopped = true;
  }
  if (!transfer.stopped && request.on_body &&
      !request.on_body({reinterpret_cast<const std::byte*>(data), size * n}))
    transfer.stopped = true;
  return transfer.stopped ? 0 : size * n;
}

int on_progress(void* user, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  auto& transfer = *static_cast<Transfer*>(user);
  if (transfer.request->cancelled && transfer.request->cancelled()) transfer.stopped = true;
  return transfer.stopped ? 1 : 0;
}

}  // namespace

struct HttpClient::Impl {
  CURL* curl;
};

HttpClient::HttpClient() {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  impl_ = new Impl{curl_easy_init()};
}

HttpClient::~HttpClient() {
  curl_easy_cleanup(impl_->curl);
  delete impl_;
}

GetReply HttpClient::get(const GetRequest& request) {
  GetReply reply;
  CURL* const curl = impl_->curl;
  if (curl == nullptr) {
    reply.error = "the transfer library could not start";
    return reply;
  }
  curl_easy_reset(curl);  // keeps connections
  Transfer transfer{.curl = curl, .request = &request};
  char message[CURL_ERROR_SIZE] = "";
  curl_easy_setopt(curl, CURLOPT_URL, request.url.c_str());
  curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, 1L);
  curl_easy_setopt(curl, CURLOPT_MAXREDIRS, kMaxRedirects);
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, kConnectSeconds);
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 1024L);
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, kStallSeconds);
  curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, 512L * 1024L);
  curl_easy_setopt(curl, CURLOPT_USERAGENT, "thermocline");
  curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, message);
  curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, on_header);
  curl_easy_setopt(curl, CURLOPT_HEADERDATA, &transfer);
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_body);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &transfer);
  curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, on_progress);
  curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &transfer);
  if (!request.token.empty()) {
    curl_easy_setopt(curl, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
    curl_easy_setopt(curl, CURLOPT_XOAUTH2_BEARER, request.token.c_str());
  }
  const std::string range = fmt::format("{}-", request.offset);
  if (request.offset > 0) curl_easy_setopt(curl, CURLOPT_RANGE, range.c_str());

  const CURLcode code = curl_easy_perform(curl);
  long status = 0;
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
  reply.status = static_cast<int>(status);
  reply.stopped = transfer.stopped;
  if (code != CURLE_OK && !transfer.stopped)
    reply.error = message[0] != '\0' ? message : curl_easy_strerror(code);
  return reply;
}

std::string host_of(std::string_view url) {
  const size_t scheme = url.find("://");
  if (scheme != std::string_view::npos) url.remove_prefix(scheme + 3);
  url = url.substr(0, url.find_first_of("/?#"));
  const size_t user = url.rfind('@');
  return std::string(user == std::string_view::npos ? url : url.substr(user + 1));
}

}  // namespace thermo
