"""The kernels' contracts as a page, from the registry: ``python -m fusiongate.report.contracts docs/contracts.md``."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from fusiongate.comparison.contracts import Ulp
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.states import Reason
from fusiongate.kernels import FUSIONS

from .text import templates, write_page

__all__ = ["DOMAINS", "GATE_REASONS", "REASONS", "Domain", "Explained", "page"]

REASONS = {
    "alignment": "D is a multiple of 4, but four elements cannot be loaded at once: a pointer or a batch stride is odd",
    "autocast": "autocast is on: which dtype the norm then has depends on the release of torch",
    "cpu": "x is on the CPU, where the device kernel is not; its `.host` is, and declines nothing for that",
    "device": "x is neither on the CPU nor on a GPU that torch calls `cuda`, or not where this build runs",
    "dtype": "x is in a dtype that the kernel is not made for",
    "eps": "eps is no number: None means another number in another release of torch",
    "mixed-device": "the tensors are on several devices",
    "mixed-dtype": "a row or a weight is in another dtype than x, so that eager promotes",
    "per-token": "scale or shift has a row for each token, and not one for all",
    "rank": "x, scale or shift has not three dimensions, or is no tensor",
    "reduction-order": "a width D that eager sums in another order than the kernel does",
    "shape": "a row or a weight that does not fit x, or a weight that is no tensor",
    "stride": "x or a weight is not contiguous, or the elements of a row are not next to each other",
    "too-large": "more rows than a grid has blocks, or a longer row than eager's order is known for",
}
"""Every reason that a shipped fusion declines with, and what it means."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A reason of the gate."""

    happened: str
    """What happened."""
    remedy: str
    """What a user can do."""


GATE_REASONS = {
    Reason.VERIFIED: Explained(
        "the kernel was compared with the reference on this signature, kept its contract, and was launched",
        "nothing; `Policy(recheck=Every(n))` compares it again later",
    ),
    Reason.FIRST_SIGHT: Explained(
        "the signature was new: the kernel was compared, and the reference's result was returned",
        "nothing; `fusiongate.warm_up(...)` has it done before a run that is timed or captured",
    ),
    Reason.RECHECK: Explained(
        "a recheck was due: the verified kernel was compared again, and the reference's result was returned",
        "nothing; look more seldom with a larger `Every(n)` or a smaller `Sampled(share)`",
    ),
    Reason.DISABLED: Explained(
        "`FUSIONGATE_DISABLE=1` was set when the fusion was made",
        "unset it, and start the process again",
    ),
    Reason.COMPILING: Explained(
        "the call is inside `torch.compile`, which gets the reference's own expression; such calls are not counted",
        'nothing; `Fusion(..., compile="op")` keeps the kernel, as an op that Inductor does not see through',
    ),
    Reason.TRACING: Explained(
        "another tracer or transform was at work, or an argument was a fake, meta, sparse, nested or lazily negated "
        "tensor, or a Tensor subclass",
        "call with plain, dense tensors outside of `make_fx`, `torch.jit.trace`, `torch.func` and dispatch modes",
    ),
    Reason.AUTOGRAD: Explained(
        "a gradient was needed: an argument, or something that the reference holds, requires one",
        "run inference under `torch.no_grad()` or `torch.inference_mode()`",
    ),
    Reason.EMPTY: Explained("a tensor had no elements", "nothing: there is nothing to launch on"),
    Reason.REFUSED: Explained(
        "the kernel broke its contract on this signature, or raised when it was launched",
        "read the one warning, or `op.gate.events`, for what differed and where, and report it; "
        "`Policy(recover=After(...))` tries again",
    ),
    Reason.CAPTURING: Explained(
        "the signature had no verdict, and a graph was being captured: nothing can be compared then, and the graph "
        "keeps the reference",
        "call `fusiongate.warm_up(...)` before capturing, and capture again",
    ),
    Reason.NOT_COMPARABLE: Explained(
        "the gate could not compare results of this kind: its own shortcoming, and no fault of the kernel's",
        "read the one warning, or `op.gate.events`, and report it",
    ),
    Reason.NO_KERNEL: Explained(
        "the kernel could not be built or loaded, or its first load, in a process of its own, failed",
        "run `fusiongate doctor`, and read `op.gate.events` for the compiler's message; then start the process again",
    ),
    Reason.OUT_OF_MEMORY: Explained(
        "there was no memory for the comparison, or for the launch; it is tried again at the next call",
        "call `fusiongate.warm_up(...)` while there is memory, before the model fills it",
    ),
    Reason.CAPACITY: Explained(
        "the gate holds as many signatures as its policy allows, and this one is not among them",
        "raise `Policy(capacity=...)`, or bucket the shapes with `Fusion(..., signature=...)`",
    ),
    Reason.OVERLAPPING: Explained(
        "an argument that is written (`mutates_args`) shares memory with another one, or with itself: what is right on "
        "copies may be wrong there",
        "pass arguments that lie apart; slices of one tensor that have no element in common do",
    ),
    Reason.DECLINES_RAISED: Explained(
        "`declines` or `signature` raised, or what `signature` gave cannot be hashed",
        "mend it: the warning has the exception",
    ),
    Reason.UNSUPPORTED_ARGUMENT: Explained(
        "an argument is none of the things that a signature can hold: tensors, numbers, bools, strings, dtypes, "
        "devices, memory formats and None",
        "pass such arguments only, and let reference and kernel close over the rest",
    ),
}
"""Every reason of the gate's own."""

