// Any bytes as the body of a request, in each API: a request or a refusal, and turns that a template can
// take.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "server/api/generation_request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace thermo;
  RequestDefaults defaults;
  defaults.n_vocab = 1000;
  defaults.n_ctx = 4096;
  Json body;
  try {
    body = parse_body({reinterpret_cast<const char*>(data), size});
  } catch (const ApiError& error) {
    THERMO_CHECK(error.code == "invalid_json", "a text that is no JSON is called so");
    return 0;
  }
  for (const auto read :
       {read_chat_request, read_completions_request, read_messages_request, read_responses_request}) {
    try {
      const GenerationRequest request = read(body, defaults);
      bool system_may_come = true;
      for (const Turn& turn : request.turns) {
        THERMO_CHECK(turn.role != "developer", "a role that templates do not know");
        THERMO_CHECK(turn.role != "system" || system_may_come, "a system turn that is not the first");
        system_may_come = false;
      }
    } catch (const ApiError& error) {
      THERMO_CHECK(error.status == 400, "a body that cannot be read is the client's fault");
      error_json(error, Dialect::Messages, "id").dump(-1, ' ', false, Json::error_handler_t::replace);
    }
  }
  return 0;
}
