# SPDX-License-Identifier: Apache-2.0
"""A mixed batch through the GPU backends: trees by our kernel, the rest by vLLM's."""

import dataclasses
import importlib
from types import SimpleNamespace

import pytest
import torch
from attention_batches import CHAIN5, TREE7, Batch, Request, check, tree

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    # Patches torch, before anything else of vLLM's runner is imported.
    importlib.import_module("vllm.v1.worker.cpu.shm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_dflash.attention import gpu_backend, mixed
from vllm_dflash.attention.metadata import AttentionContext
from vllm_dflash.attention.mixed import without_leading

MAX_LEN = 128


class TritonBuilder(gpu_backend.TreeTritonAttentionMetadataBuilder):
    """With what vLLM's constructor takes from a whole engine config."""

    impl = gpu_backend.TreeTritonAttentionImpl
    dtype = torch.float32

    def __init__(self, vllm_config, batch, device):
        self.vllm_config, self.layer_names = vllm_config, ["layer"]
        self._captured_tree = None
        num_heads, num_kv_heads, head_size = batch.shape
        self.seq_threshold_3D, self.num_par_softmax_segments = 2, 4
        self.max_seqs_64_segments, self.rswa_window = 0, None
        rows = (self.seq_threshold_3D, num_heads, self.num_par_softmax_segments)
        self.softmax_segm_output = torch.empty(*rows, head_size, device=device)
        self.softmax_segm_max = torch.empty(rows, device=device)
        self.softmax_segm_expsum = torch.empty(rows, device=device)


class FlashBuilder(gpu_backend.TreeFlashAttentionMetadataBuilder):
    """The same; FlashAttention plans its own splits, as without graphs."""

    impl = gpu_backend.TreeFlashAttentionImpl
    dtype = torch.bfloat16
    is_planned_ahead = False

    def __init__(self, vllm_config, batch, device):
        self.vllm_config, self.layer_names = vllm_config, ["layer"]
        self._captured_tree = None
        self.num_heads_q, self.num_heads_kv, self.headdim = batch.shape
        self.kv_cache_dtype, self.block_size = self.dtype, 16
        self.cache_config = SimpleNamespace(cache_dtype="auto")
        self.aot_schedule, self.aot_sliding_window = self.is_planned_ahead, (-1, -1)
        self.max_num_splits = 32 if self.is_planned_ahead else 0
        self.use_full_cuda_graph = self.is_planned_ahead
        self.max_cudagraph_size = 512
        self.scheduler_metadata = torch.zeros(1 << 12, dtype=torch.int32, device=device)
        self.dcp_world_size, self.rswa_window = 1, None
        self.mm_prefix_query_ranges_np = None


class PlannedFlashBuilder(FlashBuilder):
    """With a schedule made ahead in the buffer that graphs read."""

    is_planned_ahead = True


BUILDERS = [
    TritonBuilder,
    pytest.param(FlashBuilder, marks=pytest.mark.gpu),
    pytest.param(PlannedFlashBuilder, marks=pytest.mark.gpu),
]


@pytest.fixture
def served(device):
    """Return a batch's output, and which rows vLLM's backend was asked for."""

    def run(make_builder, requests, num_verify_reqs):
        batch = Batch(requests, device, dtype=make_builder.dtype)
        config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=MAX_LEN),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        step = SimpleNamespace(batch_ancestors=batch.ancestors, tree_len=batch.tree_len)
        context = AttentionContext(config, step)
        num_reqs = len(requests)
        starts = batch.query_start_loc
        lens = [request.query_len for request in requests]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.cpu(),
            seq_lens=batch.seq_lens,
            num_reqs=num_reqs,
            num_actual_tokens=sum(lens),
            max_query_len=max(lens),
            max_seq_len=MAX_LEN,
            block_table_tensor=batch.block_table,
            slot_mapping=torch.zeros(sum(lens), dtype=torch.int64, device=device),
            seq_lens_cpu_upper_bound=batch.seq_lens.cpu(),
        )
        trees = None
        if num_verify_reqs:
            trees = context.tree(
                num_verify_reqs,
                max(lens[:num_verify_reqs]),
                pure=num_verify_reqs == num_reqs,
            )
        builder = make_builder(config, batch, device)
        metadata = builder.build(0, common, tree=trees)
        num_heads, num_kv_heads, head_size = batch.shape
        with set_current_vllm_config(VllmConfig()):
            impl = builder.impl(
                num_heads, head_size, head_size**-0.5, num_kv_heads, None, None, "auto"
            )
        scale = torch.ones(1, device=device)
        layer = SimpleNamespace(_k_scale=scale, _v_scale=scale, _q_scale=scale)
        cache = torch.cat([batch.key_cache, batch.value_cache], -1)
        if isinstance(builder, FlashBuilder):
            # FlashAttention may multiply what nobody owns by zero.
            cache = cache.nan_to_num()
        batch.out.fill_(torch.nan)
        # Keys and values are in the cache already.
        unused = batch.query.new_empty(sum(lens), num_kv_heads, head_size)
        out = impl.forward(
            layer, batch.query, unused, unused, cache, metadata, batch.out
        )
        assert out is batch.out
        return batch, metadata

    return run


