// Endpoints that look and do not generate: health, facts, slots, metrics. The thread of the sockets; none of
// them waits.
#pragma once

#include "server/api/api_error.h"
#include "server/http/http_message.h"
#include "server/server_state.h"

namespace thermo {

// Whether requests can be served; throws the ApiError that says why not.
void require_model(const ServerState& server);
// 503: nothing new is begun, and nothing goes on for longer than the grace.
ApiError shutting_down();

HttpReply health_reply(const ServerState& server);
HttpReply ready_reply(const ServerState& server);
// Whether the engine would refuse one more request now. REQUIRES: a model that is ready.
bool queue_is_full(const ServerState& server);
Json props_json(const ServerState& server, bool admin);
// `with_prompts`: and the text that each slot reads or has read.
Json slots_json(const ServerState& server, bool with_prompts);
Json models_json(const ServerState& server);
// One element of the list. Throws ApiError 404.
Json model_json(const ServerState& server, const std::string& id);
Json request_json(const ServerState& server, const LiveRequest& live);
Json requests_json(const ServerState& server);
// Share of the KV cache in use.
double kv_cache_usage(const TokenServiceState& state);
std::string metrics_text(const ServerState& server);
// How long a client that is turned away should wait.
int retry_seconds(const ServerState& server);

HttpReply json_reply(const Json& body, int status = 200);

}  // namespace thermo
