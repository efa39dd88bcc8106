// What the RMSNorm + modulate kernels share: how a block goes through a row of x, and what is done with it. The order of the sum is theirs.
#pragma once

#include "operands.cuh"

namespace fusiongate {

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

// Whether a norm has a weight, as far as the kernel that is built knows.
enum class Weight { none, given, either };

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
  Divisor by_tokens;
  float eps;

  FUSIONGATE_DEVICE const T* source(int64_t row) const { return x + row * rows.columns; }
};

// What is applied to one vector of the normalized row.
template <typename T, int kWidth>
struct Applied {
  Vector<T, kWidth> scale;
  Vector<T, kWidth> shift;
  Vector<T, kWidth> weight;
};

// One row on its way out: everything that depends on the row alone is worked out once.
template <typename T, Weighting kWeighting, Weight kWeight>
struct OutputRow {
  const T* scale;
  const T* shift;
  const T* weight;
  T* target;
  bool skipped;
  bool spoilt;

  FUSIONGATE_DEVICE OutputRow(const NormalizedRows<T>& task, int64_t row)
      : weight(task.weight), target(task.out + row * task.rows.columns) {
    const int64_t batch = task.by_tokens.quotient(static_cast<uint32_t>(row));
    scale = task.rows.scale_of(batch);
    shift = task.rows.shift_of(batch);
    const bool last_of_batch = row - batch * task.tokens == task.tokens - 1;
    skipped = (planted<Fault::tail_skipped> && last_of_batch) || (planted<Fault::last_tile_skipped> && row == task.count - 1);
    spoilt = planted<Fault::one_element_off> && row == task.count - 1;
  }

  FUSIONGATE_DEVICE bool is_weighted() const { return kWeight == Weight::given || (kWeight == Weight::either && weight != nullptr); }

  template <int kWidth>
  FUSIONGATE_DEVICE void finish(int column, const Vector<T, kWidth>& value, float statistic, const Applied<T, kWidth>& applied) const {
    if ((planted<Fault::tail_skipped> || planted<Fault::last_tile_skipped>) && skipped) return;
    constexpr bool rounds = !planted<Fault::norm_unrounded> && !planted<Fault::all_fp32>;
    Floats<kWidth> normalized = widen(value);
    FUSIONGATE_UNROLL
    for (int i = 0; i < kWidth; ++i) normalized.values[i] = mul(statistic, normalized.values[i]);
    if (is_weighted()) {
      if constexpr (rounds && kWeighting == Weighting::after_rounding) normalized = round_each<T>(normalized);
      const Floats<kWidth> weights = widen(applied.weight);
      FUSIONGATE_UNROLL
      for (int i = 0; i < kWidth; ++i) normalized.values[i] = mul(weights.values[i], normalized.values[i]);
    }
    if constexpr (rounds) normalized = round_each<T>(normalized);
    const auto factor = one_plus<T, Schedule::every_op>(applied.scale);
    auto result = modulated<T, Schedule::every_op>(normalized, factor, applied.shift);
    if (planted<Fault::one_element_off> && spoilt && column == 0) {
      result.elements[0] = narrow<T>(add(widen(result.elements[0]), 1.0f));
    }
    store<kWidth>(target + column, result);
  }
};

// How a block goes through a row. All of it is settled when the kernel is built: asked in the kernel, any of it costs registers and
// the overlap of loads.
enum Trait : unsigned {
  ahead = 1,     // scale and shift are loaded before the sum, and wait for it in registers
  rereads = 2,   // x is read again from shared memory, and not kept in registers
  bypasses = 6,  // and x goes there past the registers
  ragged = 8,    // the row may end before a thread's last vector, or go on behind it; else it ends in the last
};

template <int kThreads, int kWidth, int kHeld, Weight kWeight, unsigned kTraits = 0, int kResident = 1>
struct Plan {
  static constexpr int threads = kThreads;
  static constexpr int width = kWidth;         // elements of a load
  static constexpr int held = kHeld;           // vectors of x that a thread takes at once
  static constexpr int resident = kResident;   // see launch
  static constexpr Weight weight = kWeight;
  static constexpr bool is_ragged = kTraits & ragged;
  static constexpr bool is_ahead = kTraits & ahead;
  static constexpr bool is_reread = kTraits & rereads;
  static constexpr bool is_bypassing = (kTraits & bypasses) == bypasses;
  // Where registers are left for it.
  static constexpr bool is_weight_ahead = is_ahead && kWeight == Weight::given && kHeld * kWidth <= 16;
  static_assert(!(is_ragged && is_ahead));

  // Whether vector i of a thread is there.
  FUSIONGATE_DEVICE static bool has(int i, int column, int columns) { return (!is_ragged && i + 1 < held) || column < columns; }

  template <typename Body>
  FUSIONGATE_DEVICE static void each_held(int thread, int columns, Body body) {
    FUSIONGATE_UNROLL
    for (int i = 0; i < held; ++i) {
      const int column = (thread + i * threads) * width;
      if (has(i, column, columns)) body(i, column);
    }
  }

  // What no register is left for: it is in the cache when it is read a second time.
  template <typename Body>
  FUSIONGATE_DEVICE static void each_other(int thread, int columns, Body body) {
    if constexpr (is_ragged) {
      for (int column = (thread + held * threads) * width; column < columns; column += threads * width) body(column);
    }
  }
};

