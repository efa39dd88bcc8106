"""The program of the child processes that compile and probe: ``python -m fusiongate.jit.child``, request on stdin.

A process of its own, because the binding layer reads environment variables and remembers what it detected, and because
a compiler or a library that aborts must not take the caller with it. Exit status 0 is success; what went wrong is
written to stderr.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

__all__: list[str] = []


def _compile(request: dict[str, Any]) -> None:
    _without_torch()
    import tvm_ffi.cpp

    try:
        tvm_ffi.cpp.build(
            request["name"],
            sources=request["sources"],
            extra_cflags=request["cflags"],
            extra_cuda_cflags=request["cuda_cflags"],
            extra_ldflags=request["ldflags"],
            build_directory=request["build_directory"],
            backend=request["backend"],
        )
    except (RuntimeError, OSError) as error:
        raise SystemExit(str(error)) from None


def _probe(request: dict[str, Any]) -> None:
    if request["without_torch"]:
        _without_torch()
    import tvm_ffi

    try:
        module = tvm_ffi.load_module(request["library"])
        if module.implements_function("fusiongate_probe"):
            module.get_function("fusiongate_probe")()
        if request["probe"] is not None:
            name, _, function = request["probe"].partition(":")
            getattr(importlib.import_module(name), function)(request["library"], request["target"])
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def _without_torch() -> None:
    # tvm_ffi imports torch whenever it can, which takes ten times as long as everything else that is done here.
    sys.modules["torch"] = None  # type: ignore[assignment]


if __name__ == "__main__":
    request = json.load(sys.stdin)
    {"compile": _compile, "probe": _probe}[request["task"]](request)
