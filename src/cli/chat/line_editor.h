// Messages typed at a terminal: editing, history, paste, completion. Over a pipe: lines. From libedit, which
// is used on terminals only.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/input.h"
#include "cli/terminal.h"

namespace thermo {

struct LineEditorOptions {
  std::string history_file;  // empty: nothing is kept
  // What could stand for the word that ends at the end of `line`; whole words.
  std::function<std::vector<std::string>(std::string_view line)> complete;
};

class LineEditor {
 public:
  using Event = LineReader::Event;

  // `terminal` outlives this.
  LineEditor(const Terminal& terminal, LineEditorOptions options);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  // One message: a line; more of them where a line ends in a backslash, between lines that begin and end with
  // """, or pasted. `initial`: text to begin with, for editing; terminals only.
  Event next(std::string& message, const std::string& initial = "");

  // A line that answers a question, not kept in the history.
  Event ask(const std::string& question, std::string& line);

  bool edits() const { return editor_ != nullptr; }

 private:
  struct Editor;
  Event next_line(const std::string& prompt, std::string& line, const std::string& initial);

  const Terminal& terminal_;
  std::unique_ptr<Editor> editor_;  // nullptr: a pipe
  LineReader lines_;
};

// "~/.local/state/thermocline/history"; empty where there is no home.
std::string default_history_file();

}  // namespace thermo
