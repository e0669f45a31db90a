# SPDX-License-Identifier: Apache-2.0
"""Which values of a training run are allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_dflash.config import MAX_BUDGET
from vllm_dflash_training.config_values import wrong_value

if TYPE_CHECKING:
    from vllm_dflash_training.config import FromAnswers, RunConfig


def check(config: RunConfig) -> None:
    """Stop at the first value that is out of range.

    Raises:
        ValueError: There is one.
    """
    training, draft, loss = config.training, config.draft, config.loss
    limit = training.time_limit_s
    positive = {
        "draft.num_layers": 1 if draft.num_layers is None else draft.num_layers,
        "training.steps": training.steps,
        "training.sequences_per_batch": training.sequences_per_batch,
        "training.anchors_per_sequence": training.anchors_per_sequence,
        "training.accumulation": training.accumulation,
        "training.loss_chunk": training.loss_chunk,
        "training.learning_rate": training.learning_rate,
        "training.time_limit_s": 1 if limit is None else limit,
        "training.log_every": training.log_every,
        "training.evaluate_every": training.evaluate_every,
        "generation.shard_size": config.generation.shard_size,
        "generation.batch_size": config.generation.batch_size,
        "generation.engines": config.generation.engines,
        "generation.max_tokens": config.generation.max_tokens,
        "evaluation.budget": config.evaluation.budget,
        "loss.gamma": loss.gamma,
        "loss.top_k": loss.top_k,
        "loss.teacher_temperature": loss.teacher_temperature,
    }
    for name, value in positive.items():
        if value <= 0:
            raise wrong_value(name, value, "more than 0")
    for name, share in {
        "loss.smoothing": loss.smoothing,
        "loss.distill_share": loss.distill_share,
        "loss.reach_power": loss.reach_power,
        "training.warmup": training.warmup,
        "training.final_rate": training.final_rate,
        "training.ema_decay": training.ema_decay or 0.0,
    }.items():
        if not 0 <= share <= 1:
            raise wrong_value(name, share, "0 to 1")
    if not 1 <= config.evaluation.max_children <= 32:
        raise wrong_value(
            "evaluation.max_children", config.evaluation.max_children, "1 to 32"
        )
    if draft.init_from is None:
        if draft.block_size < 2:
            raise wrong_value("draft.block_size", draft.block_size, "2 or more")
        if draft.mask_token_id is None:
            raise wrong_value(
                "draft.mask_token_id", None, "the id of a token that no text holds"
            )
    if config.generation.backend == "transformers" and config.generation.engines > 1:
        raise wrong_value(
            "generation.engines",
            config.generation.engines,
            "1 with generation.backend: transformers",
        )
    if not config.generation.passes:
        raise wrong_value("generation.passes", [], "at least one pass")
    if config.generation.speculative is not None:
        _check_speculation(config)
    if config.prompts.from_answers is not None:
        _check_from_answers(config, config.prompts.from_answers)


def _check_from_answers(config: RunConfig, options: FromAnswers) -> None:
    place, shares = "prompts.from_answers", dataclasses.asdict(options.shares)
    if options.count < 1:
        raise wrong_value(f"{place}.count", options.count, "1 or more")
    for name, share in shares.items():
        if not share >= 0:
            raise wrong_value(f"{place}.shares.{name}", share, "0 or more")
    if not 0 < sum(shares.values()) < float("inf"):
        raise wrong_value(f"{place}.shares", shares, "at least one above 0")
    if Path(options.data_dir).resolve() == config.data_folder().resolve():
        raise wrong_value(
            f"{place}.data_dir",
            options.data_dir,
            "the data folder of an earlier run, not this run's own",
        )


def _check_speculation(config: RunConfig) -> None:
    generation, options = config.generation, config.generation.speculative
    assert options is not None
    place = "generation.speculative"
    if generation.backend != "vllm":
        raise wrong_value(place, options, f"false with backend: {generation.backend}")
    if options.model is None and config.draft.init_from is None:
        raise wrong_value(
            f"{place}.model",
            None,
            "the folder of a draft where draft.init_from names none",
        )
    if "speculative_config" in generation.engine_args:
        raise wrong_value(
            "generation.engine_args.speculative_config",
            generation.engine_args["speculative_config"],
            f"{place} in its place",
        )
    if not 1 <= options.nodes <= MAX_BUDGET:
        raise wrong_value(f"{place}.nodes", options.nodes, f"1 to {MAX_BUDGET}")
    if options.depth is not None and not 1 <= options.depth <= options.nodes:
        raise wrong_value(
            f"{place}.depth", options.depth, f"1 to {options.nodes} (nodes)"
        )
