// What stdout and stderr are: terminals or files, with colour or without.
#pragma once

#include <string>
#include <string_view>

namespace thermo {

enum class When { Auto, Always, Never };

struct TerminalOptions {
  When color = When::Auto;     // auto: a terminal, TERM is not dumb, NO_COLOR is empty; CLICOLOR_FORCE forces
  When progress = When::Auto;  // auto: stderr is a terminal
  bool quiet = false;
};

enum class Style { Bold, Dim, Red, Yellow, Green, Cyan };

struct Terminal {
  bool stdin_is_terminal = false;
  bool stdout_is_terminal = false;
  bool stderr_is_terminal = false;
  bool color_stdout = false;
  bool color_stderr = false;
  bool escapes = false;   // TERM names a terminal that obeys escape sequences
  bool unicode = false;   // the locale is UTF-8
  bool progress = false;  // draw a progress line on stderr
  bool quiet = false;     // no statistics, no notes
  int width = 80;         // columns

  // `text` in that style, or as it is where there is no colour.
  std::string on_stdout(Style style, std::string_view text) const;
  std::string on_stderr(Style style, std::string_view text) const;
  // One line on stderr that is neither a warning nor an error: which model, which seed. Nothing when quiet.
  void note(std::string_view line) const;
  void note_unless_empty(std::string_view line) const;
};

Terminal detect_terminal(const TerminalOptions& options);

// Writes all of it and flushes. Throws OutputClosed when the reader went away.
void write_stdout(std::string_view text);

// The reader of our output went away (`thermocline run | head -1`); no error, the program ends quietly.
struct OutputClosed {};

}  // namespace thermo
