// Which paths there are, and what each needs.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "server/api/api_error.h"

namespace thermo {

enum class Endpoint {
  Chat,
  Completions,
  Messages,
  Responses,
  CountTokens,
  ChatTokens,
  ResponsesTokens,
  Control,
  Tokenize,
  Detokenize,
  ApplyTemplate,
  Models,
  Model,
  Health,
  Live,
  Ready,
  Version,
  Metrics,
  Props,
  Slots,
  Requests,
  CancelRequest,
  Plan,
  Experts,
  LiveView,
  Heat,
  Shutdown,
  NotSupported,
};

struct Route {
  std::string_view method;
  std::string_view path;  // ending in "/*": anything below
  Endpoint endpoint;
  enum class Key { None, User, Admin, Metrics } key = Key::User;
  Dialect dialect = Dialect::Native;
  bool generates = false;
  bool needs_model = false;
};

struct RouteMatch {
  const Route* route = nullptr;  // nullptr: no such path, or not with this method
  std::string allowed;           // methods that the path has; empty: there is no such path
  std::string rest;              // what "/*" stood for
};
RouteMatch find_route(std::string_view method, std::string_view path);
// The dialect in which an error at this path is told.
Dialect dialect_of(std::string_view path);
Json endpoint_names();

}  // namespace thermo
