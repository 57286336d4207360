// Tokens to statements. The grammar is that of jinja2 3.1 with the loopcontrols and do extensions and the
// `generation` tag; templates that pull in other templates are refused.
#pragma once

#include <string_view>

#include "jinja/ast.h"

namespace thermo::jinja {

// Throws TemplateError.
Block parse_template(std::string_view source);

}  // namespace thermo::jinja
