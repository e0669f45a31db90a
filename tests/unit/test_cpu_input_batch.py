# SPDX-License-Identifier: Apache-2.0
"""Twins of the input-batch kernels write what the interpreted kernels write."""

import importlib

import pytest
import torch

from vllm_dflash.cpu import input_batch as twins
from vllm_dflash.cpu import replacements

MODULE = "vllm.v1.worker.gpu.input_batch"
MAX_REQS, MAX_LEN, NUM_DRAFTS = 6, 64, 5

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compares with interpreted kernels"
)


def interpreted(name: str):
    target = f"{MODULE}:{name}"
    if target in replacements.originals:
        return replacements.originals[target]
    return getattr(importlib.import_module(MODULE), name)


def both(name: str, make_args):
    """Run kernel and twin on equal arguments; return (result, arguments) of each."""
    runs = []
    for function in (interpreted(name), getattr(twins, name)):
        args = make_args()
        runs.append((function(*args), args))
    return runs


def assert_equal_runs(runs):
    (expected, expected_args), (actual, actual_args) = runs
    if expected is not None:
        pairs = (
            zip(expected, actual, strict=True)
            if isinstance(expected, tuple)
            else [(expected, actual)]
        )
        for left, right in pairs:
            assert left.dtype == right.dtype
            assert torch.equal(left, right)
    for left, right in zip(expected_args, actual_args, strict=True):
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right)


class Batch:
    """A batch of three requests, in slots out of order.

    Slot 4 decodes with drafts, slot 0 is in the middle of its prompt, slot 3 finishes
    its prompt. Everything that must not be read or written holds a marker.
    """

    def __init__(self):
        int32 = torch.int32
        self.idx_mapping = torch.tensor([4, 0, 3], dtype=int32)
        self.query_lens = [1 + NUM_DRAFTS, 7, 4]
        starts = torch.tensor([0, *self.query_lens]).cumsum(0)
        self.query_start_loc = torch.full((MAX_REQS + 1,), int(starts[-1]), dtype=int32)
        self.query_start_loc[:4] = starts
        self.num_tokens = int(starts[-1])
        self.num_computed = torch.full((MAX_REQS,), 50, dtype=int32)
        self.num_computed[[4, 0, 3]] = torch.tensor([20, 8, 10], dtype=int32)
        self.prefill_len = torch.full((MAX_REQS,), 9, dtype=int32)
        self.prefill_len[[4, 0, 3]] = torch.tensor([12, 30, 14], dtype=int32)
        self.cu_num_logits = torch.tensor([0, 1 + NUM_DRAFTS, 7, 8], dtype=int32)
        self.seq_lens = torch.full((MAX_REQS,), 77, dtype=int32)
        self.seq_lens[:3] = torch.tensor([26, 15, 14], dtype=int32)
        tokens = torch.arange(MAX_REQS * MAX_LEN, dtype=int32)
        self.all_token_ids = tokens.view(MAX_REQS, MAX_LEN)
        self.input_ids = torch.full((40,), 9999, dtype=int32)
        self.total_len = torch.full((MAX_REQS,), 21, dtype=int32)


def test_prepare_prefill_inputs():
    def args():
        batch = Batch()
        lookahead = torch.full((2, MAX_REQS), 8888, dtype=torch.int32)
        # The second prompt token past the chunk is past the prompt.
        batch.prefill_len[0] = 16
        return (
            batch.input_ids,
            lookahead,
            batch.idx_mapping,
            batch.query_start_loc,
            batch.all_token_ids,
            batch.prefill_len,
            batch.num_computed,
        )

    runs = both("prepare_prefill_inputs", args)
    assert_equal_runs(runs)
    assert (runs[1][1][0] != 9999).sum() == 7 + 4


