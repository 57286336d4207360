#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <string_view>

#include "base/error.h"
#include "base/host_buffer.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "gguf/gguf_file.h"
#include "kernels/dequantize/dequantize.h"
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

  bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }

  Matrix matrix(const std::string& name, int n_cols, int n_rows) {
    return slice(checked(name, {n_cols, n_rows}), n_cols, n_rows, 0);
  }

  // Rows [row_begin, row_begin + n_rows) of expert e of a tensor [n_cols, all_rows, n_expert].
  Matrix expert(const GgufTensor& tensor, int n_cols, int all_rows, int row_begin, int n_rows, int e) {
    return slice(
        tensor, n_cols, n_rows,
        static_cast<uint64_t>(e) * static_cast<uint64_t>(all_rows) + static_cast<uint64_t>(row_begin));
  }

  std::vector<float> vector(const std::string& name, std::initializer_list<int> shape) {
    const GgufTensor& tensor = checked(name, shape);
    std::vector<float> values(tensor.n_elements());
    dequantize_row(tensor.dtype, tensor.data, static_cast<int64_t>(values.size()), values.data());
    return values;
  }

  const GgufTensor& checked(const std::string& name, std::initializer_list<int> shape) {
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
            file_.path(), tensor.name));
      if (tensor.name.starts_with("blk.")) {
        int block = -1;
        const std::string_view rest = tensor.name.substr(4);
        std::from_chars(rest.data(), rest.data() + rest.size(), block);
        if (block < 0 || block >= n_blocks)
          throw LoadError(fmt::format("{}: tensor {} names a block outside 0..{}; is block_count right?",
                                      file_.path(), tensor.name, n_blocks - 1));
      }
      ++n_unused;
      example = tensor.name;
    }
    if (n_unused > 0)
      log_info("model", "{} tensors are not used by this architecture, e.g. {}", n_unused, example);
  }

 private:
  Matrix slice(const GgufTensor& tensor, int n_cols, int n_rows, uint64_t first_row) {
    return {.dtype = tensor.dtype,
            .n_rows = n_rows,
            .n_cols = n_cols,
            .panels = nullptr,
            .rows = tensor.data + first_row * row_bytes(tensor.dtype, static_cast<uint64_t>(n_cols))};
  }

  const GgufFile& file_;
  std::set<std::string_view> used_;
};

AttentionWeights bind_attention(Binder& bind, const ModelConfig& c, const std::string& blk, int n_head) {
  const int q_dim = n_head * c.head_dim;
  const bool gate_in_q = c.attn_gate == AttnGate::SigmoidElement;
  AttentionWeights w;
  w.q = bind.matrix(blk + "attn_q.weight", c.n_embd, gate_in_q ? 2 * q_dim : q_dim);
  w.k = bind.matrix(blk + "attn_k.weight", c.n_embd, c.n_kv_dim());
  w.v = bind.matrix(blk + "attn_v.weight", c.n_embd, c.n_kv_dim());
  w.output = bind.matrix(blk + "attn_output.weight", q_dim, c.n_embd);
  w.q_norm = bind.vector(blk + "attn_q_norm.weight", {c.head_dim});
  w.k_norm = bind.vector(blk + "attn_k_norm.weight", {c.head_dim});
  if (!gate_in_q)
    w.gate = bind.matrix(blk + "attn_gate.weight", c.n_embd,
                         c.attn_gate == AttnGate::SoftplusHead ? n_head : q_dim);
  return w;
}

DeltaNetWeights bind_delta_net(Binder& bind, const ModelConfig& c, const std::string& blk) {
  DeltaNetWeights w;
  w.qkv = bind.matrix(blk + "attn_qkv.weight", c.n_embd, c.ssm_channels());
  w.z = bind.matrix(blk + "attn_gate.weight", c.n_embd, c.ssm_inner());
  w.alpha = bind.matrix(blk + "ssm_alpha.weight", c.n_embd, c.ssm_n_head_v);
  w.beta = bind.matrix(blk + "ssm_beta.weight", c.n_embd, c.ssm_n_head_v);
  w.output = bind.matrix(blk + "ssm_out.weight", c.ssm_inner(), c.n_embd);
  w.conv = bind.vector(blk + "ssm_conv1d.weight", {c.ssm_taps, c.ssm_channels()});
  w.a = bind.vector(blk + "ssm_a", {c.ssm_n_head_v});
  w.dt_bias = bind.vector(blk + "ssm_dt.bias", {c.ssm_n_head_v});
  w.norm = bind.vector(blk + "ssm_norm.weight", {c.ssm_dim});
  return w;
}

