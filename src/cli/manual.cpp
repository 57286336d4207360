// `thermocline manual`: the manual page, made from the declarations of the options.
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "cli/declared_commands.h"
#include "cli/version.h"

namespace thermo {
namespace {

struct CodeMeaning {
  ExitCode code;
  const char* meaning;
};
constexpr CodeMeaning kExitCodes[] = {
    {ExitCode::Ok, "all is well"},
    {ExitCode::Internal, "an error in the program itself"},
    {ExitCode::Usage,
     "wrong usage or configuration; a prompt that does not fit; a piped message that could not be answered; "
     "output that cannot be written; a server at --url that cannot be reached"},
    {ExitCode::Model, "the model is missing, unreadable, unsupported or damaged"},
    {ExitCode::Memory, "not enough memory, or the address space is used up"},
    {ExitCode::Listen, "the server cannot listen: the address is in use or not allowed"},
    {ExitCode::Device, "the requested device is missing"},
    {ExitCode::DeviceFault, "a device or a file failed while in use; a model file became shorter"},
    {ExitCode::Download, "a download failed; the same command resumes it"},
    {ExitCode::BelowTarget, "a comparison failed: bench --fail-below, verify"},
    {ExitCode::HungUp, "SIGHUP"},
    {ExitCode::Interrupted, "Ctrl-C"},
    {ExitCode::Terminated, "SIGTERM"},
};

// Text for troff: no escapes, no requests.
std::string roff(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) {
      out += std::string("\\&") + c;
    } else {
      out += c;
    }
  }
  return out;
}

std::string option_entry(const OptionView& view) {
  std::string names;
  for (const std::string& name : view.shorts())
    names += fmt::format("{}\\fB\\-{}\\fR", names.empty() ? "" : ", ", roff(name));
  for (const std::string& name : view.longs())
    names += fmt::format("{}\\fB\\-\\-{}\\fR", names.empty() ? "" : ", ", roff(name));
  if (!view.metavar().empty()) names += fmt::format(" \\fI{}\\fR", roff(view.metavar()));
  return fmt::format(".TP\n{}\n{}\n", names, roff(view.help()));
}

// Options that every command has, or that several share, stand once.
bool same_option(const Option& a, const Option& b) {
  return a.name() == b.name() && OptionView{&a}.help() == OptionView{&b}.help();
}

std::string manual_page() {
  const std::vector<std::unique_ptr<DeclaredCommand>> all = declare_commands();
  const auto is_common = [&all](const Option& option) {
    return std::count_if(all.begin(), all.end(), [&](const std::unique_ptr<DeclaredCommand>& other) {
             return std::any_of(other->set.options().begin(), other->set.options().end(),
                                [&](const Option& o) { return same_option(o, option); });
           }) > 2;
  };
  std::string out =
      fmt::format(".TH THERMOCLINE 1 \"\" \"thermocline {}\" \"User Commands\"\n", version_number());
  out += ".SH NAME\nthermocline \\- run mixture\\-of\\-experts language models from GGUF files\n";
  out += ".SH SYNOPSIS\n\\fBthermocline\\fR \\fICOMMAND\\fR [\\fIMODEL\\fR] [\\fIoptions\\fR]\n";
  out += ".SH DESCRIPTION\n" + roff(
                                   "MODEL is a GGUF file, the first file of a split model, or a folder with "
                                   "one model in it; without it the small model inside the program is used. "
                                   "Results go to standard output, everything else to standard error.\n");
  out += ".SH COMMANDS\n";
  std::vector<const Option*> common;
  for (const std::unique_ptr<DeclaredCommand>& declared : all) {
    const CommandText text = declared->command->text();
    out += fmt::format(".SS {}\n\\fBthermocline {}\\fR\n.PP\n{}.\n", roff(text.name), roff(text.usage),
                       roff(text.summary));
    if (!text.details.empty()) out += roff(text.details) + "\n";
    for (const Option& option : declared->set.options()) {
      if (!is_common(option)) {
        out += option_entry({&option});
      } else if (std::none_of(common.begin(), common.end(),
                              [&](const Option* o) { return same_option(*o, option); })) {
        common.push_back(&option);
      }
    }
    if (!text.examples.empty()) out += ".PP\nExamples:\n.PP\n.nf\n" + roff(text.examples) + "\n.fi\n";
  }
  out += ".SH OPTIONS OF SEVERAL COMMANDS\n";
  for (const Option* option : common) out += option_entry({option});
  out += ".SH EXIT STATUS\n";
  for (const CodeMeaning& code : kExitCodes)
    out += fmt::format(".TP\n\\fB{}\\fR\n{}\n", static_cast<int>(code.code), roff(code.meaning));
  out += ".SH ENVIRONMENT\n" +
         roff(
             "THERMO_OPTION sets an option by its long name (THERMO_CTX_SIZE, "
             "THERMO_TEMP); if it is not set, llama.cpp's variable is read (LLAMA_ARG_CTX_SIZE). NO_COLOR "
             "and CLICOLOR_FORCE are obeyed. THERMO_MAX_ISA limits the instruction set: portable, avx2, "
             "avxvnni or avx512; THERMO_MAX_SM the kernels chosen for a card: 75, 80, 86 or 89.\n");
  out += ".SH FILES\n.TP\n\\fI~/.config/thermocline/config.toml\\fR\n" +
         roff("options by their long names\n") + ".TP\n\\fI~/.local/state/thermocline/history\\fR\n" +
         roff("what was typed in chat\n");
  return out;
}

class ManualCommand : public Command {
 public:
  CommandText text() const override {
    return {"manual", "manual", "the manual page", "", "thermocline manual | man -l -"};
  }
  void declare(OptionSet&) override {}
  ExitCode run(const Terminal&) override {
    write_stdout(manual_page());
    return ExitCode::Ok;
  }
};

}  // namespace

std::unique_ptr<Command> make_manual_command() {
  return std::make_unique<ManualCommand>();
}

}  // namespace thermo
