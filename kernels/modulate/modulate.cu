// x * (1 + scale) + shift: x is (B, S, D), scale and shift are (B, 1, D) with any batch stride.
//
// A thread has a vector of columns of a few tokens: it works out 1 + scale once for all of them. Each byte of x is read once and each
// byte of the output written once, which is all that the op has to move; the rows come out of the cache.
#include "../common/admitted.cuh"
#include "../common/operands.cuh"

namespace fusiongate {
namespace {

constexpr int threads = 256;
constexpr int rows_in_flight = 4;   // tokens of a thread, all loaded before it computes: hides the memory's latency

template <typename T, typename Row, Schedule kSchedule, int kWidth>
struct Modulate {
  const T* x;
  T* out;
  Rows<Row> rows;
  int64_t tokens;
  int64_t column_tiles;
  int64_t token_tiles;
  int64_t tiles;
  int lane_bits;   // a block is 2^lane_bits column vectors by threads / 2^lane_bits tokens

  FUSIONGATE_DEVICE void operator()(const Block<threads>& block) const {
    const int64_t column_tile = block.index % column_tiles;
    const int64_t token_tile = block.index / column_tiles % token_tiles;
    const int64_t batch = block.index / column_tiles / token_tiles;
    if (planted<Fault::last_tile_skipped> && block.index == tiles - 1) return;

    block.each([&](int thread) {
      const int lane = thread & ((1 << lane_bits) - 1);
      const int64_t column = ((column_tile << lane_bits) + lane) * kWidth;
      if (column >= rows.columns) return;

      const auto one_plus_scale = one_plus<T, kSchedule>(load<kWidth>(rows.scale_of(batch) + column));
      const auto shift = load<kWidth>(rows.shift_of(batch) + column);

      const int step = threads >> lane_bits;
      const int64_t token = token_tile * (step * rows_in_flight) + (thread >> lane_bits);
      const T* source = x + (batch * tokens + token) * rows.columns + column;
      T* target = out + (batch * tokens + token) * rows.columns + column;
      const int64_t stride = step * rows.columns;

      auto modulate_one = [&](const Vector<T, kWidth>& value, T* address, int64_t at) {
        if (planted<Fault::tail_skipped> && at == tokens - 1) return;
        auto result = modulated<T, kSchedule>(widen(value), one_plus_scale, shift);
        if (planted<Fault::one_element_off> && column == 0 && at == tokens - 1 && batch == 0) {
          result.elements[0] = narrow<T>(add(widen(result.elements[0]), 1.0f));
        }
        store<kWidth>(address, result);
      };

      if (token + (rows_in_flight - 1) * step < tokens) {
        Vector<T, kWidth> values[rows_in_flight];
        FUSIONGATE_UNROLL
        for (int i = 0; i < rows_in_flight; ++i) values[i] = load<kWidth>(source + i * stride);
        FUSIONGATE_UNROLL
        for (int i = 0; i < rows_in_flight; ++i) modulate_one(values[i], target + i * stride, token + i * step);
      } else {
        for (int i = 0; i < rows_in_flight && token + i * step < tokens; ++i) {
          modulate_one(load<kWidth>(source + i * stride), target + i * stride, token + i * step);
        }
      }
    });
  }
};

template <typename T, typename Row, Schedule kSchedule, int kWidth>
void launch_width(const TensorView& out, const TensorView& x, const Rows<Row>& rows) {
  const int64_t vectors = rows.columns / kWidth;
  int lane_bits = 0;
  while ((1 << lane_bits) < threads && (int64_t{1} << lane_bits) < vectors) ++lane_bits;
  const int64_t tokens = x.size(1);
  const int64_t tokens_a_tile = (threads >> lane_bits) * int64_t{rows_in_flight};
  const int64_t column_tiles = (vectors + (int64_t{1} << lane_bits) - 1) >> lane_bits;
  const int64_t token_tiles = (tokens + tokens_a_tile - 1) / tokens_a_tile;
  const int64_t tiles = column_tiles * token_tiles * x.size(0);
  TVM_FFI_ICHECK(tiles < (int64_t{1} << 31)) << "too large: more blocks than a grid holds";
  launch<threads>(tiles,
                  Modulate<T, Row, kSchedule, kWidth>{static_cast<const T*>(x.data_ptr()), static_cast<T*>(out.data_ptr()),
                                                      rows, tokens, column_tiles, token_tiles, tiles, lane_bits},
                  x.device().device_id, stream_of(x));
}

template <typename T, typename Row, Schedule kSchedule>
void launch_modulate(const TensorView& out, const TensorView& x, const TensorView& scale, const TensorView& shift) {
  const Rows<Row> rows = rows_of<Row>(scale, shift, x);
  constexpr int widest = 16 / sizeof(T);
  const bool wide = rows.columns % widest == 0 && is_aligned(x, widest) && is_aligned(out, widest) &&
                    rows_allow(scale, widest) && rows_allow(shift, widest);
  if (wide) {
    launch_width<T, Row, kSchedule, widest>(out, x, rows);
  } else if (rows.columns % 4 == 0) {
    launch_width<T, Row, kSchedule, 4>(out, x, rows);
  } else {
    launch_width<T, Row, kSchedule, 1>(out, x, rows);
  }
}

void check_operands(const TensorView& out, const TensorView& x, const TensorView& scale, const TensorView& shift) {
  check_activation(out, x);
  check_row(scale, x, "scale");
  check_row(shift, x, "shift");
  TVM_FFI_ICHECK(same_type(scale, shift)) << "scale and shift differ in dtype";
}

// Rounds to the storage dtype after every op; all operands in one dtype.
void modulate(TensorView out, TensorView x, TensorView scale, TensorView shift) {
  check_operands(out, x, scale, shift);
  TVM_FFI_ICHECK(same_type(x, scale)) << "x and its rows differ in dtype";
  if (x.numel() == 0) return;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_modulate<T, T, Schedule::every_op>(out, x, scale, shift);
  });
}

// fp32 throughout, one rounding at the end; rows in x's dtype or in fp32.
void modulate_fp32(TensorView out, TensorView x, TensorView scale, TensorView shift) {
  check_operands(out, x, scale, shift);
  if (x.numel() == 0) return;
  const bool wide_rows = is_type(scale.dtype(), kDLFloat, 32);
  TVM_FFI_ICHECK(wide_rows || same_type(x, scale)) << "the rows must be in x's dtype or in float32";
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (wide_rows) {
      launch_modulate<T, float, Schedule::once>(out, x, scale, shift);
    } else {
      launch_modulate<T, T, Schedule::once>(out, x, scale, shift);
    }
  });
}

}  // namespace
}  // namespace fusiongate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(modulate, fusiongate::modulate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(modulate_fp32, fusiongate::modulate_fp32);
FUSIONGATE_EXPORT_ADMITTED_CALLS();
FUSIONGATE_EXPORT_ADMITTED(modulate);
FUSIONGATE_EXPORT_ADMITTED(modulate_fp32);
