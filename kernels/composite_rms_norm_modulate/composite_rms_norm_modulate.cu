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
// So accumulator a of lane l is a chain of its own: the elements 4 l + a, 4 l + a + chains, ... The threads of a block follow the chains
// element by element, out of the cache, and hold the row a second time in vectors as wide as loads go: the chains want
// neighbouring elements in neighbouring threads, the memory wants few wide transactions, and this gives both what they want.
#include "../common/admitted.cuh"
#include "../common/normalized_rows.cuh"

namespace fusiongate {
namespace {

constexpr int threads = 128;
constexpr int warps = threads / warp_lanes;

template <typename T, int kLanes, int kHeld, int kWidth>
struct CompositeRmsNormModulate {
  static constexpr int chains = 4 * kLanes;

  NormalizedRows<T> task;
  float reciprocal_columns;
  int height;   // the grid's; its width is kLanes / height

  FUSIONGATE_DEVICE void operator()(const Block<threads>& block) const {
    const int64_t row = block.index;
    const T* source = task.source(row);
    const int columns = static_cast<int>(task.rows.columns);
    const int vectors = columns / kWidth;

    PerThread<Held<T, kHeld, kWidth>, threads> held;
    alignas(16) FUSIONGATE_SHARED float accumulators[chains];
    block.each([&](int thread) {
      FUSIONGATE_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int vector = thread + i * threads;
        if (vector < vectors) held[thread].vectors[i] = load<kWidth>(source + vector * kWidth);
      }
      for (int chain = thread; chain < chains; chain += threads) accumulators[chain] = sum_of_squares(source, chain, columns);
    });
    block.synchronize();

    const float sum = reduce(block, accumulators);
    const float statistic = reciprocal_square_root(add(mul(sum, reciprocal_columns), planted_epsilon(task.eps)));

    const OutputRow<T, Weighting::after_rounding> output(task, row);
    block.each([&](int thread) {
      if (thread == 0 && task.rstd != nullptr) task.rstd[row] = statistic;
      FUSIONGATE_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int column = (thread + i * threads) * kWidth;
        if (column < columns) output.finish(column, held[thread].vectors[i], statistic);
      }
      for (int vector = thread + kHeld * threads; vector < vectors; vector += threads) {
        const int column = vector * kWidth;
        output.finish(column, load<kWidth>(source + column), statistic);
      }
    });
  }

  FUSIONGATE_DEVICE static float sum_of_squares(const T* source, int chain, int columns) {
    // Loads first, in groups: the additions have to wait for one another, the loads need not.
    constexpr int group = 8;
    float sum = 0.0f;
    int column = chain;
    for (; column + (group - 1) * chains < columns; column += group * chains) {
      float values[group];
      FUSIONGATE_UNROLL
      for (int i = 0; i < group; ++i) values[i] = widen(source[column + i * chains]);
      FUSIONGATE_UNROLL
      for (int i = 0; i < group; ++i) sum = add(sum, mul(values[i], values[i]));
    }
    for (; column < columns; column += chains) {
      const float value = widen(source[column]);
      sum = add(sum, mul(value, value));
    }
    return sum;
  }

  FUSIONGATE_DEVICE float reduce(const Block<threads>& block, const float* accumulators) const {
    const int width = kLanes / height;
    FUSIONGATE_SHARED float lanes[kLanes];
    block.each([&](int thread) {
      for (int lane = thread; lane < kLanes; lane += threads) {
        const auto four = load<4>(accumulators + 4 * lane);
        lanes[lane] = add(add(add(four.elements[0], four.elements[1]), four.elements[2]), four.elements[3]);
      }
    });
    block.synchronize();
    for (int half = width / 2; half >= warp_lanes; half /= 2) {
      block.each([&](int thread) {
        for (int index = thread; index < half * height; index += threads) {
          float* lane = lanes + index / half * width + index % half;
          *lane = add(*lane, lane[half]);
        }
      });
      block.synchronize();
    }
    FUSIONGATE_SHARED float lines[kLanes / warp_lanes + 1];
    for (int first = 0; first < height; first += warps) {
      PerThread<float, threads> sums;
      block.each([&](int thread) {
        const int line = first + thread / warp_lanes;
        sums[thread] = line < height ? lanes[line * width + thread % warp_lanes] : 0.0f;
      });
      reduce_warps<warp_lanes == 32>(block, sums);
      block.each([&](int thread) {
        const int line = first + thread / warp_lanes;
        if (thread % warp_lanes == 0 && line < height) lines[line] = sums[thread];
      });
    }
    block.synchronize();
    return folded(lines, height);
  }

