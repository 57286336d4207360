#include "model/gpu/gpu_weights.h"

#include <algorithm>
#include <cstring>

#include "base/units.h"
#include "device/cuda_check.h"
#include "experts/catalog.h"
#include "kernels/quant_matmul/quant_matmul.h"
#include "model/gpu/gpu_experts.h"

namespace thermo {
namespace {

constexpr uint64_t kAlign = kExpertAlign;
constexpr size_t kStageBytes = 128 * MiB;

uint64_t bytes_of(const Matrix& m) {
  return m.empty() ? 0 : align_up<uint64_t>(packed_matrix_bytes(m.dtype, m.n_rows, m.n_cols), kAlign);
}

// Calls visit(matrix) in the order in which they lie in GPU memory. An expert's matrices are neighbours.
template <class Visit>
void for_each_gpu_matrix(const ModelConfig& c, const Weights& w, bool with_experts, const Visit& visit) {
  visit(w.token_embd);
  for (int il = 0; il < c.n_layer; ++il) {
    const LayerWeights& layer = w.layers[static_cast<size_t>(il)];
    if (layer.attention)
      for (const Matrix* m : {&layer.attention->q, &layer.attention->k, &layer.attention->v,
                              &layer.attention->gate, &layer.attention->output})
        visit(*m);
    if (layer.delta_net)
      for (const Matrix* m : {&layer.delta_net->qkv, &layer.delta_net->z, &layer.delta_net->alpha,
                              &layer.delta_net->beta, &layer.delta_net->output})
        visit(*m);
    const auto visit_ffn = [&](const Ffn& ffn) {
      visit(ffn.gate);
      visit(ffn.up);
      visit(ffn.down);
    };
    if (layer.ffn) visit_ffn(*layer.ffn);
    if (layer.moe) {
      visit(layer.moe->router);
      visit_ffn(layer.moe->shared);
      if (with_experts)
        for (const Ffn& expert : layer.moe->experts) visit_ffn(expert);
    }
  }
  if (w.output.rows != w.token_embd.rows) visit(w.output);
}

// Copies matrices one behind the other: panels are packed (or copied) into one staging buffer while the other
// one travels.
class Uploader {
 public:
  Uploader(std::byte* device, uint64_t total_bytes, ThreadPool& pool, const LoadProgressFn& progress)
      : device_(device), total_(total_bytes), pool_(pool), progress_(progress) {
    for (PinnedBuffer& stage : stages_) stage = PinnedBuffer(kStageBytes);
  }

  DeviceMatrix add(const Matrix& m) {
    if (m.empty()) return {};
    const size_t bytes = panel_bytes(m.dtype, m.n_cols);
    const DeviceMatrix plain{.panels = reinterpret_cast<const uint8_t*>(device_ + offset_),
                             .panel_bytes = bytes,
                             .dtype = m.dtype,
                             .n_rows = m.n_rows,
                             .n_cols = m.n_cols};
    const DeviceMatrix result = with_chunks(plain);
    const int count = n_panels(m.n_rows);
    const int step = static_cast<int>(std::max<size_t>(1, 256 * KiB / bytes));
    for (int p = 0; p < count;) {
      if (used_ + bytes > kStageBytes) flush();
      const int fit = static_cast<int>((kStageBytes - used_) / bytes);
      const int n = std::min({count - p, fit, step});
      tasks_.push_back({&m, p, p + n, used_});
      used_ += static_cast<size_t>(n) * bytes;
      p += n;
    }
    offset_ += bytes_of(m);
    // Keep the staging buffer in step with the padding between matrices.
    const size_t padding = offset_ - (flushed_ + used_);
    if (used_ + padding > kStageBytes) {
      flush();
      flushed_ = offset_;
    } else {
      used_ += padding;
    }
    return result;
  }

