"""Models that were written to break a rewiring: each computes something else if arithmetic moves where it may not.

Every class is built without arguments and takes x (B, S, D) and rows s and t (B, 1, D). Kinds are told by the lists at
the end; what each model does to a careless rewiring stands in its docstring where its name does not say it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .scanned_models import CompositeNorm, D

__all__ = ["EAGER_RAISES", "IN_PLACE", "NORMS", "OBJECTS", "ORDER", "REGIONS"]


# -- writes before a deferred reading ----------------------------------------------------------------------------------


class InPlaceFunction(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        F.silu(x[:, :1], inplace=True)
        return h + t


class InPlaceModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        self.act(x.view(-1))
        return h + t


class Writer(nn.Module):
    """Has a method that writes to whatever it is given."""

    def write(self, *tensors: Tensor) -> Tensor:
        for tensor in tensors:
            tensor.mul_(3)
        return tensors[-1]


class ThroughAlias(Writer):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        y = x
        self.write(y)
        return h + t


class ThroughStarred(Writer):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = (x, s)
        h = x * (1 + s)
        self.write(*rows)
        return h + t


class ThroughContainer(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        kept = {"x": x}
        h = x * (1 + s)
        kept["x"].zero_()
        return h + t


class ThroughClosure(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        def write() -> None:
            x.zero_()

        h = x * (1 + s)
        write()
        return h + t


class ThroughAttribute(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        self.kept = x
        h = x * (1 + s)
        self.clear()
        return h + t

    def clear(self) -> None:
        self.kept.zero_()


class ThroughDetached(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        x.detach().zero_()
        return h + t


class OutKeyword(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        y = x
        h = x * (1 + s)
        torch.mul(t, 2, out=y[:, :1])
        return h + t


class SetItem(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        y = x
        h = x * (1 + s)
        y[:, 0] = 0
        return h + t


class AugmentedItem(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        x[0] += 1
        return h + t


class AugmentedAlias(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        y = x
        h = x * (1 + s)
        y += 1
        return h + t


class OperatorModule(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        operator.imul(x, 3)
        return h + t


class ByGetattr(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        getattr(x, "mul_")(3)  # noqa: B009
        return h + t


class ByUnboundMethod(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        write = torch.Tensor.mul_
        h = x * (1 + s)
        write(x, 3)
        return h + t


class ByBoundMethod(nn.Module):
    """A name that was bound to a method long before."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        write = x.zero_
        h = x * (1 + s)
        write()
        return h + t


