"""A fusion as data: reference, kernel, predicate, contract, and how the kernel is to be looked at."""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeAlias

from torch import Tensor
from typing_extensions import ParamSpec, TypeVar

from fusiongate.comparison.contracts import Contract, Exact, Ulp
from fusiongate.errors import UsageError

from .policies import Policy

if TYPE_CHECKING:
    from .fusion import Fusion

__all__ = ["Admission", "FusionSpec", "P", "R", "Specified", "Witness", "never_declines", "returned"]

P = ParamSpec("P", default=...)
"""The reference's parameters, which are the fusion's."""
R = TypeVar("R", default=Tensor)
"""The reference's result: a tensor, a tuple of tensors, or None where the reference only writes arguments."""

Witness: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]
"""The reference's and the kernel's intermediate, each a function of the arguments."""


class Admission(Protocol):
    """The calls that one gate has let through, as a launcher keeps them: what its ``admission()`` gives, if it has one.

    It may forget a call at any time, and it must not take one call for another that could have another verdict: it keys
    by everything that is in :func:`fusiongate.gate.signatures.call_key`.
    """

    def __call__(self, args: tuple[Any, ...]) -> Tensor | None:
        """The kernel's result if this call was admitted and launched; None if it has to go to the gate."""

    def admit(self, args: tuple[Any, ...]) -> None:
        """Recognise calls like this one from now on."""

    def forget(self) -> None:
        """Recognise none any more."""


def never_declines(*_args: Any) -> str | None:
    """Let a kernel be launched on any arguments."""
    return None


