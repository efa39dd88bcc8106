"""Models that are drawn: forwards put together out of statements around a chain, and what is done to them meanwhile."""

from __future__ import annotations

import contextlib
import copy
import itertools
import linecache
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .scanned_adversaries import BufferNorm, CallCountingNorm, FloatNorm, GammaNorm, MatmulNorm, Writer
from .scanned_models import CompositeNorm, D

__all__ = ["ALL", "NORMS", "Program", "happen", "programs", "smallest"]

NORMS: dict[str, Callable[[], nn.Module]] = {
    "composite": lambda: CompositeNorm(weighted=True),
    "weightless": CompositeNorm,
    "rms": lambda: nn.RMSNorm(D, eps=1e-6).bfloat16(),
    "layer": lambda: nn.LayerNorm(D).bfloat16(),
    "gamma": GammaNorm,
    "buffer": BufferNorm,
    "float": FloatNorm,
    "counting": CallCountingNorm,
    "matmul": MatmulNorm,
}
PLAIN_NORMS = ("composite", "weightless", "rms")
NORMS_OF = {
    "norms": ("layer", "gamma", "gamma", "buffer", "buffer", "float", "float", "counting"),
    "regions": ("matmul", "matmul", "matmul", "matmul"),
}


def writes(tensor: Tensor) -> Tensor:
    """A helper that writes to its argument."""
    return tensor.mul_(1.5)


def rows(tensor: Tensor) -> Tensor:
    """A helper that does not."""
    return tensor.unsqueeze(1).squeeze(1)


