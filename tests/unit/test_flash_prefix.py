# SPDX-License-Identifier: Apache-2.0
"""When FlashAttention gets the committed keys of a verify batch, and how."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm_dflash.attention import flash_prefix
from vllm_dflash_kernels.tree_attention.tiles import (
    prefers_given_prefix,
)


class Base:
    """Stands for FlashAttention's builder: records what it is asked to build."""

    num_heads_q, num_heads_kv, headdim = 32, 8, 128
    kv_cache_dtype = torch.bfloat16
    aot_schedule = True
    aot_sliding_window = (-1, -1)
    max_num_splits = 32

    def _build_base(self, tree, common_prefix_len, common, fast_build=False):
        return SimpleNamespace(
            seq_lens=common.seq_lens,
            causal=common.causal,
            scheduled=self.aot_schedule,
            max_num_splits=self.max_num_splits,
        )


class Builder(flash_prefix.FlashPrefixMixin, Base):
    pass


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.setattr(flash_prefix, "get_flash_attn_version", lambda **_: 3)
    common = SimpleNamespace(
        num_reqs=8,
        num_actual_tokens=8 * 48,
        seq_lens=torch.full((8,), 148, dtype=torch.int32),
        causal=True,
    )
    step = SimpleNamespace(prefix_len=torch.arange(100, 112, dtype=torch.int32))
    tree = SimpleNamespace(pure=True, max_query_len=48, step=step)
    return tree, common


def test_a_large_verify_batch_is_scheduled_over_committed_keys(batch):
    tree, common = batch
    builder = Builder()
    metadata = builder._build_base(tree, 0, common)
    assert metadata.prefix_len.tolist() == list(range(100, 108))
    assert metadata.prefix_len.data_ptr() == tree.step.prefix_len.data_ptr()
    assert (metadata.scheduled, metadata.causal) == (True, False)
    # The tree kernel needs the true lengths, and the caller's object stays as it was.
    assert metadata.seq_lens is common.seq_lens
    assert common.causal is True and builder.aot_schedule is True


@pytest.mark.parametrize(
    "change",
    [
        dict(num_heads_kv=1, num_heads_q=4),
        dict(headdim=64, num_heads_q=8),
        dict(kv_cache_dtype=torch.uint8),
        dict(aot_sliding_window=(1023, 0)),
    ],
    ids=["few programs", "small heads", "fp8", "window"],
)
def test_other_batches_are_the_tree_kernels_alone(batch, change):
    tree, common = batch
    builder = Builder()
    for name, value in change.items():
        setattr(builder, name, value)
    metadata = builder._build_base(tree, 0, common)
    assert metadata.prefix_len is None
    assert metadata.scheduled is False and builder.aot_schedule is True


def test_another_flash_attention_does_not_get_the_prefix(batch, monkeypatch):
    tree, common = batch
    monkeypatch.setattr(flash_prefix, "get_flash_attn_version", lambda **_: 2)
    assert Builder()._build_base(tree, 0, common).prefix_len is None


def test_the_first_build_keeps_its_schedule(batch):
    # FlashAttention's builder learns the layers' sliding window in its first build.
    tree, common = batch
    common.num_reqs = 1
    builder = Builder()
    builder.aot_sliding_window = None
    assert builder._build_base(tree, 0, common).scheduled is True


def test_a_schedule_that_the_first_build_gives_up_is_not_taken_up_again(batch):
    """FlashAttention's builder does so where layers have unlike windows."""
    tree, common = batch

    class Unlike(Builder):
        aot_sliding_window = None

        def _learn(self):
            if self.aot_sliding_window is None:
                self.aot_sliding_window, self.aot_schedule = (-1, -1), False

    class UnlikeBase(Base):
        def _build_base(self, *args, **kwargs):
            self._learn()
            return super()._build_base(*args, **kwargs)

    builder = type("Both", (Unlike, UnlikeBase), {})()
    for _ in range(2):
        assert builder._build_base(tree, 0, common).scheduled is False
        assert builder.aot_schedule is False


def test_the_users_flash_attention_is_asked_for_once(batch, monkeypatch):
    """While it serves, vLLM has no config to ask, and answers for the GPU alone."""
    tree, common = batch
    versions = iter([2])
    monkeypatch.setattr(
        flash_prefix, "get_flash_attn_version", lambda **_: next(versions, 3)
    )
    builder = Builder()
    for _ in range(2):
        assert builder._build_base(tree, 0, common).prefix_len is None


def test_mixed_batches_and_batches_without_trees_are_untouched(batch):
    tree, common = batch
    tree.pure = False
    for given in (tree, None):
        metadata = Builder()._build_base(given, 0, common)
        assert metadata.causal is True and metadata.scheduled is True
        assert not hasattr(metadata, "prefix_len")


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "splits"), [(1, 32), (512, 32), (1024, 16), (2048, 8), (40000, 1)]
)
def test_partial_results_stay_as_large_as_vllms(batch, num_tokens, splits, pure):
    tree, common = batch
    tree.pure, common.num_actual_tokens = pure, num_tokens
    builder = Builder()
    assert builder._build_base(tree, 0, common).max_num_splits == splits
    assert builder.max_num_splits == 32
    # 0 is FlashAttention's own choice, for engines without graphs.
    builder.max_num_splits = 0
    assert builder._build_base(tree, 0, common).max_num_splits == 0


def test_layers_with_a_window_do_without():
    impl = SimpleNamespace(sliding_window=(1023, 0))
    metadata = SimpleNamespace(prefix_len=torch.zeros(1, dtype=torch.int32))
    nothing = torch.empty(0)
    result = flash_prefix.attend_to_prefix(impl, nothing, nothing, metadata, nothing)
    assert result is None


def test_preference_grows_with_the_batch_and_the_rows():
    assert not prefers_given_prefix(1, 8, 48 * 4, 128)
    assert prefers_given_prefix(1, 8, 65 * 4, 128)
    assert prefers_given_prefix(8, 8, 16 * 4, 128)
    assert prefers_given_prefix(8, 3, 48 * 3, 64)
    assert not prefers_given_prefix(8, 3, 33 * 3, 64)
    assert not prefers_given_prefix(1, 3, 48 * 3, 64)