// The part of a row that one thread takes at once.
template <typename T, typename Way>
struct Held {
  Vector<T, Way::width> vectors[Way::held];
};

// A row of x, as an order may take it: where it lies, its copy in shared memory if the order wants one, and what the threads hold.
template <typename T, typename Way>
struct TakenRow {
  const T* source;
  const T* staged;
  int columns;
  PerThread<Held<T, Way>, Way::threads>& held;
};

// One block a row. An order that wants other elements in a thread than the memory wants in a load is given a copy of the row in
// shared memory. Whatever does not depend on the sum is under way before it.
template <typename T, Weighting kWeighting, typename Way, typename Order>
struct ModulatedRows {
  static constexpr int threads = Way::threads;
  static constexpr int width = Way::width;

  NormalizedRows<T> task;
  Order order;

  FUSIONGATE_DEVICE void operator()(const Block<threads>& block) const {
    using Output = OutputRow<T, kWeighting, Way::weight>;
    struct Waiting {
      Applied<T, width> vectors[Way::held];
    };
    const int64_t row = block.index;
    const T* source = task.source(row);
    const int columns = static_cast<int>(task.rows.columns);
    PerThread<Held<T, Way>, threads> held;
    PerThread<Waiting, Way::is_ahead ? threads : 1> waiting;
    alignas(16) FUSIONGATE_SHARED T staged[Order::staged ? Way::held * threads * width : 1];
    block.each([&](int thread) {
      Way::each_held(thread, columns, [&](int i, int column) {
        if constexpr (Way::is_bypassing) {
          copy_ahead<width>(staged + column, source + column);
        } else {
          held[thread].vectors[i] = load<width>(source + column);
        }
      });
      if constexpr (Way::is_ahead) {
        const Output output(task, row);
        Way::each_held(thread, columns, [&](int i, int column) {
          Applied<T, width>& applied = waiting[thread].vectors[i];
          applied.scale = load_ahead<width>(output.scale + column);
          applied.shift = load_ahead<width>(output.shift + column);
          if constexpr (Way::is_weight_ahead) applied.weight = load_ahead<width>(output.weight + column);
        });
      }
      if constexpr (Way::is_bypassing) {
        await_copies();
      } else if constexpr (Order::staged) {
        Way::each_held(thread, columns, [&](int i, int column) {
          *reinterpret_cast<Vector<T, width>*>(staged + column) = held[thread].vectors[i];
        });
      }
    });
    if constexpr (Order::staged) block.synchronize();

    const float eps = planted<Fault::epsilon_ignored> ? 0.0f : task.eps;
    auto statistics = order.statistics(block, TakenRow<T, Way>{source, staged, columns, held}, eps);

    const Output output(task, row);
    block.each([&](int thread) {
      const float statistic = statistics[thread];
      if (thread == 0 && task.rstd != nullptr) task.rstd[row] = statistic;
      auto finish = [&](int column, const Vector<T, width>& value, Applied<T, width> applied) {
        if constexpr (!Way::is_ahead) {
          applied.scale = load<width>(output.scale + column);
          applied.shift = load<width>(output.shift + column);
        }
        if (!Way::is_weight_ahead && output.is_weighted()) applied.weight = load<width>(output.weight + column);
        output.finish(column, value, statistic, applied);
      };
      Way::each_held(thread, columns, [&](int i, int column) {
        const auto value = Way::is_reread ? load<width>(staged + column) : held[thread].vectors[i];
        if constexpr (Way::is_ahead) {
          finish(column, value, waiting[thread].vectors[i]);
        } else {
          finish(column, value, {});
        }
      });
      Way::each_other(thread, columns, [&](int column) { finish(column, load<width>(source + column), {}); });
    });
  }
};

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
          Divisor::of(x.size(1)),
          static_cast<float>(eps)};
}

template <Weighting kWeighting, typename Way, typename T, typename Order>
void launch_rows(const NormalizedRows<T>& task, const Order& order, const TensorView& x) {
  using Kernel = ModulatedRows<T, kWeighting, Way, Order>;
  launch<Way::threads, Way::resident>(task.count, Kernel{task, order}, x.device().device_id, stream_of(x));
}

// Calls launch with the norm's Weight as a constant. Kernels for fp32 ask themselves: they have other things to wait for.
template <typename T, typename Launch>
void with_weight(const NormalizedRows<T>& task, Launch launch) {
  if constexpr (sizeof(T) == 4) {
    launch(std::integral_constant<Weight, Weight::either>{});
  } else if (task.weight == nullptr) {
    launch(std::integral_constant<Weight, Weight::none>{});
  } else {
    launch(std::integral_constant<Weight, Weight::given>{});
  }
}

// Whether every operand allows loads of 16 bytes.
template <typename T>
bool allow_widest(const TensorView& out, const TensorView& x, const TensorView& scale, const TensorView& shift,
                  const Optional<TensorView>& weight) {
  constexpr int widest = 16 / sizeof(T);
  return x.size(2) % widest == 0 && is_aligned(x, widest) && is_aligned(out, widest) && rows_allow(scale, widest) &&
         rows_allow(shift, widest) && (!weight.has_value() || is_aligned(weight.value(), widest));
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
