# SPDX-License-Identifier: Apache-2.0
"""The same Triton launch again, with other pointers, at a fraction of its host time.

A launch binds, types and specialises every argument before it finds the compiled
kernel: 33 us for the 55 arguments of tree attention on one host, where running the
compiled kernel took 9. The layers of a model launch one kernel with equal numbers and
other tensors, and in a step without a CUDA graph the host is what they wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# What Triton specialises pointers on.
_ALIGNMENT = 16


class KeptLaunch:
    """A launch of a compiled kernel that can be repeated.

    Args:
        kernel: The ``triton.jit`` function.
        compiled: What launching it returned.
        grid: Of the launch, three numbers.
        args: Positional arguments of the launch.
        kwargs: Its other arguments and options.
        varying: Names of the pointer parameters that a repetition replaces; the kernel
            may lack some.
    """

    def __init__(
        self,
        kernel: Any,
        compiled: Any,
        grid: tuple[int, int, int],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        varying: Sequence[str],
    ):
        names = list(kernel.arg_names)
        values = [*args, *(kwargs[name] for name in names[len(args) :])]
        # Plain addresses: for a tensor the launcher asks its driver each time.
        self._args = [
            value.data_ptr() if isinstance(value, torch.Tensor) else value
            for value in values
        ]
        self._positions = [
            names.index(name) if name in names else None for name in varying
        ]
        self._run = compiled[grid]

    def again(self, pointers: Sequence[int]) -> None:
        """Launch on the current stream.

        Args:
            pointers: In the order of ``varying``, of the first launch's dtypes and
                aligned to 16 bytes. 0 for one that the kernel does not read: what the
                first launch passed there stays.
        """
        args = self._args.copy()
        for position, pointer in zip(self._positions, pointers, strict=True):
            if pointer and position is not None:
                args[position] = pointer
        self._run(*args)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kept: list[KeptLaunch] | None = None,
    varying: Sequence[str] = (),
) -> None:
    """Launch a kernel; append what repeats the launch to ``kept``, if given.

    Nothing is appended by the interpreter, which has no compiled kernel.
    """
    compiled = kernel[grid](*args, **kwargs)
    if kept is not None and compiled is not None:
        kept.append(KeptLaunch(kernel, compiled, grid, args, kwargs, varying))


def are_aligned(pointers: Sequence[int]) -> bool:
    """Whether a kernel compiled for aligned pointers takes these."""
    return not any(pointer % _ALIGNMENT for pointer in pointers)
