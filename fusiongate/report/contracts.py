"""The kernels' contracts as a page, from the registry: ``python -m fusiongate.report.contracts docs/contracts.md``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from fusiongate.comparison.contracts import Ulp
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.states import Reason
from fusiongate.io import write_text
from fusiongate.kernels import FUSIONS

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

_BOUNDARIES = """\
## Why rounding boundaries matter

Eager PyTorch computes an elementwise op in fp32 and rounds its result to the tensor's dtype. In a chain of ops these
roundings are part of the result. `x * (1 + scale) + shift` has three of them:

```text
a   = round(1 + scale)
p   = round(x * a)
out = round(p + shift)
```

A kernel that keeps fp32 until the end is more accurate, and wrong: it is not what the model was trained and published
with. One element shows it, where `1 + scale` rounds to 1:

```python
import torch

x, scale = torch.tensor([1.984375, 0.003]).bfloat16()
assert (x * (1 + scale)).item() == 1.984375
assert (x.float() * (1 + scale.float())).bfloat16().item() == 1.9921875
```

A denoising loop feeds each step's result to the next, so that one such difference ends as another picture. That is why
"close" and "bit for bit" are two products here: what is exact may be mounted always, what is close only by
`quality="high"`. What follows from it for a kernel:

- **Each op rounds where eager rounds.** A product and the sum behind it stay two operations. In fp32, where storing
  rounds nothing, a fused multiply-add would still take one rounding away; contraction is switched off in every build.
- **Overflow is part of the result.** In fp16 a product can be inf although the sum behind it would be finite again;
  a fusion gives inf there too.
- **Zeros have signs, and NaN has a place.** `-0.0` is not `0.0`. NaN equals NaN by position: the bits of a NaN differ
  between right implementations.
- **A sum has an order.** RMSNorm adds up D squares, and another order of adding gives another sum. `F.rms_norm` and the
  norm that models write out as `pow`, `mean` and `rsqrt` are two kernels in eager with two orders, and so they are two
  fusions here. Rows that eager sums in yet another order are declined.
- **Equal outputs are weak evidence about a sum.** A change in the last bit of `rstd` seldom crosses a rounding boundary
  of a 16-bit output, so a wrong order can pass for thousands of rows. The norms have a witness: `rstd` itself is
  compared, in fp32, whenever a gate looks for the first time, and in the matrix.
- **A tolerance is measured where the error is made.** One ULP of the norm's output can be hundreds of the result, after
  `shift` has cancelled most of it. The high variant's ULPs are those of the largest intermediate.
- **Bit for bit is a promise about eager.** Under `torch.compile` the reference's own expression is handed to Inductor,
  which keeps fp32 between the ops that it fuses; its results are its own. The mounted high variant stays one op there.

Where a build's arithmetic differs from this machine's eager all the same, the gate finds out at first sight, and the
reference runs. The HIP builds are compiled by `nox -s amd_compile`; whether eager on an AMD GPU adds in the order that
they repeat is for the gate there to say.
"""


def page() -> str:
    """The page's text."""
    return f"""\
<!-- Made by `python -m fusiongate.report.contracts docs/contracts.md`; tests hold it to the registry. -->

# Contracts of the kernels

Every entry point is a fusion in `fusiongate.kernels`. Called on operands that it declines, it gives the result of its
reference, the eager chain; `op.explain(*args)` tells the reason and runs nothing.

| entry point | back end | contract | applies to | declines |
|---|---|---|---|---|
{chr(10).join(map(_row, FUSIONS))}

{_BOUNDARIES}
## What the entry points are held against

{chr(10).join(f"- `{op.name}`: {_first_line(op.reference)}" for op in FUSIONS)}
{chr(10).join(_scales())}

## Why a call is declined

{chr(10).join(f"- **{reason}**: {meaning}." for reason, meaning in REASONS.items())}

The host build of an entry point, `.host`, is for machines without a GPU. It gives the same reasons but `cpu`, and the
norms among them are held against an emulation of the GPU's order, which eager on a CPU does not have.

## Why the gate chose a path

`op.counters` counts each call under its path and one reason: one that the fusion declines with, or one of the gate's
own, `fusiongate.Reason`. Only `verified` is the kernel's result; with every other reason it is the reference's.

| reason | what happened | what you can do |
|---|---|---|
{chr(10).join(f"| `{reason}` | {told.happened} | {told.remedy} |" for reason, told in GATE_REASONS.items())}
"""


def _row(op: Fusion) -> str:
    domain = DOMAINS[op.name]
    quality = "; only at `quality=high`" if isinstance(op.contract, Ulp) else ""
    back_ends = "CUDA, HIP" if op.host is None else "CUDA, HIP, host"
    cells = (f"`{op.name}`", back_ends, f"{op.contract}{quality}", str(domain), ", ".join(domain.reasons))
    return f"| {' | '.join(cells)} |"


def _scales() -> list[str]:
    contracts = [op.contract for op in FUSIONS if isinstance(op.contract, Ulp)]
    return [f"- `{one.scale.__name__}`: {_first_line(one.scale)}" for one in contracts if one.scale is not None]


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").splitlines()[0].replace("``", "`")


def _write(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UsageError("expected one argument, the file to write: docs/contracts.md")
    write_text(Path(arguments[0]), page())


if __name__ == "__main__":
    try:
        _write(sys.argv[1:])
    except (UsageError, OSError) as error:
        sys.exit(f"fusiongate.report.contracts: {error}")