class ThroughNumpy(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        view = x.view(torch.int16).numpy()
        h = x * (1 + s)
        view.fill(0)
        return h + t


def _write_into(tensor: Tensor) -> Tensor:
    tensor.mul_(3)
    return tensor


class HelperWrites(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        y = x.view(-1)
        h = x * (1 + s)
        _write_into(y)
        return h + t


class ScaleIsWritten(Writer):
    """The sum is kept in a name, and its operand is written to before the product."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = [s]
        g = 1 + s
        self.write(*rows)
        return x * g + t


class InALoop(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        y = h
        for u in (t, t):
            y = h + u
            x += y
        return y


class LoopDefinesLate(nn.Module):
    """The write stands behind the reading in the source and runs before it in the second turn."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        h = x * (1 + s)
        for _ in range(2):
            total = total + (h + t)
            x.zero_()
        return total


class ShiftWrites(nn.Module):
    """The shift's own expression writes to x, in one statement."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x * (1 + s) + F.relu(x, inplace=True)


class ShiftWritesBehindAName(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        return h + F.relu(x, inplace=True)


class ShiftWritesByMethod(Writer):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x * (1 + s) + self.write(x)


class ShiftWritesByTensorMethod(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x * (1 + s) + x.mul_(3)


class ShiftWritesPositionally(nn.Module):
    """The second argument of silu is its `inplace`."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x * (1 + s) + F.silu(x, True)


class ShiftIsAProperty(nn.Module):
    x: Tensor

    @property
    def shift(self) -> Tensor:
        return self.x.mul_(3)

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        self.x = x
        return x * (1 + s) + self.shift


class ShiftIsLookedUp(nn.Module):
    """The class answers for attributes that there are not."""

    def __getattr__(self, name: str) -> Any:
        if name == "shift":
            return self.__dict__["x"].mul_(3)
        return super().__getattr__(name)

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        self.__dict__["x"] = x
        return x * (1 + s) + self.shift


class _Rows:
    """Looks like a sequence, and writes when it is read."""

    def __init__(self, x: Tensor, rows: Tensor) -> None:
        self.x, self.rows = x, rows

    def __getitem__(self, index: object) -> Tensor:
        self.x.mul_(3)
        return self.rows

    def unsqueeze(self, dim: int) -> Tensor:
        return self[dim]

    def __radd__(self, other: Tensor) -> Tensor:
        self.x.mul_(3)
        return other

    @property
    def T(self) -> Tensor:  # noqa: N802  # as a tensor calls it
        return self[0]


class ShiftIsIndexed(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = _Rows(x, t)
        return x * (1 + s) + rows[0]


class ShiftHasMethods(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = _Rows(x, t)
        return x * (1 + s) + rows.unsqueeze(1)


class ShiftHasProperties(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = _Rows(x, t)
        return x * (1 + s) + rows.T


class ShiftAddsItself(nn.Module):
    """An object that adds: the product is written to by it."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows: Any = _Rows(x, t)
        return x * (1 + s) + (t + rows)


class _Writing(torch.Tensor):
    """A subclass whose view writes to a tensor of its own."""

    victim: Tensor

    def unsqueeze(self, dim: int) -> Tensor:
        self.victim.mul_(3)
        return super().unsqueeze(dim).as_subclass(torch.Tensor)


class ShiftIsASubclass(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = t[:, 0].as_subclass(_Writing)
        rows.victim = x
        return x * (1 + s) + rows.unsqueeze(1)


class GlobalIsReplaced(nn.Module):
    """The name of a view's function is bound to something else while the model runs."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        def unsqueeze(rows: Tensor, dim: int) -> Tensor:
            x.mul_(3)
            return rows.unsqueeze(dim)

        return x * (1 + s) + unsqueeze(t[:, 0], 1)


class ContextWrites(nn.Module):
    @contextlib.contextmanager
    def writing(self, x: Tensor) -> Iterator[None]:
        x.mul_(3)
        yield

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        with self.writing(x):
            pass
        return h + t


class ContextSpans(ContextWrites):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        with self.writing(x):
            return h + t


class TestWrites(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        if x.mul_(3).sum() < 1e9:
            h = h + t
        return h


class AssertWrites(nn.Module):
    def check(self, x: Tensor) -> bool:
        x.mul_(3)
        return True

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        if not self.check(x):
            raise ValueError
        return h + t


class ComprehensionWrites(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        [y.mul_(3) for y in x]
        return h + t


class DefaultWrites(nn.Module):
    """A function's default is evaluated where the function stands."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)

        def unused(y: Tensor = x.mul_(3)) -> Tensor:  # noqa: B008  # the very point
            return y

        return h + t


class NormThenWrite(nn.Module):
    """A folded norm would read what was written after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = CompositeNorm()

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        n = self.norm(x)
        F.relu(x, inplace=True)
        return n * (1 + s) + t


class NormThenWriteByAlias(NormThenWrite):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        y = x
        n = self.norm(x)
        y.mul_(-3)
        return n * (1 + s) + t


class NormThenShiftWrites(NormThenWrite):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return self.norm(x) * (1 + s) + F.relu(x, inplace=True)


class NormThenAugmented(NormThenWrite):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        y = x
        n = self.norm(x)
        y += 1
        n = n * (1 + s) + t
        return F.relu(n)


class NormThenBranchWrites(NormThenWrite):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        n = self.norm(x)
        if x.shape[0] > 1:
            F.relu(x, inplace=True)
            n = n * (1 + s) + t
        return F.relu(n)


# -- the order of evaluation -------------------------------------------------------------------------------------------


class NextTwice(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        it = iter([t, s])
        return next(it) + x * (1 + next(it))


class NextInAViewedSum(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        it = iter([x, s])
        return (t if x is not None else s) + next(it) * (1 + next(it))[..., None, :].squeeze(-2)


class NextThrice(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        it = iter([s, x, t])
        return (1 + next(it)) * next(it) + next(it)


class NextOverStatements(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        it = iter([s, x, t])
        g = 1 + next(it)
        h = next(it) * g
        return next(it) + h


class PopsFromAList(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = [t, s, x]
        return rows.pop() * (1 + rows.pop()) + rows.pop()


class PopsReversed(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = [x, s, t]
        return rows.pop() + (rows.pop() + 1) * rows.pop()


class ViewArgumentIsRebound(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        s, t = s[:, 0], t[:, 0]
        d = 1
        g = (1 + s).unsqueeze(d)
        d = 0
        return x * g + t.unsqueeze(d + 1)


class ViewArgumentIsReboundToo(nn.Module):
    """x has as many rows as batches, so that the other axis fits as well."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        x, s, t = x[:, :2], s[:, 0], t[:, 0]
        d = 1
        g = (1 + s).unsqueeze(d)
        d = 0
        return x * g + t.unsqueeze(1)


class IndexIsRebound(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = [s, t]
        i = 0
        h = x * (1 + rows[i])
        i = 1
        return h + rows[i]


class OperandIsRebound(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        x, s = s, t
        return h + x


class ListIsChanged(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = [s]
        g = 1 + rows[0]
        rows[0] = t
        return x * g + rows[0]


class WalrusFirst(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return (h := t) + x * (1 + h)


class WalrusInTheSum(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x * (1 + (x := s)) + x


class WalrusInTheShift(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        g = 1 + s
        return x * g + (s := t) + s


class WalrusInTheView(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x * (1 + s[:, 0]).unsqueeze(d := 1) + t[:, 0].unsqueeze(d)


class Counted(nn.Module):
    """Scale and shift come from one generator, in its order."""

    def rows(self, s: Tensor, t: Tensor) -> Iterator[Tensor]:
        yield s
        yield t

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = self.rows(s, t)
        return x * (1 + next(rows)) + next(rows)


class DrawsNumbers(nn.Module):
    """Two draws, whose order the generator sees."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return torch.rand_like(t) + x * (1 + torch.rand_like(s))


class DropsOut(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + F.dropout(s, 0.5))
        x = F.dropout(x, 0.5)
        return h + F.dropout(t, 0.5) + x


class AttributeIsRebound(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        self.row = s
        h = x * (1 + self.row)
        self.row = t
        return h + self.row


class Deleted(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        del s
        return h + t


class ReadByLocals(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        y = h + t
        return y + locals()["h"]


class ReadByClosure(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        def read() -> Tensor:
            return h

        h = x * (1 + s)
        y = h + t
        return y + read()


class RaisesBetween(nn.Module):
    """What was bound when the chain raised is told apart."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        seen = t
        try:
            h = x * (1 + torch.cat([s, s], dim=-1))
            seen = s
            y = h + t
        except RuntimeError:
            return x + seen
        return y


class SuppressedBetween(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        seen = t
        with contextlib.suppress(RuntimeError):
            h = x * (1 + torch.cat([s, s], dim=-1))
            seen = s
            x = h + t
        return x + seen


class RaisesFirst(nn.Module):
    """Both the product and the shift raise: the product comes first."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        wide = torch.cat([s, s], dim=-1)
        try:
            return x * (1 + wide) + t[:, 5]
        except IndexError:
            return x
        except RuntimeError:
            return -x


class FinallyReads(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = t
        try:
            h = x * (1 + s)
            x = h + t
        finally:
            x = x + h
        return x


# -- norms -------------------------------------------------------------------------------------------------------------


class GammaNorm(nn.Module):
    """Keeps its gain under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.gamma = nn.Parameter(torch.ones(D, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return y * self.gamma


class BufferNorm(nn.Module):
    """Keeps its gain in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.register_buffer("gamma", torch.ones(D, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return y * self.gamma


class FloatNorm(nn.Module):
    """Keeps its gain as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.gamma = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return y * self.gamma


class ListNorm(nn.Module):
    """Keeps its gain in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.gamma = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        y = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return y * self.gamma[0]


_GAIN = [1.0]


class GlobalNorm(nn.Module):
    """Keeps its gain outside of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    @property
    def gamma(self) -> float:
        return _GAIN[0]

    @gamma.setter
    def gamma(self, value: float) -> None:
        _GAIN[0] = value

    def forward(self, x: Tensor) -> Tensor:
        y = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return y * _GAIN[0]


class SubmoduleNorm(nn.Module):
    """Keeps its gain in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.gain = FloatGain()

    @property
    def gamma(self) -> float:
        return self.gain.value

    @gamma.setter
    def gamma(self, value: float) -> None:
        self.gain.value = value

    def forward(self, x: Tensor) -> Tensor:
        y = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return self.gain(y)


class FloatGain(nn.Module):
    value = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class CallCountingNorm(nn.Module):
    """Another gain at every call."""

    gamma = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return y * (self.gamma if self.calls > 2 else 1.0)


class Normed(nn.Module):
    """A norm in front of the chain."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = CompositeNorm(weighted=True) if norm is None else norm

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return self.norm(x) * (1 + s) + t


class NormedBefore(Normed):
    """The same over two statements."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        x = self.norm(x)
        x = x * (1 + s) + t
        return F.relu(x)


class NormedUnderIf(Normed):
    """The same with a test in between, as LTX-2 has it."""

    modulated = True

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        n = self.norm(x)
        if self.modulated:
            n = n * (1 + s) + t
        return F.relu(n)


# -- gates, scales, and what is looked at before its time --------------------------------------------------------------


class GatedThenWritten(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        product = x * (gate := t)
        x.mul_(2)
        return x + product + gate


class GatedThenWrittenThroughAlias(Writer):
    def forward(self, x: Tensor, gate: Tensor, t: Tensor) -> Tensor:
        y = x
        product = gate * x
        self.write(y)
        return product + x


class GatedUpdateWrites(Writer):
    def forward(self, x: Tensor, gate: Tensor, t: Tensor) -> Tensor:
        return x + self.write(x) * gate


class GateWrites(Writer):
    def forward(self, x: Tensor, gate: Tensor, t: Tensor) -> Tensor:
        y = x[:, :1]
        return x + y * self.write(gate)


class GatedTwice(nn.Module):
    def forward(self, x: Tensor, gate: Tensor, t: Tensor) -> Tensor:
        x = x + gate * x
        y = x * gate
        x = y + x
        return x + y


class ScaleAloneWrites(Writer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = CompositeNorm()

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return self.norm(x) * (1 + self.write(x)[:, :1])


class ScaleAloneAfterWrite(ScaleAloneWrites):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        n = self.norm(x)
        x[:, 0] = 0
        return n * (1 + s) + x * t


class AbsentWhereItIsNotReached(ScaleAloneWrites):
    """What the branch reads is not there where the branch is not taken."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        n = self.norm(x)
        if self.training:
            n = n * (1 + self.absent) + t
        return n


class UnboundWhereItIsNotReached(ScaleAloneWrites):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        if x.ndim == 2:
            u = t
        n = self.norm(x)
        if x.ndim == 2:
            n = n * (1 + s) + u
        return n


class UnboundWhereItIsReached(ScaleAloneWrites):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        if x.ndim == 2:
            u = t
        n = self.norm(x)
        if x.ndim == 3:
            n = n * (1 + s) + u
        return n


class BoundOnTheWayAndCalled(Writer):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        h = x * (1 + s)
        write = self.write
        t = write(x)[:, :1]
        return h + t


class BoundOnTheWayToAnObject(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        rows = _Rows(x, t)
        h = x * (1 + s)
        u = rows
        v = u[0]
        return h + v


class TestIsRebound(ScaleAloneWrites):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        d = 0
        n = self.norm(x)
        d = s.ndim
        if d == 3:
            n = n * (1 + s) + t
        return n * d


AHEAD = (
    *(GatedThenWritten, GatedThenWrittenThroughAlias, GatedUpdateWrites, GateWrites, GatedTwice, ScaleAloneWrites),
    *(ScaleAloneAfterWrite, AbsentWhereItIsNotReached, UnboundWhereItIsNotReached, UnboundWhereItIsReached),
    *(BoundOnTheWayAndCalled, BoundOnTheWayToAnObject, TestIsRebound),
)


# -- regions of another kind -------------------------------------------------------------------------------------------


class NormUnderAutocast(Normed):
    """The norm runs in a region of its own."""

    def __init__(self) -> None:
        super().__init__(MatmulNorm())

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            n = self.norm(x.float())
        return n * (1 + s) + t


class MatmulNorm(nn.Module):
    """An RMSNorm that sums by a matrix product, which autocast rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(x.shape[-1], 1, dtype=x.dtype)
        return x * torch.rsqrt(torch.matmul(x.pow(2), ones).float() / x.shape[-1] + self.eps + 0 * x.mean())


class NormAroundAutocast(NormUnderAutocast):
    """The chain runs in a region of its own, and the norm does not."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        n = self.norm(x.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            n = n * (1 + s) + t
        return F.relu(n)


class NormUnderNoGrad(Normed):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            n = self.norm(x)
        return n * (1 + s) + t


class NormUnderModes(Normed):
    """A mode that changes what the norm's operations do."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        with Doubling():
            n = self.norm(x)
        return n * (1 + s) + t


class Doubling(torch.overrides.TorchFunctionMode):
    """Doubles every result of rsqrt."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.rsqrt else result


class NormInTry(Normed):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        try:
            n = self.norm(torch.cat([x, x], dim=-1))
            x = -x
            x = n * (1 + s) + t
        except RuntimeError:
            x = x + 1
        return x


# -- objects of other kinds --------------------------------------------------------------------------------------------


class Eager:
    """An operand that computes by itself, and notes in which order."""

    def __init__(self, log: list[str], name: str, tensor: Tensor) -> None:
        self.log, self.name, self.tensor = log, name, tensor

    def _noted(self, sign: str, result: Tensor) -> Eager:
        self.log.append(self.name + sign)
        return Eager(self.log, self.name, result + len(self.log))

    def __mul__(self, other: Any) -> Eager:
        return self._noted("*", self.tensor * getattr(other, "tensor", other))

    def __add__(self, other: Any) -> Eager:
        return self._noted("+", self.tensor + getattr(other, "tensor", other))

    __radd__ = __add__
    __rmul__ = __mul__

    def float(self) -> Eager:
        return self._noted("f", self.tensor)

    def __getitem__(self, index: Any) -> Eager:
        return self._noted("[]", self.tensor)

    def unsqueeze(self, dim: int) -> Eager:
        return self._noted("u", self.tensor)


class OwnOperands(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        log: list[str] = []
        a, b, c = (Eager(log, name, value) for name, value in zip("xst", (x, s, t), strict=True))
        return (a * (1 + b) + c).tensor


class OwnViews(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        log: list[str] = []
        a, b, c = (Eager(log, name, value) for name, value in zip("xst", (x, s, t), strict=True))
        return (a * (1 + b).unsqueeze(1) + c[:, None]).tensor


class OwnOverStatements(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        log: list[str] = []
        a, b, c = (Eager(log, name, value) for name, value in zip("xst", (x, s, t), strict=True))
        g = 1 + b
        h = a * g
        c = c.float()
        return (h + c).tensor


class Numbers(nn.Module):
    """The chain on numbers and on nothing but numbers."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        a, b, c = 2.5, 0.25, 3
        return x + (a * (1 + b) + c)


class Strings(nn.Module):
    """x * (1 + s) + t means something for sequences too."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        parts, more, tail = [x], 1, [x, x]
        return torch.cat(parts * (1 + more) + tail)


class CallDefined(nn.Module):
    """Never goes by nn.Module's call."""

    def __call__(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x * (1 + s) + t


class Swapped(nn.Module):
    """Changes its own class while it runs."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        x = x * (1 + s) + t
        self.__class__ = Other  # type: ignore[assignment]
        return x


class Other(Swapped):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        self.__class__ = Swapped  # type: ignore[assignment]
        return x * (1 + t) + s


class TypeIsAsked(nn.Module):
    """Computes something else when it is of another class than it was."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        x = x * (1 + s) + t
        return x if type(self) is TypeIsAsked else -x


class DictIsAsked(nn.Module):
    """Computes something else when it has more attributes than it had."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        x = x * (1 + s) + t
        return x * len(self.__dict__)


class Recursive(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor, depth: int = 2) -> Tensor:
        x = x * (1 + s) + t
        return x if depth == 0 else self.forward(x, s, t, depth - 1)


class Generator(nn.Module):
    """Runs in slices, with writes in between."""

    def steps(self, x: Tensor, s: Tensor, t: Tensor) -> Iterator[Tensor]:
        h = x * (1 + s)
        yield h
        yield h + t

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        steps = self.steps(x, s, t)
        first = next(steps)
        x.mul_(3)
        return first + next(steps)


class LayoutMatters(nn.Module):
    """Goes on with the bytes of the result in their order in memory."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        s = s[:, 0].transpose(0, 1)
        y = x * (1 + s).transpose(0, 1).unsqueeze(1) + t
        return y.as_strided((y.numel(),), (1,))


class ViewWouldNotDo(nn.Module):
    """The sum can be viewed and the scale, which is strided, cannot."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        s = torch.cat([s, t], dim=-1)[:, 0].view(2, 2, D)[:, 0]
        return x[:1, :2] * (1 + s).view(1, 2, D) + t[:1]


class ViewWouldNotDoEither(nn.Module):
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        s = s.expand(2, 4, D)[:, ::2]
        return x[:, :1] * (1 + s).view(2, 1, -1)[..., :D] + t


IN_PLACE = (
    *(InPlaceFunction, InPlaceModule, ThroughAlias, ThroughStarred, ThroughContainer, ThroughClosure, ThroughAttribute),
    *(ThroughDetached, OutKeyword, SetItem, AugmentedItem, AugmentedAlias, OperatorModule, ByGetattr, ByUnboundMethod),
    *(ByBoundMethod, ThroughNumpy, HelperWrites, ScaleIsWritten, InALoop, LoopDefinesLate, ShiftWrites),
    *(ShiftWritesBehindAName, ShiftWritesByMethod, ShiftWritesByTensorMethod, ShiftWritesPositionally),
    *(ShiftIsAProperty, ShiftIsLookedUp, ShiftIsIndexed, ShiftHasMethods, ShiftHasProperties, ShiftAddsItself),
    *(ShiftIsASubclass, GlobalIsReplaced, ContextWrites, ContextSpans, TestWrites, AssertWrites, ComprehensionWrites),
    *(DefaultWrites, NormThenWrite, NormThenWriteByAlias, NormThenShiftWrites, NormThenAugmented, NormThenBranchWrites),
)
"""Writes before a deferred reading."""

ORDER = (
    *(NextTwice, NextInAViewedSum, NextThrice, NextOverStatements, PopsFromAList, PopsReversed, ViewArgumentIsRebound),
    *(ViewArgumentIsReboundToo, IndexIsRebound, OperandIsRebound, ListIsChanged, WalrusFirst, WalrusInTheSum),
    *(WalrusInTheShift, WalrusInTheView, Counted, DrawsNumbers, DropsOut, AttributeIsRebound, Deleted, ReadByLocals),
    *(ReadByClosure, RaisesBetween, SuppressedBetween, RaisesFirst, FinallyReads),
)
"""The order of evaluation, and what is bound to which name when."""

NORMS = (GammaNorm, BufferNorm, FloatNorm, ListNorm, GlobalNorm, SubmoduleNorm, CallCountingNorm)
"""Norms with a gain that no kernel is given, called `gamma`."""

REGIONS = (NormUnderAutocast, NormAroundAutocast, NormUnderNoGrad, NormUnderModes, NormInTry)
"""Norms on the other side of a region's border."""

OBJECTS = (
    *(OwnOperands, OwnViews, OwnOverStatements, Numbers, Strings, CallDefined, Swapped, TypeIsAsked, DictIsAsked),
    *(Recursive, Generator, LayoutMatters, ViewWouldNotDo, ViewWouldNotDoEither),
)
"""Operands that are no tensors, classes that ask after themselves, layouts."""

EAGER_RAISES: tuple[type[nn.Module], ...] = ()
