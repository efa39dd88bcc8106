"""What a reference's result depends on beside its arguments: tensors that it holds, and torch's numeric switches.

Neither can be read off the reference, so it is watched while it runs. A tensor that it holds may need a gradient in a
later call. A switch, such as the precision of matrix products, may move its bits if it calls an op that heeds one:
elementwise chains and norms do not, and their calls need not look.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "UNKNOWN",
    "DrawsRandomNumbers",
    "HiddenInputs",
    "draws",
    "heeds_switches",
    "need_gradients",
    "switch_state",
    "watched",
]

Held: TypeAlias = "tuple[Callable[[], Tensor | None], ...]"

_COPIES = """
    _local_scalar_dense _to_copy _unsafe_view cat clone constant_pad_nd copy_ empty_like empty_strided fill_ flip
    full_like gather index_select lift_fresh new_empty new_full new_ones new_zeros ones_like repeat roll scalar_tensor
    stack zero_ zeros_like
"""
_REDUCTIONS = """
    _fused_rms_norm _log_softmax _softmax all amax amin any argmax argmin linalg_vector_norm max mean min
    native_group_norm native_layer_norm prod std std_mean sum var var_mean
"""
_WITHOUT_SWITCHES = frozenset(f"aten::{name}" for names in (_COPIES, _REDUCTIONS) for name in names.split())
"""Ops beside the elementwise ones and views whose results no switch moves."""


_SHARED_OUT = 32_768
"""Elements from which on threads share out a reduction: ATen's grain size."""


@dataclass(frozen=True, slots=True)
class HiddenInputs:
    """What was seen of a reference."""

    held: Held
    """The tensors that it holds, weakly."""
    switched: bool
    """Whether it calls an op that heeds a switch."""


def _unknown() -> Tensor | None:
    return None


UNKNOWN = HiddenInputs((_unknown,), switched=True)
"""Those of a reference that cannot be watched."""


class DrawsRandomNumbers(Exception):
    """An op was about to draw random numbers from a default generator."""


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op, as a dispatch mode sees it, draws from a default random generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs or {})
    if given.get("generator") is not None or given.get("train") is False:
        return False
    # Attention is tagged so for the sake of its dropout, whose default is none.
    return bool(given["dropout_p"]) if "dropout_p" in given else "dropout_p" not in _names(func)