class Base(Writer):
    """What every program's class has."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.act = nn.ReLU(inplace=True)
        self.flag = True
        self.early = False
        self.register_buffer("table", torch.linspace(-1, 1, D).bfloat16())

    @property
    def computed(self) -> Tensor:
        """Another one at every reading."""
        return self.table.add_(0.25)

    def rows(self, tensor: Tensor) -> Tensor:
        """A method that writes to nothing."""
        return tensor[..., :].to(tensor.dtype)

    @contextlib.contextmanager
    def writing(self, tensor: Tensor) -> Iterator[None]:
        """A context that writes on its way in and on its way out."""
        tensor.add_(0.5)
        yield
        tensor.mul_(0.5)

    def numbers(self, *tensors: Tensor) -> Iterator[Tensor]:
        """The tensors in turn, the last of them for ever; each reading writes to the first."""
        for tensor in (*tensors, *itertools.repeat(tensors[-1], 20)):
            tensors[0].add_(0.125)
            yield tensor


BIG, ROWS, DONE = ("x", "y", "n", "h"), ("s", "t", "u", "self.table"), ("z", "r")
ANY = (*BIG, "s", "t", "u")

# Each statement with the names in it by what they stand for: {a}, {b} any tensor, {x} a large one, {r} a row.
STATEMENTS: dict[str, Sequence[str]] = {
    "pure": (
        *("{a} = {b}", "{a} = {b}.detach()", "{a} = {b} + 1", "u = {r}.unsqueeze(1).squeeze(1)", "t, u = u, t"),
        *("{a} = self.rows({b})", "{a} = rows({b})", "y = {x}[:, :1].expand_as(x)", "u = {r}.clone()", "d = 1"),
        *("u = (self.table + {r})[..., :]", "pass", "y: object = {x}", "u, t = ({r}, {r})"),
    ),
    "in-place": (
        *("{a}.mul_(1.5)", "{x}[:, 0] = 0", "{a} += 1", "{a} *= 0.5", "F.relu({a}, inplace=True)"),
        *("F.silu({x}[:, :1], inplace=True)", "torch.mul({r}, 2, out={r})", "self.act({x}.view(-1))", "writes({a})"),
        *("{a} = self.write({b})", "self.write(*(t, {a}))", "self.write(*[{a}])", "{a} = writes({b})"),
        *("{a}.detach().add_(1)", "self.table.add_(0.5)", "getattr({a}, 'add_')(1)", "[w.mul_(2) for w in {x}]"),
    ),
    "order": (
        *("{a} = next(it)", "y = ({a} := {b})", "d = 0", "d = 1", "it = iter([s, t, u, t])", "del {a}"),
        *(
            "it = self.numbers(x, t, s)",
            "u = next(it)",
            "u = self.computed",
            "s, t = t, s",
            "self.flag = not self.flag",
        ),
        *("u = F.dropout({r}, 0.5)", "{a} = {b} + torch.rand(())", "self.kept = {a}", "u = locals()['{x}'][:, :1]"),
        *("kept = lambda: {a}\nx = kept()", "u = self.computed + self.computed"),
    ),
}
BLOCKS: dict[str, Sequence[str]] = {
    "pure": ("if self.flag:\n{body}", "if {r} is not None:\n{body}", "if self.flag:\n    pass\nelse:\n{body}"),
    "in-place": ("for k in range(2):\n{body}\n    {x}.add_(0.5)", "for w in {x}:\n    w.add_(1)\n{body}"),
    "order": (
        *("for k in range(2):\n{body}", "while d < 1:\n    d += 1\n{body}", "if {x}.sum() > 0:\n{body}"),
        *("try:\n{body}\nexcept (RuntimeError, NameError):\n    z = {x}", "if self.early:\n    return {x}\n{same}"),
        *("try:\n{body}\nfinally:\n    z = {x}", "for k in range(3):\n    if k > 1:\n        break\n{body}"),
    ),
    "regions": (
        *(
            "with torch.autocast('cpu', dtype=torch.bfloat16):\n{body}",
            "with torch.no_grad():\n{body}",
            "with self.writing({a}):\n{body}",
        ),
        *(
            "with torch.autocast('cpu', dtype=torch.bfloat16):\n{body}",
            "with torch.autocast('cpu', enabled=False):\n{body}",
        ),
    ),
}
SCALES: dict[str, Sequence[str]] = {
    "pure": ("{r}", "{r}", "{r}[:, :1]", "self.rows({r})", "rows({r})", "{r}.to(x.dtype)"),
    "in-place": (
        "self.write({r})",
        "F.relu({x}, inplace=True)[:, :1]",
        "self.write({x})[:, :1]",
        "F.relu({r}, inplace=True)",
        "F.silu({r}, True)",
        "writes({r})",
        "{r}.mul_(2)",
    ),
    "order": (
        "next(it)",
        "next(it)",
        "next(it)",
        "({r2} := {r})",
        "self.computed",
        "F.dropout({r}, 0.5)",
        "({r} if self.flag else {r})",
    ),
}
LARGE: dict[str, Sequence[str]] = {
    "pure": ("{x}", "{x}", "self.norm({x})", "self.norm({x})", "self.norm({x}.float())", "{x}[:, :]", "n", "n", "n"),
    "in-place": ("self.act({x})", "F.relu({x}, inplace=True)", "writes({x})"),
    "order": ("next(it)", "next(it)", "({x2} := {x})", "F.dropout({x}, 0.5)"),
}
SUMS = ("(1 + {s})", "({s} + 1.0)", "(1 + {s})[..., None, :].squeeze(-2)", "(1 + {s}[:, 0]).unsqueeze(1)", "g", "g")
VIEWED = ("(1 + {s}[:, 0]).unsqueeze(d)", "(1 + {s}).transpose(0, d).transpose(0, 1)", "(1 + {s}).view(2, 1, D)")
GATED = ("{x} * gate", "gate * {x}")
PRODUCTS = ("{x} * {g}", "{g} * {x}")
FIRST = {"pure": ("{n} = self.norm({x})", "{n} = self.norm({x})", "{n} = self.norm({x}.float())", "{n} = {x} + 0")}
CHAINS = {
    "pure": ("{z} = {p} + {t}", "{z} = {t} + {p}", "y = F.relu({p} + {t})", "{z} = self.rows({p} + {t})"),
    "order": ("{z} = {t} + {p}", "{z} = {p} + ({t} if self.flag else {r})"),
}
START = "y = x + 0\nn = x.clone()\nh = x * 1\nz = r = x\nu = t + s\nd = 1\ng = s\nit = iter([s, t, u, s, t])"
END = "return torch.cat([w.float().expand(2, 6, 16) for w in (x, y, n, h, z, r, s, t, u)], dim=1)"

EVENTS: dict[str, Sequence[str]] = {
    "norms": ("gain", "gain", "weight", "eps", "no weight"),
    "hooks": ("hook", "pre-hook", "wrap", "swap", "train", "parametrize", "own forward", "wrap forward"),
    "copies": ("deepcopy", "copy", "replica", "copy of the norm"),
    "regions": ("autocast",),
}
ALL = frozenset({"pure", "in-place", "order", "regions", "norms", "hooks", "copies"})


@dataclass(frozen=True)
class Program:
    """A model's forward, its norm, and what happens to it between calls."""

    body: str
    norm: str
    events: tuple[str, ...]

    @property
    def source(self) -> str:
        body = textwrap.indent("\n".join([START, self.body, END]), "        ")
        return f"class Model(Base):\n    def forward(self, x, s, t):\n{body}\n"

    def __repr__(self) -> str:
        return f"{self.norm}, {self.events}:\n{self.body}"

    def kind(self) -> type[Base]:
        """The class, compiled; its source is where Python looks for those of interactive sessions."""
        name = f"<program {next(_numbers)}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        namespace: dict[str, Any] = {"torch": torch, "F": F, "D": D, "Base": Base, "rows": rows, "writes": writes}
        exec(compile(self.source, name, "exec"), namespace)
        made: type[Base] = namespace["Model"]
        return made


