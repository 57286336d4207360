#include "server/request_body.h"

#include <algorithm>

#include "server/api/api_error.h"
#include "server/api/fields.h"
#include "server/http/compressed_body.h"

namespace thermo {
namespace {

// In any case; `known` is in small letters.
bool is(std::string_view encoding, std::string_view known) {
  return std::equal(encoding.begin(), encoding.end(), known.begin(), known.end(),
                    [](char c, char small) { return (c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c) == small; });
}

bool is_gzip(std::string_view encoding) {
  return is(encoding, "gzip") || is(encoding, "x-gzip");
}
bool is_zstd(std::string_view encoding) {
  return is(encoding, "zstd");
}

}  // namespace

bool is_known_encoding(std::string_view encoding) {
  return encoding.empty() || is(encoding, "identity") || is_gzip(encoding) || is_zstd(encoding);
}

Json body_json(const HttpRequest& request, size_t max_bytes) {
  const std::string_view encoding = request.header("content-encoding");
  const bool zstd = is_zstd(encoding);
  if (!zstd && !is_gzip(encoding)) return parse_body(request.body);
  std::string text;
  switch (zstd ? unzstd(request.body, max_bytes, text) : gunzip(request.body, max_bytes, text)) {
    case Unpacked::Broken:
      throw ApiError(400, "invalid_json",
                     zstd ? "the body is not valid zstd data, or needs a window of more than 8 MiB"
                          : "the body is not valid gzip data");
    case Unpacked::TooLarge:
      throw ApiError(413, "body_too_large", "the body of the request is too large when it is decompressed");
    case Unpacked::Ok:
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
