#include "server/http/access.h"

#include <algorithm>
#include <random>

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

Access::Access(const AccessOptions& options)
    : salt_(random_text(16)),
      trusts_unix_sockets_(options.trusts_unix_sockets),
      credentials_(options.credentials),
      methods_(options.methods),
      headers_(options.headers) {
  bool any_admin = false;
  for (const std::string& given : options.keys) {
    std::string key = given, name;
    bool admin = false;
    // "admin:" and a name may both stand before it.
    for (size_t colon = key.find(':'); colon != std::string::npos; colon = key.find(':')) {
      if (key.substr(0, colon) == "admin") admin = true;
      name = key.substr(0, colon);
      key.erase(0, colon + 1);
    }
    any_admin |= admin;
    if (name.empty()) name = "key" + std::to_string(keys_.size() + 1);
    keys_.push_back({hash_of(key), name, admin});
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
  std::string_view key = api_key;
  if (lower(authorization.substr(0, 7)) == "bearer ") key = authorization.substr(7);
  const std::string hash = hash_of(key);
  const Key* found = nullptr;
  for (const Key& one : keys_) {
    unsigned difference = 0;
    for (size_t i = 0; i < hash.size(); ++i) difference |= static_cast<unsigned>(hash[i] ^ one.hash[i]);
    if (difference == 0) found = &one;
  }
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
