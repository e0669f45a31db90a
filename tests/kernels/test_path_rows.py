# SPDX-License-Identifier: Apache-2.0
"""path_rows on hand-written batches."""

import pytest
import torch

from vllm_dflash_kernels.path_rows import path_rows
from vllm_dflash_kernels.testing import POISON_INT, poisoned


def run(query_lens, tree_lens, paths, num_sampled, positions, out_lens, impl, device):
    num_reqs, max_rows = len(query_lens), 4

    def starts(lengths):
        cumulative = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        return torch.tensor(cumulative, dtype=torch.int32, device=device)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    num_out = sum(out_lens)
    rows = poisoned(num_out + 3, dtype=torch.int64, device=device)
    out_positions = poisoned(num_out + 3, dtype=torch.int64, device=device)
    num_padding = poisoned(num_reqs + 1, dtype=torch.int32, device=device)
    # Wider than the path, to have a stride that is not its width.
    path = poisoned(num_reqs, max_rows + 3, dtype=torch.int32, device=device)
    for req, nodes in enumerate(paths):
        path[req, :max_rows] = ints(nodes + [0] * (max_rows - len(nodes)))
    path_rows(
        starts(query_lens),
        ints(tree_lens),
        path[:, :max_rows],
        ints(num_sampled),
        torch.tensor(positions, device=device),
        starts(out_lens),
        num_reqs=num_reqs,
        rows=rows,
        out_positions=out_positions,
        num_padding=num_padding,
        impl=impl,
    )
    for output, used in ((rows, num_out), (out_positions, num_out)):
        assert (output[used:] == POISON_INT).all()
    assert num_padding[num_reqs] == POISON_INT
    return (
        rows[:num_out].tolist(),
        out_positions[:num_out].tolist(),
        num_padding[:num_reqs].tolist(),
    )


def test_paths_mixed_with_prefill_and_chain_rows(impl, device):
    rows, positions, padding = run(
        # tree of 6; prefill of 3; tree of 2 (shorter than K + 1); one plain row
        query_lens=[6, 3, 2, 1],
        tree_lens=[6, 0, 2, 0],
        paths=[[0, 2, 5], [0], [0, 1], [0]],
        num_sampled=[3, 1, 2, 1],
        positions=[10, 11, 11, 12, 12, 12, 70, 71, 72, 30, 31, 99],
        out_lens=[4, 3, 2, 1],
        impl=impl,
        device=device,
    )
    assert rows == [0, 2, 5, 0, 6, 7, 8, 9, 10, 11]
    assert positions == [10, 11, 12, 10, 70, 71, 72, 30, 31, 99]
    assert padding == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("path", "count", "expected"),
    [
        ([0], 1, [2, 2, 2, 2]),
        ([0, 1, 2, 3], 4, [2, 3, 4, 5]),
        ([0, 3, 4], 3, [2, 5, 6, 2]),
        ([0], 0, [2, 2, 2, 2]),
    ],
)
def test_tree_is_the_end_of_a_longer_query(path, count, expected, impl, device):
    rows, positions, padding = run(
        [7], [5], [path], [count], [5, 6, 7, 8, 8, 9, 9], [4], impl, device
    )
    assert rows == expected
    assert positions == [7 + i if i < count else 7 for i in range(4)]
    assert padding == [4 - count]


@pytest.mark.parametrize("length", [255, 256, 257, 2600])
def test_long_prefill_is_copied_whole(length, impl, device):
    rows, positions, padding = run(
        query_lens=[length, 2],
        tree_lens=[0, 2],
        paths=[[0], [0, 1]],
        num_sampled=[1, 2],
        positions=[*range(1000, 1000 + length), 40, 41],
        out_lens=[length, 2],
        impl=impl,
        device=device,
    )
    assert rows == list(range(length + 2))
    assert positions == [*range(1000, 1000 + length), 40, 41]
    assert padding == [0, 0]
