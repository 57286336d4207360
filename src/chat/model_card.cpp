#include "chat/model_card.h"

#include <fmt/format.h>

#include <climits>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "chat/model_source.h"

namespace thermo {
namespace {

namespace fs = std::filesystem;

struct Setting {
  const char* name;
  std::variant<float SamplingParams::*, int SamplingParams::*> target;
};
const Setting kSettings[] = {
    {"temperature", &SamplingParams::temperature},
    {"top_k", &SamplingParams::top_k},
    {"top_p", &SamplingParams::top_p},
    {"min_p", &SamplingParams::min_p},
    {"typical_p", &SamplingParams::typical_p},
    {"top_n_sigma", &SamplingParams::top_n_sigma},
    {"xtc_probability", &SamplingParams::xtc_probability},
    {"xtc_threshold", &SamplingParams::xtc_threshold},
    {"presence_penalty", &SamplingParams::presence_penalty},
    {"frequency_penalty", &SamplingParams::frequency_penalty},
    {"repetition_penalty", &SamplingParams::repetition_penalty},
    {"repeat_last_n", &SamplingParams::repeat_last_n},
    {"dry_multiplier", &SamplingParams::dry_multiplier},
    {"dry_base", &SamplingParams::dry_base},
    {"dry_allowed_length", &SamplingParams::dry_allowed_length},
};

class CardReader {
 public:
  explicit CardReader(const std::string& path) { card_.path = path; }

  ModelCard read(const std::string& text) {
    card_.values = Json::parse(text, nullptr, false);
    if (!card_.values.is_object()) refuse("a JSON object was expected");
    for (const auto& [name, value] : card_.values.items()) take(name, value);
    SamplingParams checked;
    card_.apply(checked);
    if (const Status status = validate(checked, INT_MAX); !status)
      refuse("sampling: " + status.error().message);
    return std::move(card_);
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw ConfigError(fmt::format(
        "the model card {} cannot be used: {}; correct it, or rename it to go without it", card_.path, why));
  }
  int tokens(const std::string& name, const Json& value) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > INT_MAX)
      refuse(fmt::format("{} is {}, a number of tokens was expected", name, value.dump()));
    return value.get<int>();
  }
  const Json& object(const std::string& name, const Json& value) const {
    if (!value.is_object()) refuse(fmt::format("{} is {}, an object was expected", name, value.dump()));
    return value;
  }
  void take(const std::string& name, const Json& value) {
    if (name == "max_tokens") {
      card_.max_tokens = tokens(name, value);
    } else if (name == "reply_reserve") {
      card_.reply_reserve = tokens(name, value);
    } else if (name == "thinking_terminator") {
      if (!value.is_string()) refuse(fmt::format("{} is {}, a text was expected", name, value.dump()));
      card_.thinking_terminator = value.get<std::string>();
    } else if (name == "reasoning_efforts") {
      for (const auto& [effort, budget] : object(name, value).items())
        card_.reasoning_efforts[effort] = tokens(name + "." + effort, budget);
    } else if (name == "sampling") {
      for (const auto& [setting, number] : object(name, value).items()) check_setting(setting, number);
    } else if (name != "name" && name != "source" && name != "verified_at" && name != "notes") {
      refuse(fmt::format(
          "'{}' is not known; name, source, verified_at, sampling, max_tokens, reasoning_efforts, "
          "reply_reserve, thinking_terminator or notes was expected",
          name));
    }
  }
  void check_setting(const std::string& name, const Json& value) const {
    for (const Setting& setting : kSettings) {
      if (name != setting.name) continue;
      const bool whole = std::holds_alternative<int SamplingParams::*>(setting.target);
      if (whole ? !value.is_number_integer() : !value.is_number())
        refuse(fmt::format("sampling.{} is {}, a {} was expected", name, value.dump(),
                           whole ? "whole number" : "number"));
      return;
    }
    refuse(fmt::format(
        "sampling.{} is not known; temperature, top_k, top_p, min_p and the like were expected", name));
  }

  ModelCard card_;
};

// "Qwen3.6 35B A3B" to "qwen3.6-35b-a3b".
std::string as_file_name(std::string text) {
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == ' ' || c == '/') c = '-';
  }
  return text;
}

// "NAME-00001-of-00003" to "NAME".
std::string without_part(std::string name) {
  constexpr size_t kSuffix = sizeof("-00001-of-00003") - 1;
  if (name.size() > kSuffix && name.compare(name.size() - 9, 4, "-of-") == 0)
    name.resize(name.size() - kSuffix);
  return name;
}

}  // namespace

void ModelCard::apply(SamplingParams& params) const {
  const auto found = values.find("sampling");
  if (found == values.end()) return;
  for (const Setting& setting : kSettings)
    if (const auto value = found->find(setting.name); value != found->end())
      std::visit([&](auto target) { value->get_to(params.*target); }, setting.target);
}

ModelCard read_model_card(const std::string& path) {
  std::ifstream in(path);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in) throw ConfigError(fmt::format("the model card {} cannot be read", path));
  return CardReader(path).read(text);
}

std::optional<ModelCard> find_model_card(const std::string& model, const GgufFile& file) {
  const std::string name = without_part(model_display_name(model));
  std::vector<fs::path> places;
  if (!model.empty())
    places.push_back(fs::path(resolve_model_path(model)).parent_path() / (name + ".card.json"));
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  const fs::path shared = program.parent_path().parent_path() / "share/thermocline/cards";
  places.push_back(shared / (as_file_name(name) + ".card.json"));
  if (const auto inner = file.find_string("general.name"); inner && !inner->empty())
    places.push_back(shared / (as_file_name(std::string(*inner)) + ".card.json"));
  for (const fs::path& place : places) {
    if (!fs::is_regular_file(place, error)) continue;
    log_info("model", "the model card {} is used", place.string());
    return read_model_card(place.string());
  }
  return std::nullopt;
}

}  // namespace thermo
