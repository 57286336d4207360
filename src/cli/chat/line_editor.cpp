// libedit knows lines; what makes them messages is here. Bracketed paste: the terminal puts \e[200~ and
// \e[201~ around what is pasted, so its line ends are text and do not send the message. Characters are read
// here and not by libedit, so that Ctrl-C and a change of the window come back at once.
#include "cli/chat/line_editor.h"

#include <histedit.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cwchar>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/utf8.h"
#include "cli/user_folders.h"

namespace thermo {
namespace {

constexpr int kHistoryLines = 1000;
constexpr const char* kPasteOn = "\x1b[?2004h";
constexpr const char* kPasteOff = "\x1b[?2004l";
constexpr std::wstring_view kPasteEnd = L"\x1b[201~";
constexpr std::string_view kFence = "\"\"\"";

volatile std::sig_atomic_t g_resized = 0;

std::wstring widen(std::string_view text) {
  std::wstring wide;
  for (size_t i = 0; i < text.size();) {
    const DecodedChar c = decode_utf8(text, i);
    wide += static_cast<wchar_t>(c.code);
    i += c.length;
  }
  return wide;
}

std::string narrow(std::wstring_view wide) {
  std::string text;
  for (const wchar_t c : wide) append_utf8(text, static_cast<char32_t>(c));
  return text;
}

// Rows between the beginning of what is shown and its end. What stands between two \1 takes no room.
int rows_of(std::wstring_view shown, int n_columns) {
  int row = 0, column = 0;
  bool hidden = false;
  for (const wchar_t c : shown) {
    if (c == L'\1') hidden = !hidden;
    if (c == L'\1' || hidden) continue;
    const int width = std::max(wcwidth(c), 0);
    if (c == L'\n' || column + width > n_columns) {
      ++row;
      column = 0;
    }
    column += width;
  }
  return row;
}

}  // namespace

struct LineEditor::Editor {
  Editor(const Terminal& terminal, LineEditorOptions given)
      : options(std::move(given)), brackets_pastes(terminal.escapes) {
    if (terminal.unicode && std::setlocale(LC_CTYPE, "") == nullptr) std::setlocale(LC_CTYPE, "C.UTF-8");
    history = history_winit();
    HistEventW event;
    history_w(history, &event, H_SETSIZE, kHistoryLines);
    history_w(history, &event, H_SETUNIQUE, 1);
    if (!options.history_file.empty()) history_w(history, &event, H_LOAD, options.history_file.c_str());

    line = el_init("thermocline", stdin, stderr, stderr);
    el_wset(line, EL_CLIENTDATA, this);
    el_wset(line, EL_EDITOR, L"emacs");
    el_wset(line, EL_SIGNAL, 0);
    el_wset(line, EL_GETCFN, &Editor::read_char);
    el_wset(line, EL_PROMPT_ESC, &Editor::prompt_of, L'\1');
    el_wset(line, EL_HIST, history_w, history);
    el_wset(line, EL_ADDFN, L"thermo-paste", L"take what is pasted", &Editor::paste);
    el_wset(line, EL_ADDFN, L"thermo-begin", L"text to edit", &Editor::insert_initial);
    el_wset(line, EL_ADDFN, L"thermo-complete", L"complete the word", &Editor::complete);
    const auto bind = [this](const wchar_t* keys, const wchar_t* what) {
      el_wset(line, EL_BIND, keys, what, nullptr);
    };
    bind(L"\\e[200~", L"thermo-paste");
    bind(L"\\e[990~", L"thermo-begin");
    bind(L"\t", L"thermo-complete");
    for (const auto& [keys, what] : {std::pair{L"\\e[A", L"ed-prev-history"},
                                     {L"\\e[B", L"ed-next-history"},
                                     {L"\\eOA", L"ed-prev-history"},
                                     {L"\\eOB", L"ed-next-history"},
                                     {L"\\e[3~", L"ed-delete-next-char"},
                                     {L"\\e[H", L"ed-move-to-beg"},
                                     {L"\\e[F", L"ed-move-to-end"},
                                     {L"\\e[1;5C", L"em-next-word"},
                                     {L"\\e[1;5D", L"ed-prev-word"},
                                     {L"^R", L"em-inc-search-prev"}})
      bind(keys, what);
    struct sigaction action {};
    action.sa_handler = [](int) { g_resized = 1; };
    sigemptyset(&action.sa_mask);
    sigaction(SIGWINCH, &action, nullptr);
  }

  ~Editor() {
    el_end(line);
    history_wend(history);
  }

