// The RMSNorm that models write out, and modulate, in one launch:
//   y = (x * rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) [* weight];  y * (1 + scale) + shift
// x is (B, S, D), scale and shift are (B, 1, D).
//
// The sum is in the order of ATen's mean over a contiguous last dimension (aten/src/ATen/native/cuda/Reduce.cuh), seen in the tree
// that single large summands reveal. ATen gives a row to a grid of width x height lanes: lane l takes the 4-element vectors
// l, l + lanes, ...; it has four accumulators, one a position, to which the squares, already rounded, are added; then
// ((a0 + a1) + a2) + a3; then, along the width and after that along the height, the upper half is added to the lower until one is
// left. ATen chooses the grid by the number of rows and by D; the caller says which one it takes.
//
// Here two threads share a lane: each has two of its positions. That changes no sum and keeps half as much in a thread.
#include "../common/admitted.cuh"
#include "../common/normalized_rows.cuh"

namespace fusiongate {
namespace {

template <int kWidth>
struct LaneGrid {
  // The four accumulators of each lane, side by side.
  const float* accumulators;

  FUSIONGATE_DEVICE float lane(int index) const {
    const auto four = load<4>(accumulators + 4 * index);
    return add(add(add(four.elements[0], four.elements[1]), four.elements[2]), four.elements[3]);
  }

  // The sum in lane `index` once a line of the grid has been folded down to kLanes.
  template <int kLanes>
  FUSIONGATE_DEVICE float folded(int index) const {
    if constexpr (kLanes == kWidth) {
      return lane(index);
    } else {
      return add(folded<2 * kLanes>(index), folded<2 * kLanes>(index + kLanes));
    }
  }
};

template <typename T, int kWidth, int kHeight, int kHeld>
struct CompositeRmsNormModulate {
  static constexpr int threads = 2 * kWidth * kHeight;

  NormalizedRows<T> task;
  float reciprocal_columns;

  FUSIONGATE_DEVICE void operator()(const Block<threads>& block) const {
    const int64_t row = block.index;
    const T* source = task.source(row);
    const int pairs = static_cast<int>(task.rows.columns / 2);

    PerThread<Held<T, kHeld, 2>, threads> held;
    alignas(16) FUSIONGATE_SHARED float accumulators[2 * threads];
    block.each([&](int thread) {
      float first = 0.0f;
      float second = 0.0f;
      auto accumulate = [&](const Vector<T, 2>& pair) {
        const float a = widen(pair.elements[0]);
        const float b = widen(pair.elements[1]);
        first = add(first, mul(a, a));
        second = add(second, mul(b, b));
      };
      FUSIONGATE_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int pair = thread + i * threads;
        if (pair < pairs) held[thread].vectors[i] = load<2>(source + pair * 2);
      }
      FUSIONGATE_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if (thread + i * threads < pairs) accumulate(held[thread].vectors[i]);
      }
      for (int pair = thread + kHeld * threads; pair < pairs; pair += threads) accumulate(load<2>(source + pair * 2));
      accumulators[2 * thread] = first;
      accumulators[2 * thread + 1] = second;
    });
    block.synchronize();

    const float sum = reduce(block, accumulators);
    const float statistic = reciprocal_square_root(add(mul(sum, reciprocal_columns), planted_epsilon(task.eps)));

