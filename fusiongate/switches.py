"""The settings of torch and of the process that change arithmetic."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["PORTABLE", "VARIABLES", "switches"]

PORTABLE = {
    # Torch's own loops: their functions are then the C library's, which picks its code by the CPU too.
    "ATEN_CPU_CAPABILITY": "default",
    # The second three are the names that glibc had for them before 2.33.
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX2_Usable,-FMA_Usable,-FMA4_Usable",
    "MKL_CBWR": "COMPATIBLE",
    # Of MKL's vector functions, the one variant without RSQRTPS and RCPPS, which Intel and AMD approximate differently.
    "MKL_VML_DEBUG_CPU_TYPE": "1",
    # X86_V3 and what follows since NumPy 2.4, the others before; what a NumPy does not know, it leaves alone.
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR "
    "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Nehalem",
}
"""What holds every library of an x86-64 process to instructions that all such CPUs have; set before torch is loaded."""

VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDNN_CONV_WSCAP_DBG",
    "DISABLE_ADDMM_CUDA_LT",
    "FUSIONGATE_DISABLE",
    "GLIBC_TUNABLES",
    "MIOPEN_FIND_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_VML_DEBUG_CPU_TYPE",
    "NPY_DISABLE_CPU_FEATURES",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "ROCBLAS_INTERNAL_FP16_ALT_IMPL",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)
"""Environment variables that move bits."""


def switches() -> dict[str, str]:
    """What is set now: torch's settings as ``on``, ``off`` or their own word, and the variables that are set."""
    import torch

    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    settings = {
        # Torch refuses to read the older names of a precision once the newer ones have been written.
        "cuda.matmul.fp32_precision": matmul.fp32_precision,
        "cudnn.conv.fp32_precision": cudnn.conv.fp32_precision,
        "cudnn.rnn.fp32_precision": cudnn.rnn.fp32_precision,
        "cuda.matmul.bf16_reduced_precision": matmul.allow_bf16_reduced_precision_reduction,
        "cuda.matmul.fp16_reduced_precision": matmul.allow_fp16_reduced_precision_reduction,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        # Torch can set this mode but not tell it; a halved smallest normal number shows it.
        "flush_denormal": sys.float_info.min / 2 == 0,
    }
    words = {name: _word(value) for name, value in settings.items()}
    return words | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
