// x * (1 + scale) + shift: x is (B, S, D), scale and shift are (B, 1, D) with any batch stride.
//
// x is one long line of vectors, whatever D is: every thread has as little to do as there is, 16 bytes, and all have the same. Each byte
// of x is read once and each byte of the output written once, which is all that the op has to move; the rows come out of the cache.
#include <algorithm>

#include "../common/admitted.cuh"
#include "../common/operands.cuh"

namespace fusiongate {
namespace {

constexpr int threads = 128;

// kWidth elements of x move at once; the rows of the modulation in parts of kPart elements, none of which crosses the end of a row.
template <typename T, typename Row, Schedule kSchedule, int kWidth, int kPart>
struct Modulate {
  static constexpr int in_flight = kWidth * sizeof(T) == 16 ? 1 : kWidth * sizeof(T) == 8 ? 2 : 4;   // vectors of a thread
  static constexpr int step = threads * in_flight;                                                   // vectors of a block
  static constexpr int parts = kWidth / kPart;                                                       // of a vector

  // In the order of their use: a small launch waits for each line of its arguments.
  const T* x;
  uint32_t count;       // parts in this launch
  uint32_t first_row;
  Divisor by_row;       // parts of a row
  Divisor by_tokens;
  Rows<Row> rows;
  T* out;
  uint32_t tokens;
  bool last_launch;

  struct RowParts {
    Vector<Row, kPart> scale;
    Vector<Row, kPart> shift;
  };

  struct Place {
    uint32_t row;
    uint32_t column;
  };

  FUSIONGATE_DEVICE Place place_of(uint32_t part) const {
    const uint32_t row = by_row.quotient(part);
    return {first_row + row, (part - row * by_row.divisor) * kPart};
  }

  FUSIONGATE_DEVICE void operator()(const Block<threads>& block) const {
    const uint32_t start = static_cast<uint32_t>(block.index) * (step * parts);
    if (planted<Fault::last_tile_skipped> && last_launch && count - start <= step * parts) return;
    block.each([&](int thread) {
      Vector<T, kWidth> values[in_flight];
      RowParts taken[in_flight][parts];
      FUSIONGATE_UNROLL
      for (int i = 0; i < in_flight; ++i) {
        const uint32_t first = start + (thread + i * threads) * parts;
        if (!is_whole(first)) continue;
        values[i] = load_ahead<kWidth>(x + int64_t{first} * kPart);
        FUSIONGATE_UNROLL
        for (int j = 0; j < parts; ++j) taken[i][j] = rows_of_part(first + j);
      }
      FUSIONGATE_UNROLL
      for (int i = 0; i < in_flight; ++i) {
        const uint32_t first = start + (thread + i * threads) * parts;
        if (is_whole(first)) {
          Vector<T, kWidth> results;
          FUSIONGATE_UNROLL
          for (int j = 0; j < parts; ++j) {
            const Vector<T, kPart> result = result_of(first + j, part_of(values[i], j), taken[i][j]);
            FUSIONGATE_UNROLL
            for (int element = 0; element < kPart; ++element) results.elements[j * kPart + element] = result.elements[element];
          }
          store<kWidth>(out + int64_t{first} * kPart, results);
        } else {
          for (uint32_t part = first; part < count; ++part) {
            store<kPart>(out + int64_t{part} * kPart, result_of(part, load<kPart>(x + int64_t{part} * kPart), rows_of_part(part)));
          }
        }
      }
    });
  }

  // Whether all parts of the vector that begins with this one are there: the line may end within the last one.
  FUSIONGATE_DEVICE bool is_whole(uint32_t first) const { return first + (parts - 1) < count; }

  FUSIONGATE_DEVICE RowParts rows_of_part(uint32_t part) const {
    const Place place = place_of(part);
    const int64_t batch = by_tokens.quotient(place.row);
    return {load_ahead<kPart>(rows.scale_of(batch) + place.column), load_ahead<kPart>(rows.shift_of(batch) + place.column)};
  }

  FUSIONGATE_DEVICE Vector<T, kPart> result_of(uint32_t part, const Vector<T, kPart>& value, const RowParts& taken) const {
    auto result = modulated<T, kSchedule>(widen(value), one_plus<T, kSchedule>(taken.scale), taken.shift);
    if constexpr (planted<Fault::tail_skipped> || planted<Fault::one_element_off>) {
      const Place place = place_of(part);
      if (planted<Fault::tail_skipped> && place.row % tokens == tokens - 1) result = load<kPart>(out + int64_t{part} * kPart);
      if (planted<Fault::one_element_off> && place.row == tokens - 1 && place.column == 0) {
        result.elements[0] = narrow<T>(add(widen(result.elements[0]), 1.0f));
      }
    }
    return result;
  }

  FUSIONGATE_DEVICE static Vector<T, kPart> part_of(const Vector<T, kWidth>& vector, int part) {
    Vector<T, kPart> result;
    FUSIONGATE_UNROLL
    for (int element = 0; element < kPart; ++element) result.elements[element] = vector.elements[part * kPart + element];
    return result;
  }
};

// In one launch, unless 31 bits do not number the parts of x.
template <typename T, typename Row, Schedule kSchedule, int kWidth, int kPart>
void launch_width(const TensorView& out, const TensorView& x, const Rows<Row>& rows) {
  using Kernel = Modulate<T, Row, kSchedule, kWidth, kPart>;
  constexpr int64_t most = int64_t{1} << 31, a_block = Kernel::step * Kernel::parts;
  const int64_t a_row = rows.columns / kPart, height = x.size(0) * x.size(1);
  TVM_FFI_ICHECK(height < most && a_row < most / (2 * Kernel::parts)) << "too large: more rows or columns than a launch numbers";
  // A whole number of vectors in each launch but the last: they are aligned.
  const int64_t rows_a_launch = (most - a_block) / a_row / Kernel::parts * Kernel::parts;
  for (int64_t first = 0; first < height; first += rows_a_launch) {
    const int64_t count = std::min(rows_a_launch, height - first) * a_row;
    const int64_t offset = first * rows.columns;
    const Kernel kernel{static_cast<const T*>(x.data_ptr()) + offset,
                        static_cast<uint32_t>(count),
                        static_cast<uint32_t>(first),
                        Divisor::of(a_row),
                        Divisor::of(x.size(1)),
                        rows,
                        static_cast<T*>(out.data_ptr()) + offset,
                        static_cast<uint32_t>(x.size(1)),
                        first + rows_a_launch >= height};
    launch<threads>((count + a_block - 1) / a_block, kernel, x.device().device_id, stream_of(x));
  }
}

template <typename T, typename Row, Schedule kSchedule>
void launch_modulate(const TensorView& out, const TensorView& x, const TensorView& scale, const TensorView& shift) {
  const Rows<Row> rows = rows_of<Row>(scale, shift, x);
  constexpr int widest = 16 / sizeof(T);
  const bool wide = rows.columns % 4 == 0 && is_aligned(x, widest) && is_aligned(out, widest);
  if (wide && rows.columns % widest == 0 && rows_allow(scale, widest) && rows_allow(shift, widest)) {
    launch_width<T, Row, kSchedule, widest, widest>(out, x, rows);
  } else if (wide) {
    launch_width<T, Row, kSchedule, widest, 4>(out, x, rows);
  } else if (rows.columns % 4 == 0) {
    launch_width<T, Row, kSchedule, 4, 4>(out, x, rows);
  } else {
    launch_width<T, Row, kSchedule, 1, 1>(out, x, rows);
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
