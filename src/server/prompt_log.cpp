#include "server/prompt_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <boost/asio/post.hpp>

#include "base/log.h"
#include "chat/reply_json.h"

namespace thermo {
namespace {

bool write_for_owner(const std::string& path, std::string_view text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return false;
  while (!text.empty()) {
    const ssize_t n = ::write(file, text.data(), text.size());
    if (n <= 0) break;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return ::close(file) == 0 && text.empty();
}

}  // namespace

void log_prompt(ServerState& server, const PreparedRequest& prepared, const std::string& request_id,
                const std::string& reply_id, std::span<const Answer> answers) {
  const std::string& folder = server.options.prompt_folder;
  if (folder.empty()) return;
  Json file = {
      {"id", reply_id}, {"request_id", request_id}, {"dialect", dialect_name(prepared.request.dialect)}};
  file["prompts"] = Json::array();
  for (const auto& ids : prepared.prompts)
    file["prompts"].push_back(server.model->tokenizer->decode(ids, {.special = true}));
  file["answers"] = Json::array();
  for (const Answer& answer : answers) {
    Json one = message_json(answer);
    one["finish_reason"] = answer.finish_reason;
    file["answers"].push_back(std::move(one));
  }
  asio::post(server.workers, [file = std::move(file), path = folder + "/" + reply_id + ".json"] {
    const std::string text = file.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
    if (!write_for_owner(path, text)) log_warning("server", "{} cannot be written", path);
  });
}

}  // namespace thermo
