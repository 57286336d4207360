#include "cli/options/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "base/error.h"
#include "cli/options/cpu_options.h"
#include "cli/options/refused_options.h"

namespace thermo {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CpuOptions, ReadMasksAndRangesOfCores) {
  EXPECT_THAT(cores_of_mask("0xF0"), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(cores_of_mask("a1"), ElementsAre(0, 5, 7));
  EXPECT_THAT(cores_of_range("4-7"), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(cores_of_range("-2"), ElementsAre(0, 1, 2));
  EXPECT_EQ(cores_of_range("3-").front(), 3);
  for (const char* text : {"", "0x", "0", "0xg", "F0-"})
    EXPECT_THROW(cores_of_mask(text), ConfigError) << text;
  for (const char* text : {"", "-", "4", "7-4", "a-b", "0-99999"})
    EXPECT_THROW(cores_of_range(text), ConfigError) << text;
}

struct Example {
  std::string model, prompt, type = "f16";
  int n_ctx = 0;
  float temp = 1.0f;
  bool repack = true;
  std::vector<std::string> stops;
  OptionSet set;

  Example() {
    set.positional_for("model", "MODEL", "");
    set.value("-m,--model", "MODEL", model, "");
    set.value("-p,--prompt", "TEXT", prompt, "");
    set.value("-ctk,--cache-type-k", "TYPE", type, "").choices({"f16", "q8_0"});
    set.count("-c,--ctx-size", "N", n_ctx, "");
    set.value("--temp", "T", temp, "").range(0, 5);
    set.flag("--repack", repack, "");
    set.list("--stop", "TEXT", stops, "");
  }
  void parse(std::vector<std::string> arguments) {
    OptionValues values(set);
    values.parse_arguments(arguments);
    values.apply();
  }
  std::string refusal(std::vector<std::string> arguments) {
    try {
      parse(std::move(arguments));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  }
};

TEST(Options, ReadsEverySpelling) {
  Example e;
  e.parse({"--temp=0.5", "model.gguf", "-ctk", "q8_0", "--ctx-size", "128K", "--no-repack", "-p", "a b"});
  EXPECT_EQ(e.model, "model.gguf");
  EXPECT_EQ(e.type, "q8_0");
  EXPECT_EQ(e.n_ctx, 131072);
  EXPECT_FLOAT_EQ(e.temp, 0.5f);
  EXPECT_FALSE(e.repack);
  EXPECT_EQ(e.prompt, "a b");
}

TEST(Options, TakesAnOptionalListOfNumbers) {
  const auto parsed = [](std::vector<std::string> arguments) {
    std::string model, shares = "none";
    OptionSet set;
    set.positional("MODEL", model, "");
    set.value("--sweep", "[LIST]", shares, "").bare("0,50,100");
    OptionValues values(set);
    values.parse_arguments(arguments);
    values.apply();
    return shares + " " + model;
  };
  EXPECT_EQ(parsed({}), "none ");
  EXPECT_EQ(parsed({"--sweep"}), "0,50,100 ");
  EXPECT_EQ(parsed({"--sweep", "20-40+10,60%"}), "20-40+10,60% ");
  EXPECT_EQ(parsed({"--sweep=7"}), "7 ");
  EXPECT_EQ(parsed({"--sweep", "30B.gguf"}), "0,50,100 30B.gguf");
}

TEST(Options, TakesValuesThatLookLikeOptions) {
  Example e;
  e.parse({"-p", "-5 degrees", "--stop", "---"});
  EXPECT_EQ(e.prompt, "-5 degrees");
  e.parse({"--prompt=--temp"});
  EXPECT_EQ(e.prompt, "--temp");
  EXPECT_THAT(e.refusal({"-p", "--temp", "0"}), HasSubstr("-p=--temp"));
}

TEST(Options, TheLastValueWinsExceptInLists) {
  Example e;
  e.parse({"-c", "1", "-c", "2", "--stop", "x", "--stop=y", "--repack", "--no-repack", "--repack"});
  EXPECT_EQ(e.n_ctx, 2);
  EXPECT_TRUE(e.repack);
  EXPECT_THAT(e.stops, ElementsAre("x", "y"));
}

TEST(Options, DoubleDashEndsTheOptions) {
  Example e;
  e.parse({"--", "--strange-name.gguf"});
  EXPECT_EQ(e.model, "--strange-name.gguf");
}

TEST(Options, TheCommandLineWinsOverEnvironmentOverFile) {
  Example e;
  OptionValues values(e.set);
  values.parse_arguments(std::vector<std::string>{"-c", "3"});
  values.add(*e.set.find("-c").option, "2", OptionSource::Environment, "THERMO_CTX_SIZE");
  values.add(*e.set.find("--temp").option, "2", OptionSource::Environment, "THERMO_TEMP");
  values.add(*e.set.find("--temp").option, "1", OptionSource::File, "config.toml:1");
  values.add(*e.set.find("--stop").option, "file", OptionSource::File, "config.toml:2");
  values.add(*e.set.find("--stop").option, "env", OptionSource::Environment, "THERMO_STOP");
  values.apply();
  EXPECT_EQ(e.n_ctx, 3);
  EXPECT_FLOAT_EQ(e.temp, 2.0f);
  EXPECT_THAT(e.stops, ElementsAre("env"));
}

TEST(Options, TheStrongestSourceWinsBetweenOptionsOfOneTarget) {
  for (const auto& [mode_from, repack_from, expected] :
       {std::tuple(OptionSource::File, OptionSource::CommandLine, true),
        std::tuple(OptionSource::CommandLine, OptionSource::Environment, false)}) {
    bool repack = false;
    OptionSet set;
    set.flag("--repack", repack, "");
    set.custom(
        "--load-mode", "HOW", [&](std::string_view text) { repack = text == "none"; }, "");
    OptionValues values(set);
    values.add(*set.find("--load-mode").option, "mmap", mode_from, "here");
    values.add(*set.find("--repack").option, "on", repack_from, "there");
    values.apply();
    EXPECT_EQ(repack, expected);
  }
  Example e;  // on the command line, the last
  e.set.custom_flag(
      "--mapped", [&e](bool on) { e.repack = !on; }, "");
  e.parse({"--repack", "--mapped", "--repack"});
  EXPECT_TRUE(e.repack);
}

TEST(Options, LeavesOutWhatAStrongerSourceContradicts) {
  struct Drafts {
    std::string who, file;
    bool standard = false;
    OptionSet set;
    Drafts() {
      set.value("--who", "WHO", who, "");
      set.value("--file", "FILE", file, "");
      set.flag("--standard", standard, "");
      set.contradict_each_other({"--who", "--file", "--standard"});
    }
    // What counts of these.
    std::string given(const std::vector<std::tuple<const char*, const char*, OptionSource>>& all) {
      OptionValues values(set);
      for (const auto& [name, value, source] : all) values.add(*set.find(name).option, value, source, name);
      values.apply();
      std::string names;
      for (const OptionValues::Given& one : values.given()) names += one.option->name() + " ";
      return names;
    }
  };
  using enum OptionSource;
  EXPECT_EQ(Drafts().given({{"--who", "a", CommandLine}, {"--file", "b", Environment}}), "who ");
  EXPECT_EQ(Drafts().given({{"--who", "a", File}, {"--file", "b", LlamaEnvironment}}), "file ");
  EXPECT_EQ(Drafts().given({{"--who", "a", Environment}, {"--file", "b", LlamaEnvironment}}), "who ");
  EXPECT_EQ(Drafts().given({{"--who", "a", CommandLine}, {"--file", "b", CommandLine}}), "who file ");
  // A flag that is off contradicts nothing.
  EXPECT_EQ(Drafts().given({{"--standard", "off", CommandLine}, {"--file", "b", File}}), "file standard ");
  EXPECT_EQ(Drafts().given({{"--standard", "on", CommandLine}, {"--file", "b", File}}), "standard ");
}

TEST(Options, LeavesNothingOutForWhatIsLeftOutItself) {
  OptionSet set;
  std::string a, b, c;
  set.value("--aa", "X", a, "");
  set.value("--bb", "X", b, "");
  set.value("--cc", "X", c, "");
  set.contradict("--aa", "--bb");
  set.contradict("--cc", "--bb",
                 [](const std::string& of_c, const std::string& of_b) { return of_c == of_b; });
  OptionValues values(set);
  values.add(*set.find("--aa").option, "1", OptionSource::CommandLine, "");
  values.add(*set.find("--bb").option, "1", OptionSource::Environment, "");
  values.add(*set.find("--cc").option, "1", OptionSource::File, "");
  values.apply();
  EXPECT_EQ(a + "," + b + "," + c, "1,,1");
}

TEST(Options, LeavesOutWhatSaysNothingWithoutAnotherOption) {
  OptionSet set;
  std::string url, key;
  set.value("--url", "X", url, "");
  set.value("--key", "X", key, "");
  set.need("--key", "--url");
  OptionValues alone(set);
  alone.add(*set.find("--key").option, "k", OptionSource::Environment, "THERMO_KEY");
  alone.apply();
  EXPECT_EQ(key, "");
  OptionValues both(set);
  both.parse_arguments(std::vector<std::string>{"--url", "u"});
  both.add(*set.find("--key").option, "k", OptionSource::Environment, "THERMO_KEY");
  both.apply();
  EXPECT_EQ(key, "k");
  OptionValues asked(set);
  asked.parse_arguments(std::vector<std::string>{"--key", "k"});
  EXPECT_THROW(asked.apply(), ConfigError);
}

TEST(Options, APositionalIsTheOptionOfTheCommandLine) {
  Example e;
  OptionValues values(e.set);
  values.parse_arguments(std::vector<std::string>{"line.gguf"});
  values.add(*e.set.find("-m").option, "environment.gguf", OptionSource::Environment, "THERMO_MODEL");
  values.apply();
  EXPECT_EQ(e.model, "line.gguf");
  ASSERT_EQ(values.given().size(), 1u);
  EXPECT_EQ(values.given()[0].where, "MODEL");
}

TEST(Options, RefusesWithTheNameTheValueAndTheRemedy) {
  Example e;
  EXPECT_THAT(e.refusal({"--tmep", "1"}), HasSubstr("did you mean --temp?"));
  EXPECT_THAT(e.refusal({"--no-repakc"}), HasSubstr("did you mean --no-repack?"));
  EXPECT_THAT(e.refusal({"--temp", "warm"}), HasSubstr("--temp: 'warm'"));
  EXPECT_THAT(e.refusal({"--temp", "6"}), HasSubstr("from 0 to 5"));
  EXPECT_THAT(e.refusal({"-ctk", "q4_0"}), HasSubstr("f16, q8_0"));
  EXPECT_THAT(e.refusal({"-c"}), HasSubstr("needs a value"));
  EXPECT_THAT(e.refusal({"a", "b"}), HasSubstr("unexpected argument 'b'"));
  EXPECT_THAT(e.refusal({"a", "-m", "b"}), HasSubstr("both name"));
  EXPECT_THAT(e.refusal({"--repack=perhaps"}), HasSubstr("on or off"));
}

TEST(Options, RefusesNumbersWithRubbish) {
  int value = 0;
  for (const char* text : {"", "1x", "x1", " 1", "1 ", "0x10", "1e3", "99999999999", "--1", "+"})
    EXPECT_THROW(parse_value(text, value), ConfigError) << text;
  double number = 0.0;
  for (const char* text : {"nan", "inf", "1e999", "1,5"})
    EXPECT_THROW(parse_value(text, number), ConfigError) << text;
  EXPECT_THROW(parse_count("4194304K"), ConfigError);
  EXPECT_EQ(parse_count("+2k"), 2048);
  EXPECT_EQ(parse_count("16M"), 16 << 20);
}

TEST(Options, TakesBytesASecond) {
  OptionSet set;
  uint64_t rate = 0;
  set.rate("--link", "RATE", rate, "");
  const auto give = [&set](const char* text) {
    OptionValues values(set);
    values.parse_arguments(std::vector<std::string>{"--link", text});
    values.apply();
  };
  give("12G/s");
  EXPECT_EQ(rate, uint64_t{12} << 30);
  give("1.5MiB/s");
  EXPECT_EQ(rate, uint64_t{3} << 19);
  for (const char* text : {"12G", "/s", "G/s", "12G/min", "0/s", "-1G/s", "4096/s", "fast"})
    EXPECT_THROW(give(text), ConfigError) << text;
}

TEST(Options, ChecksTheRangeOfACountAfterItsUnit) {
  OptionSet set;
  int n = 0;
  set.count("--context", "N", n, "").range(1, 8192);
  const auto give = [&set](const char* text) {
    OptionValues values(set);
    values.parse_arguments(std::vector<std::string>{"--context", text});
    values.apply();
  };
  give("4K");
  EXPECT_EQ(n, 4096);
  EXPECT_THROW(give("16K"), ConfigError);
}

TEST(RefusedOptions, GiveAdviceByNameAndByPrefix) {
  EXPECT_THAT(refusal_advice("-ot").value_or(""), HasSubstr("dynamic"));
  EXPECT_THAT(refusal_advice("--lora-scaled").value_or(""), HasSubstr("merge"));
  EXPECT_FALSE(refusal_advice("--temp").has_value());
}

TEST(NearestMatch, FindsNothingForAnotherWord) {
  const std::vector<std::string> words = {"run", "chat", "bench"};
  EXPECT_EQ(nearest_match("rnu", words), "run");
  EXPECT_EQ(nearest_match("benhc", words), "bench");
  EXPECT_EQ(nearest_match("xyzzy", words), "");
}

}  // namespace
}  // namespace thermo
