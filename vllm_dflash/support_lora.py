# SPDX-License-Identifier: Apache-2.0
"""The rows of the support table about LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dflash.support_checks import find_flag, find_section
from vllm_dflash.support_rows import Feature, refused_row, tree_row

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_lora_of_experts(config: VllmConfig) -> str | None:
    """Find adapters of a mixture of experts, whose layers are wrapped as a whole."""
    return find_section("lora_config")(config) if config.model_config.is_moe else None


def lora_rows(area: str) -> tuple[Feature, ...]:
    """Return the rows, under the heading that the table gives them."""
    return (
        tree_row(
            area,
            "LoRA",
            "each row of a tree has its request's adapter, the draft none; whole "
            "engines tested on the CPU only",
        ),
        refused_row(
            area,
            "LoRA with graphs by the number of adapters",
            "they count the adapters of a batch, and not its requests without one",
            "the command without --specialize-active-lora",
            find_flag("lora_config", "specialize_active_lora"),
        ),
        refused_row(
            area,
            "LoRA on a mixture of experts",
            "untested with trees",
            "the command without --enable-lora",
            find_lora_of_experts,
        ),
    )
