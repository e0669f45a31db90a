# SPDX-License-Identifier: Apache-2.0
"""Layers of a step: the first launches through Triton, the others repeat it."""

import copy

import pytest
import torch
from attention_batches import TREE7, Batch, check, random_requests, tree

from vllm_dflash_kernels.tree_attention import TreeAttentionWorkspace
from vllm_dflash_kernels.tree_attention import launch as launch_module
from vllm_dflash_kernels.tree_attention import workspace as workspace_module
from vllm_dflash_kernels.tree_attention.reduce import reduce_splits_kernel
from vllm_dflash_kernels.tree_attention.step import TreeAttentionStep

KERNELS = ("tree_attention_kernel", "reduce_splits_kernel")


class Counted:
    """A kernel that counts its launches through Triton.

    Interpreted kernels are never compiled. In their place this hands out what a
    compiled kernel does: it takes every argument, addresses for tensors.
    """

    def __init__(self, kernel, tensors):
        self.kernel, self.tensors = kernel, tensors
        self.arg_names = kernel.arg_names
        self.launches = 0

    def warmup(self, *args, **kwargs):
        return self.kernel.warmup(*args, **kwargs)

    def __getitem__(self, grid):
        def run(*args, **kwargs):
            self.launches += 1
            compiled = self.kernel[grid](*args, **kwargs)
            if compiled is not None:
                return compiled
            for part in args:
                if isinstance(part, torch.Tensor):
                    self.tensors[part.data_ptr()] = part
            return Interpreted(self)

        return run


class Interpreted:
    def __init__(self, counted):
        self.counted = counted

    def __getitem__(self, grid):
        kernel, tensors = self.counted.kernel, self.counted.tensors

        def run(*args):
            named = dict(zip(kernel.arg_names, args, strict=True))
            for name, value in named.items():
                if name.endswith("_ptr"):
                    named[name] = tensors[value]
            assert kernel[grid](**named) is None

        return run


@pytest.fixture
def kernels(monkeypatch):
    tensors = {}
    for name in KERNELS:
        counted = Counted(getattr(launch_module, name), tensors)
        monkeypatch.setattr(launch_module, name, counted)
    attention, reduction = (getattr(launch_module, name) for name in KERNELS)
    return attention, reduction, tensors


def layer_of(batch, number):
    """The batch with a query, a cache and an output of another layer."""
    layer = copy.copy(batch)
    head_size = batch.shape[2]
    cache = torch.cat([batch.key_cache, batch.value_cache], -1)
    if batch.k_scale is None:
        cache = cache * (1.0 - 0.25 * number)
    layer.kv_cache = cache.contiguous()
    layer.key_cache, layer.value_cache = cache.split(head_size, dim=-1)
    fused = torch.zeros(
        *(batch.query.shape[0], batch.query.shape[1] + 2, head_size),
        dtype=batch.query.dtype,
        device=batch.query.device,
    )
    layer.query = fused[:, : batch.query.shape[1]]
    layer.query.copy_(batch.query.roll(number, 0))
    layer.out = torch.full_like(batch.out, torch.nan)
    return layer


def step_of(batch, workspace_rows=1 << 16):
    head_size, device = batch.shape[2], batch.query.device
    workspace = None
    if workspace_rows:
        workspace = TreeAttentionWorkspace.of_rows(workspace_rows, head_size, device)
    return TreeAttentionStep(
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        ancestors=batch.ancestors,
        tree_len=batch.tree_len,
        max_query_len=batch.width,
        max_seq_len=4096,
        workspace=workspace,
        impl="triton",
    )


def attend(step, layer, tensors, **options):
    cache = layer.kv_cache
    # The kernel reads an fp8 cache as bytes.
    cache = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    for part in (layer.query, cache, layer.out, *options.values()):
        if isinstance(part, torch.Tensor):
            tensors[part.data_ptr()] = part
    scale = layer.shape[2] ** -0.5
    step(layer.query, layer.kv_cache, layer.out, scale=scale, **options)


@pytest.fixture
def batch(device, monkeypatch):
    # Enough multiprocessors to split keys.
    monkeypatch.setattr(workspace_module, "_CPU_LIMITS", (80, 163, 132))
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    requests = [tree(300, TREE7), *random_requests(3, [(20, 9), (130, 13)])]
    return Batch(requests, device, num_heads=4, num_kv_heads=2, dtype=dtype)


def test_other_layers_repeat_the_first_ones_launches(batch, kernels):
    attention, reduction, tensors = kernels
    step = step_of(batch)
    for number in range(3):
        layer = layer_of(batch, number)
        sinks = torch.full((4,), 0.5 * number, device=batch.query.device)
        attend(step, layer, tensors, sinks=sinks)
        check(f"layer {number}", layer.expected(sinks=sinks), layer.out)
    # Long requests are split, so both kernels ran three times.
    assert (attention.launches, reduction.launches) == (1, 1)


