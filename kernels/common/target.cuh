// One source for three targets: CUDA, HIP, and the host.
//
// A kernel is a functor over a Block. On a GPU its `each` runs the lambda once, for this thread; on the host it runs it for
// every thread in turn. What a thread keeps from one `each` to the next lives in a PerThread: a register on a GPU, an array
// on the host. Nothing else differs, so the host runs the GPU's arithmetic in the GPU's order.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#if defined(FUSIONGATE_TARGET_HOST)
#define FUSIONGATE_DEVICE inline
#define FUSIONGATE_SHARED
#define FUSIONGATE_UNROLL
#elif defined(__HIP_PLATFORM_AMD__)
#include <hip/hip_runtime.h>
#define FUSIONGATE_DEVICE __device__ __forceinline__
#define FUSIONGATE_SHARED __shared__
#define FUSIONGATE_UNROLL _Pragma("unroll")
#else
#include <cuda_runtime.h>
#define FUSIONGATE_DEVICE __device__ __forceinline__
#define FUSIONGATE_SHARED __shared__
#define FUSIONGATE_UNROLL _Pragma("unroll")
#endif

namespace fusiongate {

using Stream = void*;

// Lanes of a warp, whose values a shuffle moves. The host follows the order of a 32-wide warp.
#if defined(__HIP_PLATFORM_AMD__) && !defined(FUSIONGATE_TARGET_HOST)
constexpr int warp_lanes = 64;
#else
constexpr int warp_lanes = 32;
#endif

#if defined(FUSIONGATE_TARGET_HOST)

constexpr bool on_host = true;

template <typename Value, int kThreads>
struct PerThread {
  Value values[kThreads];
  Value& operator[](int thread) { return values[thread]; }
};

template <int kThreads>
struct Block {
  static constexpr int threads = kThreads;
  int64_t index;

  template <typename Body>
  void each(Body body) const {
    for (int thread = 0; thread < kThreads; ++thread) body(thread);
  }

  // values[t] += values[t + offset], for all threads of a warp at once. Only what ends in lane 0 is used: a lane without
  // a partner adds its own value, as the shuffle instruction does.
  void add_from_above(PerThread<float, kThreads>& values, int offset) const {
    for (int thread = 0; thread < kThreads; ++thread) {
      const bool has_partner = thread % warp_lanes + offset < warp_lanes;
      values[thread] = values[thread] + values[has_partner ? thread + offset : thread];
    }
  }

  // values[t] = values[t] + values[t ^ mask]: the sums of add_from_above, in every lane at once.
  void add_across(PerThread<float, kThreads>& values, int mask) const {
    const PerThread<float, kThreads> before = values;
    for (int thread = 0; thread < kThreads; ++thread) values[thread] = before.values[thread] + before.values[thread ^ mask];
  }

  void synchronize() const {}
};

// What a host build with -DFUSIONGATE_TOLD_LAUNCHES has launched since it was asked: tests enumerate what a signature leads to.
inline std::string& told_launches() {
  static std::string told;
  return told;
}

template <int kThreads, int kResident = 1, typename Kernel>
void launch(int64_t blocks, const Kernel& kernel, int /*device*/, Stream /*stream*/) {
#if defined(FUSIONGATE_TOLD_LAUNCHES)
  told_launches() += std::string(__PRETTY_FUNCTION__) + '\n';
  return;
#endif
  for (int64_t index = 0; index < blocks; ++index) kernel(Block<kThreads>{index});
}

#else

constexpr bool on_host = false;

template <typename Value, int kThreads>
struct PerThread {
  Value value;
  FUSIONGATE_DEVICE Value& operator[](int) { return value; }
};

template <int kThreads>
struct Block {
  static constexpr int threads = kThreads;
  int64_t index;

  template <typename Body>
  FUSIONGATE_DEVICE void each(Body body) const {
    body(static_cast<int>(threadIdx.x));
  }

  FUSIONGATE_DEVICE void add_from_above(PerThread<float, kThreads>& values, int offset) const {
#if defined(__HIP_PLATFORM_AMD__)
    values.value = values.value + __shfl_down(values.value, offset, warp_lanes);
#else
    values.value = __fadd_rn(values.value, __shfl_down_sync(0xffffffffu, values.value, offset));
#endif
  }

  FUSIONGATE_DEVICE void add_across(PerThread<float, kThreads>& values, int mask) const {
#if defined(__HIP_PLATFORM_AMD__)
    values.value = values.value + __shfl_xor(values.value, mask, warp_lanes);
#else
    values.value = __fadd_rn(values.value, __shfl_xor_sync(0xffffffffu, values.value, mask));
#endif
  }

  FUSIONGATE_DEVICE void synchronize() const { __syncthreads(); }
};

// The second number means something else to AMD's compiler, and is a matter of CUDA's registers here.
#if defined(__HIP_PLATFORM_AMD__)
#define FUSIONGATE_BOUNDS(threads, resident) __launch_bounds__(threads)
#else
#define FUSIONGATE_BOUNDS(threads, resident) __launch_bounds__(threads, resident)
#endif

template <int kThreads, int kResident, typename Kernel>
__global__ void FUSIONGATE_BOUNDS(kThreads, kResident) fusiongate_kernel(const Kernel kernel) {
  kernel(Block<kThreads>{static_cast<int64_t>(blockIdx.x)});
}

#if defined(__HIP_PLATFORM_AMD__)
using Error = hipError_t;
inline Error get_device(int* device) { return hipGetDevice(device); }
inline Error set_device(int device) { return hipSetDevice(device); }
inline Error last_error() { return hipGetLastError(); }
inline const char* describe(Error error) { return hipGetErrorString(error); }
using NativeStream = hipStream_t;
constexpr Error success = hipSuccess;
#else
using Error = cudaError_t;
inline Error get_device(int* device) { return cudaGetDevice(device); }
inline Error set_device(int device) { return cudaSetDevice(device); }
inline Error last_error() { return cudaGetLastError(); }
inline const char* describe(Error error) { return cudaGetErrorString(error); }
using NativeStream = cudaStream_t;
constexpr Error success = cudaSuccess;
#endif

inline void check(Error error) {
  if (error != success) throw std::runtime_error(std::string("kernel launch failed: ") + describe(error));
}

// The tensors decide where a launch goes, not the thread's current device; that one is as before afterwards.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check(get_device(&previous_));
    if (previous_ != device_) check(set_device(device_));
  }
  ~DeviceGuard() {
    if (previous_ != device_) (void)set_device(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int previous_ = 0;
};

// kResident: how many blocks at least are to fit on a multiprocessor at once, for which registers are spared.
template <int kThreads, int kResident = 1, typename Kernel>
void launch(int64_t blocks, const Kernel& kernel, int device, Stream stream) {
  DeviceGuard guard(device);
  fusiongate_kernel<kThreads, kResident>
      <<<dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, static_cast<NativeStream>(stream)>>>(kernel);
  check(last_error());
}

#endif

}  // namespace fusiongate
