// Renders for tests/jinja_parity.py: JSON lines {"template": ..., "context": {...}} in, JSON lines
// {"ok": true, "text": ...} or {"ok": false, "error": ...} out.
#include <iostream>
#include <string>

#include "jinja/template.h"

int main() {
  using thermo::Json;
  std::ios::sync_with_stdio(false);
  for (std::string line; std::getline(std::cin, line);) {
    Json reply;
    const Json request = Json::parse(line, nullptr, false);
    if (!request.is_object() || !request.contains("template") || !request["template"].is_string()) {
      reply = {{"ok", false}, {"error", "expected a JSON object with a string 'template'"}};
    } else {
      const auto parsed = thermo::jinja::Template::parse(request["template"].get<std::string>());
      const auto rendered = parsed ? parsed->render(request.value("context", Json::object()))
                                   : thermo::Result<thermo::jinja::Rendered>(parsed.error());
      reply = rendered ? Json{{"ok", true}, {"text", rendered->text}}
                       : Json{{"ok", false}, {"error", rendered.error().message}};
    }
    std::cout << reply.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
  }
  return 0;
}
