#include "cli/chat/conversation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/json.h"
#include "base/utf8.h"
#include "cli/interrupt.h"
#include "cli/options/draft_options.h"

namespace thermo {
namespace {

namespace fs = std::filesystem;

std::string plural(size_t n, const char* what) {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

// Files that begin with `path`, folders with a slash at the end.
std::vector<std::string> files_like(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  std::vector<std::string> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder.empty() ? "." : folder, error)) {
    const std::string name = folder + entry.path().filename().string();
    if (name.starts_with(path)) found.push_back(name + (entry.is_directory(error) ? "/" : ""));
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

struct Conversation::Command {
  const char* name;
  const char* arguments;
  const char* help;
  void (Conversation::*run)(const std::string&);
  bool takes_file = false;
};

const std::vector<Conversation::Command>& Conversation::commands() {
  static const std::vector<Command> list = {
      {"/help", "", "this list", &Conversation::help},
      {"/regen", "", "answer the last message again", &Conversation::regenerate},
      {"/undo", "", "take back the last message and its answer", &Conversation::undo},
      {"/edit", "[TEXT]", "change the last message and answer again", &Conversation::edit},
      {"/file", "PATH", "attach a text file to the next message", &Conversation::attach, true},
      {"/reset", "", "forget the conversation but keep the system prompt", &Conversation::reset},
      {"/system", "[TEXT]", "set the system prompt and start over; without TEXT, show it",
       &Conversation::set_system},
      {"/think", "on|off", "turn reasoning on or off", &Conversation::set_thinking},
      {"/set", "NAME VALUE", "change an option for later answers: temp 0.2, top-k 40, predict 500",
       &Conversation::set_option},
      {"/stats", "", "tokens and speed so far", &Conversation::show_stats},
      {"/save", "FILE", "write the conversation; .json can be loaded again", &Conversation::save, true},
      {"/load", "FILE", "continue a conversation that was saved as .json", &Conversation::load, true},
      {"/exit", "", "leave (also Ctrl-D)", &Conversation::leave},
  };
  return list;
}

Conversation::Conversation(ChatPartner& partner, ConversationOptions options, const Terminal& terminal)
    : partner_(partner),
      options_(std::move(options)),
      terminal_(terminal),
      editor_(terminal, {.history_file = options_.history_file,
                         .complete = [this](std::string_view line) { return completions(line); }}),
      system_(system_prompt(options_.answer)) {}

ExitCode Conversation::talk() {
  // Leaving in an orderly way writes the heat file; a third interrupt does not wait for that.
  const InterruptScope interrupts(2);
  if (options_.first_message) answer(*options_.first_message);
  while (!leaving_) {
    if (InterruptScope::must_leave(2)) return InterruptScope::exit_code();
    std::string message;
    switch (editor_.next(message, std::exchange(to_edit_, {}))) {
      case LineReader::Event::End:
        if (terminal_.stdin_is_terminal) say("");
        leaving_ = true;
        break;
      case LineReader::Event::Interrupted:
        if (!InterruptScope::must_leave(2)) say("(Ctrl-C again or /exit to leave)");
        break;
      case LineReader::Event::Line:
        InterruptScope::reset();
        take(message);
        if (!InterruptScope::must_leave(2)) InterruptScope::reset();
        break;
    }
  }
  // The end of the input and what asks to leave may come together, as when a window is closed.
  if (InterruptScope::must_leave(2)) return InterruptScope::exit_code();
  // Over a pipe nobody sees that a message was not answered.
  return failed_ && !terminal_.stdin_is_terminal ? ExitCode::Usage : ExitCode::Ok;
}

void Conversation::say(const std::string& line) const {
  std::fprintf(stderr, "%s\n", terminal_.stderr_is_terminal ? printable(line).c_str() : line.c_str());
}

void Conversation::fail(const std::string& line) {
  failed_ = true;
  say(line);
}

void Conversation::take(const std::string& message) {
  if (message.find_first_not_of(" \t\n") == std::string::npos) return;
  if (!message.starts_with('/')) return answer(message);
  const size_t space = std::min(message.find(' '), message.size());
  std::string name = message.substr(0, space);
  const size_t rest = std::min(message.find_first_not_of(' ', space), message.size());
  const std::string arguments = message.substr(rest, message.find_last_not_of(" \n") + 1 - rest);
  for (const auto& [alias, meaning] : {std::pair{"/quit", "/exit"}, {"/bye", "/exit"}, {"/clear", "/reset"}})
    if (name == alias) name = meaning;
  std::vector<std::string> known;
  for (const Command& command : commands()) {
    if (name == command.name) return (this->*command.run)(arguments);
    known.emplace_back(command.name);
  }
  const std::string nearest = nearest_match(name, known);
  say(fmt::format("unknown command {}: {}", name,
                  nearest.empty() ? "/help lists them" : fmt::format("did you mean {}?", nearest)));
}

std::vector<std::string> Conversation::completions(std::string_view line) const {
  std::vector<std::string> words;
  if (!line.starts_with('/')) return words;
  const size_t space = line.find(' ');
  for (const Command& command : commands()) {
    if (space == std::string_view::npos && std::string_view(command.name).starts_with(line))
      words.emplace_back(command.name);
    if (space != std::string_view::npos && line.substr(0, space) == command.name && command.takes_file)
      return files_like(std::string(line.substr(line.rfind(' ') + 1)));
  }
  return words;
}

void Conversation::answer(const std::string& text) {
  try {
    require_utf8(text, "the message");
  } catch (const ConfigError& error) {
    return fail(error.what());
  }
  std::string content = text;
  if (!attached_.empty()) content += "\n\n" + attached_;
  turns_.push_back({"user", content});
  const size_t n_turns = turns_.size();
  reply();
  if (turns_.size() > n_turns) attached_.clear();  // it was answered
}

void Conversation::reply() {
  AnswerPrinter printer(terminal_, options_.answer.show_reasoning);
  Answer answer;
  size_t n_dropped = 0;
  try {
    answer = partner_.answer(system_, turns_, thinking_, printer, n_dropped);
  } catch (const NoAnswer& none) {
    turns_.pop_back();
    return fail(none.why);
  }
  if (n_dropped > 0)
    say(fmt::format("({} forgotten, to make room for the answer)", plural(n_dropped, "old message")));
  if (answer.interrupted && answer.content.empty()) {
    turns_.pop_back();  // nothing was answered: as if it had not been asked
    say("(stopped)");
    return;
  }
  turns_.push_back({"assistant", answer.content, answer.reasoning});
  last_ = answer.stats;
  n_prompt_tokens_ += answer.stats.n_prompt - answer.stats.n_cached;
  n_answer_tokens_ += answer.stats.n_completion;
  if (answer.interrupted) say("(stopped)");
  if (answer.context_full) {
    say(options_.context_shift
            ? "(the context is full, and the answer ends here: start with a larger -c)"
            : "(the context is full: /undo or /reset make room; --context-shift forgets the oldest messages "
              "automatically)");
  } else if (answer.finish_reason == "length") {
    say(fmt::format("(cut after {} tokens: /set predict {} allows more)", answer.stats.n_completion,
                    2 * answer.stats.n_completion));
  }
  if (terminal_.stderr_is_terminal) {
    terminal_.note(last_.describe());
    terminal_.note_unless_empty(describe(last_.draft));
  }
}

void Conversation::help(const std::string&) {
  std::string out;
  for (const Command& command : commands())
    out += fmt::format("  {:<19}{}\n", fmt::format("{} {}", command.name, command.arguments), command.help);
  out +=
      "  A line that ends in \\ continues on the next one; \"\"\" begins and ends a text of several lines.\n"
      "  Ctrl-C stops an answer; pressed twice, it quits. Tab completes commands, and the arrow keys bring "
      "back earlier messages.\n";
  std::fputs(out.c_str(), stderr);
}

void Conversation::reset(const std::string&) {
  turns_.clear();
  attached_.clear();
  say("(the conversation was forgotten)");
}

void Conversation::regenerate(const std::string&) {
  if (turns_.size() < 2 || turns_.back().role != "assistant")
    return say("(there is no answer to give again)");
  const Turn before = turns_.back();
  turns_.pop_back();
  const size_t n_turns = turns_.size();
  const Turn question = turns_.back();
  reply();
  if (turns_.size() > n_turns) return;
  turns_.push_back(question);  // it was stopped: what was there stays
  turns_.push_back(before);
}

void Conversation::undo(const std::string&) {
  if (turns_.empty()) return say("(there is nothing to take back)");
  while (!turns_.empty() && turns_.back().role != "user") turns_.pop_back();
  if (!turns_.empty()) turns_.pop_back();
  say(fmt::format("(taken back; {} left)", plural(turns_.size(), "message")));
}

void Conversation::edit(const std::string& rest) {
  const auto last =
      std::find_if(turns_.rbegin(), turns_.rend(), [](const Turn& turn) { return turn.role == "user"; });
  if (last == turns_.rend()) return say("(there is no message to change)");
  if (rest.empty() && !editor_.edits()) return say("/edit needs the new text here: /edit TEXT");
  const std::string text = last->content;
  undo("");
  if (rest.empty()) {
    to_edit_ = text;
  } else {
    answer(rest);
  }
}

void Conversation::attach(const std::string& rest) {
  if (rest.empty()) return say("/file needs the path of a text");
  try {
    const std::string text = read_text_file(rest, kLargestPrompt);
    require_utf8(text, rest);
    if (!attached_.empty()) attached_ += "\n\n";
    attached_ += text;
    say(fmt::format("({} is attached to the next message: {})", rest, partner_.size_of(text)));
  } catch (const ConfigError& error) {
    fail(error.what());
  }
}

void Conversation::set_system(const std::string& rest) {
  if (rest.empty()) return say(system_.empty() ? "(no system prompt)" : system_);
  system_ = rest;
  turns_.clear();
  say("(new system prompt, the conversation starts over)");
}

void Conversation::set_thinking(const std::string& rest) {
  if (rest != "on" && rest != "off") return say("/think takes on or off");
  thinking_ = rest == "on";
  say(fmt::format("(reasoning is {})", rest));
}

// Any option of an answer by its long name, with the same checks as on the command line.
void Conversation::set_option(const std::string& rest) {
  const size_t space = rest.find(' ');
  if (space == std::string::npos) return say("/set takes a name and a value: /set temp 0.2");
  std::string value = rest.substr(space + 1);
  value.erase(0, std::min(value.find_first_not_of(' '), value.size()));
  AnswerFlags flags = options_.answer;
  OptionSet set;
  add_answer_options(set, flags);
  try {
    OptionValues values(set);
    values.parse_arguments(std::vector<std::string>{fmt::format("--{}={}", rest.substr(0, space), value)});
    values.apply();
    partner_.use(flags);
    options_.answer = std::move(flags);
    say(fmt::format("({} is {})", rest.substr(0, space), value));
  } catch (const ConfigError& error) {
    say(error.what());
  }
}

void Conversation::show_stats(const std::string&) {
  say(fmt::format("{} messages, {} prompt tokens read, {} tokens answered", turns_.size(), n_prompt_tokens_,
                  n_answer_tokens_));
  if (last_.n_completion > 0) say("last: " + last_.describe());
  for (const std::string& line : partner_.facts()) say(line);
}

void Conversation::save(const std::string& path) {
  if (path.empty()) return say("/save needs a file name");
  std::error_code ignored;
  const bool is_new = !fs::exists(path, ignored);
  if (!is_new) {
    std::string reply;
    if (!terminal_.stdin_is_terminal)
      return fail(fmt::format("{} exists: choose another name, or remove it first", path));
    if (editor_.ask(fmt::format("{} exists; overwrite it? [y/N] ", path), reply) != LineReader::Event::Line ||
        (reply != "y" && reply != "Y" && reply != "yes"))
      return say("(not saved)");
  }
  std::ofstream file(path);
  if (path.ends_with(".json")) {
    Json messages = Json::array();
    if (!system_.empty()) messages.push_back({{"role", "system"}, {"content", system_}});
    for (const Turn& turn : turns_) {
      Json message = {{"role", turn.role}, {"content", turn.content}};
      if (!turn.reasoning.empty()) message["reasoning_content"] = turn.reasoning;
      messages.push_back(std::move(message));
    }
    file << messages.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
  } else {
    if (!system_.empty()) file << "system: " << system_ << "\n\n";
    for (const Turn& turn : turns_) file << turn.role << ": " << turn.content << "\n\n";
  }
  file.close();
  if (!file) {
    const int why = errno;
    if (is_new) fs::remove(path, ignored);
    return fail(fmt::format("{} cannot be written ({}): choose another file", path, std::strerror(why)));
  }
  say(fmt::format("(saved {} to {})", plural(turns_.size(), "message"), path));
}

void Conversation::load(const std::string& path) {
  if (path.empty()) return say("/load needs a file name");
  std::string system;
  std::vector<Turn> turns;
  try {
    const Json messages = Json::parse(read_text_file(path), nullptr, false);
    if (!messages.is_array())
      throw ConfigError(path + ": this is not a saved conversation; /save to a .json file makes one");
    for (const Json& message : messages) {
      const auto text = [&](const char* key) {
        return message.is_object() && message.contains(key) && message[key].is_string()
                   ? message[key].get<std::string>()
                   : "";
      };
      const std::string role = text("role");
      if (role == "system" && turns.empty() && system.empty()) {
        system = text("content");
      } else if (role == "user" || role == "assistant") {
        turns.push_back({role, text("content"), text("reasoning_content")});
      } else {
        throw ConfigError(
            fmt::format("{}: a message has the role '{}'; user and assistant can be loaded", path, role));
      }
    }
  } catch (const ConfigError& error) {
    return fail(error.what());
  }
  system_ = std::move(system);
  turns_ = std::move(turns);
  say(fmt::format("(loaded {} from {})", plural(turns_.size(), "message"), path));
}

void Conversation::leave(const std::string&) {
  leaving_ = true;
}

}  // namespace thermo
