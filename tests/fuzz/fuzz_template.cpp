// Any bytes as a template: parse and render with a fixed context and small limits. The result must
// be a text or an error.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "jinja/template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const thermo::Json kContext = thermo::Json::parse(R"({
      "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "<b>é \n x</b>"},
                   {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1.5}}}]}],
      "tools": [{"type": "function", "function": {"name": "f"}}],
      "add_generation_prompt": true, "x": 3, "l": [3, 1, 2], "d": {"a": 1, "b": [true, null]}, "s": "abc"})");
  const auto parsed = thermo::jinja::Template::parse(std::string(reinterpret_cast<const char*>(data), size));
  if (!parsed) return 0;
  thermo::jinja::RenderOptions options;
  options.untrusted_names = {"messages", "s"};
  options.limits = {
      .max_output_bytes = 1 << 16, .max_live_bytes = 1 << 22, .max_steps = 20'000, .max_depth = 200};
  const auto rendered = parsed->render(kContext, options);
  if (!rendered) return 0;
  THERMO_CHECK(rendered->text.size() <= options.limits.max_output_bytes, "the output is within its limit");
  size_t end = 0;
  for (const auto& range : rendered->marked) {
    THERMO_CHECK(range.begin >= end && range.begin < range.end, "marks ascend and do not overlap");
    end = range.end;
  }
  THERMO_CHECK(end <= rendered->text.size(), "marks lie inside the text");
  return 0;
}
