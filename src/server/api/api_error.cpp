#include "server/api/api_error.h"

namespace thermo {
namespace {

bool is_overload(const ApiError& error) {
  return error.code == "server_is_overloaded";
}

const char* openai_type(const ApiError& error) {
  switch (error.status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 500:
    case 504:
      return "server_error";
    case 501:
      return "not_supported_error";
    case 503:
      return "service_unavailable";
    default:
      return "invalid_request_error";
  }
}

const char* anthropic_type(const ApiError& error) {
  switch (error.status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 500:
      return "api_error";
    case 503:
      return error.code == "engine_failed" ? "api_error" : "overloaded_error";
    case 504:
      return "timeout_error";
    default:
      return "invalid_request_error";
  }
}

}  // namespace

ApiError invalid_value(const std::string& path, const std::string& message) {
  return {400, "invalid_value", message, path};
}

ApiError unsupported(const std::string& path, const std::string& message) {
  return {400, "unsupported_parameter", message, path};
}

int status_of(const ApiError& error, Dialect dialect) {
  return dialect == Dialect::Messages && is_overload(error) ? 529 : error.status;
}

Json error_json(const ApiError& error, Dialect dialect, const std::string& request_id) {
  if (dialect == Dialect::Messages) {
    Json inner = {{"type", anthropic_type(error)}, {"message", error.what()}};
    inner.update(error.extra);
    return {{"type", "error"}, {"error", std::move(inner)}, {"request_id", request_id}};
  }
  Json inner;
  inner["message"] = error.what();
  inner["type"] = openai_type(error);
  inner["param"] = error.param.empty() ? Json(nullptr) : Json(error.param);
  inner["code"] = error.code;
  inner.update(error.extra);
  return {{"error", std::move(inner)}};
}

}  // namespace thermo
