// The RMSNorm that models write out, and modulate, in one launch:
//   y = (x * rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) [* weight];  y * (1 + scale) + shift
// x is (B, S, D), scale and shift are (B, 1, D).
//
// The sum is in the order of ATen's mean over a contiguous last dimension (aten/src/ATen/native/cuda/Reduce.cuh). A team of threads has
// a row: thread t takes the 4-element vectors t, t + team, ...; it has four accumulators, one a position, to which the
// squares, already rounded, are added; then ((a0 + a1) + a2) + a3; then the upper half of the team is added to the lower
// until one is left. ATen sizes the team by the number of rows and by D; the caller says which
// one it takes.
#include "../common/normalized_rows.cuh"

namespace fusiongate {
namespace {

// Moves the sum of the squares of a team's row into its first thread.
template <int kTeam, int kThreads>
FUSIONGATE_DEVICE void reduce_team(const Block<kThreads>& block, PerThread<float, kThreads>& sums) {
  if constexpr (kTeam > warp_lanes) {
    FUSIONGATE_SHARED float partial[kThreads];
    block.each([&](int thread) { partial[thread] = sums[thread]; });
    FUSIONGATE_UNROLL
    for (int offset = kTeam / 2; offset >= warp_lanes; offset /= 2) {
      block.synchronize();
      block.each([&](int thread) {
        if (thread % kTeam < offset) {
          sums[thread] = add(sums[thread], partial[thread + offset]);
          partial[thread] = sums[thread];
        }
      });
    }
  }
  reduce_warps<warp_lanes == 32>(block, sums);
}

template <typename T, int kTeam, int kHeld>
struct CompositeRmsNormModulate {
  static constexpr int threads = kTeam < 128 ? 128 : kTeam;
  static constexpr int teams = threads / kTeam;

  NormalizedRows<T> task;
  float reciprocal_columns;

  FUSIONGATE_DEVICE void operator()(const Block<threads>& block) const {
    const int vectors = static_cast<int>(task.rows.columns / 4);
    PerThread<Held<T, kHeld, 4>, threads> held;
    PerThread<float, threads> sums;
    block.each([&](int thread) {
      const int64_t row = block.index * teams + thread / kTeam;
      float accumulators[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (row < task.count) {
        const T* source = task.source(row);
        auto accumulate = [&](const Vector<T, 4>& vector) {
          FUSIONGATE_UNROLL
          for (int i = 0; i < 4; ++i) {
            const float value = widen(vector.elements[i]);
            accumulators[i] = add(accumulators[i], mul(value, value));
          }
        };
        FUSIONGATE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
          const int vector = thread % kTeam + i * kTeam;
          if (vector < vectors) held[thread].vectors[i] = load<4>(source + vector * 4);
        }
        FUSIONGATE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
          if (thread % kTeam + i * kTeam < vectors) accumulate(held[thread].vectors[i]);
        }
        for (int vector = thread % kTeam + kHeld * kTeam; vector < vectors; vector += kTeam) {
          accumulate(load<4>(source + vector * 4));
        }
      }
      sums[thread] = add(add(add(accumulators[0], accumulators[1]), accumulators[2]), accumulators[3]);
    });

    reduce_team<kTeam>(block, sums);
    FUSIONGATE_SHARED float statistics[teams];
    block.each([&](int thread) {
      if (thread % kTeam != 0) return;
      const float mean_square = mul(sums[thread], reciprocal_columns);
      const float statistic = reciprocal_square_root(add(mean_square, planted_epsilon(task.eps)));
      statistics[thread / kTeam] = statistic;
      const int64_t row = block.index * teams + thread / kTeam;
      if (row < task.count && task.rstd != nullptr) task.rstd[row] = statistic;
    });
    block.synchronize();

    block.each([&](int thread) {
      const int64_t row = block.index * teams + thread / kTeam;
      if (row >= task.count) return;
      const float statistic = statistics[thread / kTeam];
      const OutputRow<T, Weighting::after_rounding> output(task, row);
      FUSIONGATE_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int vector = thread % kTeam + i * kTeam;
        if (vector < vectors) output.finish(vector * 4, held[thread].vectors[i], statistic);
      }
      for (int vector = thread % kTeam + kHeld * kTeam; vector < vectors; vector += kTeam) {
        output.finish(vector * 4, load<4>(task.source(row) + vector * 4), statistic);
      }
    });
  }
};

template <typename T, int kTeam, int kHeld>
void launch_held(const NormalizedRows<T>& task, const TensorView& x) {
  using Kernel = CompositeRmsNormModulate<T, (kTeam < warp_lanes ? warp_lanes : kTeam), kHeld>;
  const Kernel kernel{task, 1.0f / static_cast<float>(task.rows.columns)};
  launch<Kernel::threads>((task.count + Kernel::teams - 1) / Kernel::teams, kernel, x.device().device_id, stream_of(x));
}

// Small teams with long rows are the common case and keep the row in registers; the others occur with few rows only.
template <typename T>
void launch_team(const NormalizedRows<T>& task, const TensorView& x, int64_t team) {
  const int64_t needed = (task.rows.columns / 4 + team - 1) / team;
  switch (team) {
    case 32:
      if (needed <= 8) return launch_held<T, 32, 8>(task, x);
      if (needed <= 16) return launch_held<T, 32, 16>(task, x);
      if (needed <= 32) return launch_held<T, 32, 32>(task, x);
      return launch_held<T, 32, 48>(task, x);
    case 64:
      return launch_held<T, 64, 8>(task, x);
    case 128:
      return launch_held<T, 128, 8>(task, x);
    case 256:
      return launch_held<T, 256, 8>(task, x);
    case 512:
      return launch_held<T, 512, 8>(task, x);
    default:
      TVM_FFI_THROW(ValueError) << "a team has 32, 64, 128, 256 or 512 threads, not " << team;
  }
}

void composite_rms_norm_modulate(TensorView out, TensorView x, TensorView scale, TensorView shift, Optional<TensorView> weight,
                                 double eps, Optional<TensorView> rstd, int64_t team) {
  check_norm_operands(out, x, scale, shift, weight, rstd);
  TVM_FFI_ICHECK(x.size(2) % 4 == 0 && x.size(2) >= 128) << "D must be a multiple of 4 and at least 128: ATen sums other rows in another order";
  if (x.numel() == 0) return;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_team<T>(normalized_rows<T>(out, x, scale, shift, weight, eps, rstd), x, team);
  });
}

}  // namespace
}  // namespace fusiongate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(composite_rms_norm_modulate, fusiongate::composite_rms_norm_modulate);
