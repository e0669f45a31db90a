# SPDX-License-Identifier: Apache-2.0
"""bf16 on the CPU: answers leave those of no speculation at near ties only.

`test_gpu_exactness.py` asks the same of a GPU, of fp8 caches too.
"""

import pytest
from partings import find_partings, write_calm_target

from vllm_dflash.kv_cache.compaction import KVCompactor

pytestmark = pytest.mark.e2e

BF16 = dict(dtype="bfloat16")


def test_bf16_tree_leaves_no_speculation_at_near_ties(tmp_path, tiny_draft, rig):
    target = write_calm_target(tmp_path)
    found = find_partings(target, tiny_draft, rig, engine_options=BF16)
    assert rig.num_branching_paths > 100
    assert found.largest_gap < 0.1
    assert found.share_of_parting < 0.5


@pytest.mark.slow
def test_a_cache_without_compaction_is_no_near_tie(
    tmp_path, tiny_draft, rig, monkeypatch
):
    monkeypatch.setattr(KVCompactor, "compact", lambda *args, **kwargs: None)
    target = write_calm_target(tmp_path)
    found = find_partings(target, tiny_draft, rig, engine_options=BF16)
    # Beyond the limits that any 16-bit or fp8 test sets.
    assert found.largest_gap > 0.4
    assert found.share_of_parting > 0.9