Ffn bind_ffn(Binder& bind, const ModelConfig& c, const std::string& blk, const char* suffix, int n_ff) {
  return {.gate = bind.matrix(fmt::format("{}ffn_gate{}.weight", blk, suffix), c.n_embd, n_ff),
          .up = bind.matrix(fmt::format("{}ffn_up{}.weight", blk, suffix), c.n_embd, n_ff),
          .down = bind.matrix(fmt::format("{}ffn_down{}.weight", blk, suffix), n_ff, c.n_embd)};
}

MoeWeights bind_moe(Binder& bind, const ModelConfig& c, const std::string& blk) {
  const int n_expert = c.route.n_expert;
  const int n_ff = c.n_ff_expert;
  MoeWeights w;
  w.router = bind.matrix(blk + "ffn_gate_inp.weight", c.n_embd, n_expert);
  if (c.arch == Arch::Laguna) w.router_bias = bind.vector(blk + "exp_probs_b.bias", {n_expert});

  const std::string fused = blk + "ffn_gate_up_exps.weight";
  const bool is_fused = bind.has(fused);  // rows 0..n_ff-1 gate, the rest up
  const int in_rows = is_fused ? 2 * n_ff : n_ff;
  const GgufTensor& gate =
      bind.checked(is_fused ? fused : blk + "ffn_gate_exps.weight", {c.n_embd, in_rows, n_expert});
  const GgufTensor& up =
      is_fused ? gate : bind.checked(blk + "ffn_up_exps.weight", {c.n_embd, n_ff, n_expert});
  const GgufTensor& down = bind.checked(blk + "ffn_down_exps.weight", {n_ff, c.n_embd, n_expert});
  w.experts.resize(static_cast<size_t>(n_expert));
  for (int e = 0; e < n_expert; ++e) {
    Ffn& expert = w.experts[static_cast<size_t>(e)];
    expert.gate = bind.expert(gate, c.n_embd, in_rows, 0, n_ff, e);
    expert.up = bind.expert(up, c.n_embd, in_rows, is_fused ? n_ff : 0, n_ff, e);
    expert.down = bind.expert(down, n_ff, c.n_embd, 0, c.n_embd, e);
  }

  if (c.n_ff_shared > 0) w.shared = bind_ffn(bind, c, blk, "_shexp", c.n_ff_shared);
  if (c.shared_gate) w.shared_gate = bind.vector(blk + "ffn_gate_inp_shexp.weight", {c.n_embd});
  return w;
}

LayerWeights bind_layer(Binder& bind, const ModelConfig& c, int il) {
  const LayerConfig& layer = c.layers[static_cast<size_t>(il)];
  const std::string blk = fmt::format("blk.{}.", il);
  LayerWeights w;
  w.attn_norm = bind.vector(blk + "attn_norm.weight", {c.n_embd});
  // The norm before the FFN has two names.
  w.ffn_norm = bind.vector(blk + (c.arch == Arch::Laguna ? "ffn_norm.weight" : "post_attention_norm.weight"),
                           {c.n_embd});
  if (layer.recurrent)
    w.delta_net = bind_delta_net(bind, c, blk);
  else
    w.attention = bind_attention(bind, c, blk, layer.n_head);
  if (layer.moe)
    w.moe = bind_moe(bind, c, blk);
  else
    w.ffn = bind_ffn(bind, c, blk, "", c.n_ff);
  return w;
}

