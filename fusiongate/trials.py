"""Trials: a tiny random model of somebody's class, in eager and rewired, held against one another and timed."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusiongate.comparison.digests import digest
from fusiongate.errors import UsageError
from fusiongate.io import one_line
from fusiongate.scanning import RewireReport, rewired
from fusiongate.timing.intervals import Ratio
from fusiongate.timing.measuring import measure
from fusiongate.timing.pairing import Settings
from fusiongate.timing.stopwatches import Arm

__all__ = ["Trial", "try_model"]

_FEW = ("blocks", "depth", "heads", "layers")
_TEXT = ("joint_attention_dim", "caption_channels", "text_embed_dim", "text_dim", "cross_attention_dim", "cap_feat_dim")
_CALLS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one trial."""

    name: str
    """The class."""
    device: str
    """The device, and the dtype of the weights."""
    parameters: int
    """How many numbers the weights have."""
    sites: tuple[str, ...]
    """Each site with its kind, and its calls or the reason why no gate stands there."""
    mounted: int
    """The sites with a gate."""
    fused: int
    """The calls that were fused."""
    equal: bool
    """Whether every call gave eager's bits."""
    ratio: Ratio
    """The rewired model's time over eager's."""
    seconds: Mapping[str, float]
    """The median time of one forward in each arm, in seconds."""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in self.seconds.items())
        return "\n".join(
            [
                f"{self.name}: {self.parameters:,} random weights, {self.device}",
                f"{self.mounted} of {len(self.sites)} sites mounted; {self.fused} calls fused",
                *(f"  {site}" for site in self.sites),
                f"bits: {'equal' if self.equal else 'NOT equal'} in {_CALLS} calls",
                f"times of one forward: {times}; {self.ratio}",
            ]
        )

    def to_json(self) -> str:
        """The trial as a JSON object."""
        return json.dumps({**asdict(self), "ratio": self.ratio.to_json()}, indent=2, ensure_ascii=False)


def try_model(
    kind: object,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 1.0,
) -> Trial:
    """Build a tiny random model of a class, run it in eager and rewired, and compare and time both.

    Parameters
    ----------
    kind
        The class.
    config
        Arguments of its constructor. The others are their defaults, with few layers and heads where their names say so.
    inputs
        Arguments of its forward: a shape, ``{"shape": …, "dtype": "int64", "high": 8}``, or anything else as it is.
        Those that are not given are guessed from the configuration, as models in diffusers have them.
    device, dtype
        Where the model runs, and in which dtype.
    seconds
        How long to measure.

    Raises
    ------
    UsageError
        It is no class of models, or cannot be built or called with these arguments.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(f"try: {kind!r} is no class of models: expected a subclass of torch.nn.Module")
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        model, chosen = _built(kind, dict(config or {}))
        model.eval().to(device, dtype)
        for parameter in model.parameters():
            # What a constructor leaves at zero would hide every other difference.
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
        arguments = _arguments(model, chosen, inputs, device, dtype)
        eager = copy.deepcopy(model)
        expected = digest(_tensors(eager(**arguments)))
        with rewired(model) as report:
            equal = all(digest(_tensors(model(**arguments))) == expected for _ in range(_CALLS))
            told = _told(report)
            fused = sum(count for (path, _), count in report.counters.items() if path == "fused")
            arms = [Arm("eager", lambda given: eager(**given)), Arm("rewired", lambda given: model(**given))]
            measured = measure(arms, (arguments,), settings=Settings(seconds=seconds), hot=True)
    return Trial(
        kind.__name__,
        f"{device}, {str(dtype).removeprefix('torch.')}",
        sum(parameter.numel() for parameter in model.parameters()),
        told,
        len(report.mounted),
        fused,
        equal,
        measured.ratios["rewired"],
        {name: times.median.value for name, times in measured.arms.items()},
    )


def _told(report: RewireReport) -> tuple[str, ...]:
    lines = []
    for site in report.sites:
        calls = ", ".join(f"{count} {path} ({reason})" for (path, reason), count in sorted(site.counters.items()))
        lines.append(f"{site.name}  {site.kind}: {site.reason or calls or 'not called'}")
    return (*lines, *report.unsearched)


def _built(kind: type[nn.Module], config: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and what its constructor was given, its defaults among it."""
    parameters = inspect.signature(kind).parameters
    known = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    small = {**known, **_smaller(known), **config}
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    missing = [name for name in needed if name not in config]
    if missing:
        raise UsageError(f"{kind.__name__} needs {', '.join(missing)}: give them as --config '{{\"{missing[0]}\": …}}'")
    told: Exception | None = None
    for given in (small, {**known, **config}):
        try:
            return kind(**given), given
        except Exception as error:  # somebody else's constructor
            told = told or error
    what = f"{type(told).__name__}: {told}"
    raise UsageError(f"{kind.__name__} cannot be built: {one_line(what)}; give what it needs as --config '{{…}}'")


