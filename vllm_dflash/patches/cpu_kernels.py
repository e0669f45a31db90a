# SPDX-License-Identifier: Apache-2.0
"""The kernels of `vllm/v1/worker/gpu` that the CPU replaces.

Not in the ledger one by one: `vllm_dflash/cpu/replacements.py` lists them, and each has
a test against the kernel it stands for. Remove one when its kernel is fast interpreted
or vLLM has a CPU path of its own.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from vllm_dflash.cpu.replacements import (
    REPLACEMENTS,
    Replacement,
    TwinKernel,
    load,
    originals,
)
from vllm_dflash.patches.after_import import call_after_import


def install_when_imported() -> None:
    """Replace each target right after vLLM has imported its module.

    The runner's modules must not be imported here: on the CPU vLLM has to patch torch
    before them. Replacing at import also reaches every `from module import function`.
    """
    for replacement in REPLACEMENTS:
        call_after_import(
            replacement.module, functools.partial(_replace, replacement=replacement)
        )


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