# The last verifies a placeholder: rows without a tree.
TREES = [tree(20, TREE7), tree(33, CHAIN5), Request(25, causal=5)]
PLAIN = [Request(0, causal=9), Request(17, causal=4), Request(40, causal=1)]


@pytest.mark.parametrize(
    ("num_trees", "num_plain"),
    [(0, 1), (0, 3), (1, 0), (2, 0), (1, 1), (1, 3), (2, 1), (2, 3), (3, 2)],
)
@pytest.mark.parametrize("make_builder", BUILDERS)
def test_every_row_is_attended_to_once(served, make_builder, num_trees, num_plain):
    requests = TREES[:num_trees] + PLAIN[:num_plain]
    batch, metadata = served(make_builder, requests, num_trees)
    check("mixed", batch.expected(), batch.out)
    if num_trees and num_plain:
        # vLLM's backend has seen the others only.
        others = PLAIN[:num_plain]
        assert metadata.num_actual_tokens == sum(r.query_len for r in others)
        assert metadata.seq_lens.tolist() == [r.seq_len for r in others]
        assert metadata.query_start_loc[0] == 0
        assert metadata.max_query_len == max(r.query_len for r in others)
        assert metadata.verify_batch.seq_lens is batch.seq_lens


def test_the_whole_batch_stays_as_it_was(device):
    starts = torch.tensor([0, 7, 12, 21], dtype=torch.int32)
    whole = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([27, 38, 9], dtype=torch.int32, device=device),
        num_reqs=3,
        num_actual_tokens=21,
        max_query_len=9,
        max_seq_len=MAX_LEN,
        block_table_tensor=torch.zeros(3, 4, dtype=torch.int32, device=device),
        slot_mapping=torch.arange(21, device=device),
        seq_lens_cpu_upper_bound=torch.tensor([27, 38, 9]),
        mm_req_doc_ranges={1: [(0, 3)], 2: [(4, 8)]},
    )
    rest = without_leading(whole, 2, 12)
    assert rest.query_start_loc.tolist() == [0, 9]
    assert rest.query_start_loc_cpu.tolist() == [0, 9]
    assert (rest.num_reqs, rest.num_actual_tokens, rest.max_query_len) == (1, 9, 9)
    assert rest.seq_lens.tolist() == rest.seq_lens_cpu_upper_bound.tolist() == [9]
    assert rest.slot_mapping.tolist() == list(range(12, 21))
    assert rest.block_table_tensor.shape == (1, 4)
    assert rest.mm_req_doc_ranges == {0: [(4, 8)]}
    assert rest.positions is rest.is_prefilling is None
    assert whole.query_start_loc.tolist() == starts.tolist()


@pytest.mark.parametrize("num_reqs", range(1, 6))
def test_no_number_of_requests_is_another_kernel(num_reqs, device):
    """Triton compiles for pointers that begin at 16 bytes, and for others."""
    ints = dict(dtype=torch.int32, device=device)
    starts = torch.arange(0, 4 * 7, 4, dtype=torch.int32)
    whole = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.arange(10, 16, **ints),
        num_reqs=6,
        num_actual_tokens=24,
        max_query_len=4,
        max_seq_len=MAX_LEN,
        # Rows of 8 bytes, as with blocks of 64 tokens.
        block_table_tensor=torch.arange(12, **ints).view(6, 2),
        slot_mapping=torch.arange(24, device=device),
        seq_lens_cpu_upper_bound=torch.arange(10, 16),
    )
    rest = without_leading(whole, num_reqs, 4 * num_reqs)
    assert rest.seq_lens.tolist() == list(range(10 + num_reqs, 16))
    assert rest.block_table_tensor[:, 0].tolist() == list(range(2 * num_reqs, 12, 2))
    for tensor in (rest.query_start_loc, rest.seq_lens, rest.block_table_tensor):
        assert tensor.data_ptr() % 16 == 0


def test_every_field_of_a_batch_is_known():
    """A field that vLLM adds must be cut too, or be one of the whole batch."""
    cut = {*mixed._PER_REQUEST, *mixed._PER_ROW, "mm_req_doc_ranges"}
    set_anew = {
        "query_start_loc",
        "query_start_loc_cpu",
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "_num_computed_tokens_cache",
        "_token_to_req_indices_cache",
    }
    # A bound; one flag for causal layers; the rest is of other attention than trees'.
    kept = {
        "max_seq_len",
        "causal",
        "logits_indices_padded",
        "num_logits_indices",
        "max_logits_per_req",
        "encoder_seq_lens",
        "encoder_seq_lens_cpu",
        "replayssm_decode_base_cpu",
    }
    fields = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    assert fields == cut | set_anew | kept
