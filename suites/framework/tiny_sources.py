"""A kernel source of a few lines, which every test of building compiles."""

from __future__ import annotations

from pathlib import Path

from fusiongate.jit import Source

__all__ = ["TINY", "write_tiny"]

TINY = """\
#include <tvm/ffi/function.h>
#include "addend.h"

static int64_t Add(int64_t a) { return a + ADDEND; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, Add);

#if FUSIONGATE_TARGET_HOST
#if defined(__x86_64__)
__attribute__((target("fma")))
#endif
static double MultiplyAdd(double a, double b, double c) { return a * b + c; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply_add, MultiplyAdd);
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
