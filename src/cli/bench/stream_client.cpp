#include "cli/bench/stream_client.h"

#include <curl/curl.h>
#include <fmt/format.h>

#include <algorithm>
#include <list>

#include "base/error.h"
#include "base/json.h"

namespace thermo {
namespace {

constexpr long kConnectSeconds = 30;
constexpr int kPollMs = 100;

size_t on_body(char* data, size_t size, size_t n, void* user) {
  const auto& request = *static_cast<StreamRequest*>(user);
  if (request.on_bytes) request.on_bytes({data, size * n});
  return size * n;
}

}  // namespace

std::string server_root(std::string url) {
  if (!url.starts_with("http://") && !url.starts_with("https://"))
    throw ConfigError(fmt::format("--url: '{}' cannot be used, write http://127.0.0.1:8080", url));
  while (url.ends_with('/')) url.pop_back();
  if (url.ends_with("/v1")) url.resize(url.size() - 3);
  return url;
}

std::string refusal_in(std::string_view reply) {
  const Json json = Json::parse(reply, nullptr, false);
  if (!json.is_object() || !json.contains("error")) return {};
  const Json& error = json["error"];
  if (error.is_string()) return error.get<std::string>();
  return error.is_object() && error.contains("message") && error["message"].is_string()
             ? error["message"].get<std::string>()
             : std::string();
}

struct StreamClient::Impl {
  struct Transfer {
    StreamRequest request;
    CURL* curl = nullptr;
    curl_slist* headers = nullptr;
    char message[CURL_ERROR_SIZE] = "";
  };
  CURLM* multi = nullptr;
  std::list<Transfer> transfers;

  void forget(std::list<Transfer>::iterator transfer) {
    curl_multi_remove_handle(multi, transfer->curl);
    curl_easy_cleanup(transfer->curl);
    curl_slist_free_all(transfer->headers);
    transfers.erase(transfer);
  }

  void take_ended() {
    int n_left = 0;
    while (const CURLMsg* const message = curl_multi_info_read(multi, &n_left)) {
      if (message->msg != CURLMSG_DONE) continue;
      const auto found = std::find_if(transfers.begin(), transfers.end(),
                                      [&](const Transfer& t) { return t.curl == message->easy_handle; });
      const CURLcode code = message->data.result;
      long status = 0;
      curl_easy_getinfo(found->curl, CURLINFO_RESPONSE_CODE, &status);
      const std::string error = code == CURLE_OK            ? ""
                                : found->message[0] != '\0' ? found->message
                                                            : curl_easy_strerror(code);
      const auto on_end = std::move(found->request.on_end);
      forget(found);  // its connection is free for what on_end() starts
      if (on_end) on_end(static_cast<int>(status), error);
    }
  }
};

StreamClient::StreamClient() : impl_(std::make_unique<Impl>()) {
  curl_global_init(CURL_GLOBAL_DEFAULT);
  impl_->multi = curl_multi_init();
  if (impl_->multi == nullptr) throw ThermoError(ExitCode::Internal, "the transfer library could not start");
}

StreamClient::~StreamClient() {
  while (!impl_->transfers.empty()) impl_->forget(impl_->transfers.begin());
  curl_multi_cleanup(impl_->multi);
  curl_global_cleanup();
}

void StreamClient::start(StreamRequest request) {
  CURL* const curl = curl_easy_init();
  if (curl == nullptr) throw ThermoError(ExitCode::Internal, "the transfer library could not start");
  Impl::Transfer& transfer = impl_->transfers.emplace_back();
  transfer.request = std::move(request);
  transfer.curl = curl;
  const StreamRequest& r = transfer.request;
  curl_easy_setopt(curl, CURLOPT_URL, r.url.c_str());
  curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, kConnectSeconds);
  curl_easy_setopt(curl, CURLOPT_USERAGENT, "thermocline");
  curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, transfer.message);
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_body);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &transfer.request);
  if (!r.body.empty()) {
    transfer.headers = curl_slist_append(nullptr, "Content-Type: application/json");
    transfer.headers = curl_slist_append(transfer.headers, "Expect:");
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, transfer.headers);
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, r.body.c_str());
    curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE, static_cast<long>(r.body.size()));
  }
  if (!r.key.empty()) {
    curl_easy_setopt(curl, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
    curl_easy_setopt(curl, CURLOPT_XOAUTH2_BEARER, r.key.c_str());
  }
  curl_multi_setopt(impl_->multi, CURLMOPT_MAXCONNECTS, static_cast<long>(impl_->transfers.size()) + 16);
  curl_multi_add_handle(impl_->multi, curl);
}

bool StreamClient::run(const std::function<bool()>& stop, const StartDue& start_due) {
  for (;;) {
    int n_running = 0;
    curl_multi_perform(impl_->multi, &n_running);
    impl_->take_ended();
    const auto wait = start_due ? start_due() : std::nullopt;
    if (impl_->transfers.empty() && !wait) return true;
    if (stop && stop()) return false;
    const auto most = wait ? std::min<int64_t>(wait->count(), kPollMs) : kPollMs;
    curl_multi_poll(impl_->multi, nullptr, 0, static_cast<int>(most), nullptr);  // at once for a new one
  }
}

}  // namespace thermo