    const OutputRow<T, Weighting::after_rounding> output(task, row);
    block.each([&](int thread) {
      if (thread == 0 && task.rstd != nullptr) task.rstd[row] = statistic;
      FUSIONGATE_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int pair = thread + i * threads;
        if (pair < pairs) output.finish(pair * 2, held[thread].vectors[i], statistic);
      }
      for (int pair = thread + kHeld * threads; pair < pairs; pair += threads) {
        output.finish(pair * 2, load<2>(source + pair * 2), statistic);
      }
    });
  }

  // Every warp folds a line of the grid, several the same one: all threads have the sum without waiting for one that does.
  FUSIONGATE_DEVICE static float reduce(const Block<threads>& block, const float* accumulators) {
    const LaneGrid<kWidth> grid{accumulators};
    PerThread<float, threads> sums;
    block.each([&](int thread) {
      const int line = thread / warp_lanes % kHeight;
      sums[thread] = grid.template folded<warp_lanes>(line * kWidth + thread % warp_lanes);
    });
    reduce_warps<warp_lanes == 32>(block, sums);
    FUSIONGATE_SHARED float lines[kHeight];
    block.each([&](int thread) {
      if (thread % warp_lanes == 0 && thread / warp_lanes < kHeight) lines[thread / warp_lanes] = sums[thread];
    });
    block.synchronize();
    float folded[kHeight];
    FUSIONGATE_UNROLL
    for (int line = 0; line < kHeight; ++line) folded[line] = lines[line];
    FUSIONGATE_UNROLL
    for (int half = kHeight / 2; half > 0; half /= 2) {
      FUSIONGATE_UNROLL
      for (int line = 0; line < half; ++line) folded[line] = add(folded[line], folded[line + half]);
    }
    return folded[0];
  }
};

template <typename T, int kWidth, int kHeight, int kHeld>
void launch_held(const NormalizedRows<T>& task, const TensorView& x) {
  using Kernel = CompositeRmsNormModulate<T, (kWidth < warp_lanes ? warp_lanes : kWidth), kHeight, kHeld>;
  const Kernel kernel{task, 1.0f / static_cast<float>(task.rows.columns)};
  launch<Kernel::threads>(task.count, kernel, x.device().device_id, stream_of(x));
}

// One line of 32 lanes is the common case, and keeps the row in registers; the others occur with few rows or very long ones.
template <typename T>
void launch_grid(const NormalizedRows<T>& task, const TensorView& x, int64_t width, int64_t height) {
  if (width == 32 && height == 1) {
    const int64_t needed = (task.rows.columns / 2 + 63) / 64;
    if (needed <= 8) return launch_held<T, 32, 1, 8>(task, x);
    if (needed <= 16) return launch_held<T, 32, 1, 16>(task, x);
    if (needed <= 24) return launch_held<T, 32, 1, 24>(task, x);
    if (needed <= 32) return launch_held<T, 32, 1, 32>(task, x);
    return launch_held<T, 32, 1, 40>(task, x);
  }
  if (width == 64 && height == 1) return launch_held<T, 64, 1, 8>(task, x);
  if (width == 128 && height == 1) return launch_held<T, 128, 1, 8>(task, x);
  if (width == 256 && height == 1) return launch_held<T, 256, 1, 8>(task, x);
  if (width == 512 && height == 1) return launch_held<T, 512, 1, 8>(task, x);
  if (width == 32 && height == 16) return launch_held<T, 32, 16, 8>(task, x);
  if (width == 64 && height == 8) return launch_held<T, 64, 8, 8>(task, x);
  if (width == 128 && height == 4) return launch_held<T, 128, 4, 8>(task, x);
  if (width == 256 && height == 2) return launch_held<T, 256, 2, 8>(task, x);
  TVM_FFI_THROW(ValueError) << "ATen sums no row in a grid of " << width << " x " << height << " lanes";
}

void composite_rms_norm_modulate(TensorView out, TensorView x, TensorView scale, TensorView shift, Optional<TensorView> weight,
                                 double eps, Optional<TensorView> rstd, int64_t width, int64_t height) {
  check_norm_operands(out, x, scale, shift, weight, rstd);
  TVM_FFI_ICHECK(x.size(2) % 4 == 0 && x.size(2) >= 128)
      << "D must be a multiple of 4 and at least 128: ATen sums other rows in another order";
  if (x.numel() == 0) return;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_grid<T>(normalized_rows<T>(out, x, scale, shift, weight, eps, rstd), x, width, height);
  });
}

}  // namespace
}  // namespace fusiongate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(composite_rms_norm_modulate, fusiongate::composite_rms_norm_modulate);
FUSIONGATE_EXPORT_ADMITTED_CALLS();
FUSIONGATE_EXPORT_ADMITTED(composite_rms_norm_modulate);
