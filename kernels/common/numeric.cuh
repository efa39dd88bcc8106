// Storage types and the roundings between them.
//
// Eager PyTorch computes each elementwise op in fp32 and rounds its result to the storage dtype, to nearest even. The
// functions here are those steps, one at a time, with nothing that a compiler may contract or reorder. bf16 and fp16 are
// 16-bit words, so that no vendor's header decides how they round.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "faults.cuh"
#include "target.cuh"

#if !defined(FUSIONGATE_TARGET_HOST) && !defined(__HIP_PLATFORM_AMD__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FUSIONGATE_CUDA 1
#else
#define FUSIONGATE_CUDA 0
#endif

namespace fusiongate {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

FUSIONGATE_DEVICE float float_of_bits(uint32_t bits) {
#if FUSIONGATE_CUDA
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

FUSIONGATE_DEVICE uint32_t bits_of_float(float value) {
#if FUSIONGATE_CUDA
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

FUSIONGATE_DEVICE float mul(float a, float b) {
#if FUSIONGATE_CUDA
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

FUSIONGATE_DEVICE float add(float a, float b) {
#if FUSIONGATE_CUDA
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

FUSIONGATE_DEVICE float fma(float a, float b, float c) {
#if FUSIONGATE_CUDA
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

FUSIONGATE_DEVICE float divide(float a, float b) {
#if FUSIONGATE_CUDA
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// On a GPU the runtime's own rsqrtf, as ATen calls it (it scales subnormal arguments, which a bare approximation flushes).
FUSIONGATE_DEVICE float reciprocal_square_root(float a) {
#if defined(FUSIONGATE_TARGET_HOST)
  return 1.0f / std::sqrt(a);
#else
  return rsqrtf(a);
#endif
}

FUSIONGATE_DEVICE float widen(float value) { return value; }

FUSIONGATE_DEVICE float widen(bf16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

FUSIONGATE_DEVICE float widen(fp16 value) {
#if FUSIONGATE_CUDA
  return __half2float(__ushort_as_half(value.bits));
#elif defined(__HIP_PLATFORM_AMD__)
  _Float16 half;
  __builtin_memcpy(&half, &value.bits, sizeof(half));
  return static_cast<float>(half);
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1fu) return float_of_bits(sign | 0x7f800000u | (mantissa << 13));
  // A subnormal is mantissa * 2^-24, which fp32 holds exactly.
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * (static_cast<float>(mantissa) * 5.9604644775390625e-08f);
  return float_of_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
#endif
}

template <typename T>
FUSIONGATE_DEVICE T narrow(float value);

template <>
FUSIONGATE_DEVICE float narrow<float>(float value) {
  return value;
}

template <>
FUSIONGATE_DEVICE bf16 narrow<bf16>(float value) {
#if FUSIONGATE_CUDA
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  const uint32_t bits = bits_of_float(value);
  if (value != value) return {0x7fffu};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <>
FUSIONGATE_DEVICE fp16 narrow<fp16>(float value) {
#if FUSIONGATE_CUDA
  return {__half_as_ushort(__float2half_rn(value))};
#elif defined(__HIP_PLATFORM_AMD__)
  const _Float16 half = static_cast<_Float16>(value);
  fp16 result;
  __builtin_memcpy(&result.bits, &half, sizeof(half));
  return result;
#else
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fffu};
  // 65520 is half-way from the largest finite fp16 to the next power of two, and ties go to even: to infinity.
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the spacing is 2^-24: adding 0.5 aligns the last kept bit with fp32's last bit, which then rounds.
    const float aligned = float_of_bits(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bits_of_float(aligned) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)))};
#endif
}

template <typename T>
FUSIONGATE_DEVICE float rounded(float value) {
  return widen(narrow<T>(value));
}

// The result of a kernel, as stored; this is where the faults of the last rounding are planted.
template <typename T>
FUSIONGATE_DEVICE T stored(float value) {
  if constexpr (planted<Fault::truncated> && sizeof(T) == 2) {
    const float nearest = rounded<T>(value);
    if (std::fabs(nearest) > std::fabs(value)) {
      T below = narrow<T>(nearest);
      below.bits -= 1;
      return below;
    }
  }
  if constexpr (planted<Fault::sign_of_zero_lost>) value = add(value, 0.0f);
  if constexpr (planted<Fault::nan_swallowed>) value = value != value ? 0.0f : value;
  if constexpr (planted<Fault::overflow_clamped>) {
    // The largest finite number of fp16, and of bf16 (which is finite in fp32 too).
    const float largest = sizeof(T) == 4 ? 3.4028234663852886e38f : std::is_same<T, fp16>::value ? 65504.0f : 3.3895313892515355e38f;
    if (value > largest) value = largest;
    if (value < -largest) value = -largest;
  }
  if constexpr (planted<Fault::flushed_to_zero>) {
    const float smallest_normal = std::is_same<T, fp16>::value ? 6.103515625e-05f : 1.1754943508222875e-38f;
    // The sign stays, as flushing hardware leaves it.
    if (std::fabs(value) < smallest_normal) value = mul(value, 0.0f);
  }
  return narrow<T>(value);
}

// kWidth elements that move as one load or store: 16 bytes at most.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Vector {
  T elements[kWidth];
};

template <int kWidth, typename T>
FUSIONGATE_DEVICE Vector<T, kWidth> load(const T* address) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(address);
}

template <int kWidth, typename T>
FUSIONGATE_DEVICE void store(T* address, const Vector<T, kWidth>& value) {
  if constexpr (!planted<Fault::nothing_stored>) *reinterpret_cast<Vector<T, kWidth>*>(address) = value;
}

#if FUSIONGATE_CUDA
FUSIONGATE_DEVICE uint4 words_at(const uint4* address) {
  uint4 words;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address));
  return words;
}
FUSIONGATE_DEVICE uint2 words_at(const uint2* address) {
  uint2 words;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(address));
  return words;
}
#endif

