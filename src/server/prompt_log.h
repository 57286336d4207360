// Prompts and answers as files, for whoever asks for them with --log-prompts: one for each request that was
// answered. Nothing else writes what people say.
#pragma once

#include <span>
#include <string>

#include "chat/answer.h"
#include "server/prompt.h"
#include "server/server_state.h"

namespace thermo {

// FOLDER/REPLY.json with the prompts as the model saw them and the answers, for its owner only, written by a
// worker. Named by the reply's id, which we made: a request's own may be any text. Nothing where no folder
// was given. The thread of the sockets.
void log_prompt(ServerState& server, const PreparedRequest& prepared, const std::string& request_id,
                const std::string& reply_id, std::span<const Answer> answers);

}  // namespace thermo