_OPERANDS = (
    "cpu",
    "device",
    "mixed-device",
    "dtype",
    "mixed-dtype",
    "rank",
    "per-token",
    "shape",
    "stride",
    "alignment",
    "too-large",
)
_NORM = (*_OPERANDS, "eps", "autocast", "reduction-order")


@dataclass(frozen=True, slots=True)
class Domain:
    """The operands that a fusion takes, and how it declines the others."""

    rows: str
    """What scale and shift, and a weight, have to be."""
    reasons: tuple[str, ...]
    """Keys of :data:`REASONS`; the host build gives all of them but ``cpu``."""
    shortest: int = 1
    """The least D that is taken."""
    longest: int | None = None
    """The greatest D that is taken, or None."""
    multiple_of: int = 1
    """What D has to be a multiple of."""
    dtypes: str = "bf16, fp16 or fp32"
    """The dtypes of x."""

    def __str__(self) -> str:
        width = "any D" if self.multiple_of == 1 else f"D a multiple of {self.multiple_of}"
        if self.shortest > self.multiple_of:
            width += f" from {self.shortest}"
        if self.longest is not None:
            width += f" to {self.longest}"
        return f"x (B, S, D), contiguous, in {self.dtypes}, {width}; {self.rows}"


_ROWS = "scale and shift (B, 1, D) or (1, 1, D), of any batch stride, in x's dtype"
_WEIGHT = "weight (D,) in x's dtype, or none"

DOMAINS = {
    "modulate": Domain(_ROWS, _OPERANDS),
    "modulate_fp32": Domain(f"{_ROWS} or both in fp32", _OPERANDS),
    "rms_norm_modulate": Domain(f"{_ROWS}; {_WEIGHT}", _NORM, shortest=4, longest=32768, multiple_of=4),
    "composite_rms_norm_modulate": Domain(f"{_ROWS}; {_WEIGHT}", _NORM, shortest=128, longest=32768, multiple_of=4),
    "rms_norm_modulate_high": Domain(_ROWS, _NORM, shortest=4, multiple_of=4, dtypes="bf16 or fp16"),
}
"""Each shipped fusion's operands, by its name."""


def page() -> str:
    """The page's text."""
    scales = [op.contract.scale for op in FUSIONS if isinstance(op.contract, Ulp) and op.contract.scale is not None]
    return (
        templates(html=False)
        .get_template("contracts.md.j2")
        .render(
            entry_points=[_cells(op) for op in FUSIONS],
            references=[(op.name, _first_line(op.reference)) for op in FUSIONS],
            scales=[(scale.__name__, _first_line(scale)) for scale in scales],
            reasons=REASONS,
            gate_reasons=GATE_REASONS,
        )
    )


def _cells(op: Fusion) -> tuple[str, ...]:
    domain = DOMAINS[op.name]
    quality = "; only at `quality=high`" if isinstance(op.contract, Ulp) else ""
    back_ends = "CUDA, HIP" if op.host is None else "CUDA, HIP, host"
    return f"`{op.name}`", back_ends, f"{op.contract}{quality}", str(domain), ", ".join(domain.reasons)


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").splitlines()[0].replace("``", "`")


if __name__ == "__main__":
    sys.exit(write_page(page, "fusiongate.report.contracts", "docs/contracts.md"))
