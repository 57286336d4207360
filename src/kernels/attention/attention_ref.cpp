#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {
namespace {

double element(KvType type, const std::byte* head, int i) {
  switch (type) {
    case KvType::F32: {
      float x;
      std::memcpy(&x, head + 4 * i, sizeof(x));
      return x;
    }
    case KvType::F16: {
      uint16_t bits;
      std::memcpy(&bits, head + 2 * i, sizeof(bits));
      return f16_to_f32(bits);
    }
    case KvType::Q8_0: {
      const std::byte* block = head + i / 32 * 34;
      uint16_t bits;
      int8_t q;
      std::memcpy(&bits, block, sizeof(bits));
      std::memcpy(&q, block + 2 + i % 32, sizeof(q));
      return static_cast<double>(f16_to_f32(bits)) * q;
    }
    case KvType::BF16: {
      uint16_t bits;
      std::memcpy(&bits, head + 2 * i, sizeof(bits));
      return bf16_to_f32(bits);
    }
    case KvType::Q4_0: {
      const std::byte* block = head + i / 32 * 18;
      uint16_t bits;
      std::memcpy(&bits, block, sizeof(bits));
      const int pair = std::to_integer<int>(block[2 + i % 16]);
      return static_cast<double>(f16_to_f32(bits)) * ((i % 32 < 16 ? pair & 15 : pair >> 4) - 8);
    }
  }
  return 0.0;
}

// Every slot that a row may see, [n_slots][n_head_kv][head_dim].
std::vector<double> decode(KvType type, const std::byte* cache, const AttentionArgs& args) {
  const size_t dim = static_cast<size_t>(args.head_dim), n_heads = static_cast<size_t>(args.n_head_kv);
  const size_t head_bytes = kv_head_bytes(type, args.head_dim);
  const int n_slots = args.n_past + args.n_rows;
  int first = 0;
  if (args.window > 0 && args.n_rows > 0)
    first = std::max(0, *std::min_element(args.positions, args.positions + args.n_rows) - args.window + 1);
  std::vector<double> out(static_cast<size_t>(n_slots) * n_heads * dim);
  for (int slot = first; slot < n_slots; ++slot) {
    const std::byte* const heads = cache + args.kv.pages[slot / kKvPage] * args.kv.page_bytes +
                                   static_cast<size_t>(slot % kKvPage) * n_heads * head_bytes;
    for (size_t h = 0; h < n_heads; ++h)
      for (int d = 0; d < args.head_dim; ++d)
        out[(static_cast<size_t>(slot) * n_heads + h) * dim + static_cast<size_t>(d)] =
            element(type, heads + h * head_bytes, d);
  }
  return out;
}

}  // namespace

void attention_ref(const AttentionArgs& args) {
  const std::vector<double> keys = decode(args.kv.k_type, args.kv.k, args);
  const std::vector<double> values = decode(args.kv.v_type, args.kv.v, args);
  const size_t dim = static_cast<size_t>(args.head_dim);
  const size_t n_head_kv = static_cast<size_t>(args.n_head_kv);
  std::vector<double> weights;
  std::vector<size_t> slots;
  for (int row = 0; row < args.n_rows; ++row) {
    for (int head = 0; head < args.n_head; ++head) {
      const size_t g = static_cast<size_t>(head / (args.n_head / args.n_head_kv));
      const size_t offset =
          (static_cast<size_t>(row) * static_cast<size_t>(args.n_head) + static_cast<size_t>(head)) * dim;
      const auto in_window = [&](int position) {
        return args.window <= 0 || position > args.positions[row] - args.window;
      };
      slots.clear();
      for (int c = 0; c < args.n_past; ++c)
        if (in_window(c)) slots.push_back(static_cast<size_t>(c));
      for (int j = 0; j < args.n_rows; ++j)
        if ((args.both_ways || args.ancestors.sees(row, j)) && in_window(args.positions[j]))
          slots.push_back(static_cast<size_t>(args.n_past + j));

      weights.clear();
      double top = -HUGE_VAL;
      for (size_t slot : slots) {
        const double* k = keys.data() + (slot * n_head_kv + g) * dim;
        double score = 0.0;
        for (size_t d = 0; d < dim; ++d) score += double{args.q[offset + d]} * k[d];
        weights.push_back(score * double{args.scale});
        top = std::max(top, weights.back());
      }
      double total = 0.0;
      for (double& w : weights) total += w = std::exp(w - top);
      std::vector<double> sums(dim);
      for (size_t s = 0; s < slots.size(); ++s)
        for (size_t d = 0; d < dim; ++d) sums[d] += weights[s] * values[(slots[s] * n_head_kv + g) * dim + d];
      for (size_t d = 0; d < dim; ++d)
        args.out[offset + d] = slots.empty() ? 0.0f : static_cast<float>(sums[d] / total);
    }
  }
}

}  // namespace thermo
