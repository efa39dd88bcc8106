"""Sites: attaching changes nothing, mounting is all or nothing, and everything is as before afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import nn

from fusiongate import sites
from fusiongate.comparison.contracts import Ulp
from fusiongate.errors import MountError, UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.sites import Site, attach, detach, mount, mounted, site_of, token_of, unmount

from .planted import fusion

EXACT, HIGH = fusion(), Fusion("high", reference=fusion().reference, fused=fusion().fused, contract=Ulp(2))


def model() -> nn.Sequential:
    """Two blocks with an exact and a high fusion each, and one without a site."""
    tree = nn.Sequential(nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity()), nn.Identity())
    for block in list(tree.children())[:2]:
        attach(block, EXACT)
        attach(block, HIGH)
    return tree


def qualities(tree: nn.Module) -> list[str | None]:
    return [None if (site := site_of(block)) is None else site.quality for block in tree.children()]


def test_attaching_mounts_nothing() -> None:
    tree = model()

    assert Site((EXACT, HIGH), None) == site_of(tree[0])
    assert site_of(tree[2]) is None
    assert site_of(next(tree[0].children())) is None


def test_attaching_twice_is_attaching_once() -> None:
    block = nn.Identity()
    attach(block, EXACT)
    attach(block, EXACT)

    assert Site((EXACT,), None) == site_of(block)


def test_a_site_allows_exact_fusions_always_and_high_ones_at_high_quality() -> None:
    allowed = [
        [site.allows(op) for op in (EXACT, HIGH, fusion())]
        for site in (Site((EXACT, HIGH), quality) for quality in (None, "lossless", "high"))
    ]

    assert [[True, False, False], [True, False, False], [True, True, False]] == allowed


def test_mounting_reports_what_is_on_and_what_is_withheld() -> None:
    tree = model()
    report = mount(tree)

    assert ["lossless", "lossless", None] == qualities(tree)
    assert (("0", "planted"), ("1", "planted")) == report.mounted
    withheld = "within 2 ULP at |expected|; mount at quality='high' to use it"
    assert (("0", "high", withheld), ("1", "high", withheld)) == report.withheld
    assert str(report).splitlines()[1:] == [
        "  0: planted",
        "  1: planted",
        f"  0: high withheld: {withheld}",
        f"  1: high withheld: {withheld}",
    ]
    assert str(report).startswith("mounted at lossless: 2 fusions, 2 withheld")
    assert report.token in str(report)


def test_mounting_at_high_quality_withholds_nothing() -> None:
    tree = model()
    report = mount(tree, quality="high")

    assert ["high", "high", None] == qualities(tree)
    assert () == report.withheld


def test_a_part_of_a_model_can_be_mounted() -> None:
    tree = model()
    mount(tree[1], quality="high")

    assert [None, "high", None] == qualities(tree)
    assert site_of(tree[1]) is not None


def test_the_root_may_be_a_site_itself() -> None:
    block = nn.Identity()
    attach(block, EXACT)

    assert (("Identity", "planted"),) == mount(block).mounted


def test_mounting_is_all_or_nothing() -> None:
    tree = model()
    mount(tree[1], quality="high")
    token = token_of(tree)

    with pytest.raises(MountError, match="1 is mounted at high already; unmount it before mounting at lossless"):
        mount(tree)

    assert [None, "high", None] == qualities(tree)
    assert token == token_of(tree)


def test_nothing_is_left_behind_by_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = model()
    looked_at: list[Any] = []

    def allows(site: Site, op: Fusion) -> bool:
        looked_at.append(op)
        if len(looked_at) == 3:
            raise RuntimeError("in the middle")
        return True

    monkeypatch.setattr(Site, "allows", allows)
    with pytest.raises(RuntimeError, match="in the middle"):
        mount(tree)

    assert [None, None, None] == qualities(tree)
    assert "unmounted-0" == token_of(tree)


def test_mounting_again_at_the_same_quality_is_no_error() -> None:
    tree = model()
    mount(tree)

    assert 2 == len(mount(tree).mounted)


def test_a_model_without_sites_says_what_to_do() -> None:
    with pytest.raises(
        MountError, match=r"Linear has no site: attach a fusion to its modules first, with attach\(module, op\)"
    ):
        mount(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: mount(model(), quality="best"), "mount(quality='best'): expected one of 'lossless', 'high'"),  # type: ignore[arg-type]
        (lambda: mount(3), "expected the nn.Module whose sites are to be mounted, got 3"),  # type: ignore[arg-type]
        (lambda: attach(3, EXACT), "attach(3, …): expected an nn.Module"),  # type: ignore[arg-type]
        (lambda: attach(nn.Identity(), max), "attach(Identity, <built-in function max>): expected a Fusion"),  # type: ignore[arg-type]
    ],
    ids=["quality", "no-model", "no-module", "no-fusion"],
)
def test_what_is_no_model_is_told(call: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()

    assert message == str(raised.value)


def test_unmounting_switches_off_and_keeps_what_is_attached() -> None:
    tree = model()
    mount(tree, quality="high")
    unmount(tree)

    assert [None, None, None] == qualities(tree)
    assert Site((EXACT, HIGH), None) == site_of(tree[0])
    unmount(tree)


def test_every_change_has_a_token_of_its_own() -> None:
    """A key for captured graphs: what was mounted is in them."""
    tree = model()
    tokens = [token_of(tree)]
    tokens.append(mount(tree).token)
    unmount(tree)
    tokens.append(token_of(tree))
    tokens.append(mount(tree, quality="high").token)
    with pytest.raises(MountError):
        mount(tree)

    assert 4 == len(set(tokens))
    assert tokens[-1] == token_of(tree)


def test_mounted_ends_with_its_block() -> None:
    tree = model()
    mount(tree[0])
    with mounted(tree) as report:
        assert ["lossless", "lossless", None] == qualities(tree)
        inside = report.token

    assert ["lossless", None, None] == qualities(tree)
    assert inside != token_of(tree)


def test_mounted_ends_with_an_exception_too() -> None:
    tree = model()
    with pytest.raises(ZeroDivisionError), mounted(tree, quality="high"):
        raise ZeroDivisionError

    assert [None, None, None] == qualities(tree)


def test_what_is_detached_inside_stays_detached() -> None:
    tree = model()
    with mounted(tree):
        detach(tree[0])
    detach(tree[2])

    assert site_of(tree[0]) is None
    assert Site((EXACT, HIGH), None) == site_of(tree[1])


def test_a_model_that_goes_away_takes_its_sites_with_it() -> None:
    tree = model()
    mount(tree)
    gone = weakref.ref(tree[0])
    kept = model()
    gc.collect()
    before = len(sites._sites)
    del tree
    gc.collect()

    assert gone() is None
    assert before - 2 == len(sites._sites)
    assert [None, None, None] == qualities(kept)
