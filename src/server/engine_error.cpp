#include "server/engine_error.h"

#include <fmt/format.h>

#include "server/operations.h"
#include "server/prompt.h"

namespace thermo {

ApiError engine_error(const Error& error, const ServerState& server, Dialect dialect, size_t n_prompt,
                      const std::string& request_id) {
  switch (error.code) {
    case ErrorCode::Busy: {
      ApiError busy(503, "server_is_overloaded", error.message + "; try again later");
      busy.retry_seconds = retry_seconds(server);
      return busy;
    }
    case ErrorCode::ContextFull:
      return context_exceeded(dialect, n_prompt, server.model->service->n_ctx());
    case ErrorCode::InvalidArgument:
      return {400, "invalid_value", error.message};
    case ErrorCode::DeviceFault: {
      ApiError failed(503, "engine_failed", error.message);
      failed.may_retry = false;
      return failed;
    }
    case ErrorCode::Unsupported:
      return {500, "internal_error", error.message};
    default:
      return {500, "internal_error", fmt::format("request {} failed", request_id)};
  }
}

}  // namespace thermo