def test_prepare_pos_seq_lens():
    def args():
        batch = Batch()
        return (
            batch.idx_mapping,
            batch.query_start_loc,
            batch.num_computed,
            torch.full((40,), -7, dtype=torch.int64),
            batch.seq_lens,
        )

    assert_equal_runs(both("prepare_pos_seq_lens", args))


@pytest.mark.parametrize("num_new", [0, 1])
def test_combine_sampled_and_draft_tokens(num_new):
    width = NUM_DRAFTS + 1 - num_new

    def args():
        batch = Batch()
        return (
            batch.input_ids,
            batch.idx_mapping,
            torch.arange(MAX_REQS) + 500,
            batch.query_start_loc,
            batch.seq_lens,
            batch.prefill_len,
            torch.arange(MAX_REQS * width).view(MAX_REQS, -1) + 700,
            batch.cu_num_logits,
            int(batch.cu_num_logits[-1]),
            num_new,
        )

    assert_equal_runs(both("combine_sampled_and_draft_tokens", args))


def test_combine_keeps_the_tail_of_a_prompt():
    """Drafts of a request whose rows still overlap its prompt: no last token."""

    def args():
        batch = Batch()
        batch.seq_lens[0] = batch.prefill_len[4] + 2
        return (
            batch.input_ids,
            batch.idx_mapping,
            torch.arange(MAX_REQS) + 500,
            batch.query_start_loc,
            batch.seq_lens,
            batch.prefill_len,
            torch.arange(MAX_REQS * NUM_DRAFTS).view(MAX_REQS, -1) + 700,
            batch.cu_num_logits,
            int(batch.cu_num_logits[-1]),
        )

    runs = both("combine_sampled_and_draft_tokens", args)
    assert_equal_runs(runs)
    assert runs[1][1][0][0] == 9999


def test_get_num_sampled_and_rejected():
    def args():
        batch = Batch()
        return (
            torch.tensor([3, 1, 1], dtype=torch.int32),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            batch.prefill_len,
        )

    runs = both("get_num_sampled_and_rejected", args)
    assert_equal_runs(runs)
    sampled, rejected = runs[1][0]
    assert sampled.tolist() == [3, 0, 1]
    assert rejected.tolist() == [3, 0, 0]


@pytest.mark.parametrize("with_bin_counts", [False, True])
@pytest.mark.parametrize("with_query", [False, True])
def test_post_update(with_bin_counts, with_query):
    def args():
        batch = Batch()
        idx_mapping = batch.idx_mapping.clone()
        idx_mapping[1] = -1
        sampled = torch.tensor([[3, 3, 9, -1], [-1] * 4, [11, -1, -1, -1]])
        return (
            idx_mapping,
            batch.num_computed,
            torch.zeros(MAX_REQS, dtype=torch.int64),
            torch.zeros(MAX_REQS, 16, dtype=torch.int32) if with_bin_counts else None,
            sampled,
            torch.tensor([3, 0, 1], dtype=torch.int32),
            torch.tensor([3, 0, 0], dtype=torch.int32),
            batch.query_start_loc if with_query else None,
            batch.all_token_ids,
            batch.total_len,
        )

    assert_equal_runs(both("post_update", args))


def test_post_update_without_a_sampled_token():
    def args():
        batch = Batch()
        return (
            batch.idx_mapping,
            batch.num_computed,
            torch.zeros(MAX_REQS, dtype=torch.int64),
            None,
            torch.full((3, 4), -1),
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int32),
            batch.query_start_loc,
            batch.all_token_ids,
            batch.total_len,
        )

    assert_equal_runs(both("post_update", args))


def test_post_update_num_computed_tokens():
    def args():
        batch = Batch()
        return batch.idx_mapping, batch.num_computed, batch.query_start_loc

    assert_equal_runs(both("post_update_num_computed_tokens", args))


def test_expand_idx_mapping():
    def args():
        batch = Batch()
        return batch.idx_mapping, 8, batch.cu_num_logits, 1 + NUM_DRAFTS

    assert_equal_runs(both("expand_idx_mapping", args))
