# SPDX-License-Identifier: Apache-2.0
"""Acts on a module of vLLM right after its import, and costs nothing before.

A plugin is loaded in every process, and most of them never import what is patched.
Importing it for them would cost every start, also of engines without trees, and on the
CPU vLLM has to patch torch before its runner is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Action = Callable[[ModuleType], None]


def call_after_import(module_name: str, action: Action) -> None:
    """Call `action` with the module: now if it is imported, else when it has been."""
    module = sys.modules.get(module_name)
    if module is not None:
        action(module)
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.waiting.setdefault(module_name, []).append(action)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finder that lets the others find a module, and has its import watched."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _WatchedLoader(spec.loader, self.waiting)
                return spec
        return None


class _WatchedLoader(importlib.abc.Loader):
    def __init__(
        self, loader: importlib.abc.Loader, waiting: dict[str, list[Action]]
    ) -> None:
        self._loader = loader
        self._waiting = waiting

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # As if nobody had watched, also for the module's own code.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Only now: an import may fail, or only be asked for its spec, and come again.
        for action in self._waiting.pop(module.__name__, ()):
            action(module)


_FINDER = _AfterImport()