  void flush() {
    if (used_ == 0) return;
    const int which = turn_++ % 2;
    if (!events_[which].synchronize())
      throw CudaError(ExitCode::Device, "the GPU failed while weights were uploaded");
    std::byte* const stage = stages_[which].data();
    pool_.run(static_cast<int>(tasks_.size()), [&](int i, int) {
      const Task& task = tasks_[static_cast<size_t>(i)];
      const Matrix& m = *task.matrix;
      const size_t bytes = panel_bytes(m.dtype, m.n_cols);
      for (int p = task.panel_begin; p < task.panel_end; ++p) {
        std::byte* const out = stage + task.offset + static_cast<size_t>(p - task.panel_begin) * bytes;
        if (m.panels != nullptr)
          std::memcpy(out, m.panels + static_cast<size_t>(p) * bytes, bytes);
        else
          pack_panel(m.dtype, m.rows, m.n_rows, m.n_cols, p, out);
      }
    });
    cuda_check(
        cudaMemcpyAsync(device_ + flushed_, stage, used_, cudaMemcpyHostToDevice, stream_.view().handle),
        "uploading weights");
    events_[which].record(stream_.view());
    flushed_ += used_;
    used_ = 0;
    tasks_.clear();
    if (progress_) progress_({"upload", flushed_, total_});
  }

  void finish() {
    flush();
    if (!stream_.synchronize())
      throw CudaError(ExitCode::Device, "the GPU failed while weights were uploaded");
  }

 private:
  struct Task {
    const Matrix* matrix;
    int panel_begin, panel_end;
    size_t offset;  // in the staging buffer
  };

  std::byte* device_;
  uint64_t total_;
  ThreadPool& pool_;
  const LoadProgressFn& progress_;
  Stream stream_;
  Event events_[2];
  PinnedBuffer stages_[2];
  std::vector<Task> tasks_;
  uint64_t offset_ = 0;   // of the next matrix on the device
  uint64_t flushed_ = 0;  // device bytes already sent
  size_t used_ = 0;       // of the current staging buffer
  int turn_ = 0;
};

// Small vectors, collected and sent at once.
class VectorPool {
 public:
  // The address is known only after send(): `where` is filled in then.
  void add(const std::vector<float>& values, const float** where) {
    if (values.empty()) return;
    places_.push_back({where, values_.size()});
    values_.insert(values_.end(), values.begin(), values.end());
    values_.resize(align_up<size_t>(values_.size(), 64));
  }
  DeviceBuffer send() const {
    DeviceBuffer buffer(values_.size() * sizeof(float));
    cuda_check(cudaMemcpy(buffer.data(), values_.data(), buffer.size(), cudaMemcpyHostToDevice),
               "uploading norms");
    for (const Place& place : places_) *place.where = buffer.as<float>() + place.offset;
    return buffer;
  }

