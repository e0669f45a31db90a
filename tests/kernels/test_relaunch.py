# SPDX-License-Identifier: Apache-2.0
"""A kernel that was launched alike before is launched without Triton's binding."""

import pytest
import torch

from vllm_dflash_kernels.gather_rows.kernel import _gather_rows_kernel
from vllm_dflash_kernels.kv_compaction.kernel import _compact_kv_kernel
from vllm_dflash_kernels.path_rows import path_rows
from vllm_dflash_kernels.path_rows.kernel import _KEPT as PATH_ROWS
from vllm_dflash_kernels.path_rows.kernel import _path_rows_kernel
from vllm_dflash_kernels.relaunch import KeptKernel
from vllm_dflash_kernels.tree_prepare.kernel import _prepare_tree_step_kernel
from vllm_dflash_kernels.tree_walk.kernel import _walk_tree_kernel


class Kernel:
    """Stands for a ``triton.jit`` function; records both ways to launch."""

    arg_names = ("in_ptr", "stride", "out_ptr", "WIDTH", "IS_WIDE")

    def __init__(self, compiles=True):
        self.bound, self.repeated, self.compiles = [], [], compiles

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.bound.append((grid, args, kwargs))
            return Compiled(self, len(self.bound)) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, kernel, number):
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid):
        return lambda *args: self.kernel.repeated.append((self.number, grid, args))


GRID = (3, 1, 1)


@pytest.fixture
def tensors(device):
    return [torch.zeros(64, dtype=torch.int32, device=device) for _ in range(4)]


def test_equal_kinds_are_bound_once(tensors):
    kernel = Kernel()
    kept = KeptKernel(kernel, num_warps=2)
    a, b, c, d = tensors
    kept.launch(GRID, (a, 7, b), WIDTH=48, IS_WIDE=True)
    options = dict(WIDTH=48, IS_WIDE=True, num_warps=2)
    assert kernel.bound == [(GRID, (a, 7, b), options)]
    # Another grid is the same kernel; addresses and constants go in their order.
    kept.launch((5, 2, 1), (c, 7, d), WIDTH=48, IS_WIDE=True)
    assert len(kernel.bound) == 1
    addresses = (c.data_ptr(), 7, d.data_ptr(), 48, True)
    assert kernel.repeated == [(1, (5, 2, 1), addresses)]


def test_what_triton_may_tell_apart_is_bound_again(tensors):
    kernel = Kernel()
    kept = KeptKernel(kernel, num_warps=2)
    a, b, *_ = tensors
    launches = [
        ((a, 7, b), dict(WIDTH=48, IS_WIDE=True)),
        ((a, 16, b), dict(WIDTH=48, IS_WIDE=True)),
        ((a.long(), 7, b), dict(WIDTH=48, IS_WIDE=True)),
        ((a[1:], 7, b), dict(WIDTH=48, IS_WIDE=True)),
        ((a, 7, b[1:]), dict(WIDTH=48, IS_WIDE=True)),
        ((a, 7, b), dict(WIDTH=64, IS_WIDE=True)),
        ((a, 7, b), dict(WIDTH=48, IS_WIDE=False)),
    ]
    for _ in range(2):
        for args, constants in launches:
            kept.launch(GRID, args, **constants)
    assert len(kernel.bound) == len(launches)
    assert [number for number, *_ in kernel.repeated] == [1, 2, 3, 4, 5, 6, 7]


def test_an_aligned_slice_is_of_the_same_kind(tensors):
    kernel = Kernel()
    kept = KeptKernel(kernel, num_warps=2)
    a, b, *_ = tensors
    kept.launch(GRID, (a, 7, b), WIDTH=48, IS_WIDE=True)
    kept.launch(GRID, (a[4:], 7, b), WIDTH=48, IS_WIDE=True)
    assert len(kernel.bound) == len(kernel.repeated) == 1


def test_the_interpreter_has_nothing_to_keep(tensors):
    kernel = Kernel(compiles=False)
    kept = KeptKernel(kernel, num_warps=2)
    a, b, *_ = tensors
    for _ in range(2):
        kept.launch(GRID, (a, 7, b), WIDTH=48, IS_WIDE=True)
    assert len(kernel.bound) == 2 and not kernel.repeated


def test_arguments_out_of_order_are_noticed(tensors):
    a, b, *_ = tensors
    with pytest.raises(AssertionError, match="order"):
        KeptKernel(Kernel(), 2).launch(GRID, (a, 7, b), IS_WIDE=True, WIDTH=48)


@pytest.mark.parametrize(
    "kernel",
    [
        _compact_kv_kernel,
        _gather_rows_kernel,
        _path_rows_kernel,
        _prepare_tree_step_kernel,
        _walk_tree_kernel,
    ],
    ids=lambda kernel: kernel.__name__,
)
def test_constant_parameters_come_last(kernel):
    names = list(kernel.arg_names)
    constants = [name for name in names if name.isupper()]
    assert names[len(names) - len(constants) :] == constants


@pytest.mark.gpu
def test_a_repeated_launch_does_the_same(device):
    held = 0
    for number, num_reqs in enumerate((2, 3, 2, 3)):
        if number == 2:
            held = len(PATH_ROWS._compiled)
        ints = dict(dtype=torch.int32, device=device)
        starts = torch.arange(0, 4 * num_reqs + 1, 4, **ints)
        rows = torch.full((4 * num_reqs,), -1, dtype=torch.int64, device=device)
        positions = torch.arange(4 * num_reqs, device=device)
        found = torch.full_like(rows, -1)
        path_rows(
            starts,
            torch.zeros(num_reqs, **ints),
            torch.zeros(num_reqs, 3, **ints),
            torch.ones(num_reqs, **ints),
            positions,
            starts,
            num_reqs=num_reqs,
            rows=rows,
            out_positions=found,
            num_padding=torch.full((num_reqs,), -1, **ints),
        )
        assert rows.tolist() == found.tolist() == list(range(4 * num_reqs))
    assert len(PATH_ROWS._compiled) == held > 0
