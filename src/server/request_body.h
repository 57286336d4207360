// What a request brings besides its path: the body as JSON, the id of a trace.
#pragma once

#include "base/json.h"
#include "server/http/http_message.h"

namespace thermo {

// Decompresses it where it is compressed; `max_bytes`: also of what comes out. Throws ApiError.
Json body_json(const HttpRequest& request, size_t max_bytes);
// Whether a body of this encoding can be read.
bool is_known_encoding(std::string_view encoding);

// Of the header "traceparent", "00-<32 hexadecimal digits>-...": those digits; empty: there are none.
std::string trace_id(std::string_view traceparent);

}  // namespace thermo
