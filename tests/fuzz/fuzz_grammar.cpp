// Any bytes as a grammar: an error, or a grammar that reads any text, whose states can all go on or end,
// unless it can be read in more ways than the machine follows.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "grammar/gbnf.h"
#include "grammar/grammar_machine.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto grammar = thermo::parse_gbnf(text);
  if (!grammar) {
    THERMO_CHECK(!grammar.error().message.empty(), "a refusal says why");
    return 0;
  }
  thermo::GrammarMachine machine(*grammar);
  // What the input itself suggests, and otherwise the first byte that goes on.
  thermo::GrammarMachine::State state = machine.start();
  for (size_t i = 0; i < 300; ++i) {
    THERMO_CHECK(state != thermo::GrammarMachine::kDead, "every state can be finished");
    if (machine.must_end(state)) break;
    thermo::GrammarMachine::State next = size > 0 ? machine.step(state, data[(7 * i) % size]) : machine.kDead;
    for (int byte = 0; next == machine.kDead && byte < 256; ++byte)
      next = machine.step(state, static_cast<uint8_t>(byte));
    if (next == machine.kDead && machine.has_given_up()) break;
    state = next;
  }
  return 0;
}
