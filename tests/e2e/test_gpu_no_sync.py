# SPDX-License-Identifier: Apache-2.0
"""Nothing of the tree's round makes the host wait for the device."""

import pytest
import torch
from engines import engine, generate, params, tree_config

from vllm_dflash.runner.model_state import DDTreeModelState
from vllm_dflash.runner.speculator import DDTreeSpeculator
from vllm_dflash.sample.tree_sampler import TreeRejectionSampler

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]


@pytest.mark.parametrize(
    ("eager", "stage_times"),
    [(True, "0"), (False, "0"), (False, "1")],
    ids=["eager", "graphs", "timed"],
)
def test_round_never_waits_for_the_device(
    tiny_target, tiny_draft, prompts, eager, stage_times, monkeypatch
):
    monkeypatch.setenv("VLLM_DFLASH_STAGE_TIMES", stage_times)
    calls: dict[str, int] = {}
    armed = False

    def watch(cls, name):
        original = getattr(cls, name)

        def watched(self, *args, **kwargs):
            if not armed:
                return original(self, *args, **kwargs)
            calls[name] = calls.get(name, 0) + 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(self, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(cls, name, watched)

    watch(DDTreeModelState, "add_request")
    watch(DDTreeModelState, "preprocess_state")
    watch(DDTreeModelState, "prepare_attn")
    watch(TreeRejectionSampler, "__call__")
    watch(DDTreeSpeculator, "propose")
    mix = [
        params(24, temperature=t, seed=i, top_p=0.9)
        for i, t in enumerate((0.0, 1.0, 0.0, 0.7, 0.0, 1.0))
    ]
    options = dict(enforce_eager=eager, dtype="bfloat16", max_num_batched_tokens=1024)
    with engine(tiny_target, tree_config(tiny_draft, budget=32), **options) as llm:
        # Compilation and first-use allocations may wait.
        generate(llm, prompts, mix)
        armed = True
        generate(llm, prompts, mix)
        armed = False
    assert calls["propose"] >= calls["__call__"] > 10
    assert calls["add_request"] >= len(prompts)
