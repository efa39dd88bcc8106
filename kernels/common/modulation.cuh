// x * (1 + scale) + shift for one element, in the roundings of the eager chain that it replaces.
#pragma once

#include "numeric.cuh"

namespace fusiongate {

// Where the eager chain rounds: after every op (each op's result is a tensor of the storage dtype), or once, at the end
// (the chain runs on fp32 copies: x.float() * (1 + scale.float()) + shift.float()).
enum class Schedule { every_op, once };

template <int kWidth>
struct Floats {
  float values[kWidth];
};

template <int kWidth, typename T>
FUSIONGATE_DEVICE Floats<kWidth> widen(const Vector<T, kWidth>& vector) {
  Floats<kWidth> result;
  FUSIONGATE_UNROLL
  for (int i = 0; i < kWidth; ++i) result.values[i] = widen(vector.elements[i]);
  return result;
}

// Whether two elements may go through the pairwise instructions; a build with a planted fault goes element by element.
template <typename T, int kWidth>
inline constexpr bool in_pairs = sizeof(T) == 2 && kWidth % 2 == 0 && planted<Fault::none>;

template <typename T, int kWidth>
FUSIONGATE_DEVICE Floats<kWidth> round_each(const Floats<kWidth>& exact) {
  Floats<kWidth> result;
  if constexpr (in_pairs<T, kWidth>) {
    FUSIONGATE_UNROLL
    for (int i = 0; i < kWidth; i += 2) {
      const Vector<T, 2> pair = narrow_pair<T>(exact.values[i], exact.values[i + 1]);
      result.values[i] = widen(pair.elements[0]);
      result.values[i + 1] = widen(pair.elements[1]);
    }
  } else {
    FUSIONGATE_UNROLL
    for (int i = 0; i < kWidth; ++i) result.values[i] = rounded<T>(exact.values[i]);
  }
  return result;
}

// 1 + scale depends on the column alone, so that a kernel may compute it once and keep it while rows stream by.
template <typename T, Schedule kSchedule, int kWidth, typename Row>
FUSIONGATE_DEVICE Floats<kWidth> one_plus(const Vector<Row, kWidth>& scale) {
  Floats<kWidth> sum = widen(scale);
  if constexpr (planted<Fault::rows_downcast>) sum = round_each<T>(sum);
  FUSIONGATE_UNROLL
  for (int i = 0; i < kWidth; ++i) sum.values[i] = add(1.0f, sum.values[i]);
  constexpr bool unrounded = kSchedule == Schedule::once || planted<Fault::scale_unrounded> || planted<Fault::all_fp32>;
  if constexpr (unrounded) return sum;
  return round_each<T>(sum);
}

// x * one_plus_scale + shift, as stored.
template <typename T, Schedule kSchedule, int kWidth, typename Row>
FUSIONGATE_DEVICE Vector<T, kWidth> modulated(const Floats<kWidth>& x, const Floats<kWidth>& one_plus_scale,
                                              const Vector<Row, kWidth>& shift) {
  Vector<T, kWidth> result;
  if constexpr (in_pairs<T, kWidth>) {
    FUSIONGATE_UNROLL
    for (int i = 0; i < kWidth; i += 2) {
      const float first = mul(x.values[i], one_plus_scale.values[i]);
      const float second = mul(x.values[i + 1], one_plus_scale.values[i + 1]);
      Vector<T, 2> pair;
      if constexpr (kSchedule == Schedule::every_op) {
        pair = add_pair<T>(narrow_pair<T>(first, second), {{shift.elements[i], shift.elements[i + 1]}});
      } else {
        pair = narrow_pair<T>(add(first, widen(shift.elements[i])), add(second, widen(shift.elements[i + 1])));
      }
      result.elements[i] = pair.elements[0];
      result.elements[i + 1] = pair.elements[1];
    }
  } else {
    constexpr bool contracted = planted<Fault::product_unrounded> || planted<Fault::all_fp32> ||
                                (planted<Fault::narrow_unrounded> && kWidth * sizeof(T) < 16);
    FUSIONGATE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      float added = widen(shift.elements[i]);
      if constexpr (planted<Fault::rows_downcast>) added = rounded<T>(added);
      const float product = mul(x.values[i], one_plus_scale.values[i]);
      const float kept = kSchedule == Schedule::once ? product : rounded<T>(product);
      result.elements[i] = stored<T>(contracted ? fma(x.values[i], one_plus_scale.values[i], added) : add(kept, added));
    }
    if constexpr (planted<Fault::nan_spread>) {
      bool spoilt = false;
      for (int i = 0; i < kWidth; ++i) spoilt = spoilt || x.values[i] != x.values[i];
      for (int i = 0; i < kWidth; ++i) result.elements[i] = spoilt ? narrow<T>(float_of_bits(0x7fc00000u)) : result.elements[i];
    }
  }
  return result;
}

// The (B, 1, D) rows of a modulation: one row of D a batch entry, any number of elements from one to the next.
template <typename Row>
struct Rows {
  const Row* scale;
  const Row* shift;
  int64_t scale_stride;
  int64_t shift_stride;
  int64_t batches;
  int64_t columns;

  FUSIONGATE_DEVICE int64_t entry(int64_t batch) const {
    if constexpr (planted<Fault::first_row_for_all>) return 0;
    if constexpr (planted<Fault::batch_rows_mixed>) return (batch + 1) % batches;
    return batch;
  }
  FUSIONGATE_DEVICE const Row* scale_of(int64_t batch) const {
    return scale + entry(batch) * (planted<Fault::stride_ignored> ? columns : scale_stride);
  }
  FUSIONGATE_DEVICE const Row* shift_of(int64_t batch) const {
    return shift + entry(batch) * (planted<Fault::stride_ignored> ? columns : shift_stride);
  }
};

}  // namespace fusiongate
