#include "experts/forecast.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/thread_pool.h"
#include "kernels/dequantize/dequantize.h"

namespace thermo {
namespace {

constexpr int kMaxChosen = 64;

// Q4_K reads the same form of a row as most experts do. If rows do not consist of its blocks, a format with
// smaller blocks.
DType type_for(int n_cols) {
  return n_cols % 256 == 0 ? DType::Q4_K : DType::Q8_0;
}

bool same_shape(const RouterView& a, const RouterView& b) {
  return a.router.n_cols == b.router.n_cols && a.router.n_rows == b.router.n_rows;
}

// `to`: as it will be read after the norm of `before`.
void fold_and_pack(const RouterView& before, const RouterView& to, std::byte* panels) {
  const int n_cols = to.router.n_cols, n_rows = to.router.n_rows;
  const uint64_t from_bytes = row_bytes(to.router.dtype, static_cast<uint64_t>(n_cols));
  const DType type = type_for(n_cols);
  const uint64_t to_bytes = row_bytes(type, static_cast<uint64_t>(n_cols));
  std::vector<float> row(static_cast<size_t>(n_cols));
  std::vector<std::byte> rows(static_cast<size_t>(n_rows) * to_bytes);
  for (int r = 0; r < n_rows; ++r) {
    dequantize_row(to.router.dtype, to.router.rows + static_cast<uint64_t>(r) * from_bytes, n_cols,
                   row.data());
    for (size_t c = 0; c < row.size(); ++c) {
      const float quotient = to.norm[c] / before.norm[c];
      row[c] *= std::isfinite(quotient) ? quotient : 0.0f;  // a column that `before` zeroes says nothing
    }
    quantize_row(type, row.data(), n_cols, rows.data() + static_cast<uint64_t>(r) * to_bytes);
  }
  for (int p = 0; p < n_panels(n_rows); ++p)
    pack_panel(type, rows.data(), n_rows, n_cols, p,
               panels + static_cast<size_t>(p) * panel_bytes(type, n_cols));
}

}  // namespace

ExpertForecast::ExpertForecast(const RouteConfig& config, std::span<const RouterView> layers, int distance,
                               Isa isa, ThreadPool& pool)
    : config_(config), distance_(distance), kernels_(quant_matmul_kernels(isa)), layers_(layers.size()) {
  const auto before_of = [&](size_t l) -> const RouterView& {
    return layers[l - static_cast<size_t>(distance)];
  };
  // Only the order matters.
  config_.normalize = false;
  if (config_.gating == Gating::Softmax) config_.gating = Gating::SoftmaxSelected;
  std::vector<int> guessed;
  for (size_t l = static_cast<size_t>(distance); l < layers.size(); ++l) {
    const RouterView &before = before_of(l), &to = layers[l];
    if (to.router.rows == nullptr || before.router.empty() || !same_shape(before, to)) continue;
    if (to.router.n_cols % 32 == 0) guessed.push_back(static_cast<int>(l));
  }
  if (guessed.empty()) return;
  const Matrix& first = layers[static_cast<size_t>(guessed.front())].router;
  THERMO_CHECK(first.n_rows == config.n_expert, "a router of another size");
  const DType type = type_for(first.n_cols);
  const size_t bytes = packed_matrix_bytes(type, first.n_rows, first.n_cols);
  memory_ = HostBuffer(bytes * guessed.size());
  pool.run(static_cast<int>(guessed.size()), [&](int i, int) {
    const auto l = static_cast<size_t>(guessed[static_cast<size_t>(i)]);
    std::byte* const panels = memory_.data() + static_cast<size_t>(i) * bytes;
    fold_and_pack(before_of(l), layers[l], panels);
    layers_[l].router = {.dtype = type, .n_rows = first.n_rows, .n_cols = first.n_cols, .panels = panels};
    layers_[l].bias = layers[l].bias;
  });
}

uint64_t ExpertForecast::planned_bytes(const ExpertCatalog& catalog) {
  if (catalog.n_embd % 32 != 0) return 0;
  return static_cast<uint64_t>(catalog.n_moe_layers()) *
         packed_matrix_bytes(type_for(catalog.n_embd), catalog.n_expert, catalog.n_embd);
}

void ExpertForecast::add_format(ActFormats& formats) const {
  for (const Layer& layer : layers_) formats.add(layer.router);
}

void ExpertForecast::score(int layer, const ActBuffer& x, int row, int panel, float* scores) const noexcept {
  multiply_tile(layers_[static_cast<size_t>(layer)].router, panel, 1, {.x = &x, .first = row, .n = 1},
                scores + panel * kPanelRows, kPanelRows, nullptr, kernels_);
}

std::span<const std::byte> ExpertForecast::weights(int layer, int begin, int end) const noexcept {
  const Matrix& router = layers_[static_cast<size_t>(layer)].router;
  const size_t bytes = panel_bytes(router.dtype, router.n_cols);
  return {router.panels + static_cast<size_t>(begin) * bytes, static_cast<size_t>(end - begin) * bytes};
}

void ExpertForecast::choose(int layer, float* scores, std::span<int32_t> ids) const noexcept {
  RouteConfig route = config_;
  route.n_expert_used = std::min({static_cast<int>(ids.size()), config_.n_expert, kMaxChosen});
  float weights[kMaxChosen];
  const std::span<const float> bias = layers_[static_cast<size_t>(layer)].bias;
  route_topk(route, scores, bias.empty() ? nullptr : bias.data(), ids.data(), weights);
}

}  // namespace thermo