_numbers = itertools.count()


class _Writer:
    """Writes one program; what is drawn goes by one seed, so that no two programs are alike."""

    def __init__(self, seed: int, kinds: frozenset[str]) -> None:
        self.random = random.Random(seed)
        # A model with everything in it is nothing but obstacles: most have one kind of hazard, or two.
        hazards = sorted(kinds - {"pure"})
        self.kinds = {"pure", *self.random.sample(hazards, min(len(hazards), self.random.choice((0, 1, 1, 1, 2))))}

    def often(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def text(self, choices: Mapping[str, Sequence[str]], **given: str) -> str:
        hazards = [kind for kind in choices if kind in self.kinds and kind != "pure"]
        kind = self.random.choice([*hazards, *hazards, "pure"] if "pure" in choices else hazards)
        names = {"a": ANY, "b": ANY, "x": BIG, "x2": BIG, "r": ROWS, "r2": ("s", "t", "u"), "z": (*DONE, "n", "x")}
        drawn = {name: self.random.choice(several) for name, several in names.items()}
        return self.random.choice(choices[kind]).format(**{**drawn, **given})

    def chain(self) -> list[str]:
        """The statements of one chain, in their order."""
        # A name that was there before, or one that is not.
        normed = self.random.choice("nm")
        made = [self.text(FIRST, n=normed)] if self.often(50) else []
        scale = self.text(SCALES)
        if self.often(20):
            made = [f"gate = {scale}", f"p = {self.random.choice(GATED).format(x=self.text(LARGE))}"]
            if self.often(50):
                return [*made, self.text({"pure": ("{z} = {x} + p", "{z} = p + {x}")})]
            return [made[0], self.text({"pure": ("{z} = {x} + {p}", "{z} = {p} + {x}")}, p=made[1][4:])]
        total = self.random.choice(SUMS if "order" not in self.kinds else (*SUMS, *VIEWED)).format(s=scale)
        if total == "g":
            made.append(f"g = 1 + {scale}")
        large = normed if made and self.often(60) else self.text(LARGE)
        product = self.random.choice(PRODUCTS).format(x=large, g=total)
        if self.often(40):
            made.append(f"h = {product}")
            product = "h"
        if self.often(10):
            return [*made, self.text({"pure": ("{z} = {p}",)}, p=product)]
        return [*made, self.text(CHAINS, p=product, t=self.text(SCALES))]

    def block(self, depth: int) -> str:
        """Statements with a chain among them."""
        made: list[str] = []
        chain = self.chain()
        for place, part in enumerate(chain):
            while self.often(30):
                made.append(self.text(STATEMENTS))
            if place and depth and self.often(20):
                made.append(self.compound("\n".join(chain[place:])))
                break
            around = 40 if "regions" in self.kinds else 15
            made.append(self.compound(part) if depth and self.often(around) else part)
        if depth and self.often(30):
            made.append(self.compound(self.block(depth - 1)))
        return "\n".join(made)

    def compound(self, body: str) -> str:
        return self.text(BLOCKS, body=textwrap.indent(body, "    "), same=body)

    def program(self) -> Program:
        blocks = [self.block(self.random.randrange(3)) for _ in range(self.random.choice((1, 2)))]
        norm = self.random.choice((*PLAIN_NORMS, *(n for k in sorted(self.kinds) for n in NORMS_OF.get(k, ()))))
        known = [event for kind, several in EVENTS.items() if kind in self.kinds for event in several]
        events = self.random.choices(known, k=self.random.choice((0, 1, 2))) if known else []
        return Program("\n".join(blocks), norm, tuple(events))


def programs(kinds: frozenset[str] = ALL) -> st.SearchStrategy[Program]:
    """Programs of some kinds."""
    return st.integers(0, 2**64 - 1).map(lambda seed: _Writer(seed, kinds).program())


def smallest(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A program from which nothing can be left out without its ceasing to fail."""
    lines = program.body.splitlines()
    place = 0
    while place < len(lines):
        depth = len(lines[place]) - len(lines[place].lstrip())
        end = place + 1
        while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > depth:
            end += 1
        inner = [line[4:] for line in lines[place + 1 : end]]
        for kept in ([], inner):
            shorter = replace(program, body="\n".join([*lines[:place], *kept, *lines[end:]]))
            if _compiles(shorter) and fails(shorter):
                lines = shorter.body.splitlines()
                break
        else:
            place += 1
    shorter = replace(program, body="\n".join(lines))
    for place in range(len(program.events)):
        fewer = replace(shorter, events=program.events[:place] + program.events[place + 1 :])
        shorter = fewer if fails(fewer) else shorter
    return shorter


def _compiles(program: Program) -> bool:
    try:
        compile(program.source, "<shorter>", "exec")
    except SyntaxError:
        return False
    return True


class Wrapper(nn.Module):
    """Computes what another module does, and doubles it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def fill(model: nn.Module) -> None:
    """Other numbers in every parameter."""
    for parameter in model.parameters():
        parameter.fill_(3.0)


def happen(event: str, model: Any) -> Any:
    """Let something happen to a model; what is called from now on is returned."""
    norm = model.norm
    match event:
        case "gain":
            gain = getattr(norm, "gamma", None)
            if isinstance(gain, Tensor):
                gain.fill_(2.5)
            elif gain is not None:
                norm.gamma = 2.5
        case "weight":
            fill(norm)
        case "eps":
            norm.eps = 0.25
        case "no weight":
            norm.weight = None
        case "hook":
            norm.register_forward_hook(lambda module, args, result: 2 * result)
        case "pre-hook":
            norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        case "wrap":
            model.norm = Wrapper(norm)
        case "swap":
            model.norm = CompositeNorm(eps=0.5)
        case "train":
            model.train()
        case "parametrize" if isinstance(getattr(norm, "weight", None), nn.Parameter):
            parametrize.register_parametrization(norm, "weight", Doubled())
        case "own forward":
            forward = norm.forward
            norm.forward = lambda x: 2 * forward(x)
        case "wrap forward":
            before = model.forward
            model.forward = lambda *args: 2 * before(*args)
        case "deepcopy" | "copy" | "replica" | "copy of the norm":
            return copied(event, model)
    return model


def copied(event: str, model: Any) -> Any:
    """A copy of a model, with other weights."""
    if event == "copy of the norm":
        model.norm = copy.deepcopy(model.norm)
        fill(model.norm)
        return model
    if event == "deepcopy":
        made = copy.deepcopy(model)
    else:
        made = copy.copy(model) if event == "copy" else model._replicate_for_data_parallel()
        made._modules = {name: copy.deepcopy(module) for name, module in model._modules.items()}
    fill(made)
    return made
