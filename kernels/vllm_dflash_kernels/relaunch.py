# SPDX-License-Identifier: Apache-2.0
"""Launches past most of Triton's own host work.

A launch binds, types and specialises every argument, 50 of tree attention, before it
finds the compiled kernel. Outside CUDA graphs the host is what a step of a small model
waits for (``benchmarks/bench_launch.py``).

``KeptLaunch`` repeats one launch with other pointers, as the layers of a step do.
``KeptKernel`` finds the compiled kernel by what the arguments are like, for kernels
that every step launches once.
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


class KeptKernel:
    """A ``triton.jit`` function and what it was compiled to.

    Args:
        kernel: The function; its constant parameters come last.
        num_warps: Of every launch.
    """

    def __init__(self, kernel: Any, num_warps: int):
        self.kernel = kernel
        self.num_warps = num_warps
        self._compiled: dict[tuple, Any] = {}

    def launch(
        self, grid: tuple[int, int, int], args: Sequence[Any], **constants: Any
    ) -> None:
        """Launch on the current stream.

        Args:
            grid: Three numbers.
            args: Tensors and integers, in the order of the kernel's parameters.
            constants: Its constant parameters, in their order.
        """
        values: list[Any] = []
        # Triton distinguishes numbers less finely, so no two kinds share a kernel that
        # it would have kept apart.
        kind: list[Any] = [*constants.values()]
        for arg in args:
            if isinstance(arg, torch.Tensor):
                address = arg.data_ptr()
                values.append(address)
                kind += (arg.dtype, address % _ALIGNMENT == 0)
            else:
                values.append(arg)
                kind.append(arg)
        key = (args[0].device, *kind)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*values, *constants.values())
            return
        names = [*self.kernel.arg_names[: len(args)], *constants]
        assert names == list(self.kernel.arg_names), "arguments out of order"
        compiled = self.kernel[grid](*args, **constants, num_warps=self.num_warps)
        # The interpreter compiles nothing.
        if compiled is not None:
            self._compiled[key] = compiled