// Calls visit(Matrix&) for every matrix that is multiplied, in the order a step reads them. The matrices of
// one expert are neighbours, so an expert is one run of memory. The routed experts of the main stack can be
// left out.
template <class WeightsT, class Visit>
void for_each_matrix(WeightsT& w, bool with_experts, const Visit& visit) {
  const size_t n_main = w.layers.size() - (w.nextn ? 1 : 0);
  const auto visit_ffn = [&](auto& ffn) {
    visit(ffn.gate);
    visit(ffn.up);
    visit(ffn.down);
  };
  for (size_t l = 0; l < w.layers.size(); ++l) {
    auto& layer = w.layers[l];
    if (layer.attention) {
      visit(layer.attention->q);
      visit(layer.attention->k);
      visit(layer.attention->v);
      visit(layer.attention->gate);
      visit(layer.attention->output);
    }
    if (layer.delta_net) {
      visit(layer.delta_net->qkv);
      visit(layer.delta_net->z);
      visit(layer.delta_net->alpha);
      visit(layer.delta_net->beta);
      visit(layer.delta_net->output);
    }
    if (layer.ffn) visit_ffn(*layer.ffn);
    if (layer.moe) {
      visit(layer.moe->router);
      visit_ffn(layer.moe->shared);
      if (with_experts || l >= n_main)
        for (auto& expert : layer.moe->experts) visit_ffn(expert);
    }
  }
  if (w.nextn) {
    visit(w.nextn->eh_proj);
    if (w.nextn->output.rows != w.output.rows) visit(w.nextn->output);
  }
  visit(w.output);
}

uint64_t packed_bytes_of(const Matrix& m) {
  return m.empty() ? 0 : packed_matrix_bytes(m.dtype, m.n_rows, m.n_cols);
}

uint64_t count_bytes_per_token(const ModelConfig& c, const Weights& w) {
  uint64_t bytes = w.output.n_bytes() + row_bytes(w.token_embd.dtype, static_cast<uint64_t>(c.n_embd));
  for (int il = 0; il < c.n_layer; ++il) {
    const LayerWeights& layer = w.layers[static_cast<size_t>(il)];
    if (layer.attention) {
      const AttentionWeights& a = *layer.attention;
      bytes += a.q.n_bytes() + a.k.n_bytes() + a.v.n_bytes() + a.output.n_bytes();
      if (!a.gate.empty()) bytes += a.gate.n_bytes();
    }
    if (layer.delta_net) {
      const DeltaNetWeights& d = *layer.delta_net;
      bytes += d.qkv.n_bytes() + d.z.n_bytes() + d.alpha.n_bytes() + d.beta.n_bytes() + d.output.n_bytes() +
               d.conv.size() * sizeof(float);
    }
    if (layer.ffn) bytes += layer.ffn->n_bytes();
    if (layer.moe) {
      bytes += layer.moe->router.n_bytes() +
               static_cast<uint64_t>(c.route.n_expert_used) * layer.moe->experts[0].n_bytes();
      if (!layer.moe->shared.empty())
        bytes += layer.moe->shared.n_bytes() + layer.moe->shared_gate.size() * sizeof(float);
    }
    bytes += (layer.attn_norm.size() + layer.ffn_norm.size()) * sizeof(float);
  }
  return bytes;
}

void bind_all(Weights& w, const ModelConfig& c, const GgufFile& file) {
  Binder bind(file);
  w.token_embd = bind.matrix("token_embd.weight", c.n_embd, c.n_vocab);
  w.output_norm = bind.vector("output_norm.weight", {c.n_embd});
  w.output = bind.has("output.weight") ? bind.matrix("output.weight", c.n_embd, c.n_vocab) : w.token_embd;
  for (int il = 0; il < static_cast<int>(c.layers.size()); ++il) w.layers.push_back(bind_layer(bind, c, il));
  if (c.n_nextn > 0) {
    const std::string blk = fmt::format("blk.{}.nextn.", c.n_layer);
    NextnWeights n;
    n.eh_proj = bind.matrix(blk + "eh_proj.weight", 2 * c.n_embd, c.n_embd);
    n.embd_norm = bind.vector(blk + "enorm.weight", {c.n_embd});
    n.hidden_norm = bind.vector(blk + "hnorm.weight", {c.n_embd});
    n.head_norm = bind.has(blk + "shared_head_norm.weight")
                      ? bind.vector(blk + "shared_head_norm.weight", {c.n_embd})
                      : w.output_norm;
    n.token_embd = bind.has(blk + "embed_tokens.weight")
                       ? bind.matrix(blk + "embed_tokens.weight", c.n_embd, c.n_vocab)
                       : w.token_embd;
    n.output = bind.has(blk + "shared_head_head.weight")
                   ? bind.matrix(blk + "shared_head_head.weight", c.n_embd, c.n_vocab)
                   : w.output;
    w.nextn = std::move(n);
  }
  bind.check_unused(static_cast<int>(c.layers.size()));
  for (const GgufTensor& tensor : file.tensors()) w.n_params += tensor.n_elements();
  w.bytes_per_token = count_bytes_per_token(c, w);
}

