#include "server/request_body.h"

#include <algorithm>

#include "server/api/api_error.h"
#include "server/api/fields.h"
#include "server/http/gzip.h"

namespace thermo {
namespace {

bool is_gzip(std::string_view encoding) {
  return encoding == "gzip" || encoding == "x-gzip";
}

}  // namespace

bool is_known_encoding(std::string_view encoding) {
  return encoding.empty() || encoding == "identity" || is_gzip(encoding);
}

Json body_json(const HttpRequest& request, size_t max_bytes) {
  if (!is_gzip(request.header("content-encoding"))) return parse_body(request.body);
  std::string text;
  switch (gunzip(request.body, max_bytes, text)) {
    case Gunzip::Broken:
      throw ApiError(400, "invalid_json", "the body is not what gzip makes");
    case Gunzip::TooLarge:
      throw ApiError(413, "body_too_large", "the body of the request is too large when it is decompressed");
    case Gunzip::Ok:
      break;
  }
  return parse_body(text);
}

std::string trace_id(std::string_view traceparent) {
  const std::string_view id = traceparent.substr(0, 36).substr(std::min<size_t>(3, traceparent.size()));
  const bool good = traceparent.size() >= 55 && traceparent[2] == '-' && traceparent[35] == '-' &&
                    id.substr(0, 32).find_first_not_of("0123456789abcdef") == std::string_view::npos;
  return good ? std::string(id.substr(0, 32)) : std::string();
}

}  // namespace thermo
