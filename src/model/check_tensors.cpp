#include "model/check_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/units.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {
namespace {

constexpr uint64_t kPieceElements = 1 << 20;  // of a task
constexpr uint64_t kBufferElements = 4096;    // a multiple of every block
constexpr uint64_t kRoundBytes = 256 * MiB;   // between looks at the progress bar
static_assert(kPieceElements % kBufferElements == 0);

struct Piece {
  const GgufTensor* tensor;
  uint64_t first, count;  // elements
};

std::vector<Piece> pieces_of(const GgufFile& file) {
  std::vector<Piece> pieces;
  for (const GgufTensor& tensor : file.tensors()) {
    if (!dtype_info(tensor.dtype).is_weight) continue;
    for (uint64_t first = 0; first < tensor.n_elements(); first += kPieceElements)
      pieces.push_back({&tensor, first, std::min(kPieceElements, tensor.n_elements() - first)});
  }
  return pieces;
}

// The first element that is not finite; n_elements() if all are.
uint64_t find_bad(const Piece& piece) {
  float values[kBufferElements];
  const DType dtype = piece.tensor->dtype;
  for (uint64_t done = 0; done < piece.count; done += kBufferElements) {
    const uint64_t n = std::min(kBufferElements, piece.count - done), first = piece.first + done;
    dequantize_row(dtype, piece.tensor->data + row_bytes(dtype, first), static_cast<int64_t>(n), values);
    for (uint64_t i = 0; i < n; ++i)
      if (!std::isfinite(values[i])) return first + i;
  }
  return piece.tensor->n_elements();
}

[[noreturn]] void refuse(const GgufFile& file, const Piece& piece) {
  const GgufTensor& tensor = *piece.tensor;
  throw LoadError(
      fmt::format("{}: tensor {} ({}, {}) has a number that is not finite, at element {} of {}; the file "
                  "is damaged or was converted wrongly: download or convert it again",
                  file.path(), escape_text(tensor.name), describe_shape(tensor), dtype_name(tensor.dtype),
                  find_bad(piece), tensor.n_elements()));
}

}  // namespace

void check_small_tensors(const GgufFile& file) {
  for (const GgufTensor& tensor : file.tensors()) {
    const Piece whole{&tensor, 0, tensor.n_elements()};
    if (tensor.dtype != DType::F32 || whole.count > kPieceElements) continue;
    const bool bad = find_bad(whole) < whole.count;
    if (const std::string fault = file.fault(); !fault.empty()) throw LoadError(fault);
    if (bad) refuse(file, whole);
  }
}

void check_tensors(const GgufFile& file, ThreadPool& pool, const LoadProgressFn& progress) {
  const std::vector<Piece> pieces = pieces_of(file);
  uint64_t done = 0, total = 0;
  const auto bytes_of = [](const Piece& piece) { return row_bytes(piece.tensor->dtype, piece.count); };
  for (const Piece& piece : pieces) total += bytes_of(piece);
  if (progress) progress({"check", 0, total});
  for (size_t begin = 0; begin < pieces.size();) {
    size_t end = begin;
    for (uint64_t bytes = 0; end < pieces.size() && bytes < kRoundBytes; ++end)
      bytes += bytes_of(pieces[end]);
    std::atomic<size_t> bad = end;  // the first of the round
    pool.run(static_cast<int>(end - begin), [&](int task, int) {
      const size_t at = begin + static_cast<size_t>(task);
      if (at >= bad.load() || find_bad(pieces[at]) == pieces[at].tensor->n_elements()) return;
      for (size_t now = bad.load(); at < now && !bad.compare_exchange_weak(now, at);) {
      }
    });
    if (const std::string fault = file.fault(); !fault.empty()) throw LoadError(fault);
    if (bad < end) refuse(file, pieces[bad]);
    for (; begin < end; ++begin) done += bytes_of(pieces[begin]);
    if (progress) progress({"check", done, total});
  }
}

}  // namespace thermo
