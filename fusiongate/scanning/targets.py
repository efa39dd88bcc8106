"""From words on a command line to what is scanned."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from fusiongate.errors import UsageError

__all__ = ["named_target"]


def named_target(words: str) -> Any:
    """What ``package.module``, ``package.module:Class`` or ``path/to/file.py`` names, imported.

    Raises
    ------
    UsageError
        If it cannot be imported, or the module has no such attribute.
    """
    place, colon, attribute = words.partition(":")
    if not place or (colon and not attribute):
        raise UsageError(f"target {words!r}: expected package.module, package.module:Class or a Python file")
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        # Importing runs what somebody else wrote, and that may end in any way.
        told = error if isinstance(error, (ImportError, OSError, SyntaxError)) else f"{type(error).__name__}: {error}"
        expected = "expected a module's name or a Python file, which can be imported here"
        raise UsageError(f"{place}: it cannot be imported: {told}; {expected}") from error
    found: Any = module
    for name in filter(None, attribute.split(".")):
        if not hasattr(found, name):
            raise UsageError(f"{words}: {place} has no {attribute!r}; expected a class or a function of it")
        found = getattr(found, name)
    return found


def _file(path: Path) -> Any:
    """A file's module, which may import its neighbours as it may where it is run, or its package's."""
    path = path.resolve()
    folder, names = path.parent, [path.stem]
    while (folder / "__init__.py").exists():
        folder, names = folder.parent, [folder.name, *names]
    sys.path.insert(0, str(folder))
    try:
        if len(names) > 1:
            module = importlib.import_module(".".join(names))
            if getattr(module, "__file__", None) != str(path):
                raise ImportError(f"the name {'.'.join(names)} is another module's: {module.__file__}")
            return module
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError("it is no Python file")
        module = importlib.util.module_from_spec(spec)
        # Sources are found by way of the functions, so that nothing needs its entry in sys.modules afterwards.
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))