  Event read(const std::string& text, std::string& out, const std::string& begin_with) {
    prompt = widen(text);
    initial = widen(begin_with);
    if (!initial.empty()) el_wpush(line, L"\x1b[990~");
    // libedit prints the prompt first and takes the terminal after it: what is typed in between would be
    // edited by the terminal, which knows no arrows.
    el_wset(line, EL_PREP_TERM, 1);
    if (brackets_pastes) std::fputs(kPasteOn, stderr);
    int n = 0;
    errno = 0;
    stopped = false;
    const wchar_t* wide = el_wgets(line, &n);
    if (brackets_pastes) std::fputs(kPasteOff, stderr);
    if (wide == nullptr || n <= 0) {
      if (stopped) std::fputs("\n", stderr);
      return stopped ? Event::Interrupted : Event::End;
    }
    n_seen = 0;  // with a message the count begins anew
    out = narrow({wide, static_cast<size_t>(n)});
    if (out.ends_with('\n')) out.pop_back();
    return Event::Line;
  }

  // Private to the user: messages may be.
  void remember(const std::string& message) {
    if (message.find_first_not_of(" \t\n") == std::string::npos) return;
    HistEventW event;
    history_w(history, &event, H_ENTER, widen(message).c_str());
    if (options.history_file.empty()) return;
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(options.history_file).parent_path(), ignored);
    const mode_t before = ::umask(0077);
    history_w(history, &event, H_SAVE, options.history_file.c_str());
    ::umask(before);
  }

  static Editor& of(EditLine* line) {
    Editor* self = nullptr;
    el_wget(line, EL_CLIENTDATA, &self);
    return *self;
  }

  static wchar_t* prompt_of(EditLine* line) { return of(line).prompt.data(); }

  // A byte of stdin; 0 at the end, -1 when Ctrl-C came.
  ssize_t read_byte(char& byte) {
    if (kept) {
      byte = *std::exchange(kept, std::nullopt);
      return 1;
    }
    const auto look = [this] {
      if (g_resized == 0) return;
      g_resized = 0;
      resize();
    };
    while (true) {
      if (!wait_for_stdin(n_seen, look)) {
        stopped = true;
        return -1;
      }
      const ssize_t n = ::read(STDIN_FILENO, &byte, 1);
      if (n >= 0 || errno != EINTR) return n;
    }
  }

  // libedit keeps the place of the cursor in the old window and writes past the end of a smaller one. So it
  // is shown nothing while it learns the size, and then the line as if it had just been typed. A terminal
  // that wraps its text anew has other rows than one that does not: the fewer are taken back.
  void resize() {
    const LineInfoW* info = el_wline(line);
    const std::wstring text(info->buffer, info->lastchar);
    const auto n_before = static_cast<size_t>(info->cursor - info->buffer);
    const auto n_after = static_cast<int>(text.size() - n_before);
    const std::wstring shown_prompt = std::exchange(prompt, L"");
    const std::wstring shown = shown_prompt + text.substr(0, n_before);
    const auto n_rows = [&] {
      int n_columns = 80;
      el_wget(line, EL_GETTC, "co", &n_columns);
      return rows_of(shown, n_columns);
    };
    const int n_old_rows = n_rows();
    el_cursor(line, n_after);
    el_wdeletestr(line, static_cast<int>(text.size()));
    el_wset(line, EL_REFRESH);
    el_resize(line);
    const int n_above = std::min(n_old_rows, n_rows());
    if (!brackets_pastes) {
      std::fputs("\n", stderr);  // a terminal without escapes
    } else {
      if (n_above > 0) std::fprintf(stderr, "\x1b[%dA", n_above);
      std::fputs("\r\x1b[J", stderr);
    }
    prompt = shown_prompt;
    el_winsertstr(line, text.c_str());
    el_cursor(line, -n_after);
    el_wset(line, EL_REFRESH);
  }

  // One character; 0 at the end, -1 when Ctrl-C came. What is no UTF-8 becomes U+FFFD, and takes no key that
  // follows it along.
  static int read_char(EditLine* line, wchar_t* out) {
    Editor& self = of(line);
    std::string bytes;
    while (true) {
      char byte = 0;
      if (const ssize_t n = self.read_byte(byte); n <= 0) return static_cast<int>(n);
      const bool continues = (static_cast<uint8_t>(byte) & 0xC0) == 0x80;
      if (!bytes.empty() && !continues) {
        self.kept = byte;
        *out = static_cast<wchar_t>(kReplacement);
        return 1;
      }
      bytes += byte;
      const int length = utf8_sequence_length(static_cast<uint8_t>(bytes[0]));
      if (length > static_cast<int>(bytes.size())) continue;
      *out = static_cast<wchar_t>(decode_utf8(bytes, 0).code);
      return 1;
    }
  }

