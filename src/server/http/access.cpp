#include "server/http/access.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "base/error.h"
#include "base/sha256.h"

namespace thermo {
namespace {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    std::string_view part = text.substr(0, end);
    while (part.starts_with(' ')) part.remove_prefix(1);
    while (part.ends_with(' ')) part.remove_suffix(1);
    if (!part.empty()) parts.emplace_back(part);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

std::string random_text(size_t n) {
  static constexpr char kLetters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  std::random_device device;
  std::string out;
  for (size_t i = 0; i < n; ++i) out += kLetters[device() % 64];
  return out;
}

}  // namespace

std::string generate_key() {
  return "tc-" + random_text(43);  // 258 bits
}

std::string host_name(std::string_view host) {
  if (host.starts_with('[')) return lower(host.substr(1, host.find(']') - 1));
  return lower(host.substr(0, host.rfind(':') == host.find(':') ? host.find(':') : std::string_view::npos));
}

bool is_loopback_name(std::string_view name) {
  return name == "localhost" || name == "::1" || name.ends_with(".localhost") ||
         (name.starts_with("127.") && name.find_first_not_of("0123456789.") == std::string_view::npos);
}

GivenKey read_key(std::string_view text) {
  GivenKey given;
  const auto take_admin = [&] {
    constexpr std::string_view kAdmin = "admin:";
    if (given.admin || !text.starts_with(kAdmin)) return;
    given.admin = true;
    text.remove_prefix(kAdmin.size());
  };
  take_admin();
  if (const size_t colon = text.find(':'); colon != std::string_view::npos) {
    given.name = text.substr(0, colon);
    text.remove_prefix(colon + 1);
    take_admin();
  }
  while (text.starts_with(' ')) text.remove_prefix(1);
  given.key = text;
  if (given.key.empty())
    throw ConfigError(fmt::format("the key {} is empty; text was expected after the colon",
                                  !given.name.empty() ? "'" + given.name + "'"
                                  : given.admin       ? "of the administrator"
                                                      : "without a name"));
  return given;
}

Access::Access(const AccessOptions& options)
    : salt_(random_text(16)),
      trusts_unix_sockets_(options.trusts_unix_sockets),
      credentials_(options.credentials),
      methods_(options.methods),
      headers_(options.headers) {
  bool any_admin = false;
  for (const std::string& text : options.keys) {
    GivenKey given = read_key(text);
    any_admin |= given.admin;
    if (given.name.empty()) given.name = given.admin ? "admin" : fmt::format("key{}", keys_.size() + 1);
    keys_.push_back({hash_of(given.key), std::move(given.name), given.admin});
  }
  if (!any_admin)
    for (Key& key : keys_) key.admin = true;
  for (const std::string& host : options.allowed_hosts) hosts_.push_back(lower(host));
  for (const std::string& origin : split(options.origins, ',')) {
    any_origin_ |= origin == "*";
    local_origins_ |= origin == "localhost";
    origins_.push_back(lower(origin));
  }
}

std::string Access::hash_of(std::string_view key) const {
  const std::string salted = salt_ + std::string(key);
  return sha256_hex(std::as_bytes(std::span(salted.data(), salted.size())));
}

std::optional<Access::Caller> Access::caller(std::string_view authorization, std::string_view api_key,
                                             bool over_unix_socket) const {
  if (keys_.empty()) return Caller{"", true};
  const auto known = [this](std::string_view key) {
    const std::string hash = hash_of(key);
    const Key* found = nullptr;
    for (const Key& one : keys_) {
      unsigned difference = 0;
      for (size_t i = 0; i < hash.size(); ++i) difference |= static_cast<unsigned>(hash[i] ^ one.hash[i]);
      if (difference == 0) found = &one;
    }
    return found;
  };
  const Key* found = nullptr;
  if (lower(authorization.substr(0, 7)) == "bearer ") found = known(authorization.substr(7));
  if (found == nullptr) found = known(api_key);  // the other one may be for a proxy
  if (found == nullptr && over_unix_socket && trusts_unix_sockets_) return Caller{"", true};
  if (found == nullptr) return std::nullopt;
  return Caller{found->name, found->admin};
}

bool Access::host_allowed(std::string_view host) const {
  if (host.empty()) return true;  // an HTTP/1.0 client; a browser always names one
  const std::string name = host_name(host);
  return is_loopback_name(name) || std::find(hosts_.begin(), hosts_.end(), name) != hosts_.end();
}

std::string Access::allowed_origin(std::string_view origin) const {
  if (origin.empty()) return {};
  if (any_origin_) return "*";
  const std::string known = lower(origin);
  if (std::find(origins_.begin(), origins_.end(), known) != origins_.end()) return std::string(origin);
  const size_t scheme = known.find("://");
  if (!local_origins_ || scheme == std::string::npos) return {};
  const std::string kind = known.substr(0, scheme);
  return (kind == "http" || kind == "https") && is_loopback_name(host_name(known.substr(scheme + 3)))
             ? std::string(origin)
             : std::string();
}

bool Access::page_may_write(std::string_view origin, std::string_view fetch_site,
                            std::string_view host) const {
  if (any_origin_) return true;
  if (origin.empty()) return fetch_site != "cross-site";
  const size_t scheme = origin.find("://");
  const bool is_own =
      scheme != std::string_view::npos && !host.empty() && lower(origin.substr(scheme + 3)) == lower(host);
  return is_own || !allowed_origin(origin).empty();
}

Access::Headers Access::origin_headers(std::string_view origin) const {
  Headers headers;
  const std::string allowed = allowed_origin(origin);
  if (!allowed.empty()) headers.emplace_back("Access-Control-Allow-Origin", allowed);
  if (credentials_ && !allowed.empty() && allowed != "*")
    headers.emplace_back("Access-Control-Allow-Credentials", "true");
  if (!origin.empty()) headers.emplace_back("Vary", "Origin");
  return headers;
}

Access::Headers Access::preflight_headers(std::string_view origin, std::string_view wanted) const {
  if (allowed_origin(origin).empty()) return {};
  Headers headers = {{"Access-Control-Allow-Methods", methods_}};
  const std::string allowed = headers_ == "*" ? std::string(wanted) : headers_;
  if (!allowed.empty()) headers.emplace_back("Access-Control-Allow-Headers", allowed);
  headers.emplace_back("Access-Control-Max-Age", "600");
  return headers;
}

}  // namespace thermo
