// Attention of the rows of one sequence over its cache, and the write into that cache.
//
//   out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, g]) * v[j, g],   g = h / (n_head / n_head_kv)
//
// Cache slots 0..n_past-1 hold committed keys, slot = position. The step's own rows follow in slots
// n_past + i, written by kv_append before attention runs. Slots lie in pages of kKvPage, wherever these are;
// pages that no row sees need not exist. Row i sees:
//   - committed slot c   iff c > position[i] - window (always, when window is 0);
//   - its own step's row j iff j is i or an ancestor of i, and position[j] > position[i] - window.
// Without `ancestors` the rows are a chain, j <= i, and row i is at position n_past + i; with `both_ways` the
// rows of a chain see the ones after them, too.
//
// For one instruction set, the bits of a row's output depend on its query and on the keys and values it sees,
// in the order of their positions, and on nothing else: not on other rows, on the slots of its ancestors, nor
// on the number of threads (attention_impl.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/isa.h"

namespace thermo {

class ThreadPool;

// Their numbers are part of the name of a cache on disk: new ones go to the end.
enum class KvType : uint8_t { F32, F16, Q8_0, BF16, Q4_0 };
const char* kv_type_name(KvType type);
// Q8_0 and Q4_0 store blocks of 32 as GGUF does, an f16 scale and 32 int8, or 16 bytes of which number i has
// elements i and 16 + i in its low and high half, plus 8. They need head_dim % 32 == 0.
constexpr bool kv_in_blocks(KvType type) {
  return type == KvType::Q8_0 || type == KvType::Q4_0;
}
size_t kv_head_bytes(KvType type, int head_dim);  // of head_dim elements

// Slots of a page, and the slots that are read together, from multiples of kKvTile on: a tile never crosses
// the border of a page.
inline constexpr int kKvPage = 256;
inline constexpr int kKvTile = 64;
static_assert(kKvPage % kKvTile == 0);

// The K and V of one layer of one sequence. Slot s is number s % kKvPage of page pages[s / kKvPage], which
// lies that many times page_bytes after `k` and `v`: [kKvPage][n_head_kv][head_dim], heads packed back to
// back.
struct KvView {
  KvType k_type;
  KvType v_type;
  std::byte* k;
  std::byte* v;
  const int32_t* pages;
  int64_t page_bytes;
};

// Rows that form a tree. Bit j of row i's words: row j is row i itself or an ancestor of it.
struct AncestorBits {
  const uint64_t* words = nullptr;  // [n_rows][words_per_row]; nullptr: the rows are a chain
  int words_per_row = 0;

  bool is_chain() const noexcept { return words == nullptr; }
  bool sees(int row, int other) const noexcept {
    if (is_chain()) return other <= row;
    return (words[static_cast<size_t>(row) * static_cast<size_t>(words_per_row) +
                  static_cast<size_t>(other >> 6)] >>
            (other & 63)) &
           1;
  }
};

struct AttentionArgs {
  const float* q;  // [n_rows, n_head, head_dim], normed and rotated
  KvView kv;
  float* out;                // [n_rows, n_head, head_dim]
  const int32_t* positions;  // [n_rows]
  int n_rows, n_past;
  int n_head, n_head_kv, head_dim;
  float scale;
  int window;  // 0: none
  AncestorBits ancestors;
  bool both_ways = false;  // only where the rows are a chain
};

struct KvAppendArgs {
  const float* k;  // [n_rows, n_head_kv, head_dim]
  const float* v;
  KvView kv;
  int first_slot;  // row i goes to slot first_slot + i
  int n_rows, n_head_kv, head_dim;
};

// Consecutive spans, and whether they are the first or the last ones.
struct SpanRange {
  int n_spans;
  bool first, last;
};

struct AttentionKernels {
  // Rows [row_begin, row_end) of the query heads that read kv head `head_kv`. Single-threaded. `scratch`:
  // attention_scratch_floats floats owned by the calling thread, 64-byte aligned. A row that sees no slot at
  // all gets zeros.
  void (*attend)(const AttentionArgs& args, int row_begin, int row_end, int head_kv, float* scratch) noexcept;
  // A long context is cut into spans of positions, which several threads can take. One span, unfinished:
  // `partial` gets a SpanState (attention_tiles.h).
  void (*attend_span)(const AttentionArgs& args, int row_begin, int row_end, int head_kv, int span,
                      float* scratch, float* partial) noexcept;
  // Adds spans in order to `merged` (as large as one of them), and writes the output after the last one.
  void (*merge_spans)(const AttentionArgs& args, int row_begin, int row_end, int head_kv, SpanRange spans,
                      float* partials, float* merged) noexcept;
  void (*kv_append)(const KvAppendArgs& args) noexcept;
};
const AttentionKernels& attention_kernels(Isa isa);
// Per thread: working tiles, and this thread's share of the partial results of a split context.
size_t attention_scratch_floats(int n_head, int n_head_kv, int head_dim);

// All rows and heads on all threads. `scratch` has attention_scratch_floats for each thread of the pool.
// Tasks are (tile of rows, kv head); when those are fewer than the threads and the context is long, they are
// split into their spans, so one decoded row still uses every thread.
void attention_cpu(const AttentionArgs& args, const AttentionKernels& kernels, ThreadPool& pool,
                   float* scratch) noexcept;

// The same for several sequences, in one parallel region where they are tasks enough.
void attention_cpu(std::span<const AttentionArgs> sequences, const AttentionKernels& kernels,
                   ThreadPool& pool, float* scratch) noexcept;

void attention_ref(const AttentionArgs& args);  // double accumulation

}  // namespace thermo
