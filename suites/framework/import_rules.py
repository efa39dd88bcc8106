"""The direction of imports: `python suites/framework/import_rules.py` lists every import that points upwards."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAYERS = (
    ("errors",),
    ("io", "platforms", "switches"),
    ("comparison", "diagnosis"),
    ("gate",),
    ("sites", "scanning", "jit"),
    ("kernels",),
    ("models",),
    ("matrix", "subjects", "sabotage", "presets", "timing", "certificates"),
    ("ledger",),
    ("plugin", "report", "cli"),
)
"""From the bottom to the top: a module imports from its own layer and from those before it."""

RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

TREES = {"fusiongate": ("fusiongate",), "kernels": ("fusiongate", "kernels"), "suites": ("fusiongate", "suites")}
"""Each folder of the checkout and the name that it is installed under."""

PUBLIC_MODULES = frozenset({"jit", "kernels", "models", "presets", "sabotage", "timing"})
"""What the suites may import apart from the names of `fusiongate` itself."""

PUBLIC_KERNELS = frozenset(
    {
        "composite_rms_norm_modulate",
        "modulate",
        "modulate_fp32",
        "rms_norm_modulate",
        "rms_norm_modulate_high",
    }
)
"""What `fusiongate.kernels` exports; a module of the same name would take the function's place."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One import, or one module, that breaks a rule."""

    path: Path
    """The file, relative to the checkout."""
    line: int
    """The line of the import; 1 where the module itself is at fault."""
    message: str
    """What is wrong and what to do."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class _Import:
    line: int
    target: tuple[str, ...]
    spelled_absolutely: bool


def violations(root: Path) -> list[Violation]:
    """Every breach of the rules in the three trees of the checkout at `root`, in the order of the files."""
    found = (violation for tree in TREES for path in _modules(root / tree) for violation in _check(root, tree, path))
    # One `from` with several names breaks a rule once.
    return list(dict.fromkeys(found))


def public_names(root: Path) -> frozenset[str]:
    """The strings of `__all__` in `fusiongate/__init__.py`, read without importing it.

    Raises
    ------
    LookupError
        The module assigns no `__all__`.
    """
    module = ast.parse((root / "fusiongate" / "__init__.py").read_text(encoding="utf-8"))
    for node in module.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return frozenset(
                leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
            )
    raise LookupError("fusiongate/__init__.py assigns no __all__: list the public names there")


def shadowing_modules(root: Path) -> list[Violation]:
    """Every module that bears the name of a public function: importing it would replace the function."""
    taken = {"fusiongate": public_names(root) - PUBLIC_MODULES, "kernels": PUBLIC_KERNELS}
    return [
        Violation(
            path.relative_to(root), 1, f"a module called `{name}` would replace the public function: rename the module"
        )
        for tree, names in taken.items()
        for path in _modules(root / tree)
        for name in [path.parent.name if path.name == "__init__.py" else path.stem]
        if name in names and len(path.relative_to(root / tree).parts) == (2 if path.name == "__init__.py" else 1)
    ]


def _modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _check(root: Path, tree: str, path: Path) -> Iterator[Violation]:
    inside = path.relative_to(root / tree)
    package = (*TREES[tree], *inside.parent.parts)
    module = package if inside.name == "__init__.py" else (*package, inside.stem)
    component = module[1] if len(module) > 1 else None
    if tree != "suites" and component is not None and component not in RANKS:
        unplaced = f"`{component}` stands in no layer: add it to LAYERS in suites/framework/import_rules.py"
        yield Violation(path.relative_to(root), 1, unplaced)
        return
    for found in _imports(ast.parse(path.read_text(encoding="utf-8")), package):
        if tree == "suites":
            message = _breach_in_suites(found, in_framework=inside.parts[0] == "framework")
        else:
            message = _breach_in_library(found, component, in_kernels=tree == "kernels")
        if message:
            yield Violation(path.relative_to(root), found.line, message)


def _imports(module: ast.Module, package: tuple[str, ...]) -> Iterator[_Import]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(node.lineno, tuple(alias.name.split(".")), spelled_absolutely=True)
        elif isinstance(node, ast.ImportFrom):
            source = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                source = package[: len(package) - node.level + 1] + source
            for alias in node.names:
                yield _Import(node.lineno, (*source, alias.name), spelled_absolutely=not node.level)


def _breach_in_library(found: _Import, component: str | None, *, in_kernels: bool) -> str | None:
    if found.spelled_absolutely and found.target[0] in {"kernels", "suites"}:
        return f"`{found.target[0]}` is installed as `fusiongate.{found.target[0]}`: import it by that name"
    if found.target[0] != "fusiongate" or component is None:
        return None
    if in_kernels and found.spelled_absolutely and found.target[1:2] == ("kernels",):
        return "inside kernels/ import relatively: the folder has another name in a checkout"
    above = ".".join(found.target[:2])
    imported = found.target[1] if len(found.target) > 1 else None
    if imported is None:
        return f"`{component}` imports `fusiongate` itself, which stands above it: import the defining module"
    if imported not in RANKS:
        return f"`{component}` imports `{above}`, which stands in no layer: import the defining module"
    if RANKS[imported] > RANKS[component]:
        return f"`{component}` imports `{above}`, which stands above it: move what both need into a lower layer"
    return None


def _breach_in_suites(found: _Import, *, in_framework: bool) -> str | None:
    if found.spelled_absolutely and (
        found.target[0] in {"kernels", "suites"} or found.target[:2] == ("fusiongate", "suites")
    ):
        return (
            "checkout and wheel differ in this name: import relatively within suites/, kernels as `fusiongate.kernels`"
        )
    if in_framework or not found.spelled_absolutely or found.target[0] != "fusiongate" or len(found.target) == 1:
        return None
    if found.target[1] in RANKS and found.target[1] not in PUBLIC_MODULES:
        return f"`fusiongate.{found.target[1]}` is no public name: suites outside framework/ use the public API"
    return None


if __name__ == "__main__":
    checkout = Path(__file__).parents[2]
    sys.exit("\n".join(map(str, [*violations(checkout), *shadowing_modules(checkout)])) or 0)
