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
// So accumulator a of lane l is a chain of its own: the elements 4 l + a, 4 l + a + chains, ... The chains want neighbouring elements in
// neighbouring threads, the memory wants few wide loads. The common grid, one line of 32 lanes, gives both: the loads leave a copy
// in shared memory, and thread t follows chain t through it. The other grids occur with few rows or very long ones; there the
// chains are followed out of the cache.
#include "../common/admitted.cuh"
#include "../common/normalized_rows.cuh"

namespace fusiongate {
namespace {

constexpr int threads = 128;
constexpr int warps = threads / warp_lanes;
constexpr int most_lines = 16;   // of a grid
constexpr auto norm = Weighting::after_rounding;

// The square of a 16-bit number is exact in fp32, so that one rounding gives what two give; save that a bf16's may be subnormal
// there, which the caller has to know harmless.
template <typename T>
FUSIONGATE_DEVICE float plus_exact_square(float sum, float value) {
  if constexpr (sizeof(T) == 2) return fma(value, value, sum);
  return add(sum, mul(value, value));
}

FUSIONGATE_DEVICE float line_of(const Vector<float, 4>& accumulators) {
  const auto& [first, second, third, fourth] = accumulators.elements;
  return add(add(add(first, second), third), fourth);
}

// One line of 32 lanes: 128 chains, a thread each, of a row that lies in shared memory.
struct LineOrder {
  static constexpr bool staged = true;
  static constexpr int chains = 128;

  float reciprocal_columns;

  template <typename T, typename Way>
  FUSIONGATE_DEVICE PerThread<float, threads> statistics(const Block<threads>& block, const TakenRow<T, Way>& row, float eps) const {
    alignas(16) FUSIONGATE_SHARED float accumulators[chains];
    block.each([&](int thread) { accumulators[thread] = sum_of_squares(row.staged, thread, row.columns); });
    block.synchronize();
    // Each warp adds them up for itself, and each thread ends with the sum: nothing has to be handed round.
    PerThread<float, threads> sums;
    block.each([&](int thread) { sums[thread] = line_of(load<4>(accumulators + 4 * (thread % warp_lanes))); });
    if constexpr (!planted<Fault::reduction_reordered>) {
      FUSIONGATE_UNROLL
      for (int mask = warp_lanes / 2; mask > 0; mask /= 2) block.add_across(sums, mask);
    } else {
      FUSIONGATE_UNROLL
      for (int mask = 1; mask < warp_lanes; mask *= 2) block.add_across(sums, mask);
    }
    block.each([&](int thread) { sums[thread] = reciprocal_square_root(add(mul(sums[thread], reciprocal_columns), eps)); });
    return sums;
  }

  // In groups without a branch, so that their loads do not wait for one another. Past the row's end the squares are zeros, which
  // the sum does not notice.
  template <typename T>
  FUSIONGATE_DEVICE static float sum_of_squares(const T* staged, int chain, int columns) {
    float sum = 0.0f;
    int column = chain;
    for (; column + 7 * chains < columns; column += 8 * chains) sum = with_group<8, false>(sum, staged, column, columns);
    if (column + 3 * chains < columns) {
      sum = with_group<4, false>(sum, staged, column, columns);
      column += 4 * chains;
    }
    return column < columns ? with_group<3, true>(sum, staged, column, columns) : sum;
  }

  template <int kGroup, bool kLast, typename T>
  FUSIONGATE_DEVICE static float with_group(float sum, const T* staged, int column, int columns) {
    float values[kGroup];
    FUSIONGATE_UNROLL
    for (int i = 0; i < kGroup; ++i) values[i] = kLast && column + i * chains >= columns ? 0.0f : widen(staged[column + i * chains]);
    FUSIONGATE_UNROLL
    for (int i = 0; i < kGroup; ++i) sum = plus_exact_square<T>(sum, values[i]);
    return sum;
  }
};

// The upper half of the first 2 * kHalf values added to the lower, until one is left.
template <int kHalf>
FUSIONGATE_DEVICE void fold(float* values, int height) {
  if constexpr (kHalf > 0) {
    FUSIONGATE_UNROLL
    for (int line = 0; line < kHalf; ++line) values[line] = kHalf < height ? add(values[line], values[line + kHalf]) : values[line];
    fold<kHalf / 2>(values, height);
  }
}

// The sum of the lines, by every thread for itself.
FUSIONGATE_DEVICE float folded(const float* lines, int height) {
  float values[most_lines];
  FUSIONGATE_UNROLL
  for (int line = 0; line < most_lines; ++line) values[line] = line < height ? lines[line] : 0.0f;
  fold<most_lines / 2>(values, height);
  return values[0];
}

// The grid of many long rows, 16 lines of 32 lanes, of a row that lies in shared memory: a thread takes whole lanes, a warp whole lines.
struct LinesOrder {
  static constexpr bool staged = true;
  static constexpr int lanes = most_lines * 32;

