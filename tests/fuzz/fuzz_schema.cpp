// Any JSON as a schema, strict or not: an error, or a grammar whose texts are JSON.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "grammar/grammar_machine.h"
#include "grammar/json_schema.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const thermo::Json schema = thermo::Json::parse(data, data + size, nullptr, false);
  if (schema.is_discarded()) return 0;
  const auto compiled = thermo::compile_json_schema(schema, {.strict = size % 2 == 0});
  if (!compiled) {
    THERMO_CHECK(!compiled.error().message.empty(), "a refusal says why");
    return 0;
  }
  thermo::GrammarMachine machine(compiled->grammar);
  thermo::GrammarMachine::State state = machine.start();
  std::string text;
  for (size_t i = 0; i < 400 && !machine.can_end(state); ++i) {
    // Bytes that close something first.
    thermo::GrammarMachine::State next = machine.kDead;
    for (const char byte : {'}', ']', '"', 'a', '0', ',', ':'}) {
      next = machine.step(state, static_cast<uint8_t>(byte));
      if (next == machine.kDead) continue;
      text += byte;
      break;
    }
    for (int byte = 255; next == machine.kDead && byte >= 0; --byte) {
      next = machine.step(state, static_cast<uint8_t>(byte));
      if (next != machine.kDead) text += static_cast<char>(byte);
    }
    THERMO_CHECK(next != machine.kDead, "every state can be finished");
    state = next;
  }
  if (machine.can_end(state)) THERMO_CHECK(thermo::Json::accept(text), "what fits a schema is JSON");
  return 0;
}
