"""Trials: the results of a kernel on given operands, compared with eager's and boiled down to an md5."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from fusiongate.comparison.bits import integer_view
from fusiongate.comparison.verdicts import bits_differ, compare
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion

from .records import Counterexample, StageResult

__all__ = ["Found", "Trials"]

Arguments = tuple[Tensor, ...]

_OPERANDS = ("x", "scale", "shift")
_PENDING = 8
"""Blocks that are under way before the host looks at what came of them."""


class Found(Exception):
    """A kernel's result is not eager's."""

    def __init__(self, counterexample: Counterexample) -> None:
        super().__init__(str(counterexample))
        self.counterexample = counterexample


class Trials:
    """Tries one kernel, without its gate.

    Parameters
    ----------
    kernel
        Its name in results.
    fusion
        The kernel and its reference.
    """

    def __init__(self, kernel: str, fusion: Fusion) -> None:
        self._kernel = kernel
        self._fusion = fusion

    def run(self, name: str, what: str, trials: Iterable[Arguments], *, complete: bool) -> StageResult:
        """Compare all results.

        Parameters
        ----------
        name, what
            The stage, in a word and in words.
        trials
            Arguments, call after call.
        complete
            Whether these are all that there are.

        Raises
        ------
        Found
            One is not eager's.
        UsageError
            The kernel declines the operands.
        """
        digest = hashlib.md5(usedforsecurity=False)
        tried = 0
        pending: list[tuple[Arguments, Tensor, Tensor]] = []
        for args in trials:
            reason = self._fusion.declines(*args)
            if reason is not None:
                raise UsageError(f"{self._fusion.name} cannot be certified here: it declines its operands ({reason})")
            expected = self._fusion.reference(*args)
            actual = self._fusion.fused(*args)
            pending.append((args, bits_differ(actual, expected), _checksums(actual)))
            tried += expected.numel()
            # To ask after each block would leave the device waiting for the host.
            if len(pending) == (_PENDING if expected.is_cuda else 1):
                self._settle(name, pending, digest)
        self._settle(name, pending, digest)
        return StageResult(name, what, tried, complete, digest.hexdigest())

    def _settle(self, stage: str, pending: list[tuple[Arguments, Tensor, Tensor]], digest: hashlib._Hash) -> None:
        if not pending:
            return
        differing = torch.stack([differs for _, differs, _ in pending]).tolist()
        if any(differing):
            raise Found(self._counterexample(stage, pending[differing.index(True)][0]))
        for _, _, checksums in pending:
            digest.update(bytes(checksums.cpu().contiguous().view(torch.uint8).tolist()))
        pending.clear()

    def _counterexample(self, stage: str, args: Arguments) -> Counterexample:
        actual, expected = self._fusion.fused(*args), self._fusion.reference(*args)
        index = compare(actual, expected).first_index
        assert index is not None
        operands = {name: operand.expand_as(expected)[index] for name, operand in zip(_OPERANDS, args, strict=True)}
        return Counterexample.at(self._kernel, stage, operands, actual[index], expected[index])


def _checksums(results: Tensor) -> Tensor:
    """A sum for each row of results, in int64 modulo 2**64: in any order the same, and other where one bit is other.

    An md5 of all bits would take a minute on the host for each second of the device's.
    """
    flat = results.masked_fill(results.isnan(), float("nan")).view(-1)
    width = 8 // flat.element_size()
    words = flat[: flat.numel() // width * width].view(torch.int64)
    rest = integer_view(flat[words.numel() * width :]).long().sum()
    rows = words.view(results.shape[0], -1) if words.numel() % results.shape[0] == 0 else words.view(1, -1)
    weights = torch.arange(rows.shape[1], device=results.device).mul_(0x9E3779B97F4A7C15 - (1 << 64)).bitwise_or_(1)
    return torch.cat([(rows * weights).sum(1), rest.view(1)])
