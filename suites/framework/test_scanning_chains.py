"""Chains in the syntax tree of one function: what is found, as which kind, and what stands in the way."""

from __future__ import annotations

import ast
import textwrap

import pytest

from fusiongate.scanning.chains import find_chains
from fusiongate.scanning.def_use import FunctionNode
from fusiongate.scanning.links import Chain

CHAIN = "x * (1 + scale) + shift"


def chains_of(body: str) -> tuple[Chain, ...]:
    """The chains of a function with a body."""
    (function,) = ast.parse("def forward(self, x, scale, shift):\n" + textwrap.indent(body, "    ")).body
    assert isinstance(function, FunctionNode)
    return find_chains(function).chains


def chain_of(body: str) -> Chain:
    """The only chain of a function with a body."""
    (chain,) = chains_of(body)
    return chain


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (CHAIN, ("modulate", "x", "scale", "shift")),
        ("shift + (scale + 1.0) * x", ("modulate", "x", "scale", "shift")),
        ("(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)", ("modulate_fp32", "x", "scale", "shift")),
        (
            "(x.to(torch.float32) * (1 + scale) + shift.to(dtype=torch.float32)).type_as(x)",
            ("modulate_fp32", "x", "scale", "shift"),
        ),
        # Cast to something else's dtype, the whole is no kernel's: what stands inside is.
        ("(x.float() * (1 + scale) + shift).type_as(y)", ("modulate", "x.float()", "scale", "shift")),
        ("(x * (1 + scale) + shift).to(x.dtype)", ("modulate", "x", "scale", "shift")),
        ("(x.to(device) * (1 + scale) + shift).to(x.dtype)", ("modulate", "x.to(device)", "scale", "shift")),
        ("x * (1 + scale[:, None]) + shift", ("modulate", "x", "scale[:, None]", "shift")),
    ],
)
def test_the_kind_and_the_operands(expression: str, expected: tuple[str, str, str, str]) -> None:
    chain = chain_of(f"return {expression}")
    assert chain.shift is not None
    operands = (chain.x, chain.scale, chain.shift)
    assert expected == (chain.kind, *(ast.unparse(operand.expression) for operand in operands))


@pytest.mark.parametrize(
    "body",
    [
        "return x * (2 + scale) + shift",
        "return x * (True + scale) + shift",
        "return x * (1 + scale) + 1",
        "return x * (1 + 2) + shift",
        "return 2 * (1 + scale)",
        "return x * (1 + scale)[0] + shift",
        "return x * (1 + scale)[1:] + shift",
        "return x * (1 + scale).mean(1) + shift",
        "x += shift\nreturn x",
        "x -= 1 + scale\nx += shift\nreturn x",
        "x *= scale\nx += shift\nreturn x",
        "x *= 1 + scale\nx -= shift\nreturn x",
    ],
)
def test_what_is_no_chain(body: str) -> None:
    assert () == chains_of(body)


def test_a_cast_to_a_dtype_that_another_value_had_is_none() -> None:
    """`x` was another tensor when its name was read for the chain."""
    body = "y = x.float() * (1 + scale) + shift\nx = other(x)\nreturn y.to(x.dtype)"
    assert "modulate" == chain_of(body).kind


def test_in_place_there_is_no_gate() -> None:
    chain = chain_of("x *= 1 + scale\nx += shift\nreturn x")
    assert "it writes in place, and a fused kernel returns a new tensor" == chain.reason


def test_a_product_with_another_reader_has_to_be_computed_anyway() -> None:
    chain = chain_of("y = x * (1 + scale)\nz = y + shift\nreturn z, y")
    assert "its product is read elsewhere too (line 4)" == chain.reason


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("self.norm(x)", ("norm",)),
        ("self.first.norm(x)", ("first", "norm")),
        ("F.rms_norm(x)", None),
        ("rms_norm(x)", None),
        ("self.ln_1(x)", ("ln_1",)),
    ],
)
def test_the_norm_and_the_way_to_it(call: str, expected: tuple[str, ...] | None) -> None:
    for body in (f"return {call} * (1 + scale) + shift", f"y = {call}\nreturn y * (1 + scale) + shift"):
        norm = chain_of(body).norm
        assert norm is not None
        assert norm.obstacle is None
        assert expected == norm.path


@pytest.mark.parametrize(
    "call", ["norm(x)", "self.norms[0].of(x)", "self.norm()", "self.blocks[0](x)", "self.linear(x)"]
)
def test_what_is_called_nothing_like_a_norm_is_none(call: str) -> None:
    """A plain function by the name of `norm` may be a vector's length."""
    assert chain_of(f"return {call} * (1 + scale) + shift").norm is None


@pytest.mark.parametrize("call", ["self.norm(x, scale)", "self.norm(x, eps=1e-6)", "self.norm(*x)"])
def test_a_norm_of_several_arguments_is_not_folded_in(call: str) -> None:
    for body in (f"return {call} * (1 + scale) + shift", f"y = {call}\nreturn y * (1 + scale) + shift"):
        norm = chain_of(body).norm
        assert norm is not None
        assert "the norm is called with more than one argument" == norm.obstacle


def test_a_scale_without_a_shift_is_listed_behind_a_norm_only() -> None:
    assert "a scale without a shift: there is no kernel for it" == chain_of("return self.norm(x) * (1 + scale)").reason
    assert () == chains_of("return self.linear(x) * (1 + scale)")


@pytest.mark.parametrize(
    ("between", "writes"),
    [
        ("x += 1", True),
        ("x[0] = 1", True),
        ("x.zero_()", True),
        ("torch.add(a, b, out=c)", True),
        ("helper(x)", True),
        ("helper(x=x)", True),
        ("for a in b:\n    helper(a, scale)", True),
        ("helper(shift)", False),
        ("x.__len__()", False),
        ("y = x", False),
        ("assert x", False),
    ],
)
def test_what_may_write_to_operands_in_between_keeps_a_chain_apart(between: str, writes: bool) -> None:
    chain = chain_of(f"product = x * (1 + scale)\n{between}\nreturn product + shift")
    line = 4 if between.startswith("for") else 3
    assert (f"line {line} may write to its operands" if writes else None) == chain.reason


@pytest.mark.parametrize("body", [f"return lambda: {CHAIN}", f"def inner():\n    return {CHAIN}\nreturn inner"])
def test_a_function_inside_the_function_is_no_place_for_a_gate(body: str) -> None:
    assert "it stands in a function inside the function" == chain_of(body).reason
