// F.rms_norm(x, (D,), weight, eps) * (1 + scale) + shift in one launch: x is (B, S, D), scale and shift are (B, 1, D).
//
// The order is that of ATen's vectorised row kernel (aten/src/ATen/native/cuda/layer_norm_kernel.cu): four warps a row; thread t
// takes the 4-element vectors t, t + threads, ...; fused multiply-adds in element order; each warp's shuffles by halves; the warps as
// (w0 + w2) + (w1 + w3); rsqrt(sum / D + eps). Another order would be no faster: `rms_norm_modulate_high` has the same.
#include "../common/admitted.cuh"
#include "../common/normalized_rows.cuh"

namespace fusiongate {
namespace {

constexpr int warps = 4;
constexpr int threads = warps * warp_lanes;
constexpr auto norm = Weighting::before_rounding;

// ATen's order, by threads that hold ATen's own vectors, or by way of shared memory where theirs are wider.
template <bool kStaged>
struct RowKernelOrder {
  static constexpr bool staged = kStaged;

  template <typename T, typename Way>
  FUSIONGATE_DEVICE PerThread<float, threads> statistics(const Block<threads>& block, const TakenRow<T, Way>& row, float eps) const {
    const float center = planted<Fault::mean_subtracted> ? mean(row) : 0.0f;
    PerThread<float, threads> sums;
    block.each([&](int thread) {
      if constexpr (staged) {
        sums[thread] = sum_of_staged(row, thread, center);
      } else {
        sums[thread] = sum_of_held(row, thread, center);
      }
    });
    reduce_warps<true>(block, sums);
    FUSIONGATE_SHARED float partial[warps];
    block.each([&](int thread) {
      if (thread % warp_lanes == 0) partial[thread / warp_lanes] = sums[thread];
    });
    block.synchronize();
    const float sum = add(add(partial[0], partial[2]), add(partial[1], partial[3]));
    const float statistic = reciprocal_square_root(add(divide(sum, static_cast<float>(row.columns)), eps));
    block.each([&](int thread) { sums[thread] = statistic; });
    return sums;
  }

  template <typename T, typename Way>
  FUSIONGATE_DEVICE static float sum_of_held(const TakenRow<T, Way>& row, int thread, float center) {
    float sum = 0.0f;
    Way::each_held(thread, row.columns, [&](int i, int) { sum = with_squares(sum, row.held[thread].vectors[i], center); });
    Way::each_other(thread, row.columns, [&](int column) { sum = with_squares(sum, load<Way::width>(row.source + column), center); });
    return sum;
  }

  // In groups without a branch, so that their loads do not wait for one another: past the row's end stand zeros, which a sum of
  // squares does not notice.
  template <typename T, typename Way>
  FUSIONGATE_DEVICE static float sum_of_staged(const TakenRow<T, Way>& row, int thread, float center) {
    constexpr int steps = Way::held * Way::width / 4, group = 4;
    float sum = 0.0f;
    FUSIONGATE_UNROLL
    for (int first = 0; first < steps; first += group) {
      Vector<T, 4> values[group];
      FUSIONGATE_UNROLL
      for (int i = 0; i < group && first + i < steps; ++i) {
        const int column = 4 * (thread + (first + i) * threads);
        const bool inside = Way::has((first + i) * 4 / Way::width, column, row.columns);
        values[i] = load<4>(row.staged + (inside ? column : 0));
        if (!inside) values[i] = filled(narrow<T>(center));
      }
      FUSIONGATE_UNROLL
      for (int i = 0; i < group && first + i < steps; ++i) sum = with_squares(sum, values[i], center);
    }
    return sum;
  }

  template <typename T, int kWidth>
  FUSIONGATE_DEVICE static float with_squares(float sum, const Vector<T, kWidth>& vector, float center) {
    FUSIONGATE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const float value = planted<Fault::mean_subtracted> ? widen(vector.elements[i]) - center : widen(vector.elements[i]);
      sum = fma(value, value, sum);
    }
    return sum;
  }

  template <typename T>
  FUSIONGATE_DEVICE static Vector<T, 4> filled(T value) {
    return {{value, value, value, value}};
  }

