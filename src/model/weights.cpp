#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <string_view>

#include "base/error.h"
#include "base/host_buffer.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "gguf/gguf_file.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/quant_matmul/pack.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {

struct Weights::Storage {
  HostBuffer panels;
};

Weights::Weights() = default;
Weights::~Weights() = default;
Weights::Weights(Weights&&) noexcept = default;
Weights& Weights::operator=(Weights&&) noexcept = default;

namespace {

// Finds tensors by name, checks their shapes, and remembers which ones were asked for.
class Binder {
 public:
  explicit Binder(const GgufFile& file) : file_(file) {}

  Matrix matrix(const TensorSpec& spec) {
    return slice(checked(spec.name, spec.shape), spec.shape[0], spec.shape[1], 0);
  }

  // This tensor's matrix of each expert.
  void experts(const TensorSpec& spec, std::vector<Ffn>& ffns) {
    const GgufTensor& tensor = checked(spec.name, spec.shape);
    ffns.resize(static_cast<size_t>(spec.n_parts > 0 ? spec.n_parts : spec.shape[2]));
    for (size_t e = 0; e < ffns.size(); ++e) {
      Matrix& matrix = spec.role == Role::ExpertGate ? ffns[e].gate
                       : spec.role == Role::ExpertUp ? ffns[e].up
                                                     : ffns[e].down;
      if (spec.n_parts > 0 && spec.role == Role::ExpertDown)
        matrix = some_columns(tensor, spec, e);
      else if (spec.n_parts > 0)
        matrix = slice(tensor, spec.shape[0], spec.n_rows, e * static_cast<uint64_t>(spec.n_rows));
      else
        matrix = slice(tensor, spec.shape[0], spec.n_rows,
                       e * static_cast<uint64_t>(spec.shape[1]) + static_cast<uint64_t>(spec.row_begin));
    }
  }

  std::vector<float> vector(const std::string& name, std::span<const int> shape) {
    const GgufTensor& tensor = checked(name, shape);
    std::vector<float> values(tensor.n_elements());
    dequantize_row(tensor.dtype, tensor.data, static_cast<int64_t>(values.size()), values.data());
    return values;
  }

  const GgufTensor& checked(const std::string& name, std::span<const int> shape) {
    const GgufTensor& tensor = file_.require_tensor(name);
    std::array<uint64_t, 4> expected{1, 1, 1, 1};
    std::copy(shape.begin(), shape.end(), expected.begin());  // trailing ones do not count
    if (tensor.dims != expected)
      throw LoadError(fmt::format("{}: {}: shape {}, expected [{}]; was this file made for another revision?",
                                  file_.path(), name, describe_shape(tensor), fmt::join(shape, ", ")));
    if (!dtype_info(tensor.dtype).is_weight)
      throw LoadError(fmt::format("{}: {} has type {}, which is not a weight type", file_.path(), name,
                                  dtype_name(tensor.dtype)));
    used_.insert(tensor.name);
    return tensor;
  }

  // Tensors that no part of the model asked for: ignored, or refused where they would change the result.
  void check_unused(int n_blocks) const {
    size_t n_unused = 0;
    std::string_view example;
    for (const GgufTensor& tensor : file_.tensors()) {
      if (used_.count(tensor.name)) continue;
      if (tensor.name.ends_with(".scale"))
        throw LoadError(fmt::format(
            "{}: {} scales its weight (an NVFP4 conversion), which is not supported; use a Q4_K_M file",
            file_.path(), escape_text(tensor.name)));
      if (tensor.name.starts_with("blk.")) {
        int block = -1;
        const std::string_view rest = tensor.name.substr(4);
        std::from_chars(rest.data(), rest.data() + rest.size(), block);
        if (block < 0 || block >= n_blocks)
          throw LoadError(fmt::format("{}: tensor {} names a block outside 0..{}; is block_count right?",
                                      file_.path(), escape_text(tensor.name), n_blocks - 1));
      }
      ++n_unused;
      example = tensor.name;
    }
    if (n_unused > 0)
      log_info("model", "{} tensors are not used by this architecture, e.g. {}", n_unused,
               escape_text(example));
  }

