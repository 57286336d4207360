#include "server/turn_store.h"

#include <algorithm>
#include <cmath>

#include "base/json_limits.h"

namespace thermo {
namespace {

using SortedJson = nlohmann::json;  // keys in order, unlike Json

std::string trimmed(const std::string& text) {
  const char* const kSpace = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// 1.0 and 1e0 are 1.
void settle_numbers(SortedJson& value) {
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::abs(number) < 9e15 && number == std::floor(number)) value = static_cast<int64_t>(number);
  } else if (value.is_structured()) {
    for (SortedJson& member : value) settle_numbers(member);
  }
}

std::string canonical_call(const ToolCall& call) {
  SortedJson arguments(SortedJson::value_t::discarded);
  if (beyond_limits(call.arguments).empty()) arguments = SortedJson::parse(call.arguments, nullptr, false);
  if (arguments.is_discarded()) return call.name + '\0' + call.arguments;
  settle_numbers(arguments);
  return call.name + '\0' + arguments.dump(-1, ' ', false, SortedJson::error_handler_t::replace);
}

// What a turn says, however it is written: visible text without the space around it, calls in any order.
std::string name_of(const std::string& owner, const Turn& turn) {
  std::vector<std::string> calls;
  for (const ToolCall& call : turn.tool_calls) calls.push_back(canonical_call(call));
  std::sort(calls.begin(), calls.end());
  std::string name = owner + '\0' + trimmed(turn.content);
  for (const std::string& call : calls) name += '\0' + call;
  return name;
}

// Most clients drop the reasoning.
bool agrees(const std::string& kept, const Turn& turn) {
  return turn.reasoning.empty() || trimmed(turn.reasoning) == kept;
}

}  // namespace

uint64_t TurnStore::Entry::bytes() const {
  return sizeof(Entry) + name.capacity() + reasoning.capacity() + ids.capacity() * sizeof(int32_t) +
         128;  // of the list and the table
}

void TurnStore::remember(const std::string& owner, std::span<const int32_t> prompt, const Turn& answer,
                         std::span<const int32_t> ids, const Vocab& vocab) {
  size_t begin = prompt.size();
  while (begin > 0 && !vocab.is_end_of_generation(prompt[begin - 1])) --begin;
  if (begin == 0 || limit_bytes_ == 0) return;
  Entry entry{.name = name_of(owner, answer), .reasoning = trimmed(answer.reasoning), .head = {}, .ids = {}};
  entry.head.add(prompt.first(begin));
  entry.ids.reserve(prompt.size() - begin + ids.size());
  entry.ids.assign(prompt.begin() + static_cast<std::ptrdiff_t>(begin), prompt.end());
  entry.ids.insert(entry.ids.end(), ids.begin(), ids.end());
  const uint64_t bytes = entry.bytes();
  if (bytes > limit_bytes_) return;

  const std::lock_guard lock(mutex_);
  const size_t hash = std::hash<std::string>{}(entry.name);
  for (auto [it, end] = by_name_.equal_range(hash); it != end; ++it)
    if (it->second->name == entry.name && it->second->head == entry.head) {
      drop(it->second);
      break;
    }
  while (bytes_ + bytes > limit_bytes_) drop(std::prev(entries_.end()));
  entries_.push_front(std::move(entry));
  by_name_.emplace(hash, entries_.begin());
  bytes_ += bytes;
}

std::optional<TurnStore::Known> TurnStore::known(const std::string& owner, const Turn& turn) const {
  const std::string name = name_of(owner, turn);
  const std::lock_guard lock(mutex_);
  std::optional<Known> found;
  for (auto [it, end] = by_name_.equal_range(std::hash<std::string>{}(name)); it != end; ++it) {
    if (it->second->name != name || !agrees(it->second->reasoning, turn)) continue;
    if (!found) found.emplace();
    found->has_reasoning |= !it->second->reasoning.empty();
  }
  return found;
}

std::optional<TurnStore::Found> TurnStore::find(const std::string& owner, const Turn& turn,
                                                const PromptHash& head) {
  const std::string name = name_of(owner, turn);
  const std::lock_guard lock(mutex_);
  for (auto [it, end] = by_name_.equal_range(std::hash<std::string>{}(name)); it != end; ++it) {
    const Entry& entry = *it->second;
    if (entry.name != name || entry.head != head || !agrees(entry.reasoning, turn)) continue;
    entries_.splice(entries_.begin(), entries_, it->second);
    return Found{entry.ids, !entry.reasoning.empty()};
  }
  return std::nullopt;
}

uint64_t TurnStore::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

void TurnStore::drop(Entries::iterator entry) {
  for (auto [it, end] = by_name_.equal_range(std::hash<std::string>{}(entry->name)); it != end; ++it)
    if (it->second == entry) {
      by_name_.erase(it);
      break;
    }
  bytes_ -= entry->bytes();
  entries_.erase(entry);
}

}  // namespace thermo