// A load of what the kernel does not write, issued where it stands. The compiler would move it to its use, behind a reduction
// or another load's wait; and it may make two 16-bit loads of one word.
template <int kWidth, typename T>
FUSIONGATE_DEVICE Vector<T, kWidth> load_ahead(const T* address) {
#if FUSIONGATE_CUDA
  constexpr int bytes = kWidth * sizeof(T);
  if constexpr (bytes % 8 == 0) {
    using Words = std::conditional_t<bytes == 8, uint2, uint4>;
    constexpr int count = bytes / sizeof(Words);
    Words words[count];
    FUSIONGATE_UNROLL
    for (int i = 0; i < count; ++i) words[i] = words_at(reinterpret_cast<const Words*>(address) + i);
    Vector<T, kWidth> result;
    __builtin_memcpy(&result, words, sizeof(result));
    return result;
  }
#endif
  return load<kWidth>(address);
}

// Copies 16 bytes of what the kernel does not write to shared memory, past the registers where the hardware can. `await_copies` waits for
// those of the thread.
template <int kWidth, typename T>
FUSIONGATE_DEVICE void copy_ahead(T* shared, const T* address) {
  static_assert(kWidth * sizeof(T) == 16);
#if FUSIONGATE_CUDA && __CUDA_ARCH__ >= 800
  const auto target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(address) : "memory");
#else
  *reinterpret_cast<Vector<T, kWidth>*>(shared) = load<kWidth>(address);
#endif
}

FUSIONGATE_DEVICE void await_copies() {
#if FUSIONGATE_CUDA && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// n / divisor for n < 2^31 by a multiplication (Granlund and Montgomery, "Division by invariant integers using multiplication",
// 1994): a division takes as long as a row's arithmetic.
struct Divisor {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;

  static Divisor of(int64_t divisor) {
    uint32_t shift = 0;
    while ((int64_t{1} << shift) < divisor) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - static_cast<uint64_t>(divisor);
    const uint64_t multiplier = (excess << 32) / static_cast<uint64_t>(divisor) + 1;
    return {static_cast<uint32_t>(divisor), static_cast<uint32_t>(multiplier), shift};
  }

  FUSIONGATE_DEVICE uint32_t quotient(uint32_t n) const {
    return (static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32) + n) >> shift;
  }
};

// Two at a time, where the hardware has one instruction for it: the kernels move memory as fast as it goes only while
// arithmetic stays out of its way.
template <typename T>
FUSIONGATE_DEVICE Vector<T, 2> narrow_pair(float first, float second) {
#if FUSIONGATE_CUDA
  if constexpr (std::is_same<T, bf16>::value) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return {{{__bfloat16_as_ushort(pair.x)}, {__bfloat16_as_ushort(pair.y)}}};
  }
  if constexpr (std::is_same<T, fp16>::value) {
    const __half2 pair = __floats2half2_rn(first, second);
    return {{{__half_as_ushort(pair.x)}, {__half_as_ushort(pair.y)}}};
  }
#endif
  return {{narrow<T>(first), narrow<T>(second)}};
}

// The rounded sums of two pairs of the storage type. In 16 bits one addition with one rounding gives what fp32 addition and a
// second rounding give: fp32 has more than twice the bits (Figueroa, "When is double rounding innocuous?", 1995), and a sum
// that is subnormal is exact. The same does not hold for a bf16 product, whose fp32 value may itself be subnormal.
template <typename T>
FUSIONGATE_DEVICE Vector<T, 2> add_pair(Vector<T, 2> a, Vector<T, 2> b) {
#if FUSIONGATE_CUDA
  if constexpr (std::is_same<T, bf16>::value) {
    const __nv_bfloat162 sum =
        __hadd2_rn(__nv_bfloat162(__ushort_as_bfloat16(a.elements[0].bits), __ushort_as_bfloat16(a.elements[1].bits)),
                   __nv_bfloat162(__ushort_as_bfloat16(b.elements[0].bits), __ushort_as_bfloat16(b.elements[1].bits)));
    return {{{__bfloat16_as_ushort(sum.x)}, {__bfloat16_as_ushort(sum.y)}}};
  }
  if constexpr (std::is_same<T, fp16>::value) {
    const __half2 sum = __hadd2_rn(__half2(__ushort_as_half(a.elements[0].bits), __ushort_as_half(a.elements[1].bits)),
                                   __half2(__ushort_as_half(b.elements[0].bits), __ushort_as_half(b.elements[1].bits)));
    return {{{__half_as_ushort(sum.x)}, {__half_as_ushort(sum.y)}}};
  }
#endif
  return narrow_pair<T>(add(widen(a.elements[0]), widen(b.elements[0])), add(widen(a.elements[1]), widen(b.elements[1])));
}

}  // namespace fusiongate
