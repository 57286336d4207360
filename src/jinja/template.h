// A Jinja template: parse once, render many times. Behaves as python3-jinja2 set up the way transformers does
// it for chat templates: trim_blocks, lstrip_blocks, no autoescape, loopcontrols, its own tojson.
//
// A template comes with a model file and is not trusted: depth, steps, memory and output are bounded
// (Limits), nothing outside the given context can be reached.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "jinja/text.h"
#include "jinja/value.h"

namespace thermo::jinja {

struct RenderOptions {
  // Names of the context whose strings come from outside: their bytes are reported in Rendered::marked.
  std::vector<std::string> untrusted_names;
  std::optional<std::chrono::system_clock::time_point> now;  // for strftime_now; none: the clock
  Limits limits;
};

struct Rendered {
  std::string text;
  std::vector<ByteRange> marked;  // ascending: the bytes of `text` that came from untrusted names
};

struct ParsedTemplate;

// May be rendered from several threads at once. Copies share the parsed form.
class Template {
 public:
  // Errors (InvalidArgument) say the line, what was seen and what was expected.
  static Result<Template> parse(const std::string& source);

  // `context`: an object, its members are the names the template sees. Errors are InvalidArgument; the
  // message of raise_exception() is the error's message, after the line number.
  Result<Rendered> render(const Json& context, const RenderOptions& options = {}) const;

 private:
  explicit Template(std::shared_ptr<const ParsedTemplate> parsed) : parsed_(std::move(parsed)) {}

  std::shared_ptr<const ParsedTemplate> parsed_;  // shared: handed to threads that outlive the owner's reload
};

}  // namespace thermo::jinja
