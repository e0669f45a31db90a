# SPDX-License-Identifier: Apache-2.0
"""The same equality on a GPU: compiled kernels, CUDA graphs, async scheduling.

fp32 runs on TRITON_ATTN, the backend that takes fp32; bf16 on vLLM's own choice, where
near ties may flip between batch shapes, so an answer may leave the other at those.
"""

import pytest
from engines import FP32_BACKEND, engine, generate, params, token_ids, tree_config
from tiny_models import write_draft, write_target

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]

FP32 = dict(dtype="float32", attention_backend=FP32_BACKEND, block_size=16)


def gpu_options(eager: bool, **kwargs):
    return dict(enforce_eager=eager, num_gpu_blocks_override=256, **kwargs)


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


def largest_gap(target, draft, prompts, budget, **kwargs) -> float:
    """Gap of the best two tokens where a greedy answer leaves no speculation's.

    The answers of a random target part early and often in 16 bits, so their number
    says nothing; but they may part at near ties only.
    """
    options = gpu_options(False, max_num_batched_tokens=2048, **kwargs)
    with engine(target, **options) as llm:
        outputs = generate(llm, prompts, params(32, logprobs=2))
    with engine(target, tree_config(draft, budget=budget), **options) as llm:
        got = token_ids(generate(llm, prompts, params(32)))
    gaps = [0.0]
    for output, tokens in zip(outputs, got, strict=True):
        expected = list(output.outputs[0].token_ids)
        for i, (a, b) in enumerate(zip(expected, tokens, strict=True)):
            if a != b:
                step = output.outputs[0].logprobs[i].values()
                best, second = sorted((v.logprob for v in step), reverse=True)[:2]
                gaps.append(best - second)
                break
    print("gaps:", [round(gap, 3) for gap in gaps])
    return max(gaps)


def test_bf16_tree_leaves_no_speculation_at_near_ties(
    tiny_target, tiny_draft, prompts, rig
):
    assert largest_gap(tiny_target, tiny_draft, prompts, 32, dtype="bfloat16") < 0.3


def test_bf16_with_the_prefix_by_flash_attention(tmp_path, prompts, rig):
    # Wide heads and a wide tree: FlashAttention-3 attends to the committed keys.
    target = write_target(tmp_path / "target", head_dim=128)
    draft = write_draft(tmp_path / "draft")
    assert largest_gap(target, draft, prompts, 100, dtype="bfloat16") < 0.3


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_fp8_cache_leaves_no_speculation_at_near_ties(
    tiny_target, tiny_draft, prompts, rig, backend
):
    # vLLM's kernels round the probabilities to fp8 as well, ours does not.
    options = dict(kv_cache_dtype="fp8", attention_backend=backend, dtype="bfloat16")
    assert largest_gap(tiny_target, tiny_draft, prompts, 32, **options) < 1.0
