# SPDX-License-Identifier: Apache-2.0
"""The kernels of `vllm/v1/worker/gpu` that the CPU replaces.

Not in the ledger one by one: `vllm_dflash/cpu/replacements.py` lists them, and each has
a test against the kernel it stands for. Remove one when its kernel is fast interpreted
or vLLM has a CPU path of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from vllm_dflash.cpu.replacements import (
    REPLACEMENTS,
    Replacement,
    TwinKernel,
    load,
    originals,
)


def install_when_imported() -> None:
    """Replace each target right after vLLM has imported its module.

    The runner's modules must not be imported here: on the CPU vLLM has to patch torch
    before them. Replacing at import also reaches every `from module import function`.
    """
    waiting: dict[str, list[Replacement]] = {}
    for replacement in REPLACEMENTS:
        module = sys.modules.get(replacement.module)
        if module is None:
            waiting.setdefault(replacement.module, []).append(replacement)
        else:
            _replace(module, replacement)
    if waiting and not any(isinstance(f, _AfterImport) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(waiting))


def _replace(module: ModuleType, replacement: Replacement) -> None:
    if replacement.target in originals:
        return
    *owners, attribute = replacement.attribute.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    before = getattr(owner, attribute)
    twin = load(replacement.twin)
    if replacement.is_kernel:
        twin = TwinKernel(twin)
    originals[replacement.target] = before
    setattr(owner, attribute, twin)
    for importer in list(sys.modules.values()):
        if (
            getattr(importer, "__name__", "").startswith("vllm.")
            and vars(importer).get(attribute) is before
        ):
            setattr(importer, attribute, twin)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finder that lets the others find a module and acts after it has run."""

    def __init__(self, waiting: dict[str, list[Replacement]]) -> None:
        self._waiting = waiting

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        replacements = self._waiting.pop(fullname, None)
        if replacements is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _ReplacingLoader(spec.loader, replacements)
        return spec


class _ReplacingLoader(importlib.abc.Loader):
    def __init__(
        self, loader: importlib.abc.Loader, replacements: list[Replacement]
    ) -> None:
        self._loader = loader
        self._replacements = replacements

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for replacement in self._replacements:
            _replace(module, replacement)
