// The conversation of `thermocline chat`: messages, answers, and the commands that begin with a slash.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/chat/chat_partner.h"
#include "cli/chat/line_editor.h"
#include "cli/terminal.h"

namespace thermo {

struct ConversationOptions {
  AnswerFlags answer;
  std::optional<std::string> first_message;
  std::string history_file;    // empty: none
  bool context_shift = false;  // the partner makes room by itself
};

class Conversation {
 public:
  // The references outlive this.
  Conversation(ChatPartner& partner, ConversationOptions options, const Terminal& terminal);

  // Until the end of the input, /exit or the second interrupt.
  ExitCode talk();

 private:
  struct Command;
  static const std::vector<Command>& commands();

  void say(const std::string& line) const;  // by the program and not by the model
  void take(const std::string& message);    // a message or a command
  void answer(const std::string& text);
  void reply();  // to the last turn
  void fail(const std::string& line);
  std::vector<std::string> completions(std::string_view line) const;

  // The commands. `rest` is what stands after the name.
  void help(const std::string& rest);
  void reset(const std::string& rest);
  void regenerate(const std::string& rest);
  void undo(const std::string& rest);
  void edit(const std::string& rest);
  void attach(const std::string& rest);
  void set_system(const std::string& rest);
  void set_thinking(const std::string& rest);
  void set_option(const std::string& rest);
  void show_stats(const std::string& rest);
  void save(const std::string& rest);
  void load(const std::string& rest);
  void leave(const std::string& rest);

  ChatPartner& partner_;
  ConversationOptions options_;
  const Terminal& terminal_;
  LineEditor editor_;
  std::string system_;
  std::optional<bool> thinking_;
  std::vector<Turn> turns_;
  std::string attached_;  // text for the next message
  std::string to_edit_;   // the next message begins with it
  bool leaving_ = false;
  bool failed_ = false;  // a message could not be answered
  AnswerStats last_;
  int64_t n_prompt_tokens_ = 0, n_answer_tokens_ = 0;
};

}  // namespace thermo
