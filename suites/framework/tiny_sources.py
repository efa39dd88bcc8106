"""A kernel source of a few lines, which every test of building compiles."""

from __future__ import annotations

from pathlib import Path

from fusiongate.jit import Source

__all__ = ["TINY", "write_tiny"]

TINY = """\
// The plain interface: the headers of the typed one take twenty times as long to compile as everything here.
#include <tvm/ffi/c_api.h>
#include "addend.h"

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_add(void*, const TVMFFIAny* given, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = given[0].v_int64 + ADDEND;
  return 0;
}

#if FUSIONGATE_TARGET_HOST
#if defined(__x86_64__)
__attribute__((target("fma")))
#endif
static double MultiplyAdd(double a, double b, double c) { return a * b + c; }

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_multiply_add(void*, const TVMFFIAny* given, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIFloat;
  result->v_float64 = MultiplyAdd(given[0].v_float64, given[1].v_float64, given[2].v_float64);
  return 0;
}
#else
__global__ void MultiplyAdd(float* p) { p[0] = p[1] * p[2] + p[3]; }
#endif
"""


def write_tiny(folder: Path, *, code: str = TINY, addend: int = 2) -> Source:
    """A source of one file and one header below a folder, both written anew."""
    headers = folder / "headers"
    headers.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.cu").write_text(code)
    (headers / "addend.h").write_text(f"#define ADDEND {addend}\n")
    return Source("tiny", (folder / "tiny.cu",), (headers,))