def test_layers_of_another_kind_launch_for_themselves(batch, kernels):
    attention, _, tensors = kernels
    step = step_of(batch)
    # As in a model of full and sliding layers in turn.
    for number, window in enumerate((-1, 9, -1, 9, 40, -1)):
        layer = layer_of(batch, number % 3)
        attend(step, layer, tensors, sliding_window=window)
        expected = layer.expected(sliding_window=window)
        check(f"layer {number}", expected, layer.out)
    assert attention.launches == 3


def test_a_given_prefix_is_repeated_with_its_own_sums(batch, kernels):
    attention, _, tensors = kernels
    step = step_of(batch)
    for number in range(3):
        layer = layer_of(batch, number)
        out, lse = layer.prefix_state()
        layer.out.copy_(out)
        attend(step, layer, tensors, prefix_lse=lse)
        written = ~torch.isnan(layer.expected()[:, 0, 0])
        actual = torch.where(written[:, None, None], layer.out, torch.nan)
        check(f"layer {number}", layer.expected(), actual)
    assert attention.launches == 1


def test_an_fp8_cache_is_repeated_with_its_own_scales(device, kernels):
    attention, _, tensors = kernels
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    requests = random_requests(3, [(20, 9), (130, 13)])
    batch = Batch(requests, device, num_heads=4, num_kv_heads=2, dtype=dtype, fp8=True)
    step = step_of(batch)
    for number in range(3):
        layer = layer_of(batch, number)
        layer.k_scale = torch.tensor(0.5 + 0.25 * number, device=device)
        layer.v_scale = torch.tensor(1.0 + number, device=device)
        # Of a query in fp8 too, the scale of the keys is a tensor of this call.
        scales = dict(k_scale=layer.k_scale * 1.0, v_scale=layer.v_scale)
        attend(step, layer, tensors, **scales)
        check(f"layer {number}", layer.expected(), layer.out)
    assert attention.launches == 1


def test_layers_with_another_softcap_launch_for_themselves(batch, kernels):
    attention, _, tensors = kernels
    step = step_of(batch)
    for number, softcap in enumerate((0.0, 5.0, 5.0, 0.0)):
        layer = layer_of(batch, number % 3)
        attend(step, layer, tensors, softcap=softcap)
        check(f"layer {number}", layer.expected(softcap=softcap), layer.out)
    assert attention.launches == 2


def test_what_begins_at_another_alignment_is_not_repeated(batch, kernels):
    attention, _, tensors = kernels
    step = step_of(batch)
    for number in range(3):
        layer = layer_of(batch, number)
        if number == 1:
            room = layer.out.new_full((layer.out.numel() + 1,), torch.nan)
            layer.out = room[1:].view(layer.out.shape)
        attend(step, layer, tensors)
        check(f"layer {number}", layer.expected(), layer.out)
    assert attention.launches == 2


def test_without_a_workspace_nothing_is_repeated(batch, kernels):
    """The scratch of a call is gone with the call."""
    attention, _, tensors = kernels
    step = step_of(batch, workspace_rows=0)
    for number in range(2):
        layer = layer_of(batch, number)
        attend(step, layer, tensors)
        check(f"layer {number}", layer.expected(), layer.out)
    assert attention.launches == 2


@pytest.mark.gpu
def test_a_graph_holds_the_repeated_launches(device):
    requests = random_requests(5, [(700, 11), (64, 7)])
    batch = Batch(requests, device, dtype=torch.bfloat16)
    layers = [layer_of(batch, number) for number in range(3)]

    def run():
        step = step_of(batch)
        for layer in layers:
            attend(step, layer, {})

    run()
    expected = [layer.out.clone() for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for layer in layers:
        layer.out.fill_(torch.nan)
    graph.replay()
    for layer, one in zip(layers, expected, strict=True):
        check("replayed", layer.expected(), layer.out)
        assert torch.equal(layer.out.nan_to_num(), one.nan_to_num())


@pytest.mark.gpu
def test_every_reduction_is_compiled_with_the_first(device):
    batch = Batch(
        random_requests(5, [(700, 11), (64, 7)]), device, dtype=torch.bfloat16
    )
    batch.run(num_splits=2)
    compiled = reduce_splits_kernel.device_caches[torch.cuda.current_device()][0]
    held = len(compiled)
    for num_splits in (3, 4, 7, 8, 16, 32):
        batch.run(num_splits=num_splits)
    assert len(compiled) == held
