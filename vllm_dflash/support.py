# SPDX-License-Identifier: Apache-2.0
"""Whether an engine can serve trees: one table, which the checks and the docs share."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_dflash.config import OPTION_KEY, DDTreeConfig, resolve_depth
from vllm_dflash.draft_fit import dflash_options
from vllm_dflash.support_checks import tokens_reserved
from vllm_dflash.support_table import FEATURES, Status

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

_OFF = f'"{OPTION_KEY}": false in speculative_config for vLLM\'s chain'


@dataclass(frozen=True)
class Refusal:
    """Why an engine can't serve trees, and what to type instead."""

    reason: str
    way_out: str = ""

    @property
    def message(self) -> str:
        """The text of the error of a demanded tree."""
        choices = ", or ".join(filter(None, (self.way_out, _OFF)))
        return f"{self.reason.rstrip('.')}. Type {choices}."


def find_refusal(config: VllmConfig) -> Refusal | None:
    """Return what keeps an engine from serving trees, all of it in one text."""
    found = [
        (feature, value)
        for feature in FEATURES
        if feature.check is not None and (value := feature.check(config)) is not None
    ]
    if not found:
        return None
    return Refusal(
        "; ".join(
            f"DDTree does not work with {feature.name} (got {value}): {feature.note}"
            for feature, value in found
        ),
        "; ".join(feature.way_out for feature, _ in found if feature.way_out),
    )


def find_early_refusal(
    config: SpeculativeConfig, tree: DDTreeConfig, max_num_batched_tokens: int | None
) -> Refusal | None:
    """Return what must be known before the budget replaces the user's numbers."""
    schedule = config.num_speculative_tokens_per_batch_size
    if schedule is not None:
        return Refusal(
            "num_speculative_tokens_per_batch_size counts the drafts of a chain (got "
            f"{schedule}). Trees have a schedule of their own",
            f'"{OPTION_KEY}": {{"budget_per_batch_size": [[1, 8, 16], [9, 256, 3]]}}',
        )
    needed = tokens_reserved(tree)
    if max_num_batched_tokens is None or max_num_batched_tokens >= needed:
        return None
    return Refusal(
        "DDTree does not work with a step smaller than a tree (got "
        f"--max-num-batched-tokens {max_num_batched_tokens} and a budget of "
        f"{tree.budget}): each request reserves its rows and its depth",
        f'--max-num-batched-tokens {needed} or more, or a smaller "budget"',
    )


def require_supported(config: VllmConfig) -> None:
    """Refuse in a worker what the front end should have refused.

    Raises:
        ValueError: The engine can't serve trees.
    """
    refusal = find_refusal(config)
    if refusal is not None:
        raise ValueError(refusal.message)


def require_supported_model_state(state_cls: type[Any]) -> None:
    """Refuse a target whose state is more than a KV cache.

    Raises:
        ValueError: vLLM serves the model with a ModelState of its own.
    """
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    if state_cls is not DefaultModelState:
        raise ValueError(
            Refusal(
                "DDTree does not work with this target model (got the model state "
                f"{state_cls.__name__}): only the default state, a plain KV cache, "
                "can be committed along a path"
            ).message
        )


def draft_block_size(config: SpeculativeConfig) -> int | None:
    """Return the block size that the draft checkpoint names."""
    hf_config = config.draft_model_config.hf_config
    size = getattr(hf_config, "block_size", None)
    if size is None:
        size = dflash_options(hf_config).get("block_size")
    return size


def draft_depth(config: SpeculativeConfig) -> int:
    """Return the depth of a draft for which the user has named none.

    Raises:
        ValueError: The draft checkpoint doesn't name one either.
    """
    block_size = draft_block_size(config)
    if block_size is None:
        named = _speculators_depth(config)
        if named is not None:
            return named
    return resolve_depth(None, block_size)


def _speculators_depth(config: SpeculativeConfig) -> int | None:
    """Return `speculative_tokens` of a checkpoint in the speculators layout.

    vLLM reads it when the checkpoint is named as the model, and drops it, like the
    block size, when it is named as the draft.
    """
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    draft = config.draft_model_config
    if not isinstance(draft.hf_config, SpeculatorsConfig):
        return None
    words = get_hf_file_to_dict("config.json", draft.model, draft.revision) or {}
    return SpeculatorsConfig.extract_vllm_speculative_config(words)[
        "num_speculative_tokens"
    ]


def log_tree(
    logger: logging.Logger, config: VllmConfig, tree: DDTreeConfig, backend: str | None
) -> None:
    """Say at start-up what the trees look like."""
    scheduler = config.scheduler_config
    schedule = tree.budget_per_batch_size
    compilation = config.compilation_config
    graphs = [
        size
        for size in compilation.cudagraph_capture_sizes or ()
        if compilation.cudagraph_mode.has_full_cudagraphs()
        and any(width > 1 and size % width == 0 for width in tree.widths)
    ]
    logger.info(
        "DDTree verifies every DFlash block as a tree: depth %d, budget %d nodes%s, "
        "width %s, %d candidates a depth, scores at %s, attention %s, FULL graphs %s, "
        "up to %d requests in a step of %d tokens",
        tree.depth,
        tree.budget,
        "" if schedule is None else f" by batch size {[list(e) for e in schedule]}",
        "/".join(str(width) for width in tree.widths),
        tree.max_children,
        "the request's temperature" if tree.scale_by_temperature else "temperature 1",
        backend or "as vLLM chooses",
        f"up to {max(graphs)} tokens" if graphs else "off",
        min(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens // tokens_reserved(tree),
        ),
        scheduler.max_num_batched_tokens,
    )


def warn_chain(logger: logging.Logger, refusal: Refusal, depth: int) -> None:
    """Say once that vLLM's chain serves instead of a tree nobody demanded."""
    logger.warning(
        "DDTree is not used; vLLM's DFlash chain of %d drafts is. %s. %sType %s to "
        "keep the chain without this warning.",
        depth,
        refusal.reason.rstrip("."),
        f"For trees type {refusal.way_out}. " if refusal.way_out else "",
        f'"{OPTION_KEY}": false',
    )


def render_markdown() -> str:
    """Return the table as the docs show it, one heading for each area."""
    words = {
        Status.TREE: "tree",
        Status.CHAIN: "chain, in the same batch",
        Status.REFUSED: "refused",
    }
    lines: list[str] = []
    for area in dict.fromkeys(feature.area for feature in FEATURES):
        lines += [f"## {area}", "", "| feature | served as | why |", "|---|---|---|"]
        for feature in FEATURES:
            if feature.area != area:
                continue
            note = feature.note
            if feature.way_out:
                note += f"; way out: {feature.way_out}"
            lines.append(f"| {feature.name} | {words[feature.status]} | {note} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