 private:
  Matrix slice(const GgufTensor& tensor, int n_cols, int n_rows, uint64_t first_row) {
    return {.dtype = tensor.dtype,
            .n_rows = n_rows,
            .n_cols = n_cols,
            .panels = nullptr,
            .rows = tensor.data + first_row * row_bytes(tensor.dtype, static_cast<uint64_t>(n_cols))};
  }
  // Part `e` of a matrix that is cut by inputs.
  Matrix some_columns(const GgufTensor& tensor, const TensorSpec& spec, size_t e) {
    Matrix matrix = slice(tensor, spec.shape[0], spec.shape[1], 0);
    matrix.row_stride = row_bytes(tensor.dtype, static_cast<uint64_t>(matrix.n_cols));
    matrix.n_cols /= spec.n_parts;
    matrix.rows += e * row_bytes(tensor.dtype, static_cast<uint64_t>(matrix.n_cols));
    return matrix;
  }

  const GgufFile& file_;
  std::set<std::string_view> used_;
};

BlockWeights bind_block(Binder& bind, const Block& block) {
  BlockWeights w;
  for (const TensorSpec& spec : block.tensors) {
    if (spec.of_target) continue;
    switch (spec.form) {
      case TensorForm::Matrix:
      case TensorForm::Lookup:
        w[spec.role] = bind.matrix(spec);
        break;
      case TensorForm::Vector:
        w.vectors[static_cast<size_t>(spec.role)] = bind.vector(spec.name, spec.shape);
        break;
      case TensorForm::Experts:
        bind.experts(spec, w.experts);
        break;
    }
  }
  return w;
}

std::vector<BlockWeights> bind_blocks(Binder& bind, const std::vector<Block>& blocks) {
  std::vector<BlockWeights> all;
  for (const Block& block : blocks) all.push_back(bind_block(bind, block));
  return all;
}

// Calls visit(Matrix&) for every matrix that is multiplied, in the order a step reads them. The matrices of
// one expert are neighbours, so an expert is one run of memory. The routed experts of the main stack can be
// left out. Those that a drafter borrows of its target are visited once it has them.
template <class WeightsT, class Visit>
void for_each_matrix(const ModelConfig& c, WeightsT& w, bool with_experts, const Visit& visit) {
  const auto visit_block = [&](const Block& block, auto& weights, bool experts) {
    for (const TensorSpec& spec : block.tensors)
      if (spec.form == TensorForm::Matrix && !weights[spec.role].empty()) visit(weights[spec.role]);
    if (!experts) return;
    for (auto& expert : weights.experts) {
      visit(expert.gate);
      visit(expert.up);
      visit(expert.down);
    }
  };
  for (size_t l = 0; l < w.layers.size(); ++l)
    for (size_t b = 0; b < w.layers[l].blocks.size(); ++b)
      visit_block(c.network.layers[l].blocks[b], w.layers[l].blocks[b],
                  with_experts || l >= static_cast<size_t>(c.n_layer));
  for (size_t b = 0; b < w.output.size(); ++b) visit_block(c.network.output[b], w.output[b], true);
  for (size_t b = 0; b < w.features.size(); ++b) visit_block(c.network.features[b], w.features[b], true);
}

// The same without repetitions: a next-token block may have the trunk's head.
template <class WeightsT, class Visit>
void for_each_own_matrix(const ModelConfig& c, WeightsT& w, bool with_experts, const Visit& visit) {
  std::set<const std::byte*> seen;
  for_each_matrix(c, w, with_experts, [&](auto& m) {
    if (seen.insert(m.rows).second) visit(m);
  });
}

uint64_t packed_bytes_of(const Matrix& m) {
  return packed_matrix_bytes(m.dtype, m.n_rows, m.n_cols);
}

uint64_t block_bytes_per_token(const Block& block, const BlockWeights& w) {
  uint64_t bytes = 0;
  for (const TensorSpec& spec : block.tensors) switch (spec.form) {
      case TensorForm::Matrix:
        bytes += w[spec.role].n_bytes();
        break;
      case TensorForm::Lookup:
        bytes += row_bytes(w[spec.role].dtype, static_cast<uint64_t>(w[spec.role].n_cols));
        break;
      case TensorForm::Vector:
        bytes += w.vector(spec.role).size() * sizeof(float);
        break;
      case TensorForm::Experts:
        break;
    }
  if (!w.experts.empty())
    bytes += static_cast<uint64_t>(block.route.n_expert_used) * w.experts.front().n_bytes();
  return bytes;
}

void bind_all(Weights& w, const ModelConfig& c, const GgufFile& file) {
  Binder bind(file);
  w.input = bind_blocks(bind, c.network.input);
  for (const Layer& layer : c.network.layers) w.layers.push_back({bind_blocks(bind, layer.blocks)});
  w.output = bind_blocks(bind, c.network.output);
  w.features = bind_blocks(bind, c.network.features);
  bind.check_unused(static_cast<int>(c.network.layers.size()));
  for (const GgufTensor& tensor : file.tensors()) w.n_params += tensor.n_elements();
  const auto count = [&](const Block& block, const BlockWeights& weights) {
    w.bytes_per_token += block_bytes_per_token(block, weights);
  };
  for (size_t b = 0; b < w.input.size(); ++b) count(c.network.input[b], w.input[b]);
  for_each_main_block(c, w, count);
  for (size_t b = 0; b < w.output.size(); ++b) count(c.network.output[b], w.output[b]);
}

// Panels of one matrix that one task packs.
struct PackTask {
  const Matrix* matrix;
  std::byte* out;
  int panel_begin, panel_end;
};

void pack_all(const ModelConfig& c, Weights& w, bool with_experts, std::byte* out, const GgufFile& file,
              ThreadPool& pool, const LoadProgressFn& progress) {
  constexpr uint64_t kTaskBytes = 512 * KiB;
  constexpr uint64_t kRoundBytes = 256 * MiB;  // between looks at the progress bar
  const uint64_t total = w.packed_bytes;
  uint64_t done = 0, round_bytes = 0;
  std::vector<PackTask> tasks;
  const auto flush = [&] {
    pool.run(static_cast<int>(tasks.size()), [&](int t, int) {
      const PackTask& task = tasks[static_cast<size_t>(t)];
      const Matrix& m = *task.matrix;
      const size_t bytes = panel_bytes(m.dtype, m.n_cols);
      for (int p = task.panel_begin; p < task.panel_end; ++p)
        pack_panel(m.dtype, m.rows, m.row_stride, m.n_rows, m.n_cols, p,
                   task.out + static_cast<size_t>(p) * bytes);
    });
    done += round_bytes;
    round_bytes = 0;
    tasks.clear();
    if (progress) progress({"repack", done, total});
  };
  if (progress) progress({"repack", 0, total});
  std::map<const std::byte*, const std::byte*> panels_of;
  for_each_matrix(c, w, with_experts, [&](Matrix& m) {
    const auto [panels, is_new] = panels_of.emplace(m.rows, out);
    m.panels = panels->second;
    if (!is_new) return;
    const size_t bytes = panel_bytes(m.dtype, m.n_cols);
    const int step = static_cast<int>(std::max<uint64_t>(1, kTaskBytes / bytes));
    const int count = n_panels(m.n_rows);
    for (int p = 0; p < count; p += step) tasks.push_back({&m, out, p, std::min(p + step, count)});
    out += packed_bytes_of(m);
    round_bytes += packed_bytes_of(m);
    if (round_bytes >= kRoundBytes) flush();
  });
  flush();
  // The file's pages were read once and are not needed again (but for the embedding, which is re-read by
  // row).
  for (int part = 0; part < file.n_parts(); ++part)
    if (const MappedFile* mapping = file.part(part)) mapping->release(0, mapping->bytes().size());
}

}  // namespace

