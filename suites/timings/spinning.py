"""Kernels of known length: one that spins, and one that copies as many bytes as it is told."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from fusiongate.jit import Source, Target, library

__all__ = ["copy_part", "spin_cycles", "spin_ns"]

_CODE = """\
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#if defined(__HIP_PLATFORM_AMD__)
#include <hip/hip_runtime.h>
using Stream = hipStream_t;
#else
#include <cuda_runtime.h>
using Stream = cudaStream_t;
#endif

using tvm::ffi::TensorView;

namespace {

// Nanoseconds of a timer that keeps its rate whatever the core clock does.
__device__ unsigned long long timer_ns() {
#if defined(__HIP_PLATFORM_AMD__)
  return wall_clock64() * 10;  // 100 MHz
#else
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#endif
}

__global__ void spin_until(int64_t* out, unsigned long long ns) {
  const unsigned long long start = timer_ns();
  unsigned long long now = start;
  while (now - start < ns) now = timer_ns();
  out[0] = static_cast<int64_t>(now - start);
}

__global__ void spin_for(int64_t* out, long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
  out[0] = cycles;
}

__global__ void copy_some(int4* out, const int4* in, int64_t vectors) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors; i += step) out[i] = in[i];
}

Stream stream_of(const TensorView& t) {
  return static_cast<Stream>(TVMFFIEnvGetStream(t.device().device_type, t.device().device_id));
}

void SpinNs(TensorView out, int64_t ns) {
  spin_until<<<1, 1, 0, stream_of(out)>>>(static_cast<int64_t*>(out.data_ptr()), ns);
}

void SpinCycles(TensorView out, int64_t cycles) {
  spin_for<<<1, 1, 0, stream_of(out)>>>(static_cast<int64_t*>(out.data_ptr()), cycles);
}

void CopyPart(TensorView out, TensorView in, int64_t vectors, int64_t blocks) {
  copy_some<<<static_cast<unsigned>(blocks), 512, 0, stream_of(out)>>>(
      static_cast<int4*>(out.data_ptr()), static_cast<const int4*>(in.data_ptr()), vectors);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(spin_ns, SpinNs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(spin_cycles, SpinCycles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_part, CopyPart);
"""


@functools.cache
def _functions(device: torch.device) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spinning.cu"
        path.write_text(_CODE)
        return library(Source("spinning", (path,)), Target.of(device))


def spin_ns(x: Tensor, ns: int) -> Tensor:
    """Spin for so many nanoseconds by the device's own timer; the result is what it counted, int64 of shape (1,).

    Parameters
    ----------
    x
        int64 of shape (1,), on the device that is to spin; a CPU spins too.
    ns
        Nanoseconds.
    """
    if x.device.type == "cpu":
        started = time.perf_counter_ns()
        while (spun := time.perf_counter_ns() - started) < ns:
            pass
        return torch.full_like(x, spun)
    out = torch.empty_like(x)
    _functions(x.device).spin_ns(out, ns)  # type: ignore[attr-defined]  # what the library exports
    return out


def spin_cycles(x: Tensor, cycles: int) -> Tensor:
    """Spin for so many cycles of the core clock; the result is that number, int64 of shape (1,)."""
    out = torch.empty_like(x)
    _functions(x.device).spin_cycles(out, cycles)  # type: ignore[attr-defined]  # what the library exports
    return out


def copy_part(x: Tensor, share: float) -> Tensor:
    """Copy the first part of a contiguous tensor, in whole vectors of 16 bytes; the rest of the result is unset.

    A fixed grid strides over it, so that the time is as the bytes are and no last wave stands half empty.
    """
    out = torch.empty_like(x)
    blocks = 4 * torch.cuda.get_device_properties(x.device).multi_processor_count
    _functions(x.device).copy_part(out, x, int(x.nbytes * share) // 16, blocks)  # type: ignore[attr-defined]  # likewise
    return out
