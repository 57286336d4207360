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

// Parts of the OpenAI APIs. `may_have_images`: an image becomes a placeholder instead of a refusal. Throws
// ApiError.
Content read_content(const Json* content, const std::string& path, bool may_have_images);

// "data:image/png;base64,..." or {"media_type", "data"}.
std::string describe_image(const Json& part);

}  // namespace thermo
