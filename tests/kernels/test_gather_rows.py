# SPDX-License-Identifier: Apache-2.0
"""gather_rows against torch indexing."""

import pytest
import torch

from vllm_dflash_kernels.gather_rows import gather_rows


@pytest.mark.parametrize("num_sources", [1, 5, 8, 9])
@pytest.mark.parametrize("num_columns", [1, 63, 2048, 2050])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_all_sources_side_by_side(
    num_sources, num_columns, dtype, impl, device
):
    generator = torch.Generator().manual_seed(num_columns)
    # Rows of a wider buffer: the row stride is not the number of columns.
    sources = [
        torch.randn(7, num_columns + 3, generator=generator)
        .to(dtype)
        .to(device)[:, :num_columns]
        for _ in range(num_sources)
    ]
    rows = torch.tensor([6, 0, 0, 3], device=device)
    out = gather_rows(sources, rows, impl=impl)
    expected = torch.stack(
        [torch.cat([source[row] for source in sources]) for row in rows.tolist()]
    )
    assert torch.equal(out, expected)


def test_no_rows(impl, device):
    source = torch.ones(3, 4, device=device)
    rows = torch.empty(0, dtype=torch.int64, device=device)
    assert gather_rows([source, source], rows, impl=impl).shape == (0, 8)


def test_sources_of_unequal_layout(impl, device):
    wide = torch.arange(24.0, device=device).view(4, 6)
    sources = [wide[:, :3].contiguous(), wide[:, 3:]]
    out = gather_rows(sources, torch.tensor([2], device=device), impl=impl)
    assert out.tolist() == [wide[2].tolist()]