def _names(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


class _Watch(TorchDispatchMode):
    """Notes what goes into the ops of this thread and did not come out of one."""

    fusiongate_transparent = True

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self.held: dict[int, weakref.ref[Tensor]] = {}
        self.switched = False
        self._know(args)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: keeping the compiler out of this mode would import it, for seconds, in processes that compile nothing."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs):
            # Before it draws: the caller's generator moves once a call, as in eager.
            raise DrawsRandomNumbers
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not self._is_known(leaf):
                self.held[id(leaf)] = weakref.ref(leaf)
        self.switched = self.switched or heeds_switches(func, args, result)
        self._know(result)
        return result

    def _know(self, values: Any) -> None:
        self._known.update({id(leaf): weakref.ref(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)})

    def _is_known(self, tensor: Tensor) -> bool:
        # An id alone may be that of a tensor which has gone.
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor


def heeds_switches(func: Any, args: Any, result: Any) -> bool:
    """Whether a switch may move the bits of an op's result.

    Parameters
    ----------
    func
        The op, as a dispatch mode sees it.
    args, result
        What it was called with, and what it gave.
    """
    if func.is_view:
        return False
    if torch.Tag.pointwise in func.tags:
        # A quotient of integers, say, has the default dtype.
        operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return not any(one.is_floating_point() or one.is_complex() for one in operands) and _is_floating(result)
    if func._schema.name not in _WITHOUT_SWITCHES:
        return True
    # On a CPU the threads share out a long reduction to a single number, and add up what each of them has.
    operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return any(one.device.type == "cpu" and one.numel() >= _SHARED_OUT for one in operands) and _is_single(result)


def _is_floating(result: Any) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point()


def _is_single(result: Any) -> bool:
    return isinstance(result, Tensor) and result.numel() == 1


def watched(reference: Callable[..., Any], args: Sequence[Any]) -> HiddenInputs:
    """Run a reference, and tell what its result depends on beside its arguments.

    Parameters
    ----------
    reference
        The eager chain.
    args
        Its arguments; those that it writes are written.

    Raises
    ------
    DrawsRandomNumbers
        From the reference, in the place of an op that would draw.
    """
    watch = _Watch(args)
    with torch.no_grad(), watch:
        reference(*args)
    # Constants that it made on the way are gone.
    return HiddenInputs(tuple(ref for ref in watch.held.values() if ref() is not None), watch.switched)


def need_gradients(held: Held) -> bool:
    """Whether one of the held tensors needs a gradient, or is one that has been replaced."""
    return any((tensor := ref()) is None or tensor.requires_grad for ref in held)


# Looked up once: they are read on every call of a fusion whose reference heeds switches.
_precision = torch._C._get_fp32_precision_getter
_default_dtype = torch._C.get_default_dtype
_deterministic = torch._C._get_deterministic_algorithms
_threads = torch.get_num_threads
_sdp_flash = torch._C._get_flash_sdp_enabled
_sdp_efficient = torch._C._get_mem_efficient_sdp_enabled
_sdp_math = torch._C._get_math_sdp_enabled
_sdp_math_in_16_bits = torch._C._get_math_sdp_allow_fp16_bf16_reduction
_sdp_cudnn = torch._C._get_cudnn_sdp_enabled
_mkldnn = torch._C._get_mkldnn_enabled
_mkldnn_deterministic = torch._C._get_mkldnn_deterministic
_nnpack = torch._C._get_nnpack_enabled
_cpu_fp16: Callable[[], bool] = torch._C._get_cpu_allow_fp16_reduced_precision_reduction  # type: ignore[attr-defined]  # untold
_cublas_bf16 = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
_cublas_fp16 = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
_cublas_fp16_sums = torch._C._get_cublas_allow_fp16_accumulation
_cudnn = torch._C._get_cudnn_enabled
_cudnn_benchmark = torch._C._get_cudnn_benchmark
_cudnn_deterministic = torch._C._get_cudnn_deterministic
_blas = torch._C._get_blas_preferred_backend
_linalg = torch._C._get_linalg_preferred_backend


def _on_cpu() -> Hashable:
    return (
        _default_dtype(),
        _deterministic(),
        _sdp_flash(),
        _sdp_math(),
        _sdp_math_in_16_bits(),
        _threads(),
        _mkldnn(),
        _mkldnn_deterministic(),
        _nnpack(),
        _cpu_fp16(),
        _precision("mkldnn", "matmul"),
        _precision("mkldnn", "conv"),
        _precision("mkldnn", "rnn"),
    )


def _on_gpu() -> Hashable:
    return (
        _default_dtype(),
        _deterministic(),
        _sdp_flash(),
        _sdp_efficient(),
        _sdp_math(),
        _sdp_math_in_16_bits(),
        _sdp_cudnn(),
        _cublas_bf16(),
        _cublas_fp16(),
        _cublas_fp16_sums(),
        _cudnn(),
        _cudnn_benchmark(),
        _cudnn_deterministic(),
        _blas(),
        _linalg(),
        _precision("cuda", "matmul"),
        _precision("cuda", "conv"),
        _precision("cuda", "rnn"),
    )


def switch_state(args: Sequence[Any]) -> Hashable:
    """The switches that may move bits on the arguments' device, as they are now."""
    for arg in args:
        if isinstance(arg, Tensor):
            return _on_cpu() if arg.device.type == "cpu" else _on_gpu()
    return _on_cpu()