// Panels of one matrix that one task packs.
struct PackTask {
  const Matrix* matrix;
  std::byte* out;
  int panel_begin, panel_end;
};

void pack_all(Weights& w, bool with_experts, std::byte* out, const GgufFile& file, ThreadPool& pool,
              const LoadProgressFn& progress) {
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
        pack_panel(m.dtype, m.rows, m.n_rows, m.n_cols, p, task.out + static_cast<size_t>(p) * bytes);
    });
    done += round_bytes;
    round_bytes = 0;
    tasks.clear();
    if (progress) progress({"repack", done, total});
  };
  if (progress) progress({"repack", 0, total});
  for_each_matrix(w, with_experts, [&](Matrix& m) {
    if (m.empty()) return;
    const size_t bytes = panel_bytes(m.dtype, m.n_cols);
    const int step = static_cast<int>(std::max<uint64_t>(1, kTaskBytes / bytes));
    const int count = n_panels(m.n_rows);
    for (int p = 0; p < count; p += step) tasks.push_back({&m, out, p, std::min(p + step, count)});
    m.panels = out;
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

uint64_t Weights::planned_packed_bytes(const ModelConfig& config, const GgufFile& file, bool pack_experts) {
  const Weights w = bind(config, file);
  uint64_t bytes = 0;
  for_each_matrix(w, pack_experts, [&](const Matrix& m) { bytes += packed_bytes_of(m); });
  return bytes;
}

size_t Weights::max_unpacked_panel_bytes() const {
  size_t most = 0;
  for_each_matrix(*this, packed_bytes == 0, [&](const Matrix& m) {
    if (!m.empty() && !m.panels) most = std::max(most, panel_bytes(m.dtype, m.n_cols));
  });
  return most;
}

Weights Weights::load(const ModelConfig& config, const GgufFile& file, bool repack, ThreadPool& pool,
                      const LoadProgressFn& progress, bool pack_experts) {
  Weights w = bind(config, file);
  if (!repack) return w;
  for_each_matrix(w, pack_experts, [&](const Matrix& m) { w.packed_bytes += packed_bytes_of(m); });
  w.storage_ = std::make_unique<Storage>();
  w.storage_->panels = HostBuffer(w.packed_bytes);
  for (int part = 0; part < file.n_parts(); ++part)
    if (const MappedFile* mapping = file.part(part)) mapping->advise_sequential();
  pack_all(w, pack_experts, w.storage_->panels.data(), file, pool, progress);
  if (w.nextn && w.nextn->output.rows == w.output.rows) w.nextn->output = w.output;
  return w;
}

std::vector<RouterView> router_views(const ModelConfig& config, const Weights& weights) {
  std::vector<RouterView> views;
  for (int il = 0; il < config.n_layer; ++il) {
    const LayerWeights& layer = weights.layers[static_cast<size_t>(il)];
    RouterView& view = views.emplace_back();
    if (!layer.moe) continue;
    view = {.router = layer.moe->router, .bias = layer.moe->router_bias, .norm = layer.ffn_norm};
  }
  return views;
}

ExpertCatalog expert_catalog(const ModelConfig& config, const Weights& weights) {
  std::vector<std::vector<Ffn>> layers;
  for (int il = 0; il < config.n_layer; ++il) {
    const auto& moe = weights.layers[static_cast<size_t>(il)].moe;
    layers.push_back(moe ? moe->experts : std::vector<Ffn>());
  }
  return ExpertCatalog::of(std::move(layers), config.route.n_expert_used, config.n_embd);
}

}  // namespace thermo