def returned(result: object) -> tuple[object, ...]:
    """The outputs that a reference or a kernel returned: one, several, or, for one that only writes, none."""
    if isinstance(result, tuple):
        return result
    return () if result is None else (result,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusionSpec(Generic[P, R]):
    """Everything that makes a fusion, its gate apart; a variant is ``dataclasses.replace(spec, …)``.

    Raises
    ------
    UsageError
        If a field is not what is asked for.
    """

    name: str
    """For messages, reports and snapshots."""
    reference: Callable[P, R]
    """The eager chain; right by definition."""
    fused: Callable[..., R]
    """The kernel's launcher: the same arguments, passed positionally."""
    declines: Callable[..., str | None] = never_declines
    """The static predicate: None (may launch) or a reason."""
    signature: Callable[..., Hashable] | None = None
    """Gives what stands for the shapes of its arguments in the signature; None: the shapes."""
    contract: Contract | tuple[Contract, ...] = Exact()  # noqa: RUF009  # frozen
    """What "same" means: for all outputs, or one for each: those that are returned, then the written arguments."""
    policy: Policy = Policy()  # noqa: RUF009  # frozen
    """How the gate behaves."""
    probe: Callable[..., Sequence[Any]] | None = None
    """Fresh operands for a probe, as ``probe(*args)``; None: floating tensors are redrawn, all else is live."""
    witness: Witness | None = None
    """An intermediate to compare too."""
    grows: bool | Callable[[Sequence[Any], Sequence[Any]], bool] = True
    """Whether a probe may have a larger batch than the live call, or a function of the live and the probe's ones."""
    mutates_args: tuple[str, ...] = ()
    """The parameters of the reference whose tensors it writes; the kernel has to write the same into them."""
    compile: Literal["expression", "op"] = "expression"
    """What ``torch.compile`` sees: the reference's expression, or a custom op."""
    host: Fusion[..., Any] | None = None
    """The same kernel built for the host, a fusion of its own."""
    parameters: inspect.Signature | None = field(init=False, repr=False)
    """The reference's; None where it tells none."""
    names: tuple[str, ...] = field(init=False, repr=False)
    """Those of the parameters; none where the reference tells none."""
    written: tuple[int, ...] = field(init=False, repr=False)
    """The positions of the written arguments, in the order of ``mutates_args``."""

    def __post_init__(self) -> None:
        for label in ("reference", "fused", "declines"):
            self._expect(label, callable(getattr(self, label)), "a callable")
        for label in ("signature", "probe"):
            option = getattr(self, label)
            self._expect(label, option is None or callable(option), "a callable or None")
        pair = isinstance(self.witness, tuple) and len(self.witness) == 2 and all(map(callable, self.witness))
        self._expect("witness", self.witness is None or pair, "a pair of callables or None")
        contracts = self.contract if isinstance(self.contract, tuple) else (self.contract,)
        kept = bool(contracts) and all(isinstance(one, Exact | Ulp) for one in contracts)
        self._expect("contract", kept, "Exact() or Ulp(n), or a tuple of them, one for each output")
        self._expect("policy", isinstance(self.policy, Policy), "a Policy")
        self._expect("compile", self.compile in ("expression", "op"), "'expression' or 'op'")
        try:
            parameters = inspect.signature(self.reference)
        except (TypeError, ValueError):
            parameters = None
        names = () if parameters is None else tuple(parameters.parameters)
        named = isinstance(self.mutates_args, tuple) and all(name in names for name in self.mutates_args)
        self._expect(
            "mutates_args", named, f"a tuple of the reference's parameters ({', '.join(names) or 'none told'})"
        )
        object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "written", tuple(map(names.index, self.mutates_args)))

    def _expect(self, label: str, right: bool, expected: str) -> None:
        if not right:
            raise UsageError(f"Fusion({self.name!r}): {label}= is {getattr(self, label)!r}; expected {expected}")

    def outputs(self, result: object, args: Sequence[Any]) -> tuple[object, ...]:
        """Everything that a call gave: what it returned, then the tensors that it wrote, as they are now.

        Parameters
        ----------
        result
            What the reference or the kernel returned.
        args
            The arguments that it was called with.
        """
        written = (args[position] for position in self.written if position < len(args))
        return (*returned(result), *(arg for arg in written if isinstance(arg, Tensor)))

    def contract_of(self, output: int) -> Contract:
        """The contract of an output, by its place in :meth:`outputs`.

        Raises
        ------
        UsageError
            If there are several contracts, and none for this output.
        """
        if not isinstance(self.contract, tuple):
            return self.contract
        if output >= len(self.contract):
            raise UsageError(f"Fusion({self.name!r}): contract= has {len(self.contract)}, and there are more outputs")
        return self.contract[output]

    def positional(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as a kernel takes them; defaults after the last one given stay away, as in a positional call.

        Raises
        ------
        TypeError
            If they do not fit the reference's parameters.
        UsageError
            If the reference tells no parameters.
        """
        if not named:
            return args
        if self.parameters is None:
            raise UsageError(f"{self.name}: its reference tells no parameters; pass all arguments by position")
        bound = self.parameters.bind(*args, **named)
        last = max(self.names.index(name) for name in bound.arguments)
        bound.apply_defaults()
        return bound.args[: last + 1]


class Specified(Generic[P, R]):
    """Whatever is made from a spec, and shows its fields."""

    spec: FusionSpec[P, R]
    """A variant is made of ``dataclasses.replace(spec, …)``."""

    def __copy__(self) -> Self:
        """Itself, as a function is its own copy: a copied model goes through the same gate."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, likewise."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The name under which a module holds it, as of a function: no verdict goes to another process.

        Raises
        ------
        UsageError
            If no module does.
        """
        for name, module in list(sys.modules.items()):
            held = list(vars(module).items()) if isinstance(module, ModuleType) else []
            for attribute, value in held:
                if value is self:
                    return _imported, (name, attribute)
                # By its type: some modules hold objects that warn when they are asked for their class.
                if issubclass(type(value), Specified) and value.host is self:
                    return _imported, (name, f"{attribute}.host")
        raise UsageError(
            f"{self!r} is pickled by the name under which a module holds it, and no module does: assign it at the top "
            f"level of a module, or take it off the model before the model is saved or sent to another process"
        )

    @property
    def name(self) -> str:
        """For messages, reports and snapshots."""
        return self.spec.name

    @property
    def reference(self) -> Callable[P, R]:
        """The eager chain."""
        return self.spec.reference

    @property
    def fused(self) -> Callable[..., R]:
        """The kernel's launcher."""
        return self.spec.fused

    @property
    def declines(self) -> Callable[..., str | None]:
        """The static predicate."""
        return self.spec.declines

    @property
    def contract(self) -> Any:
        """What "same" means: a contract, or a tuple of them where each output has its own."""
        return self.spec.contract

    @property
    def policy(self) -> Policy:
        """How the gate behaves."""
        return self.spec.policy

    @property
    def witness(self) -> Witness | None:
        """The intermediate that is compared too."""
        return self.spec.witness

    @property
    def grows(self) -> bool | Callable[[Sequence[Any], Sequence[Any]], bool]:
        """Whether a probe may have a larger batch than the live call."""
        return self.spec.grows

    @property
    def mutates_args(self) -> tuple[str, ...]:
        """The arguments that are written."""
        return self.spec.mutates_args

    @property
    def compile(self) -> Literal["expression", "op"]:
        """What ``torch.compile`` sees."""
        return self.spec.compile

    @property
    def host(self) -> Fusion[..., Any] | None:
        """The same kernel built for the host."""
        return self.spec.host


def _imported(module: str, path: str) -> Specified[..., Any]:
    """The fusion that was pickled by this name.

    Raises
    ------
    UsageError
        If there is none any more.
    """
    try:
        found = operator.attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        found = error
    if not isinstance(found, Specified):
        raise UsageError(f"a pickle names the fusion {module}.{path}, and there is none: {found!r}")
    return found
