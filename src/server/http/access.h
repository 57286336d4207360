// Who may come in: keys, the host check, origins. Pure but for the salt; keys are never kept, only their
// hashes.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace thermo {

// A key as it is configured: "key", "name:key", "admin:key" or "admin:name:key". A key that has a colon in it
// needs a name before it.
struct GivenKey {
  std::string key, name;  // without a name: empty
  bool admin = false;
};
// Throws ConfigError when there is no key in it: nothing at all would be one that everybody has.
GivenKey read_key(std::string_view text);

struct AccessOptions {
  std::vector<std::string> keys = {};           // each as read_key takes it
  bool trusts_unix_sockets = false;             // who may open the socket needs no key
  std::vector<std::string> allowed_hosts = {};  // beside localhost, for listeners of this machine
  std::string origins = "localhost";            // "localhost", "*", or origins with commas
  // For pages of these origins.
  std::string methods = "GET, POST, DELETE, OPTIONS";
  std::string headers = "*";  // that requests may have, with commas; "*": those that they ask for
  bool credentials = false;   // may be sent; never with "*" for the origins
};

class Access {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;
  explicit Access(const AccessOptions& options);  // throws as read_key does

  struct Caller {
    std::string name;  // of the key; for logs and fairness
    bool admin = false;
  };
  bool needs_key() const { return !keys_.empty(); }
  // nullopt: no key, or a wrong one. Takes the same time for every key.
  std::optional<Caller> caller(std::string_view authorization, std::string_view api_key,
                               bool over_unix_socket = false) const;

  // Whether a Host header is one of this machine's names.
  bool host_allowed(std::string_view host) const;
  // What Access-Control-Allow-Origin says; empty: nothing, the origin is a stranger.
  std::string allowed_origin(std::string_view origin) const;
  // Whether a request that changes something may come: a browser says whose page sends it. A page of the
  // server's own address is no stranger.
  bool page_may_write(std::string_view origin, std::string_view fetch_site, std::string_view host) const;
  // CORS headers of every reply to a page of that origin; none for a stranger.
  Headers origin_headers(std::string_view origin) const;
  // What a browser that asks before its request gets besides. `wanted`: headers that the request will have.
  Headers preflight_headers(std::string_view origin, std::string_view wanted) const;

 private:
  struct Key {
    std::string hash, name;
    bool admin;
  };
  std::string hash_of(std::string_view key) const;

  std::string salt_;
  std::vector<Key> keys_;
  std::vector<std::string> hosts_, origins_;
  bool trusts_unix_sockets_, any_origin_ = false, local_origins_ = false, credentials_;
  std::string methods_, headers_;
};

// 32 random bytes as text.
std::string generate_key();
// "[::1]:8080" to "::1".
std::string host_name(std::string_view host);
bool is_loopback_name(std::string_view name);

}  // namespace thermo