  float reciprocal_columns;

  template <typename T, typename Way>
  FUSIONGATE_DEVICE PerThread<float, threads> statistics(const Block<threads>& block, const TakenRow<T, Way>& row, float eps) const {
    FUSIONGATE_SHARED float lines[most_lines];
    FUSIONGATE_UNROLL
    for (int first = 0; first < lanes; first += threads) {
      PerThread<float, threads> sums;
      block.each([&](int thread) { sums[thread] = sum_of_squares(row.staged, first + thread, row.columns); });
      reduce_warps<true>(block, sums);
      block.each([&](int thread) {
        if (thread % warp_lanes == 0) lines[(first + thread) / warp_lanes] = sums[thread];
      });
    }
    block.synchronize();
    const float statistic = reciprocal_square_root(add(mul(folded(lines, most_lines), reciprocal_columns), eps));
    PerThread<float, threads> statistics;
    block.each([&](int thread) { statistics[thread] = statistic; });
    return statistics;
  }

  template <typename T>
  FUSIONGATE_DEVICE static float sum_of_squares(const T* staged, int lane, int columns) {
    Vector<float, 4> sums{};
    for (int column = 4 * lane; column < columns; column += 4 * lanes) {
      const auto values = widen(load<4>(staged + column));
      FUSIONGATE_UNROLL
      for (int i = 0; i < 4; ++i) sums.elements[i] = add(sums.elements[i], mul(values.values[i], values.values[i]));
    }
    return line_of(sums);
  }
};

// Any grid: of kLanes lanes, or of at most as many if the launch is to tell.
template <int kLanes, bool kTold>
struct GridOrder {
  static constexpr bool staged = false;

  float reciprocal_columns;
  int width;
  int height;

  template <typename T, typename Way>
  FUSIONGATE_DEVICE PerThread<float, threads> statistics(const Block<threads>& block, const TakenRow<T, Way>& row, float eps) const {
    alignas(16) FUSIONGATE_SHARED float accumulators[4 * kLanes];
    const int chains = 4 * (kTold ? width * height : kLanes);
    block.each([&](int thread) {
      for (int chain = thread; chain < chains; chain += threads) {
        accumulators[chain] = sum_of_squares(row.source, chain, chains, row.columns);
      }
    });
    block.synchronize();
    const float sum = reduced(block, accumulators);
    const float statistic = reciprocal_square_root(add(mul(sum, reciprocal_columns), eps));
    PerThread<float, threads> statistics;
    block.each([&](int thread) { statistics[thread] = statistic; });
    return statistics;
  }

