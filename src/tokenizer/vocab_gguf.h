// The vocabulary of a model file.
#pragma once

#include <optional>

#include "tokenizer/vocab.h"

namespace thermo {

class GgufFile;

// nullopt when the file has no vocabulary: `tokenizer.ggml.model` is "none" or absent. Such a model is used
// with ids in and ids out. Throws LoadError: an unknown kind of tokenizer, a key missing or of the wrong
// type, more tokens than embedding rows. What the lists hold is checked by Vocab and MergeTable.
std::optional<VocabData> read_vocab(const GgufFile& file);

}  // namespace thermo
