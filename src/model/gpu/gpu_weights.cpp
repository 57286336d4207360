#include "model/gpu/gpu_weights.h"

#include <algorithm>
#include <cstring>

#include "base/units.h"
#include "device/cuda_check.h"
#include "experts/catalog.h"
#include "kernels/quant_matmul/pack.h"
#include "kernels/quant_matmul/quant_matmul.h"
#include "model/gpu/gpu_experts.h"

namespace thermo {
namespace {

constexpr uint64_t kAlign = kExpertAlign;
constexpr size_t kStageBytes = 128 * MiB;

uint64_t bytes_of(const Matrix& m) {
  return m.empty() ? 0 : align_up<uint64_t>(packed_matrix_bytes(m.dtype, m.n_rows, m.n_cols), kAlign);
}

// Calls visit(block, weights) for the blocks that a step runs, in order. `weights`: Weights or GpuWeights.
template <class WeightsT, class Visit>
void for_each_block(const ModelConfig& c, WeightsT& w, const Visit& visit) {
  for (size_t b = 0; b < c.network.input.size(); ++b) visit(c.network.input[b], w.input[b]);
  for_each_main_block(c, w, visit);
  for (size_t b = 0; b < c.network.output.size(); ++b) visit(c.network.output[b], w.output[b]);
  for (size_t b = 0; b < c.network.features.size(); ++b) visit(c.network.features[b], w.features[b]);
}

bool is_matrix(const TensorSpec& spec) {
  return spec.form == TensorForm::Matrix || spec.form == TensorForm::Lookup;
}

// Copies matrices one after the other: panels are packed (or copied) into one staging buffer while the other
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
          pack_panel(m.dtype, m.rows, m.row_stride, m.n_rows, m.n_cols, p, out);
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

// A matrix that lies `offset` bytes after its expert's address.
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

GpuWeights::MatrixSet GpuWeights::matrices_of(const ModelConfig& c, const Weights& w) {
  MatrixSet all;
  for_each_block(c, w, [&](const Block& block, const BlockWeights& from) {
    for (const TensorSpec& spec : block.tensors)
      if (is_matrix(spec)) all.insert(from[spec.role].rows);
  });
  return all;
}

uint64_t GpuWeights::planned_bytes(const ModelConfig& c, const Weights& w, bool with_experts,
                                   MatrixSet seen) {
  uint64_t bytes = 0;  // the embedding may be the head too
  for_each_block(c, w, [&](const Block& block, const BlockWeights& from) {
    for (const TensorSpec& spec : block.tensors)
      if (is_matrix(spec) && seen.insert(from[spec.role].rows).second) bytes += bytes_of(from[spec.role]);
    if (with_experts)
      for (const Ffn& expert : from.experts)
        bytes += bytes_of(expert.gate) + bytes_of(expert.up) + bytes_of(expert.down);
  });
  return bytes;
}

GpuWeights::GpuWeights(const ModelConfig& c, const Weights& w, const GpuExperts* experts,
                       const GpuWeights* target, ThreadPool& pool, const LoadProgressFn& progress) {
  MatrixSet shared;
  if (target != nullptr) {
    matrices_ = target->matrices_;
    for (const auto& [rows, matrix] : matrices_) shared.insert(rows);
  }
  const uint64_t total = planned_bytes(c, w, experts == nullptr, std::move(shared));
  panels_ = DeviceBuffer(total);
  Uploader upload(panels_.data(), total, pool, progress);
  VectorPool vectors;
  std::vector<const uint8_t*> expert_table;

  // An expert's matrices are neighbours; the shapes of the last one stand for all.
  const auto add_experts = [&](const BlockWeights& from, GpuBlockWeights& to) {
    for (const Ffn& expert : from.experts) {
      const DeviceMatrix gate = upload.add(expert.gate), up = upload.add(expert.up),
                         down = upload.add(expert.down);
      to[Role::ExpertGate] = relative(gate, gate.panels);
      to[Role::ExpertUp] = relative(up, gate.panels);
      to[Role::ExpertDown] = relative(down, gate.panels);
      expert_table.push_back(gate.panels);
    }
  };
  const auto add_block = [&](const Block& block, const BlockWeights& from, GpuBlockWeights& to) {
    for (const TensorSpec& spec : block.tensors) {
      if (is_matrix(spec)) {
        const Matrix& m = from[spec.role];
        const auto at = matrices_.find(m.rows);
        to[spec.role] =
            at != matrices_.end() ? at->second : matrices_.emplace(m.rows, upload.add(m)).first->second;
      } else if (spec.form == TensorForm::Vector) {
        vectors.add(from.vector(spec.role), &to.vectors[static_cast<size_t>(spec.role)]);
      }
    }
    if (experts == nullptr) add_experts(from, to);
  };

  // All of it is made first: the vectors' addresses are filled in at the end.
  input.resize(w.input.size());
  output.resize(w.output.size());
  features.resize(w.features.size());
  layers.resize(static_cast<size_t>(c.n_layer));
  for (size_t b = 0; b < input.size(); ++b) add_block(c.network.input[b], w.input[b], input[b]);
  for (size_t l = 0; l < layers.size(); ++l) {
    const LayerWeights& from = w.layers[l];
    layers[l].blocks.resize(from.blocks.size());
    for (size_t b = 0; b < from.blocks.size(); ++b) {
      GpuBlockWeights& to = layers[l].blocks[b];
      add_block(c.network.layers[l].blocks[b], from.blocks[b], to);
      if (experts == nullptr || from.blocks[b].experts.empty()) continue;
      const Ffn& expert = from.blocks[b].experts.front();
      to[Role::ExpertGate] = shape_at(expert.gate, 0);
      to[Role::ExpertUp] = shape_at(expert.up, bytes_of(expert.gate));
      to[Role::ExpertDown] = shape_at(expert.down, bytes_of(expert.gate) + bytes_of(expert.up));
      to.experts = experts->table(static_cast<int>(l));
    }
  }
  for (size_t b = 0; b < output.size(); ++b) add_block(c.network.output[b], w.output[b], output[b]);
  for (size_t b = 0; b < features.size(); ++b) add_block(c.network.features[b], w.features[b], features[b]);
  upload.finish();
  vectors_ = vectors.send();

  tables_ = DeviceBuffer(expert_table.size() * sizeof(const uint8_t*));
  if (expert_table.empty()) return;
  cuda_check(cudaMemcpy(tables_.data(), expert_table.data(), tables_.size(), cudaMemcpyHostToDevice),
             "uploading the expert table");
  size_t next = 0;
  for_each_main_block(c, *this, [&](const Block& block, GpuBlockWeights& to) {
    if (!block.routed()) return;
    to.experts = tables_.as<const uint8_t*>() + next;
    next += static_cast<size_t>(block.route.n_expert);
  });
}

uint64_t GpuWeights::planned_small_bytes(const ModelConfig& c, const Weights& w, bool with_experts) {
  uint64_t floats = 0, tables = 0;
  for_each_block(c, w, [&](const Block& block, const BlockWeights& from) {
    for (const TensorSpec& spec : block.tensors)
      if (spec.form == TensorForm::Vector) floats += align_up<uint64_t>(from.vector(spec.role).size(), 64);
    if (with_experts) tables += from.experts.size() * sizeof(const uint8_t*);
  });
  return floats * sizeof(float) + tables;
}

}  // namespace thermo
