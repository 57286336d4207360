// The content of a message: a string, nothing, or parts. A list of one part and the same text as a string
// give the same turn.
#pragma once

#include <string>

#include "server/api/generation_request.h"

namespace thermo {

struct Content {
  std::string text;
  std::string reasoning;  // of parts of type thinking or reasoning
};

// Where a text stands.
enum class Place {
  Question,   // the last turn, of the user
  Elsewhere,  // an older turn, or a result of a tool
};

// Parts of the OpenAI APIs. Throws ApiError.
Content read_content(const Json* content, const std::string& path, Place place, ImagePolicy images);

// A placeholder for an image ("data:image/png;base64,..." or {"media_type", "data"}), or ApiError.
std::string read_image(const Json& part, const std::string& path, Place place, ImagePolicy images);

}  // namespace thermo
