# SPDX-License-Identifier: Apache-2.0
"""Whether a draft's config fits the target, before anything is loaded.

vLLM notices some of these misfits after it has loaded both models, and others never:
the draft then proposes noise and nothing but the acceptance tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_dflash.config import OPTION_KEY
from vllm_dflash.errors import option_error
from vllm_dflash.support_checks import TREE_DRAFT

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig

LEAVE_IT_TO_VLLM = f'"{OPTION_KEY}": false to leave the draft to vLLM unchecked'
# Where vLLM looks for the id, in its order.
_MASK_TOKEN_KEYS = (
    "mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)


def require_fitting_draft(config: SpeculativeConfig) -> None:
    """Refuse a DFlash draft that was not made for this target.

    Drafts of another architecture are left to the support table.

    Raises:
        ValueError: Sizes, layers or ids of the two configs don't go together.
    """
    draft, target = config.draft_model_config, config.target_model_config
    if TREE_DRAFT not in draft.architectures:
        return
    misfits = list(find_misfits(draft.hf_config, target))
    if misfits:
        raise option_error(
            f"the draft {draft.model} does not fit the target {target.model} (got "
            + ", and ".join(got for got, _ in misfits)
            + ")",
            "; ".join(allowed for _, allowed in misfits),
            f'"model": with a DFlash draft made for this target, or {LEAVE_IT_TO_VLLM}',
        )


def find_misfits(hf_config: Any, target: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield what the draft's config says, and what the target allows."""
    yield from _find_wrong_sizes(hf_config, target)
    yield from _find_wrong_layers(hf_config, target)
    yield from _find_wrong_mask(hf_config, target.get_vocab_size())


def dflash_options(hf_config: Any) -> dict[str, Any]:
    """Return `dflash_config` of a draft's config; empty if there is none."""
    options = getattr(hf_config, "dflash_config", None)
    return options if isinstance(options, dict) else {}


def reads_target_layers(hf_config: Any) -> bool:
    """Whether the draft's context is made of hidden states of several layers."""
    default = getattr(hf_config, "use_aux_hidden_state", True)
    return bool(dflash_options(hf_config).get("use_aux_hidden_state", default))


def target_layer_ids(hf_config: Any) -> Any:
    """Return the target's layers that the draft reads, counted from 0."""
    after = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
    if isinstance(after, list | tuple) and all(is_int(layer) for layer in after):
        if after:
            return [layer - 1 for layer in after]
    elif after is not None:
        return after
    for place in (
        dflash_options(hf_config).get("target_layer_ids"),
        getattr(hf_config, "dspark_target_layer_ids", None),
        getattr(hf_config, "target_layer_ids", None),
    ):
        if place:
            return place
    return None


def is_int(value: Any) -> bool:
    """Whether a value of a JSON file is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def _find_wrong_sizes(hf_config: Any, target: ModelConfig) -> Iterator[tuple[str, str]]:
    vocab_size, hidden_size = target.get_vocab_size(), target.get_hidden_size()
    # A draft of another width says so, and has its own embedding and lm_head.
    width_name = (
        "hidden_size"
        if getattr(hf_config, "target_hidden_size", None) is None
        else "target_hidden_size"
    )
    for name, expected in ((width_name, hidden_size), ("vocab_size", vocab_size)):
        got = getattr(hf_config, name, None)
        if got != expected:
            yield f"{name} {got!r}", f"{name} {expected} is the target's"
    drafted = getattr(hf_config, "draft_vocab_size", None)
    if drafted is not None and not (is_int(drafted) and 1 <= drafted <= vocab_size):
        yield (
            f"draft_vocab_size {drafted!r}",
            f"draft_vocab_size 1 to {vocab_size} is allowed",
        )


def _find_wrong_layers(
    hf_config: Any, target: ModelConfig
) -> Iterator[tuple[str, str]]:
    if not reads_target_layers(hf_config):
        return
    layers = target_layer_ids(hf_config)
    last = target.get_total_num_hidden_layers() - 1
    # vLLM hands over the hidden states in the target's order, whatever the list's.
    if (
        not isinstance(layers, list | tuple)
        or not layers
        or not all(is_int(layer) and 0 <= layer <= last for layer in layers)
        or list(layers) != sorted(set(layers))
    ):
        yield (
            f"dflash_config.target_layer_ids {layers!r}",
            f"target_layer_ids are layers of the target, 0 to {last}, in ascending "
            "order",
        )


def _find_wrong_mask(hf_config: Any, vocab_size: int) -> Iterator[tuple[str, str]]:
    mask = dflash_options(hf_config).get("mask_token_id")
    for name in _MASK_TOKEN_KEYS:
        if mask is None:
            mask = getattr(hf_config, name, None)
    if mask is None and not dflash_options(hf_config):
        got = f"dflash_config {getattr(hf_config, 'dflash_config', None)!r}"
    else:
        got = f"dflash_config.mask_token_id {mask!r}"
    if not is_int(mask) or not 0 <= mask < vocab_size:
        yield got, f"mask_token_id 0 to {vocab_size - 1} is allowed"
