# SPDX-License-Identifier: Apache-2.0
"""What holds inside an engine with trees, whatever its requests do."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from draft_records import record_drafts
from engines import engine, generate, model_runner, params, token_ids, tree_config
from paged_kv import PagedKV
from stepper import Stepper
from tiny_models import NUM_LAYERS, write_target

from vllm_dflash.sample.tree_sampler import TreeRejectionSampler
from vllm_dflash.tree.builder import TreeBuilder
from vllm_dflash.tree.draft_tree import DraftTreeBuffers
from vllm_dflash_kernels.tree_walk import walk_tree

pytestmark = pytest.mark.e2e

# One row at a time or a whole prompt: fp32 products are summed in another order.
KV_ATOL = 2e-4


@pytest.fixture(scope="module")
def windowed_target(tmp_path_factory) -> str:
    """Window and full layers in turn: cache groups with block tables of their own."""
    return write_target(
        tmp_path_factory.mktemp("windowed"),
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=12,
    )


@pytest.fixture(params=["full", "windowed"])
def target(request, tiny_target, windowed_target) -> str:
    return {"full": tiny_target, "windowed": windowed_target}[request.param]


@pytest.fixture
def references(target, prompts) -> list[list[int]]:
    with engine(target) as llm:
        return token_ids(generate(llm, prompts[:4], params()))


def test_cache_holds_what_a_cold_prefill_of_the_same_tokens_writes(
    target, references, tiny_draft, prompts, rig
):
    rig.add_references(prompts[:4], references)
    with engine(target, tree_config(tiny_draft), enable_prefix_caching=False) as llm:
        stepper, kv = Stepper(llm), PagedKV(llm)
        assert len(kv.target_layers) == NUM_LAYERS
        names = [f"tree{i}" for i in range(4)]
        for name, prompt in zip(names, prompts, strict=False):
            stepper.add(name, prompt, params())
        stepper.step(7)
        assert rig.num_branching_paths > 8
        histories = {name: stepper.committed(name) for name in names}
        written = {name: target_rows(kv, stepper, name) for name in names}
        for name in names:
            stepper.abort(name)
            stepper.add(f"cold {name}", histories[name], params(4))
        stepper.step(1)
        for name, prompt in zip(names, prompts, strict=False):
            assert len(histories[name]) > len(prompt) + 8
            assert stepper.tokens[f"cold {name}"], "the prefill was cut in chunks"
            cold = target_rows(kv, stepper, f"cold {name}")
            for layer, rows in written[name].items():
                torch.testing.assert_close(rows, cold[layer], rtol=0, atol=KV_ATOL)


def target_rows(kv: PagedKV, stepper: Stepper, name: str) -> dict[str, torch.Tensor]:
    """KV of a request in all target layers, as far back as the next row will look."""
    slot = stepper.slot(name)
    positions = torch.arange(len(stepper.committed(name)))
    return {
        layer: kv.rows(layer, slot, positions[-kv.reach(layer) :])
        for layer in kv.target_layers
    }


def test_compaction_moves_the_accepted_path_and_nothing_else(
    target, references, tiny_draft, prompts, rig, monkeypatch
):
    verify = TreeRejectionSampler.__call__
    num_moves = 0

    def checked_verify(self, logits, input_batch, *args, **kwargs):
        nonlocal num_moves
        before = kv.snapshot()
        output = verify(self, logits, input_batch, *args, **kwargs)
        moved = defaultdict(set)
        starts = input_batch.query_start_loc.tolist()
        for req, slot in enumerate(input_batch.idx_mapping.tolist()):
            if not int(self.step.tree_len[req]):
                continue
            path = self.step.path[req, : int(output.num_sampled[req])].long()
            num_rows = starts[req + 1] - starts[req]
            first = int(input_batch.seq_lens[req]) - num_rows
            moves = path != torch.arange(len(path))
            targets = first + torch.arange(len(path))[moves]
            for layer in kv.target_layers:
                blocks, offsets = kv.locate(layer, slot, first + path[moves])
                expected = before[layer][blocks, :, offsets]
                assert torch.equal(kv.rows(layer, slot, targets), expected)
                places = torch.stack(kv.locate(layer, slot, targets), dim=1)
                moved[kv.memory(layer)].update(
                    tuple(place) for place in places.tolist()
                )
            num_moves += len(targets)
        for layer in kv.caches:
            assert kv.changed(before, layer) <= moved[kv.memory(layer)]
        return output

    rig.add_references(prompts[:4], references)
    monkeypatch.setattr(TreeRejectionSampler, "__call__", checked_verify)
    with engine(target, tree_config(tiny_draft)) as llm:
        kv = PagedKV(llm)
        assert token_ids(generate(llm, prompts[:4], params())) == references
    assert num_moves > 20


def test_more_nodes_never_accept_less(
    tiny_target, tiny_draft, prompts, greedy_reference, rig
):
    """One set of candidates, trees of every budget, walked along the reference."""
    rig.add_references(prompts, greedy_reference)
    with engine(tiny_target, tree_config(tiny_draft)) as llm:
        records = record_drafts(llm)
        generate(llm, prompts, params())
    texts = [p + t for p, t in zip(prompts, greedy_reference, strict=True)]
    steps = [
        (record, text[len(context) :], len(context), index)
        for index, text in enumerate(texts)
        for context, record in sorted(records.items(), key=lambda item: len(item[0]))
        if tuple(text[: len(context)]) == context
    ]
    budgets = [7, 8, 11, 16, 23, 32, 48, 64]
    emitted = torch.stack([emitted_tokens(steps, budget) for budget in budgets])
    assert (emitted.diff(dim=0) >= 0).all()
    assert emitted[-1].sum() > emitted[0].sum() + 20
    # The engine emitted what the walk over its own budget says.
    at_16 = emitted[budgets.index(16)].tolist()
    for i, (_, _, length, index) in enumerate(steps[:-1]):
        _, _, next_length, next_index = steps[i + 1]
        if next_index == index:
            assert next_length - length == at_16[i]


def emitted_tokens(steps: list[tuple], budget: int) -> torch.Tensor:
    """Tokens that a tree of the budget emits at each step, the bonus included."""
    count = len(steps)
    depth, num_candidates = steps[0][0].built_tokens.shape
    trees = DraftTreeBuffers.allocate(count, budget + 1, torch.device("cpu"))
    builder = TreeBuilder(
        trees, depth, num_candidates, False, False, 512, torch.device("cpu")
    )
    builder.cand_tokens.copy_(torch.cat([s[0].built_tokens for s in steps]))
    builder.cand_logprobs.copy_(torch.cat([s[0].built_logprobs for s in steps]))
    slots = torch.arange(count)
    builder.build(count, slots.repeat_interleave(depth))

    # Row 0 is the root; the reference continues every node at its depth.
    node_tokens = torch.zeros(count, budget + 1, dtype=torch.int32)
    node_tokens[:, 1:] = builder.draft_tokens
    continuation = torch.full((count, depth + 1), -1)
    for row, (_, rest, _, _) in enumerate(steps):
        known = rest[: depth + 1]
        continuation[row, : len(known)] = torch.tensor(known)
    num_emitted = torch.zeros(count, dtype=torch.int32)
    walk_tree(
        continuation.gather(1, trees.depths.long()).flatten(),
        node_tokens.flatten(),
        (torch.arange(count + 1) * (budget + 1)).int(),
        slots,
        trees.parents,
        trees.num_nodes,
        sampled=torch.zeros(count, budget + 1, dtype=torch.int64),
        num_sampled=num_emitted,
        path=torch.zeros(count, depth + 1, dtype=torch.int32),
    )
    return num_emitted


LIFECYCLE_SAMPLING = [
    dict(max_tokens=32),
    dict(max_tokens=32, temperature=1.0, seed=31),
    dict(max_tokens=7),
    dict(max_tokens=32, temperature=0.9, seed=32),
    dict(max_tokens=32),
    dict(max_tokens=20),
]


def lifecycle_options() -> list[Any]:
    """New objects for each engine: LLM.generate changes those that it is given."""
    return [params(**kwargs) for kwargs in LIFECYCLE_SAMPLING]


def test_joining_aborted_and_finished_requests_leave_others_alone(
    tiny_target, tiny_draft, prompts, rig
):
    """Three slots for six requests; a released slot's buffers are poisoned."""
    with engine(tiny_target) as llm:
        expected = token_ids(generate(llm, prompts, lifecycle_options()))
    options = lifecycle_options()
    rig.add_references(prompts, expected)
    names = [f"r{i}" for i in range(6)]
    with engine(tiny_target, tree_config(tiny_draft), max_num_seqs=3) as llm:
        poisoned = poison_released_slots(model_runner(llm))
        stepper = Stepper(llm)
        for i in (0, 1):
            stepper.add(names[i], prompts[i], options[i])
        stepper.step(2)
        stepper.add(names[2], prompts[2], options[2])
        stepper.step(2)
        # Drafts of the aborted request are in flight.
        stepper.abort(names[1])
        stepper.add(names[3], prompts[3], options[3])
        while names[2] not in stepper.finished:
            stepper.step()
        for i in (4, 5):
            stepper.add(names[i], prompts[i], options[i])
        while names[0] not in stepper.finished:
            stepper.step()
        # From here on every request is in a slot that was poisoned before.
        paths_before = len(rig.paths)
        stepper.run()
    assert len(poisoned) >= 3
    aborted = stepper.tokens[names[1]]
    assert 0 < len(aborted) < 32
    assert aborted == expected[1][: len(aborted)]
    for i in (0, 2, 3, 4, 5):
        assert stepper.tokens[names[i]] == expected[i]
    # The poison says chain; the slots' new requests verify trees.
    late = rig.paths[paths_before:]
    assert sum(path != list(range(len(path))) for path in late) > 5


def poison_released_slots(runner: Any) -> list[int]:
    """Spoil what belongs to a slot when it is freed; return the list of such slots."""
    released: list[int] = []
    remove = runner.req_states.remove_request
    runtime = runner.speculator.runtime

    def poisoning_remove(req_id):
        slot = remove(req_id)
        if slot is not None:
            released.append(slot)
            trees, step = runtime.trees, runtime.step
            trees.parents[slot] = 0
            trees.depths[slot] = 1
            trees.ancestors[slot] = -1
            trees.num_nodes[slot] = trees.width
            trees.chain_only[slot] = 1
            # Scratch of one step, in batch order.
            step.batch_ancestors.fill_(-1)
            step.tree_len.fill_(3)
            step.path.fill_(2)
        return slot

    runner.req_states.remove_request = poisoning_remove
    return released
