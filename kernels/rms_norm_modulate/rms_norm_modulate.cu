// F.rms_norm(x, (D,), weight, eps) * (1 + scale) + shift in one launch: x is (B, S, D), scale and shift are (B, 1, D).
//
// `rms_norm_modulate` repeats the order of ATen's vectorised row kernel (aten/src/ATen/native/cuda/layer_norm_kernel.cu): four
// warps a row; thread t takes the 4-element vectors t, t + threads, ...; fused multiply-adds in element order; each warp's
// shuffles by halves; the warps as (w0 + w2) + (w1 + w3); rsqrt(sum / D + eps). `rms_norm_modulate_high` is free of that order.
#include "../common/admitted.cuh"
#include "../common/normalized_rows.cuh"

namespace fusiongate {
namespace {

constexpr int warps = 4;
constexpr int threads = warps * warp_lanes;

// The width of a load, and how much of a row a thread keeps: kHeld vectors.
template <typename T, int kHeld, int kWidth>
struct RmsNormModulate {
  NormalizedRows<T> task;

  FUSIONGATE_DEVICE void operator()(const Block<threads>& block) const {
    const int64_t row = block.index;
    const T* source = task.source(row);
    const int64_t columns = task.rows.columns;
    const int vectors = static_cast<int>(columns / kWidth);

    PerThread<Held<T, kHeld, kWidth>, threads> held;
    PerThread<float, threads> sums;
    const float center = planted<Fault::mean_subtracted> ? mean(block, source, columns) : 0.0f;
    block.each([&](int thread) {
      float sum = 0.0f;
      auto accumulate = [&](const Vector<T, kWidth>& vector) {
        FUSIONGATE_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          const float value = planted<Fault::mean_subtracted> ? widen(vector.elements[i]) - center : widen(vector.elements[i]);
          sum = fma(value, value, sum);
        }
      };
      FUSIONGATE_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int vector = thread + i * threads;
        if (vector < vectors) held[thread].vectors[i] = load<kWidth>(source + vector * kWidth);
      }
      FUSIONGATE_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if (thread + i * threads < vectors) accumulate(held[thread].vectors[i]);
      }
      for (int vector = thread + kHeld * threads; vector < vectors; vector += threads) {
        accumulate(load<kWidth>(source + vector * kWidth));
      }
      sums[thread] = sum;
    });

    reduce_warps<true>(block, sums);
    FUSIONGATE_SHARED float partial[warps];
    block.each([&](int thread) {
      if (thread % warp_lanes == 0) partial[thread / warp_lanes] = sums[thread];
    });
    block.synchronize();
    const float sum = add(add(partial[0], partial[2]), add(partial[1], partial[3]));
    const float mean_square = divide(sum, static_cast<float>(columns));
    const float statistic = reciprocal_square_root(add(mean_square, planted_epsilon(task.eps)));

    const OutputRow<T, Weighting::before_rounding> output(task, row);
    block.each([&](int thread) {
      if (thread == 0 && task.rstd != nullptr) task.rstd[row] = statistic;
      FUSIONGATE_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int vector = thread + i * threads;
        if (vector < vectors) output.finish(vector * kWidth, held[thread].vectors[i], statistic);
      }
      for (int vector = thread + kHeld * threads; vector < vectors; vector += threads) {
        output.finish(vector * kWidth, load<kWidth>(source + vector * kWidth), statistic);
      }
    });
  }

  // Only the planted LayerNorm needs it; every thread reads the whole row.
  FUSIONGATE_DEVICE static float mean(const Block<threads>&, const T* source, int64_t columns) {
    float sum = 0.0f;
    for (int64_t column = 0; column < columns; ++column) sum = add(sum, widen(source[column]));
    return divide(sum, static_cast<float>(columns));
  }
};

template <typename T, int kHeld, int kWidth>
void launch_held(const NormalizedRows<T>& task, const TensorView& x) {
  launch<threads>(task.count, RmsNormModulate<T, kHeld, kWidth>{task}, x.device().device_id, stream_of(x));
}

// As many vectors in registers as the row needs: a power of two, so that few variants are compiled.
template <typename T, int kWidth>
void launch_width(const NormalizedRows<T>& task, const TensorView& x) {
  const int64_t needed = (task.rows.columns / kWidth + threads - 1) / threads;
  if (needed <= 2) {
    launch_held<T, 2, kWidth>(task, x);
  } else if (needed <= 4) {
    launch_held<T, 4, kWidth>(task, x);
  } else if (needed <= 8) {
    launch_held<T, 8, kWidth>(task, x);
  } else {
    launch_held<T, 16, kWidth>(task, x);
  }
}

void rms_norm_modulate(TensorView out, TensorView x, TensorView scale, TensorView shift, Optional<TensorView> weight, double eps,
                       Optional<TensorView> rstd) {
  check_norm_operands(out, x, scale, shift, weight, rstd);
  TVM_FFI_ICHECK(x.size(2) % 4 == 0) << "D must be a multiple of 4: ATen sums other rows in another order";
  if (x.numel() == 0) return;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_width<T, 4>(normalized_rows<T>(out, x, scale, shift, weight, eps, rstd), x);
  });
}

// Loads of 16 bytes where the operands allow it: the order of the sum is whatever that gives.
void rms_norm_modulate_high(TensorView out, TensorView x, TensorView scale, TensorView shift, double eps) {
  check_norm_operands(out, x, scale, shift, {}, {});
  TVM_FFI_ICHECK(x.size(2) % 4 == 0) << "D must be a multiple of 4";
  if (x.numel() == 0) return;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto task = normalized_rows<T>(out, x, scale, shift, {}, eps, {});
    constexpr int widest = 16 / sizeof(T);
    const bool wide = task.rows.columns % widest == 0 && is_aligned(x, widest) && is_aligned(out, widest) &&
                      rows_allow(scale, widest) && rows_allow(shift, widest);
    if (wide) {
      launch_width<T, widest>(task, x);
    } else {
      launch_width<T, 4>(task, x);
    }
  });
}

}  // namespace
}  // namespace fusiongate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_modulate, fusiongate::rms_norm_modulate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_modulate_high, fusiongate::rms_norm_modulate_high);
FUSIONGATE_EXPORT_ADMITTED_CALLS();
FUSIONGATE_EXPORT_ADMITTED(rms_norm_modulate);
FUSIONGATE_EXPORT_ADMITTED(rms_norm_modulate_high);
