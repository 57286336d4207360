// The methods of Python's str, on Text so that marks survive. Positions here are bytes.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "jinja/value.h"

namespace thermo::jinja {

enum class Side : uint8_t { Left, Right, Both };

// Without `chars`, whitespace; else every character of that set.
ByteRange strip_bounds(std::string_view s, std::optional<std::string_view> chars, Side side);
Text strip(const Text& t, std::optional<std::string_view> chars, Side side);

// max_splits < 0: all. Without `separator`, runs of whitespace. REQUIRES: separator not empty.
std::vector<Text> split(const Text& t, std::optional<std::string_view> separator, Int max_splits);
std::vector<Text> split_from_right(const Text& t, std::optional<std::string_view> separator, Int max_splits);
std::vector<Text> split_lines(const Text& t, bool keep_ends);

// The first `count` occurrences, all when count < 0. The result is checked against the heap's limits.
Text replace(Heap& heap, const Text& t, std::string_view old_text, const Text& new_text, Int count);

Text to_upper(const Text& t);
Text to_lower(const Text& t);
Text to_title(const Text& t);
Text capitalize(const Text& t);
Text swap_case(const Text& t);

// The byte offset of character `index`, or the end.
size_t byte_offset(std::string_view s, size_t index);

}  // namespace thermo::jinja