Weights Weights::bind(const ModelConfig& config, const GgufFile& file) {
  Weights w;
  bind_all(w, config, file);
  return w;
}

Weights Weights::of_nextn(const ModelConfig& config, const Weights& target) {
  // As add_nextn() put them: the input, what the layer has, the head.
  const std::vector<BlockWeights>& blocks = target.layers.back().blocks;
  Weights w;
  w.input = {blocks.front()};
  w.layers = {{{blocks.begin() + 1, blocks.end() - 1}}};
  w.output = {blocks.back()};
  w.output.resize(config.network.output.size());  // a tap has no weights
  w.packed_bytes = target.packed_bytes;
  return w;
}

Weights Weights::of_drafter(const ModelConfig& config, const GgufFile& file, const Weights& target,
                            bool repack, ThreadPool& pool) {
  Weights w = load(config, file, repack, pool, {});
  Matrix& embedding = w.input.front()[Role::Embedding];
  if (embedding.empty()) embedding = target.input.front()[Role::Embedding];
  Matrix& head = w.output.front()[Role::Output];
  if (head.empty()) head = target.output.front()[Role::Output];
  return w;
}

uint64_t Weights::planned_packed_bytes(const ModelConfig& config, const GgufFile& file, bool pack_experts) {
  const Weights w = bind(config, file);
  uint64_t bytes = 0;
  for_each_own_matrix(config, w, pack_experts, [&](const Matrix& m) { bytes += packed_bytes_of(m); });
  return bytes;
}

