"""From a source to a launcher: the library of the operands' target, built when it is first needed."""

from __future__ import annotations

from typing import Any

import torch

from fusiongate.build import Source, Target, library

__all__ = ["Entry"]


class Entry:
    """One exported function of a kernel's library, on whatever device its operands are.

    Parameters
    ----------
    source
        The library's source.
    name
        The function.
    """

    __slots__ = ("_functions", "name", "source")

    def __init__(self, source: Source, name: str) -> None:
        self.source = source
        self.name = name
        self._functions: dict[torch.device, Any] = {}

    def on(self, device: torch.device) -> Any:
        """The function for a device.

        Raises
        ------
        BuildError
            If there is no library for it and none can be built.
        """
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = getattr(library(self.source, Target.of(device)), self.name)
        return function