  template <typename T>
  FUSIONGATE_DEVICE static float sum_of_squares(const T* source, int chain, int chains, int columns) {
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

  FUSIONGATE_DEVICE float reduced(const Block<threads>& block, const float* accumulators) const {
    FUSIONGATE_SHARED float lanes[kLanes];
    block.each([&](int thread) {
      for (int lane = thread; lane < width * height; lane += threads) lanes[lane] = line_of(load<4>(accumulators + 4 * lane));
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
    FUSIONGATE_SHARED float lines[most_lines];
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
    return kLanes == warp_lanes ? lines[0] : folded(lines, height);
  }
};

// Whether the order of one line takes the row, and was launched.
template <Weight kWeight, typename T>
bool launch_line(const NormalizedRows<T>& task, const TensorView& x, float reciprocal) {
  constexpr int width = 16 / sizeof(T);
  constexpr bool weighted = kWeight == Weight::given;
  const auto way = [&](auto plan) {
    launch_rows<norm, decltype(plan)>(task, LineOrder{reciprocal}, x);
    return true;
  };
  const int64_t needed = (task.rows.columns / width + threads - 1) / threads;
  switch (needed) {
    case 1:
      return way(Plan<threads, width, 1, kWeight, ahead | rereads>{});
    case 2:
      return way(Plan<threads, width, 2, kWeight, ahead | rereads>{});
    case 3:
      return way(Plan<threads, width, 3, kWeight, ahead | rereads, 8>{});
    case 4:
      return way(Plan<threads, width, 4, kWeight, weighted ? ahead | bypasses : ahead, weighted ? 8 : 1>{});
    default:
      break;
  }
  if constexpr (sizeof(T) == 2) {
    switch (needed) {
      case 5:
        return way(Plan<threads, width, 5, kWeight, ahead | rereads>{});
      case 6:
        return way(Plan<threads, width, 6, kWeight, ahead | bypasses, 8>{});
      case 7:
        return way(Plan<threads, width, 7, kWeight, ahead | rereads>{});
      case 8:
        return way(Plan<threads, width, 8, kWeight, ahead | rereads>{});
      default:
        break;
    }
  }
  return false;
}

// Whether the order of 16 lines takes the row, and was launched.
template <typename T>
bool launch_lines(const NormalizedRows<T>& task, const TensorView& x, float reciprocal) {
  constexpr int width = 16 / sizeof(T), held = 16;
  if (task.rows.columns > held * threads * width) return false;
  launch_rows<norm, Plan<threads, width, held, Weight::either, rereads | ragged, 6>>(task, LinesOrder{reciprocal}, x);
  return true;
}

template <int kWidth, int kLanes, bool kTold, typename T>
void launch_grid(const NormalizedRows<T>& task, const TensorView& x, const GridOrder<kLanes, kTold>& order) {
  constexpr int resident = kWidth == 4 ? 8 : 5;
  launch_rows<norm, Plan<threads, kWidth, 8, Weight::either, ragged, resident>>(task, order, x);
}

template <int kWidth, typename T>
void launch_other(const NormalizedRows<T>& task, const TensorView& x, float reciprocal, int width, int height) {
  if (width * height == 512) {
    launch_grid<kWidth>(task, x, GridOrder<512, false>{reciprocal, width, height});
  } else {
    launch_grid<kWidth>(task, x, GridOrder<256, true>{reciprocal, width, height});
  }
}

template <typename T>
void launch_task(const NormalizedRows<T>& task, const TensorView& x, bool widest, int width, int height) {
  const float reciprocal = 1.0f / static_cast<float>(task.rows.columns);
  if constexpr (warp_lanes == 32) {
    if (width == 32 && height == 1) {
      // A mean square below 2^-101 is lost in an ordinary eps, and above that no subnormal square is seen.
      const bool harmless = !std::is_same<T, bf16>::value || task.eps >= 1e-18f;
      bool launched = false;
      if (widest && harmless) with_weight(task, [&](auto known) { launched = launch_line<known.value>(task, x, reciprocal); });
      if (!launched) launch_grid<4>(task, x, GridOrder<32, false>{reciprocal, width, height});
      return;
    }
    if (width == 32 && height == most_lines && widest && launch_lines(task, x, reciprocal)) return;
  }
  if (widest) {
    launch_other<16 / sizeof(T)>(task, x, reciprocal, width, height);
  } else {
    launch_other<4>(task, x, reciprocal, width, height);
  }
}

void composite_rms_norm_modulate(TensorView out, TensorView x, TensorView scale, TensorView shift, Optional<TensorView> weight,
                                 double eps, Optional<TensorView> rstd, int64_t width, int64_t height) {
  check_norm_operands(out, x, scale, shift, weight, rstd);
  TVM_FFI_ICHECK(x.size(2) % 4 == 0 && x.size(2) >= 128)
      << "D must be a multiple of 4 and at least 128: ATen sums other rows in another order";
  TVM_FFI_ICHECK(width >= warp_lanes && width <= 512 && (width & (width - 1)) == 0 && height >= 1 && height <= most_lines &&
                 (height == 1 || width * height == 512))
      << "ATen sums no row in a grid of " << width << " x " << height << " lanes";
  if (x.numel() == 0) return;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto task = normalized_rows<T>(out, x, scale, shift, weight, eps, rstd);
    launch_task(task, x, allow_widest<T>(out, x, scale, shift, weight), static_cast<int>(width), static_cast<int>(height));
  });
}

}  // namespace
}  // namespace fusiongate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(composite_rms_norm_modulate, fusiongate::composite_rms_norm_modulate);
FUSIONGATE_EXPORT_ADMITTED_CALLS();
FUSIONGATE_EXPORT_ADMITTED(composite_rms_norm_modulate);