std::vector<Matrix> Weights::packed_matrices(const ModelConfig& config) const {
  std::vector<Matrix> matrices;
  for_each_own_matrix(config, *this, true, [&](const Matrix& m) {
    if (m.panels) matrices.push_back(m);
  });
  return matrices;
}

size_t Weights::max_unpacked_panel_bytes(const ModelConfig& config) const {
  size_t most = 0;
  for_each_matrix(config, *this, packed_bytes == 0, [&](const Matrix& m) {
    if (!m.panels) most = std::max(most, panel_bytes(m.dtype, m.n_cols));
  });
  return most;
}

Weights Weights::load(const ModelConfig& config, const GgufFile& file, bool repack, ThreadPool& pool,
                      const LoadProgressFn& progress, bool pack_experts) {
  Weights w = bind(config, file);
  if (!repack) return w;
  for_each_own_matrix(config, w, pack_experts,
                      [&](const Matrix& m) { w.packed_bytes += packed_bytes_of(m); });
  w.storage_ = std::make_unique<Storage>();
  w.storage_->panels = HostBuffer(w.packed_bytes);
  for (int part = 0; part < file.n_parts(); ++part)
    if (const MappedFile* mapping = file.part(part)) mapping->advise_sequential();
  pack_all(config, w, pack_experts, w.storage_->panels.data(), file, pool, progress);
  return w;
}

std::vector<RouterView> router_views(const ModelConfig& config, const Weights& weights) {
  if (!config.is_moe()) return {};
  std::vector<RouterView> views(static_cast<size_t>(config.n_layer));
  for (size_t l = 0; l < views.size(); ++l)
    for (const BlockWeights& w : weights.layers[l].blocks)
      if (!w.experts.empty())
        views[l] = {
            .router = w[Role::Router], .bias = w.vector(Role::RouterBias), .norm = w.vector(Role::Norm)};
  return views;
}

ExpertCatalog expert_catalog(const ModelConfig& config, const Weights& weights) {
  std::vector<std::vector<Ffn>> layers(static_cast<size_t>(config.n_layer));
  for (size_t l = 0; l < layers.size(); ++l)
    for (const BlockWeights& w : weights.layers[l].blocks)
      if (!w.experts.empty()) layers[l] = w.experts;
  return ExpertCatalog::of(std::move(layers), config.route.n_expert_used, config.n_embd);
}

}  // namespace thermo
