# SPDX-License-Identifier: Apache-2.0
"""The same equality on a GPU: compiled kernels, CUDA graphs, async scheduling.

fp32 runs on TRITON_ATTN, the backend that takes fp32; bf16 on vLLM's own choice, where
near ties may flip between batch shapes, so most prompts must agree and not all.
"""

import pytest
from engines import engine, generate, params, token_ids, tree_config

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]

FP32 = dict(dtype="float32", attention_backend="TRITON_ATTN", block_size=16)


def gpu_options(eager: bool, **kwargs):
    options = dict(enforce_eager=eager, gpu_memory_utilization=0.1)
    options.update(num_gpu_blocks_override=256, **kwargs)
    return options


@pytest.mark.parametrize("budget", [16, 63, 100])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_fp32_tree_equals_no_speculation(
    tiny_target, tiny_draft, prompts, rig, eager, budget
):
    options = gpu_options(eager, max_num_batched_tokens=1024, **FP32)
    mix = [
        params(48, **kwargs)
        for kwargs in (
            dict(),
            dict(temperature=1.0, seed=1),
            dict(),
            dict(temperature=0.8, seed=2, top_k=20, top_p=0.9),
            dict(repetition_penalty=1.2),
            dict(logprobs=2),
        )
    ]
    with engine(tiny_target, **options) as llm:
        expected = token_ids(generate(llm, prompts, mix))
    rig.add_references(prompts, expected)
    with engine(tiny_target, tree_config(tiny_draft, budget=budget), **options) as llm:
        got = token_ids(generate(llm, prompts, mix))
    assert got == expected
    assert rig.mean_tokens > 2
    assert rig.num_branching_paths > 10


def test_bf16_tree_mostly_equals_no_speculation(tiny_target, tiny_draft, prompts, rig):
    options = gpu_options(False, dtype="bfloat16", max_num_batched_tokens=1024)
    with engine(tiny_target, **options) as llm:
        expected = token_ids(generate(llm, prompts, params(32)))
    with engine(tiny_target, tree_config(tiny_draft, budget=32), **options) as llm:
        got = token_ids(generate(llm, prompts, params(32)))
    equal = sum(a == b for a, b in zip(got, expected, strict=True))
    assert equal > 0.6 * len(prompts)
