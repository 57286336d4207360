// Refusals in the words of each API.
//
// They are thrown: a body is read by a dozen small functions, and one place (on a worker's thread, before
// anything is submitted) turns the first refusal into a reply. Nothing of the engine unwinds.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "base/json.h"

namespace thermo {

enum class Dialect { Chat, Completions, Responses, Messages, Native };

struct ApiError : std::runtime_error {
  ApiError(int http_status, std::string error_code, const std::string& message, std::string json_path = {})
      : std::runtime_error(message),
        status(http_status),
        code(std::move(error_code)),
        param(std::move(json_path)) {}

  int status;
  std::string code;             // "invalid_value"
  std::string param;            // JSON path; empty: none
  Json extra = Json::object();  // more members of the error object
  int retry_seconds = 0;        // of 429 and 503: when to come back
  bool may_retry = true;
  bool counted = false;  // metrics and the log know of it
};

// 400 invalid_value.
ApiError invalid_value(const std::string& path, const std::string& message);
// 400 unsupported_parameter.
ApiError unsupported(const std::string& path, const std::string& message);

// The HTTP status in this dialect: Anthropic's 529 is everybody else's 503 for a full queue.
int status_of(const ApiError& error, Dialect dialect);
// The error object, as the body of a reply or in a stream.
Json error_json(const ApiError& error, Dialect dialect, const std::string& request_id);

}  // namespace thermo
