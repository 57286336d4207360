// The values of /metrics again, under the names that dashboards for other servers ask for.
#pragma once

#include <string>

#include "server/server_state.h"

namespace thermo {

// Appends the families of the servers that the options name. Nothing before the model is ready.
void write_compat_metrics(std::string& out, const ServerState& server);

}  // namespace thermo