def _smaller(known: Mapping[str, Any]) -> dict[str, Any]:
    """Few layers and heads; what is as wide as all heads together, as a layer's width, becomes narrower with them."""
    made = {name: min(2, value) for name, value in known.items() if name.endswith(_FEW) and type(value) is int}
    width = known.get("attention_head_dim")
    heads = known.get("num_attention_heads")
    if type(width) is int and type(heads) is int:
        for name, value in known.items():
            if value == width * heads and name not in made:
                made[name] = width * min(2, heads)
    return made


def _arguments(
    model: nn.Module,
    config: Mapping[str, Any],
    given: Mapping[str, Any] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Arguments that a forward takes: those that are given, and the first guess with which it runs."""
    accepted = inspect.signature(model.forward).parameters
    made = {name: _made(value, device, dtype) for name, value in (given or {}).items()}
    unknown = [name for name in made if name not in accepted]
    if unknown:
        names = ", ".join(accepted)
        raise UsageError(f"{type(model).__name__}.forward takes no {unknown[0]!r}: it takes {names}")
    told = "nothing was tried"
    for guess in _guesses(config, device, dtype):
        arguments = {**{name: value for name, value in guess.items() if name in accepted}, **made}
        missing = [p.name for p in accepted.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        missing = [name for name in missing if name not in arguments]
        if missing:
            told = f"no {missing[0]!r} is known"
            break
        try:
            _tensors(copy.deepcopy(model)(**arguments))
        except Exception as error:  # somebody else's forward
            told = f"it raises {type(error).__name__}: {error}"
        else:
            return arguments
    example = next(iter(accepted), "x")
    raise UsageError(
        f"{type(model).__name__} cannot be called: {one_line(told)}; "
        f"give shapes as --inputs '{{\"{example}\": [1, 16, 64]}}'"
    )


def _made(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, list) and value and all(type(size) is int for size in value):
        return torch.randn(value, device=device).to(dtype)
    if isinstance(value, dict) and "shape" in value:
        kind = getattr(torch, str(value.get("dtype", "float32")), None)
        if not isinstance(kind, torch.dtype):
            raise UsageError(f"dtype {value['dtype']!r}: expected one of torch's, such as int64")
        if kind.is_floating_point:
            return torch.randn(value["shape"], device=device).to(kind)
        return torch.randint(0, int(value.get("high", 2)), value["shape"], device=device).to(kind)
    return value


def _guesses(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Arguments as the transformers in diffusers have them: packed, as images, or as videos."""
    channels = config.get("in_channels") or 4
    widths = [config[name] for name in _TEXT if type(config.get(name)) is int] or [16]
    axes = config.get("axes_dims_rope") or config.get("axes_dim") or (0, 0, 0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    shapes: Sequence[tuple[int, ...]] = [
        (1, 16, channels),
        (1, channels, 8, 8),
        (1, channels, 2, 8, 8),
        (1, 2, channels, 8, 8),
    ]
    times = [torch.tensor([500], device=device), torch.tensor([0.5], device=device).to(dtype)]
    for shape, width, time in itertools.product(shapes, dict.fromkeys(widths), times):
        yield {
            "hidden_states": normal(*shape),
            "encoder_hidden_states": normal(1, 7, width),
            "timestep": time,
            "pooled_projections": normal(1, config.get("pooled_projection_dim") or 16),
            "encoder_attention_mask": torch.ones(1, 7, dtype=torch.int64, device=device),
            "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.int64, device=device),
            "class_labels": torch.zeros(1, dtype=torch.int64, device=device),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "img_shapes": [[(1, 4, 4)]],
            "img_ids": torch.zeros(16, len(axes), device=device),
            "txt_ids": torch.zeros(7, len(axes), device=device),
            "image_rotary_emb": None,
            **({"guidance": torch.ones(1, device=device)} if config.get("guidance_embeds") else {}),
            **({"num_frames": 1, "height": 4, "width": 4} if len(shape) == 3 else {}),
            "return_dict": False,
        }


def _tensors(result: Any) -> list[Tensor]:
    """The tensors of a result."""
    found = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    if not found:
        raise UsageError("its forward returns no tensors")
    return found
