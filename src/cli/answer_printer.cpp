#include "cli/answer_printer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "base/utf8.h"
#include "cli/interrupt.h"
#include "cli/progress.h"
#include "engine/memory_plan.h"

namespace thermo {

AnswerPrinter::AnswerPrinter(const Terminal& terminal, bool show_reasoning)
    : terminal_(terminal),
      reasoning_(terminal.stdout_is_terminal ? Reasoning::Stdout
                 : show_reasoning            ? Reasoning::Stderr
                                             : Reasoning::Hide) {}

// Pieces of one kind are written together: a step with a draft has several.
void AnswerPrinter::print(const AnswerParser::Events& events) {
  for (size_t i = 0; i < events.size();) {
    const AnswerEvent::Kind kind = events[i].kind;
    std::string text;
    for (; i < events.size() && events[i].kind == kind; ++i) text += events[i].text;
    if (kind == AnswerEvent::Kind::Reasoning) print_reasoning(text);
    if (kind == AnswerEvent::Kind::Content) print_content(text);
  }
}

void AnswerPrinter::print_reasoning(const std::string& piece) {
  if (reasoning_ == Reasoning::Stdout) {
    std::string text;
    if (!reasoning_open_ && !terminal_.color_stdout) text = "<think>\n";
    text += terminal_.on_stdout(Style::Dim, printable(piece));
    write_stdout(text);
    reasoning_open_ = true;
  } else if (reasoning_ == Reasoning::Stderr) {
    std::fputs(terminal_.on_stderr(Style::Dim, piece).c_str(), stderr);
    reasoning_open_ = true;
  }
}

void AnswerPrinter::print_content(const std::string& piece) {
  close_reasoning();
  write_stdout(terminal_.stdout_is_terminal ? printable(piece) : piece);
  wrote_content_ = true;
  last_ = piece.back();
}

void AnswerPrinter::close_reasoning() {
  if (!reasoning_open_) return;
  reasoning_open_ = false;
  if (reasoning_ == Reasoning::Stderr) {
    std::fputs("\n", stderr);
  } else {
    write_stdout(terminal_.color_stdout ? "\n\n" : "\n</think>\n\n");
  }
}

void AnswerPrinter::finish() {
  close_reasoning();
  if (wrote_content_ && last_ != '\n') write_stdout("\n");
}

Answer print_answer(TokenService& service, const Tokenizer& tokenizer, const AnswerRequest& request,
                    const Terminal& terminal, AnswerPrinter* printer) {
  std::optional<ProgressLine> progress(std::in_place, terminal);
  AnswerObserver observer;
  observer.on_prompt = [&progress](int done, int total) {
    if (progress) progress->update_prompt(done, total);
  };
  observer.on_events = [&progress, printer](const AnswerParser::Events& events) {
    progress.reset();
    if (printer) printer->print(events);
  };
  observer.cancelled = [] { return InterruptScope::interrupted(); };
  Answer answer = generate_answer(service, tokenizer, request, observer);
  if (printer) printer->finish();
  return answer;
}

namespace {

// As llama.cpp does: what cannot be locked is worth a word and no more.
void lock_memory(const Terminal& terminal) {
  if (mlockall(MCL_CURRENT | MCL_ONFAULT) == 0) return;
  terminal.note(fmt::format("--mlock: the system does not allow it ({}); raise the limit with ulimit -l",
                            std::strerror(errno)));
}

}  // namespace

void load_model(TextModel& model, EngineOptions options, const EngineFlags& flags, const Terminal& terminal) {
  note_unusual(model.config(), options, terminal);
  ProgressLine progress(terminal);
  options.progress = [line = progress.callback(), also = options.progress](const LoadProgress& loaded) {
    if (line) line(loaded);
    if (also) also(loaded);
  };
  model.load(options);
  progress.clear();
  terminal.note_unless_empty(model.engine().plan().note);
  if (flags.lock_memory) lock_memory(terminal);
}

}  // namespace thermo
