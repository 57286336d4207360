// The body of a request as JSON.
#pragma once

#include "base/json.h"
#include "server/http/http_message.h"

namespace thermo {

// Decompresses it where it is compressed; `max_bytes`: also of what comes out. Throws ApiError.
Json body_json(const HttpRequest& request, size_t max_bytes);
// Whether a body of this encoding can be read.
bool is_known_encoding(std::string_view encoding);

}  // namespace thermo
