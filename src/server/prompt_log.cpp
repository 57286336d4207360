#include "server/prompt_log.h"

#include <boost/asio/post.hpp>
#include <fstream>

#include "base/log.h"
#include "chat/reply_json.h"

namespace thermo {

void log_prompt(ServerState& server, const PreparedRequest& prepared, const std::string& request_id,
                std::span<const Answer> answers) {
  const std::string& folder = server.options.prompt_folder;
  if (folder.empty()) return;
  Json file = {{"id", request_id}, {"dialect", dialect_name(prepared.request.dialect)}};
  file["prompts"] = Json::array();
  for (const auto& ids : prepared.prompts)
    file["prompts"].push_back(server.model->tokenizer->decode(ids, {.special = true}));
  file["answers"] = Json::array();
  for (const Answer& answer : answers) {
    Json one = message_json(answer);
    one["finish_reason"] = answer.finish_reason;
    file["answers"].push_back(std::move(one));
  }
  asio::post(server.workers, [file = std::move(file), path = folder + "/" + request_id + ".json"] {
    std::ofstream out(path);
    out << file.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
    if (!out.flush()) log_warning("server", "{} cannot be written", path);
  });
}

}  // namespace thermo
