#include "server/routes.h"

#include <charconv>
#include <set>

namespace thermo {
namespace {

using Key = Route::Key;

constexpr Route kRoutes[] = {
    {"POST", "/v1/chat/completions", Endpoint::Chat, Key::User, Dialect::Chat, true, true},
    {"POST", "/v1/completions", Endpoint::Completions, Key::User, Dialect::Completions, true, true},
    {"POST", "/v1/messages", Endpoint::Messages, Key::User, Dialect::Messages, true, true},
    {"POST", "/v1/responses", Endpoint::Responses, Key::User, Dialect::Responses, true, true},
    {"POST", "/v1/messages/count_tokens", Endpoint::CountTokens, Key::User, Dialect::Messages, false, true},
    {"POST", "/v1/chat/completions/input_tokens", Endpoint::ChatTokens, Key::User, Dialect::Chat, false,
     true},
    {"POST", "/v1/responses/input_tokens", Endpoint::ResponsesTokens, Key::User, Dialect::Responses, false,
     true},
    {"POST", "/v1/chat/completions/control", Endpoint::Control, Key::User, Dialect::Chat},
    {"POST", "/tokenize", Endpoint::Tokenize, Key::User, Dialect::Native, false, true},
    {"POST", "/detokenize", Endpoint::Detokenize, Key::User, Dialect::Native, false, true},
    {"POST", "/apply-template", Endpoint::ApplyTemplate, Key::User, Dialect::Native, false, true},
    {"GET", "/v1/models", Endpoint::Models},
    {"GET", "/v1/models/*", Endpoint::Model},
    {"GET", "/health", Endpoint::Health, Key::None},
    {"GET", "/v1/health", Endpoint::Health, Key::None},
    {"GET", "/live", Endpoint::Live, Key::None},
    {"GET", "/ready", Endpoint::Ready, Key::None},
    {"GET", "/version", Endpoint::Version, Key::None},
    {"GET", "/metrics", Endpoint::Metrics, Key::Metrics},
    {"GET", "/props", Endpoint::Props},
    {"GET", "/slots", Endpoint::Slots},
    {"GET", "/thermo/requests", Endpoint::Requests},
    {"DELETE", "/thermo/requests/*", Endpoint::CancelRequest},
    {"GET", "/thermo/plan", Endpoint::Plan},
    {"GET", "/thermo/experts", Endpoint::Experts},
    {"GET", "/thermo/live", Endpoint::LiveView},
    {"POST", "/thermo/heat", Endpoint::Heat, Key::Admin},
    {"POST", "/thermo/shutdown", Endpoint::Shutdown, Key::Admin},
    {"POST", "/v1/embeddings", Endpoint::NotSupported},
    {"POST", "/embeddings", Endpoint::NotSupported},
    {"POST", "/v1/rerank", Endpoint::NotSupported},
    {"POST", "/v1/audio/*", Endpoint::NotSupported},
    {"POST", "/v1/images/*", Endpoint::NotSupported},
    {"POST", "/v1/files", Endpoint::NotSupported},
    {"GET", "/v1/files", Endpoint::NotSupported},
    {"GET", "/v1/files/*", Endpoint::NotSupported},
    {"DELETE", "/v1/files/*", Endpoint::NotSupported},
    {"POST", "/v1/batches", Endpoint::NotSupported},
    {"GET", "/v1/batches", Endpoint::NotSupported},
    {"GET", "/v1/batches/*", Endpoint::NotSupported},
    {"POST", "/v1/batches/*", Endpoint::NotSupported},
    {"POST", "/v1/fine_tuning/*", Endpoint::NotSupported},
    {"GET", "/v1/fine_tuning/*", Endpoint::NotSupported},
};

// "a%2Fb" to "a/b"; what is no such code stays as it is.
std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned code = 0;
    const char* const digits = text.data() + i + 1;
    const bool is_code = text[i] == '%' && i + 2 < text.size() &&
                         std::from_chars(digits, digits + 2, code, 16).ptr == digits + 2;
    out += is_code ? static_cast<char>(code) : text[i];
    if (is_code) i += 2;
  }
  return out;
}

bool matches(std::string_view pattern, std::string_view path, std::string& rest) {
  if (!pattern.ends_with("/*")) return pattern == path;
  const std::string_view folder = pattern.substr(0, pattern.size() - 1);
  if (!path.starts_with(folder) || path.size() == folder.size()) return false;
  rest = percent_decoded(path.substr(folder.size()));
  return true;
}

}  // namespace

RouteMatch find_route(std::string_view method, std::string_view path) {
  RouteMatch match;
  std::set<std::string_view> allowed;  // "/health" is there twice
  if (method == "HEAD") method = "GET";
  for (const Route& route : kRoutes) {
    std::string rest;
    // What generates is also there without /v1.
    const bool found = matches(route.path, path, rest) ||
                       (route.path.starts_with("/v1/") && matches(route.path.substr(3), path, rest));
    if (!found) continue;
    if (route.method == method) return {&route, {}, std::move(rest)};
    allowed.insert(route.method);
    if (route.method == "GET") allowed.insert("HEAD");
  }
  for (const std::string_view one : allowed)
    match.allowed += (match.allowed.empty() ? "" : ", ") + std::string(one);
  return match;
}

Dialect dialect_of(std::string_view path) {
  std::string rest;
  for (const Route& route : kRoutes)
    if (route.dialect != Dialect::Native &&
        (matches(route.path, path, rest) ||
         (route.path.starts_with("/v1/") && matches(route.path.substr(3), path, rest))))
      return route.dialect;
  // What is below them and not known is refused in their words, too.
  for (const std::string_view folder : {"/v1/messages/*", "/messages/*"})
    if (matches(folder, path, rest)) return Dialect::Messages;
  return Dialect::Native;
}

Json endpoint_names() {
  std::set<std::string> names;
  for (const Route& route : kRoutes)
    if (route.endpoint != Endpoint::NotSupported)
      names.insert(std::string(route.method) + " " + std::string(route.path));
  return Json(names);
}

}  // namespace thermo
