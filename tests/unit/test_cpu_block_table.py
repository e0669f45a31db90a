# SPDX-License-Identifier: Apache-2.0
"""Twins of the block-table kernels write what the interpreted kernels write."""

import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (patches torch before the next imports)
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import FusedStagedWriter, StagedWriteTensor

from vllm_dflash.cpu import block_table as twins
from vllm_dflash.cpu import replacements

MAX_REQS, MAX_TOKENS, MAX_BLOCKS = 5, 40, 8
_TABLE = "vllm.v1.worker.gpu.block_table:BlockTables"
_BUFFERS = "vllm.v1.worker.gpu.buffer_utils"

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compares with interpreted kernels"
)


def interpreted(target: str, owner: type, name: str):
    return replacements.originals.get(target, vars(owner)[name])


def interpreted_gather(*args):
    return interpreted(
        f"{_TABLE}.gather_block_tables", BlockTables, "gather_block_tables"
    )(*args)


def interpreted_slots(*args):
    return interpreted(
        f"{_TABLE}.compute_slot_mappings", BlockTables, "compute_slot_mappings"
    )(*args)


def make_tables(
    num_groups: int = 1, enabled: list[bool] | None = None, cp_size: int = 1
) -> BlockTables:
    tables = BlockTables(
        block_sizes=[4, 8][:num_groups],
        max_num_reqs=MAX_REQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_blocks_per_group=[MAX_BLOCKS] * num_groups,
        device=torch.device("cpu"),
        slot_mapping_enabled=enabled,
        cp_size=cp_size,
    )
    for slot in range(MAX_REQS):
        blocks = [100 * slot + i + 1 for i in range(MAX_BLOCKS - 1)]
        tables.append_block_ids(slot, tuple([blocks] * num_groups), overwrite=True)
    for group in range(num_groups):
        twins.apply_write(tables.block_tables[group])
    tables.num_blocks.copy_to_uva()
    for table in tables.input_block_tables:
        table.fill_(-3)
    tables.slot_mappings.fill_(-9)
    return tables


IDX_MAPPING = torch.tensor([4, 0, 3], dtype=torch.int32)
QUERY_START_LOC = torch.tensor([0, 6, 13, 14, 14, 14], dtype=torch.int32)
POSITIONS = torch.cat(
    [torch.arange(10, 16), torch.arange(7), torch.tensor([27]), torch.zeros(26)]
).long()


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_reqs_padded", [3, 5])
def test_gather_block_tables(num_groups, num_reqs_padded):
    expected_tables, actual_tables = make_tables(num_groups), make_tables(num_groups)
    expected = interpreted_gather(expected_tables, IDX_MAPPING, num_reqs_padded)
    actual = twins.gather_block_tables(actual_tables, IDX_MAPPING, num_reqs_padded)
    assert len(actual) == num_groups
    for left, right in zip(expected, actual, strict=True):
        assert torch.equal(left, right)
    for left, right in zip(
        expected_tables.input_block_tables,
        actual_tables.input_block_tables,
        strict=True,
    ):
        assert torch.equal(left, right)


@pytest.mark.parametrize("enabled", [[True, True], [True, False]])
def test_compute_slot_mappings(enabled):
    expected_tables, actual_tables = make_tables(2, enabled), make_tables(2, enabled)
    args = (IDX_MAPPING, QUERY_START_LOC, POSITIONS, 16)
    expected = interpreted_slots(expected_tables, *args)
    actual = twins.compute_slot_mappings(actual_tables, *args)
    assert torch.equal(expected, actual)
    assert torch.equal(expected_tables.slot_mappings, actual_tables.slot_mappings)
    assert int(actual[0, 0]) == 403 * 4 + 2


def test_dummy_requests_get_padding():
    expected_tables, actual_tables = make_tables(), make_tables()
    idx_mapping = torch.tensor([4, -1, 3], dtype=torch.int32)
    args = (idx_mapping, QUERY_START_LOC, POSITIONS, 16)
    expected = interpreted_slots(expected_tables, *args)
    assert torch.equal(expected, twins.compute_slot_mappings(actual_tables, *args))
    assert (actual_tables.slot_mappings[0, 6:13] == -1).all()


def test_context_parallelism_is_left_to_the_kernel(monkeypatch):
    calls = []
    monkeypatch.setitem(
        replacements.originals,
        f"{_TABLE}.compute_slot_mappings",
        lambda *args: calls.append(args),
    )
    tables = make_tables(cp_size=2)
    twins.compute_slot_mappings(tables, IDX_MAPPING, QUERY_START_LOC, POSITIONS, 16)
    assert len(calls) == 1


def staged(size, dtype=torch.int32) -> StagedWriteTensor:
    tensor = StagedWriteTensor(size, dtype, torch.device("cpu"))
    tensor.gpu.fill_(-1)
    return tensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_apply_write(dtype):
    apply = interpreted(
        f"{_BUFFERS}:StagedWriteTensor.apply_write", StagedWriteTensor, "apply_write"
    )
    results = []
    for write in (apply, twins.apply_write):
        matrix, vector = staged((4, 6), dtype), staged(4, dtype)
        write(matrix)
        matrix.stage_write(2, 1, [7, 8, 9])
        matrix.stage_write(0, 0, [])
        matrix.stage_write(3, 5, [4])
        matrix.stage_write(2, 2, [1])
        vector.stage_write_elem(3, 12)
        write(matrix)
        write(vector)
        assert not matrix._staged_write_contents
        results.append((matrix.gpu, vector.gpu))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    assert results[1][0][2].tolist() == [-1, 7, 1, 9, -1, -1]


def test_apply_fused_writes():
    apply = interpreted(
        f"{_BUFFERS}:FusedStagedWriter.apply", FusedStagedWriter, "apply"
    )
    results = []
    for write in (apply, twins.apply_fused_writes):
        tensors = [staged((4, 6)), staged((4, 5)), staged((4, 3))]
        tensors[0].stage_write(1, 2, [5, 6])
        tensors[2].stage_write(3, 0, [8])
        pointers = torch.tensor([t.gpu.data_ptr() for t in tensors], dtype=torch.uint64)
        strides = torch.tensor([t.gpu.stride(0) for t in tensors])
        write(FusedStagedWriter(torch.device("cpu"), 12), tensors, pointers, strides)
        assert not any(t._staged_write_contents for t in tensors)
        results.append([t.gpu for t in tensors])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
