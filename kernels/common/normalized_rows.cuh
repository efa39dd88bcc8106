// What the RMSNorm + modulate kernels share: a row of x in registers, its sum of squares, and what is done with it.
#pragma once

#include "operands.cuh"

namespace fusiongate {

// The part of a row that one thread keeps from the reduction to the output: the row is read once. A longer row is read
// again for the output; it is in the cache then.
template <typename T, int kHeld, int kWidth>
struct Held {
  Vector<T, kWidth> vectors[kHeld];
};

// Shuffles a warp's values into lane 0. ATen's reductions move down by halves; on AMD, ATen's generic one moves up by doubling.
template <bool kHalving, int kThreads>
FUSIONGATE_DEVICE void reduce_warps(const Block<kThreads>& block, PerThread<float, kThreads>& values) {
  constexpr bool halving = kHalving != planted<Fault::reduction_reordered>;
  if constexpr (halving) {
    FUSIONGATE_UNROLL
    for (int offset = warp_lanes / 2; offset > 0; offset /= 2) block.add_from_above(values, offset);
  } else {
    FUSIONGATE_UNROLL
    for (int offset = 1; offset < warp_lanes; offset *= 2) block.add_from_above(values, offset);
  }
}

// Where a norm's weight is applied: to the fp32 value, with one rounding for both (F.rms_norm), or to the norm's rounded
// result, as an op of its own (the norm that models write out).
enum class Weighting { before_rounding, after_rounding };

// Everything of an RMSNorm + modulate but the order of its sum.
template <typename T>
struct NormalizedRows {
  const T* x;
  const T* weight;   // null for a norm without one
  T* out;
  float* rstd;       // null unless the caller wants the statistic itself
  Rows<T> rows;
  int64_t tokens;
  int64_t count;     // rows of x
  float eps;

  FUSIONGATE_DEVICE const T* source(int64_t row) const { return x + row * rows.columns; }
};

// One row on its way out: everything that depends on the row alone is worked out once.
template <typename T, Weighting kWeighting>
struct OutputRow {
  const T* scale;
  const T* shift;
  const T* weight;
  T* target;
  bool skipped;
  bool spoilt;

  FUSIONGATE_DEVICE OutputRow(const NormalizedRows<T>& task, int64_t row) : weight(task.weight), target(task.out + row * task.rows.columns) {
    const int64_t batch = row / task.tokens;
    scale = task.rows.scale_of(batch);
    shift = task.rows.shift_of(batch);
    const bool last_of_batch = row - batch * task.tokens == task.tokens - 1;
    skipped = (planted<Fault::tail_skipped> && last_of_batch) || (planted<Fault::last_tile_skipped> && row == task.count - 1);
    spoilt = planted<Fault::one_element_off> && row == task.count - 1;
  }

  template <int kWidth>
  FUSIONGATE_DEVICE void finish(int column, const Vector<T, kWidth>& value, float statistic) const {
    if ((planted<Fault::tail_skipped> || planted<Fault::last_tile_skipped>) && skipped) return;
    constexpr bool rounds = !planted<Fault::norm_unrounded> && !planted<Fault::all_fp32>;
    Floats<kWidth> normalized = widen(value);
    FUSIONGATE_UNROLL
    for (int i = 0; i < kWidth; ++i) normalized.values[i] = mul(statistic, normalized.values[i]);
    if (weight != nullptr) {
      if constexpr (rounds && kWeighting == Weighting::after_rounding) normalized = round_each<T>(normalized);
      const Floats<kWidth> gain = widen(load<kWidth>(weight + column));
      FUSIONGATE_UNROLL
      for (int i = 0; i < kWidth; ++i) normalized.values[i] = mul(gain.values[i], normalized.values[i]);
    }
    if constexpr (rounds) normalized = round_each<T>(normalized);
    const auto factor = one_plus<T, Schedule::every_op>(load<kWidth>(scale + column));
    auto result = modulated<T, Schedule::every_op>(normalized, factor, load<kWidth>(shift + column));
    if (planted<Fault::one_element_off> && spoilt && column == 0) {
      result.elements[0] = narrow<T>(add(widen(result.elements[0]), 1.0f));
    }
    store<kWidth>(target + column, result);
  }
};

FUSIONGATE_DEVICE float planted_epsilon(float eps) { return planted<Fault::epsilon_ignored> ? 0.0f : eps; }

using tvm::ffi::Optional;

template <typename T>
NormalizedRows<T> normalized_rows(const TensorView& out, const TensorView& x, const TensorView& scale, const TensorView& shift,
                                  const Optional<TensorView>& weight, double eps, const Optional<TensorView>& rstd) {
  return {static_cast<const T*>(x.data_ptr()),
          weight.has_value() ? static_cast<const T*>(weight.value().data_ptr()) : nullptr,
          static_cast<T*>(out.data_ptr()),
          rstd.has_value() ? static_cast<float*>(rstd.value().data_ptr()) : nullptr,
          rows_of<T>(scale, shift, x),
          x.size(1),
          x.size(0) * x.size(1),
          static_cast<float>(eps)};
}

inline void check_norm_operands(const TensorView& out, const TensorView& x, const TensorView& scale, const TensorView& shift,
                                const Optional<TensorView>& weight, const Optional<TensorView>& rstd) {
  check_activation(out, x);
  check_row(scale, x, "scale");
  check_row(shift, x, "shift");
  TVM_FFI_ICHECK(same_type(x, scale) && same_type(x, shift)) << "x and its rows differ in dtype";
  if (weight.has_value()) {
    const TensorView& gain = weight.value();
    TVM_FFI_ICHECK(gain.ndim() == 1 && gain.size(0) == x.size(2)) << "the weight must be (D,)";
    TVM_FFI_ICHECK(same_type(gain, x) && same_device(gain, x)) << "the weight differs from x in dtype or device";
    TVM_FFI_ICHECK(is_dense(gain) && (x.size(2) % 4 != 0 || is_aligned(gain, 4))) << "the weight is strided or misaligned";
  }
  if (rstd.has_value()) {
    const TensorView& statistic = rstd.value();
    TVM_FFI_ICHECK(is_type(statistic.dtype(), kDLFloat, 32) && same_device(statistic, x) && is_dense(statistic) &&
                   statistic.numel() == x.size(0) * x.size(1))
        << "rstd must be float32, one element a row of x";
  }
  TVM_FFI_ICHECK(x.size(0) * x.size(1) < (int64_t{1} << 31)) << "too large: more rows than a grid holds";
}

}  // namespace fusiongate