  // Only the planted LayerNorm needs it; every thread reads the whole row.
  template <typename T, typename Way>
  FUSIONGATE_DEVICE static float mean(const TakenRow<T, Way>& row) {
    float sum = 0.0f;
    for (int column = 0; column < row.columns; ++column) sum = add(sum, widen(row.source[column]));
    return divide(sum, static_cast<float>(row.columns));
  }
};

constexpr RowKernelOrder<false> direct{};   // vectors of 4 elements are ATen's own: nothing has to change hands
[[maybe_unused]] constexpr RowKernelOrder<true> staged{};

// Measured on an H200: below, the blocks of a launch all start together, and the shortest way through a row wins.
template <typename T>
bool is_large(const NormalizedRows<T>& task) {
  return task.count * task.rows.columns >= int64_t{1} << 24;
}

// Whether the row is a long one of a 16-bit type that 16-byte loads may take, and was launched.
template <Weight kWeight, typename T>
bool launch_long(const NormalizedRows<T>& task, const TensorView& x) {
  constexpr int width = 16 / sizeof(T);
  const auto way = [&](auto plan) {
    launch_rows<norm, decltype(plan)>(task, staged, x);
    return true;
  };
  const int64_t needed = (task.rows.columns / width + threads - 1) / threads;
  switch (needed) {
    case 1:
    case 2:
    case 3:
      return false;
    case 4:
      if (kWeight == Weight::none && is_large(task) && task.rows.columns > 7 * 4 * threads) return false;
      return way(Plan<threads, width, 4, kWeight, ahead | bypasses, 8>{});
    case 5:
      return way(Plan<threads, width, 5, kWeight, ahead | bypasses, 8>{});
    case 6:
      return way(Plan<threads, width, 6, kWeight, ahead | bypasses, 8>{});
    case 7:
      return way(Plan<threads, width, 7, kWeight, ahead | rereads>{});
    case 8:
      return way(Plan<threads, width, 8, kWeight, ahead | rereads>{});
    default:
      return needed <= 16 && way(Plan<threads, width, 16, kWeight, bypasses | ragged, kWeight == Weight::none ? 4 : 6>{});
  }
}

// What registers take is exact for the common lengths: those of an empty place would be lost.
template <Weight kWeight, typename T>
void launch_task(const NormalizedRows<T>& task, const TensorView& x, bool widest) {
  constexpr bool is_short = sizeof(T) == 2;
  if constexpr (is_short && warp_lanes == 32) {
    if (widest && launch_long<kWeight>(task, x)) return;
  }
  const auto way = [&](auto plan) { launch_rows<norm, decltype(plan)>(task, direct, x); };
  switch ((task.rows.columns / 4 + threads - 1) / threads) {
    case 1:
      return way(Plan<threads, 4, 1, Weight::either, ahead>{});
    case 2:
      return way(Plan<threads, 4, 2, kWeight, ahead>{});
    case 3:
      return way(Plan<threads, 4, 3, kWeight, ahead>{});
    case 4:
      return way(Plan<threads, 4, 4, kWeight, ahead>{});
    case 5:
      return way(Plan<threads, 4, 5, kWeight, is_short ? ahead : 0>{});
    case 6:
      return way(Plan<threads, 4, 6, kWeight, is_short ? ahead : 0, 8>{});
    case 8:
      if constexpr (kWeight != Weight::given) return way(Plan<threads, 4, 8, kWeight, is_short ? ahead : 0, is_short ? 6 : 8>{});
      break;
    case 10:
    case 11:
      // All but the last vector have to be there.
      if constexpr (!is_short) {
        if (task.rows.columns >= 10 * 4 * threads) return way(Plan<threads, 4, 11, kWeight, 0, 6>{});
      }
      break;
    case 12:
    case 13:
    case 14:
    case 15:
      if constexpr (!is_short) return way(Plan<threads, 4, 16, kWeight, ragged, 5>{});
      break;
    default:
      break;
  }
  way(Plan<threads, 4, 8, Weight::either, ragged, is_short ? 8 : 6>{});
}

void rms_norm_modulate(TensorView out, TensorView x, TensorView scale, TensorView shift, Optional<TensorView> weight, double eps,
                       Optional<TensorView> rstd) {
  check_norm_operands(out, x, scale, shift, weight, rstd);
  TVM_FFI_ICHECK(x.size(2) % 4 == 0) << "D must be a multiple of 4: ATen sums other rows in another order";
  if (x.numel() == 0) return;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto task = normalized_rows<T>(out, x, scale, shift, weight, eps, rstd);
    const bool widest = allow_widest<T>(out, x, scale, shift, weight);
    with_weight(task, [&](auto known) { launch_task<known.value>(task, x, widest); });
  });
}

void rms_norm_modulate_high(TensorView out, TensorView x, TensorView scale, TensorView shift, double eps) {
  rms_norm_modulate(out, x, scale, shift, {}, eps, {});
}

}  // namespace
}  // namespace fusiongate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_modulate, fusiongate::rms_norm_modulate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_modulate_high, fusiongate::rms_norm_modulate_high);
FUSIONGATE_EXPORT_ADMITTED_CALLS();
FUSIONGATE_EXPORT_ADMITTED(rms_norm_modulate);
FUSIONGATE_EXPORT_ADMITTED(rms_norm_modulate_high);