 private:
  struct Place {
    const float** where;
    size_t offset;
  };
  std::vector<Place> places_;
  std::vector<float> values_;
};

// A matrix that lies `offset` bytes behind its expert's address.
DeviceMatrix shape_at(const Matrix& m, uint64_t offset) {
  return with_chunks({.panels = reinterpret_cast<const uint8_t*>(offset),
                      .panel_bytes = panel_bytes(m.dtype, m.n_cols),
                      .dtype = m.dtype,
                      .n_rows = m.n_rows,
                      .n_cols = m.n_cols});
}

DeviceMatrix relative(DeviceMatrix m, const uint8_t* base) {
  m.panels = reinterpret_cast<const uint8_t*>(static_cast<size_t>(m.panels - base));
  return m;
}

}  // namespace

uint64_t GpuWeights::planned_bytes(const ModelConfig& c, const Weights& w, bool with_experts) {
  uint64_t bytes = 0;
  for_each_gpu_matrix(c, w, with_experts, [&](const Matrix& m) { bytes += bytes_of(m); });
  return bytes;
}

GpuWeights::GpuWeights(const ModelConfig& c, const Weights& w, const GpuExperts* experts, ThreadPool& pool,
                       const LoadProgressFn& progress) {
  const uint64_t total = planned_bytes(c, w, experts == nullptr);
  panels_ = DeviceBuffer(total);
  Uploader upload(panels_.data(), total, pool, progress);
  VectorPool vectors;
  std::vector<const uint8_t*> expert_table;

  token_embd = upload.add(w.token_embd);
  layers.resize(static_cast<size_t>(c.n_layer));
  for (int il = 0; il < c.n_layer; ++il) {
    const LayerWeights& from = w.layers[static_cast<size_t>(il)];
    GpuLayerWeights& to = layers[static_cast<size_t>(il)];
    vectors.add(from.attn_norm, &to.attn_norm);
    vectors.add(from.ffn_norm, &to.ffn_norm);
    if (from.attention) {
      const AttentionWeights& a = *from.attention;
      to.attention.q = upload.add(a.q);
      to.attention.k = upload.add(a.k);
      to.attention.v = upload.add(a.v);
      to.attention.gate = upload.add(a.gate);
      to.attention.output = upload.add(a.output);
      vectors.add(a.q_norm, &to.attention.q_norm);
      vectors.add(a.k_norm, &to.attention.k_norm);
    }
    if (from.delta_net) {
      const DeltaNetWeights& d = *from.delta_net;
      to.delta_net.qkv = upload.add(d.qkv);
      to.delta_net.z = upload.add(d.z);
      to.delta_net.alpha = upload.add(d.alpha);
      to.delta_net.beta = upload.add(d.beta);
      to.delta_net.output = upload.add(d.output);
      vectors.add(d.conv, &to.delta_net.conv);
      vectors.add(d.a, &to.delta_net.a);
      vectors.add(d.dt_bias, &to.delta_net.dt_bias);
      vectors.add(d.norm, &to.delta_net.norm);
    }
    GpuFfnWeights& ffn = to.ffn;
    const auto add_ffn = [&](const Ffn& f, DeviceMatrix& gate, DeviceMatrix& up, DeviceMatrix& down) {
      gate = upload.add(f.gate);
      up = upload.add(f.up);
      down = upload.add(f.down);
    };
    if (from.ffn) add_ffn(*from.ffn, ffn.shared_gate, ffn.shared_up, ffn.shared_down);
    if (from.moe) {
      ffn.moe = true;
      ffn.router = upload.add(from.moe->router);
      add_ffn(from.moe->shared, ffn.shared_gate, ffn.shared_up, ffn.shared_down);
      vectors.add(from.moe->router_bias, &ffn.router_bias);
      vectors.add(from.moe->shared_gate, &ffn.shared_weight);
      if (experts != nullptr) {
        const Ffn& expert = from.moe->experts.front();
        ffn.gate = shape_at(expert.gate, 0);
        ffn.up = shape_at(expert.up, bytes_of(expert.gate));
        ffn.down = shape_at(expert.down, bytes_of(expert.gate) + bytes_of(expert.up));
        ffn.experts = experts->table(il);
        continue;
      }
      for (const Ffn& expert : from.moe->experts) {
        DeviceMatrix gate, up, down;
        add_ffn(expert, gate, up, down);
        ffn.gate = relative(gate, gate.panels);
        ffn.up = relative(up, gate.panels);
        ffn.down = relative(down, gate.panels);
        expert_table.push_back(gate.panels);
      }
    }
  }
  output = w.output.rows != w.token_embd.rows ? upload.add(w.output) : token_embd;
  vectors.add(w.output_norm, &output_norm);
  upload.finish();
  vectors_ = vectors.send();

  tables_ = DeviceBuffer(expert_table.size() * sizeof(const uint8_t*));
  if (!expert_table.empty())
    cuda_check(cudaMemcpy(tables_.data(), expert_table.data(), tables_.size(), cudaMemcpyHostToDevice),
               "uploading the expert table");
  size_t next = 0;
  for (GpuLayerWeights& layer : layers) {
    if (!layer.ffn.moe || experts != nullptr) continue;
    layer.ffn.experts = tables_.as<const uint8_t*>() + next;
    next += static_cast<size_t>(c.route.n_expert);
  }
}

uint64_t GpuWeights::planned_small_bytes(const ModelConfig& c, const Weights& w, bool with_experts) {
  uint64_t floats = 0, tables = 0;
  const auto add = [&](const std::vector<float>& values) { floats += align_up<uint64_t>(values.size(), 64); };
  for (int il = 0; il < c.n_layer; ++il) {
    const LayerWeights& layer = w.layers[static_cast<size_t>(il)];
    add(layer.attn_norm);
    add(layer.ffn_norm);
    if (layer.attention) {
      add(layer.attention->q_norm);
      add(layer.attention->k_norm);
    }
    if (layer.delta_net)
      for (const std::vector<float>* v :
           {&layer.delta_net->conv, &layer.delta_net->a, &layer.delta_net->dt_bias, &layer.delta_net->norm})
        add(*v);
    if (layer.moe) {
      add(layer.moe->router_bias);
      add(layer.moe->shared_gate);
      if (with_experts) tables += static_cast<uint64_t>(c.route.n_expert) * sizeof(const uint8_t*);
    }
  }
  add(w.output_norm);
  return floats * sizeof(float) + tables;
}

}  // namespace thermo