  // The lines' sums, the upper half added to the lower until one is left, by every thread for itself.
  FUSIONGATE_DEVICE static float folded(const float* lines, int height) {
    if constexpr (kLanes < 512) {
      return lines[0];
    } else {
      constexpr int most = 16;
      float values[most];
      FUSIONGATE_UNROLL
      for (int line = 0; line < most; ++line) values[line] = line < height ? lines[line] : 0.0f;
      FUSIONGATE_UNROLL
      for (int half = most / 2; half > 0; half /= 2) {
        if (half >= height) continue;
        FUSIONGATE_UNROLL
        for (int line = 0; line < half; ++line) values[line] = add(values[line], values[line + half]);
      }
      return values[0];
    }
  }
};

template <typename T, int kLanes, int kHeld, int kWidth>
void launch_held(const NormalizedRows<T>& task, const TensorView& x, int64_t height) {
  const float reciprocal = 1.0f / static_cast<float>(task.rows.columns);
  launch<threads>(task.count, CompositeRmsNormModulate<T, kLanes, kHeld, kWidth>{task, reciprocal, static_cast<int>(height)},
                  x.device().device_id, stream_of(x));
}

// A line of 32 lanes is the common case, and keeps rows of ordinary length in registers; the other grids occur with few rows or very long ones.
template <typename T, int kWidth>
void launch_width(const NormalizedRows<T>& task, const TensorView& x, int64_t lanes, int64_t height) {
  const int64_t needed = (task.rows.columns / kWidth + threads - 1) / threads;
  switch (lanes) {
    case 32:
      if constexpr (warp_lanes == 32) {
        if (needed <= 2) return launch_held<T, 32, 2, kWidth>(task, x, height);
        if (needed <= 4) return launch_held<T, 32, 4, kWidth>(task, x, height);
        return launch_held<T, 32, 8, kWidth>(task, x, height);
      }
      [[fallthrough]];
    case 64:
      return launch_held<T, 64, 4, kWidth>(task, x, height);
    case 128:
      return launch_held<T, 128, 4, kWidth>(task, x, height);
    case 256:
      return launch_held<T, 256, 4, kWidth>(task, x, height);
    case 512:
      return launch_held<T, 512, 8, kWidth>(task, x, height);
    default:
      TVM_FFI_THROW(ValueError) << "ATen sums no row in a grid of " << lanes << " lanes";
  }
}

void composite_rms_norm_modulate(TensorView out, TensorView x, TensorView scale, TensorView shift, Optional<TensorView> weight,
                                 double eps, Optional<TensorView> rstd, int64_t width, int64_t height) {
  check_norm_operands(out, x, scale, shift, weight, rstd);
  TVM_FFI_ICHECK(x.size(2) % 4 == 0 && x.size(2) >= 128)
      << "D must be a multiple of 4 and at least 128: ATen sums other rows in another order";
  TVM_FFI_ICHECK(width >= warp_lanes && height >= 1 && height <= 16 && (height == 1 || width * height == 512))
      << "ATen sums no row in a grid of " << width << " x " << height << " lanes";
  if (x.numel() == 0) return;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto task = normalized_rows<T>(out, x, scale, shift, weight, eps, rstd);
    constexpr int widest = 16 / sizeof(T);
    const bool wide = task.rows.columns % widest == 0 && is_aligned(x, widest) && is_aligned(out, widest) &&
                      rows_allow(scale, widest) && rows_allow(shift, widest) &&
                      (!weight.has_value() || is_aligned(weight.value(), widest));
    if (wide) {
      launch_width<T, widest>(task, x, width * height, height);
    } else {
      launch_width<T, 4>(task, x, width * height, height);
    }
  });
}

}  // namespace
}  // namespace fusiongate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(composite_rms_norm_modulate, fusiongate::composite_rms_norm_modulate);
FUSIONGATE_EXPORT_ADMITTED_CALLS();
FUSIONGATE_EXPORT_ADMITTED(composite_rms_norm_modulate);
