# SPDX-License-Identifier: Apache-2.0
"""The registry of torch twins for kernels that are slow when interpreted.

Installed by `vllm_dflash/patches/cpu_kernels.py`, with VLLM_DFLASH_CPU=1 only. A launch
costs 1.5 to 4 ms in the interpreter and each program of a grid as much again, so a
decode step of vLLM spends 300 ms on kernels that a GPU runs in microseconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_GPU = "vllm.v1.worker.gpu"
_CPU = "vllm_dflash.cpu"


@dataclass(frozen=True)
class Replacement:
    """A function, method or kernel of vLLM and its twin.

    Attributes:
        target: `module:function`, `module:Class.method` or `module:_kernel`.
        twin: `module:function` of ours. The twin of a function has its signature; the
            twin of a kernel gets the grid and then the launch's arguments.
    """

    target: str
    twin: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]

    @property
    def is_kernel(self) -> bool:
        return self.attribute.endswith("_kernel")


REPLACEMENTS: tuple[Replacement, ...] = tuple(
    Replacement(f"{module}:{attribute}", f"{_CPU}.{twin}")
    for module, attribute, twin in (
        (f"{_GPU}.sample.gumbel", "gumbel_sample", "gumbel:gumbel_sample"),
        (f"{_GPU}.sample.gumbel", "apply_temperature", "logits:apply_temperature"),
        (f"{_GPU}.sample.min_p", "apply_min_p", "logits:apply_min_p"),
        (
            f"{_GPU}.sample.logprob",
            "compute_token_logprobs",
            "logits:compute_token_logprobs",
        ),
        (f"{_GPU}.sample.logprob", "_ranks_kernel", "logits:ranks_kernel"),
        (f"{_GPU}.sample.penalties", "apply_penalties", "logits:apply_penalties"),
        (f"{_GPU}.sample.bad_words", "apply_bad_words", "token_rules:apply_bad_words"),
        (
            f"{_GPU}.sample.logit_bias",
            "apply_logit_bias",
            "token_rules:apply_logit_bias",
        ),
        (
            "vllm.v1.sample.ops.topk_topp_sampler",
            "apply_top_k_top_p",
            "logits:apply_top_k_top_p",
        ),
        (
            f"{_GPU}.structured_outputs",
            "_apply_grammar_bitmask_kernel",
            "logits:apply_grammar_bitmask_kernel",
        ),
        (
            f"{_GPU}.input_batch",
            "prepare_prefill_inputs",
            "input_batch:prepare_prefill_inputs",
        ),
        (
            f"{_GPU}.input_batch",
            "prepare_pos_seq_lens",
            "input_batch:prepare_pos_seq_lens",
        ),
        (
            f"{_GPU}.input_batch",
            "combine_sampled_and_draft_tokens",
            "input_batch:combine_sampled_and_draft_tokens",
        ),
        (
            f"{_GPU}.input_batch",
            "get_num_sampled_and_rejected",
            "input_batch:get_num_sampled_and_rejected",
        ),
        (f"{_GPU}.input_batch", "post_update", "input_batch:post_update"),
        (
            f"{_GPU}.input_batch",
            "post_update_num_computed_tokens",
            "input_batch:post_update_num_computed_tokens",
        ),
        (f"{_GPU}.input_batch", "expand_idx_mapping", "input_batch:expand_idx_mapping"),
        (
            f"{_GPU}.block_table",
            "BlockTables.gather_block_tables",
            "block_table:gather_block_tables",
        ),
        (
            f"{_GPU}.block_table",
            "BlockTables.compute_slot_mappings",
            "block_table:compute_slot_mappings",
        ),
        (
            f"{_GPU}.buffer_utils",
            "StagedWriteTensor.apply_write",
            "block_table:apply_write",
        ),
        (
            f"{_GPU}.buffer_utils",
            "FusedStagedWriter.apply",
            "block_table:apply_fused_writes",
        ),
        (
            f"{_GPU}.spec_decode.dflash.speculator",
            "prepare_dflash_inputs",
            "dflash_inputs:prepare_dflash_inputs",
        ),
        (
            f"{_GPU}.spec_decode.rejection_sampler",
            "gather_draft_sampled",
            "rejection:gather_draft_sampled",
        ),
        (
            f"{_GPU}.spec_decode.rejection_sampler",
            "_flatten_sampled_kernel",
            "rejection:flatten_sampled_kernel",
        ),
        (
            f"{_GPU}.spec_decode.rejection_sampler_utils",
            "rejection_sample",
            "rejection:rejection_sample",
        ),
    )
)

# Target -> vLLM's own object, filled by the installer.
originals: dict[str, Any] = {}


def original(target: str) -> Any:
    """Return vLLM's own object of an installed replacement.

    Raises:
        RuntimeError: Nothing is installed, so there is no interpreted kernel to use.
    """
    if target not in originals:
        raise RuntimeError(f"{target} has not been replaced")
    return originals[target]


def load(path: str) -> Any:
    """Return the object at `module:attribute`."""
    module_name, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attributes.split("."):
        found = getattr(found, part)
    return found


class TwinKernel:
    """Stands where a Triton kernel stood: `kernel[grid](*args)` calls the twin."""

    def __init__(self, twin: Callable[..., None]) -> None:
        self.twin = twin

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.twin(grid, *args, **kwargs)