  static unsigned char paste(EditLine* line, int) {
    std::wstring text;
    wchar_t c = 0;
    while (!text.ends_with(kPasteEnd)) {
      if (el_wgetc(line, &c) != 1) return CC_EOF;
      text += c == L'\r' ? L'\n' : c;
    }
    text.resize(text.size() - kPasteEnd.size());
    std::erase_if(text, [](wchar_t x) { return (x < L' ' && x != L'\n' && x != L'\t') || x == 0x7F; });
    el_winsertstr(line, text.c_str());
    return CC_REFRESH;
  }

  static unsigned char insert_initial(EditLine* line, int) {
    el_winsertstr(line, of(line).initial.c_str());
    return CC_REFRESH;
  }

  // Completes as far as there is one way to; shows the ways where there are several.
  static unsigned char complete(EditLine* line, int) {
    Editor& self = of(line);
    const LineInfoW* info = el_wline(line);
    const std::string text = narrow({info->buffer, static_cast<size_t>(info->cursor - info->buffer)});
    const std::vector<std::string> words =
        self.options.complete ? self.options.complete(text) : std::vector<std::string>{};
    if (words.empty()) return CC_ERROR;
    const std::string word = text.substr(text.rfind(' ') == std::string::npos ? 0 : text.rfind(' ') + 1);
    std::string common = words[0];
    for (const std::string& other : words) {
      size_t n = 0;
      while (n < common.size() && n < other.size() && common[n] == other[n]) ++n;
      common.resize(n);
    }
    if (common.size() > word.size()) {
      const bool done = words.size() == 1 && !common.ends_with('/');
      el_winsertstr(line, widen(common.substr(word.size()) + (done ? " " : "")).c_str());
      return CC_REFRESH;
    }
    if (words.size() == 1) return CC_ERROR;
    std::fputs("\n", stderr);
    for (const std::string& other : words) std::fprintf(stderr, "%s  ", other.c_str());
    std::fputs("\n", stderr);
    return CC_REDISPLAY;
  }

  LineEditorOptions options;
  EditLine* line = nullptr;
  HistoryW* history = nullptr;
  std::wstring prompt, initial;
  const bool brackets_pastes;
  bool stopped = false;
  std::optional<char> kept;  // a byte that was read and begins the next character
  int n_seen = 0;            // interrupts
};

LineEditor::LineEditor(const Terminal& terminal, LineEditorOptions options) : terminal_(terminal) {
  if (terminal.stdin_is_terminal && terminal.stderr_is_terminal)
    editor_ = std::make_unique<Editor>(terminal, std::move(options));
}

LineEditor::~LineEditor() = default;

LineEditor::Event LineEditor::next_line(const std::string& prompt, std::string& line,
                                        const std::string& initial) {
  if (editor_) return editor_->read(prompt, line, initial);
  if (terminal_.stdin_is_terminal) std::fputs(prompt.c_str(), stderr);  // stderr goes elsewhere
  return lines_.next(line);
}

LineEditor::Event LineEditor::next(std::string& message, const std::string& initial) {
  // \1 tells libedit that what stands between two of them takes no room. It writes that with the character
  // after it, so one has to follow.
  constexpr const char* kBold = "\1\x1b[1m\1>\1\x1b[0m\1 ";
  message.clear();
  std::string line;
  Event event = next_line(terminal_.color_stderr && editor_ ? kBold : "> ", line, initial);
  if (event != Event::Line) return event;
  const bool fenced = line.starts_with(kFence);
  message = fenced ? line.substr(kFence.size()) : line;
  const auto goes_on = [&] { return fenced ? !message.ends_with(kFence) : message.ends_with('\\'); };
  while (goes_on()) {
    if (fenced) {
      message += '\n';
    } else {
      message.back() = '\n';
    }
    event = next_line("  ", line, "");
    if (event == Event::Interrupted) return event;
    if (event == Event::End) break;
    message += line;
  }
  if (fenced) {
    if (message.ends_with(kFence)) message.resize(message.size() - kFence.size());
    if (message.starts_with('\n')) message.erase(0, 1);
    if (message.ends_with('\n')) message.pop_back();
  }
  if (editor_) editor_->remember(message);
  return Event::Line;
}

LineEditor::Event LineEditor::ask(const std::string& question, std::string& line) {
  return next_line(question, line, "");
}

std::string default_history_file() {
  return in_state_folder("history", in_user_state("thermocline/history")).string();
}

}  // namespace thermo
