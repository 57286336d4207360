// Renders a template in a test, with a context given as JSON text.
#pragma once

#include <string>

#include "jinja/template.h"

namespace thermo::jinja {

inline Result<Rendered> try_render(const std::string& source, const std::string& context = "{}",
                                   const RenderOptions& options = {}) {
  Result<Template> parsed = Template::parse(source);
  if (!parsed) return parsed.error();
  return parsed->render(Json::parse(context), options);
}

// The text, or "ERROR " and the message.
inline std::string render(const std::string& source, const std::string& context = "{}",
                          const RenderOptions& options = {}) {
  Result<Rendered> rendered = try_render(source, context, options);
  return rendered ? rendered->text : "ERROR " + rendered.error().message;
}

}  // namespace thermo::jinja
