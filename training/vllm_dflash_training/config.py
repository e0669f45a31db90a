# SPDX-License-Identifier: Apache-2.0
"""A training run as a YAML file: sections, defaults, checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from vllm_dflash.errors import option_error
from vllm_dflash_training.config_checks import check
from vllm_dflash_training.config_values import parse, set_word

EMBEDDED = "embedded"


@dataclass(frozen=True)
class DraftOptions:
    """What the draft is. With `init_from` its config is kept, all but the layers.

    Attributes:
        init_from: Folder of a draft to go on from, "embedded", or null for new weights.
        num_layers: Decoder layers; null: those of `init_from`, or 5 of a new draft.
            With more than `init_from` has the draft is grown: the rest begin as layers
            that add nothing.
        block_size: Anchor and mask tokens of a block; the depth is one less.
        mask_token_id: A token that no text holds. Needed for a new draft.
        target_layer_ids: Layers whose outputs are the context, counted from 0; null
            spreads `num_features` of them from the second to the third-last.
        num_features: Number of layers when `target_layer_ids` is null.
    """

    init_from: str | None = None
    num_layers: int | None = None
    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_features: int = 5


@dataclass(frozen=True)
class SelfPrompts:
    """Prompts that the target writes itself, after the opening of a user's turn."""

    count: int = 0
    temperature: float = 0.9
    min_p: float = 0.04
    max_tokens: int = 128


@dataclass(frozen=True)
class AnswerShares:
    """How often each kind of prompt is made of an earlier answer; in any unit.

    Attributes:
        text_task: A text, and something to do with it.
        code_task: Code, and something to do with it.
        second_turn: The earlier prompt, its answer, and what a user says next.
    """

    text_task: float = 0.5
    code_task: float = 0.15
    second_turn: float = 0.35


@dataclass(frozen=True)
class FromAnswers:
    """Prompts made of what the target has answered in an earlier run.

    Attributes:
        data_dir: Data folder of that run, of the same target.
        count: Number of prompts.
    """

    data_dir: str
    count: int
    shares: AnswerShares = AnswerShares()


@dataclass(frozen=True)
class PromptOptions:
    """Where prompts come from.

    Attributes:
        synthetic: Number of prompts of the seeded generator.
        files: JSONL files of {"messages": [...]} rows, relative to the repository.
        from_answers: Prompts made of earlier answers; null for none.
        heldout: JSONL file of prompts that must not be trained on.
        max_tokens: Longer prompts are left out.
    """

    synthetic: int = 0
    files: list[str] = field(default_factory=list)
    self_generated: SelfPrompts = SelfPrompts()
    from_answers: FromAnswers | None = None
    heldout: str = "evals/prompts/heldout.jsonl"
    max_tokens: int = 440


@dataclass(frozen=True)
class Pass:
    """One answer to a share of the prompts."""

    temperature: float = 0.0
    share: float = 1.0


@dataclass(frozen=True)
class SpeculativeOptions:
    """A draft that answers are made with: faster, and the same answers.

    Attributes:
        model: Folder of a draft for the target, or "embedded"; null: `draft.init_from`.
        nodes: Of a tree, root excluded. A request has a row more in each step.
        depth: Tokens that a block drafts; null: as many as the draft and `nodes` allow.
    """

    model: str | None = None
    nodes: int = 15
    depth: int | None = None


@dataclass(frozen=True)
class GenerationOptions:
    """How the target answers.

    Attributes:
        backend: vLLM's offline engine, or `generate` of transformers.
        batch_size: Requests at once: `max_num_seqs` of an engine, or rows of a padded
            batch.
        shard_size: Prompts of a file. The last answers of a file are no pause: the
            engine has begun with the next one.
        time_limit_s: No shard is begun later than this after the start.
        engines: Engines side by side on the same GPU, each with its own process and its
            own shards. What they write doesn't depend on how many there are.
        gpu_memory_utilization: Of all engines together.
        speculative: Answer with a draft and this project's plugin; true for the
            defaults, null or false for none. vLLM's backend only.
        engine_args: More arguments of `vllm.LLM`, as `tensor_parallel_size`; they win,
            and are those of each engine.
    """

    backend: Literal["vllm", "transformers"] = "vllm"
    passes: list[Pass] = field(default_factory=lambda: [Pass()])
    max_tokens: int = 320
    min_p: float = 0.0
    batch_size: int = 1024
    shard_size: int = 4096
    time_limit_s: float | None = None
    engines: int = 1
    gpu_memory_utilization: float = 0.6
    speculative: SpeculativeOptions | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOptions:
    """Which loss; see `losses.py`.

    Attributes:
        kind: ce; ce_decay: weights exp(-(k - 1) / gamma) by depth k; ce_reach: weights
            by how likely the depths before k are right; ce_smooth: decay and label
            smoothing; distill: decay, and forward KL from the target's `top_k` most
            likely tokens for the share `distill_share` of the loss.
        reach_power: Of the probabilities in `ce_reach`: 0 counts all depths alike.
    """

    kind: Literal["ce", "ce_decay", "ce_reach", "ce_smooth", "distill"] = "ce_decay"
    gamma: float = 7.0
    reach_power: float = 0.2
    smoothing: float = 0.05
    distill_share: float = 0.5
    top_k: int = 16
    teacher_temperature: float = 1.0


@dataclass(frozen=True)
class TrainingOptions:
    """How the draft is trained.

    Attributes:
        steps: Optimizer steps; the learning rate ends with them.
        time_limit_s: Seconds of training after which it ends, learning rate included.
            With it two runs are equal only if they are equally fast.
        sequences_per_batch: Sequences of one micro-batch on one GPU.
        anchors_per_sequence: Blocks drawn from a sequence.
        accumulation: Micro-batches of a step on each GPU.
        ema_decay: Exponential average of the weights, exported instead of them.
    """

    steps: int = 1000
    time_limit_s: float | None = None
    max_length: int = 768
    sequences_per_batch: int = 64
    anchors_per_sequence: int = 64
    accumulation: int = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    warmup: float = 0.04
    final_rate: float = 0.01
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    ema_decay: float | None = None
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    attention: Literal["auto", "flex", "sdpa"] = "auto"
    compile: bool | None = None
    loss_chunk: int = 8192
    log_every: int = 20
    probe_blocks: int = 64
    evaluate_every: int = 500
    save_every_s: float = 60.0


@dataclass(frozen=True)
class EvaluationOptions:
    """Held-out acceptance, during training and with the engine at the end.

    Attributes:
        budget: Nodes of the trees of the proxies.
        engine_budgets: Budgets served by the engine; empty: no engine.
        limit: Number of held-out prompts, kinds in turn; null: all.
    """

    max_tokens: int = 128
    limit: int | None = None
    budget: int = 47
    max_children: int = 8
    engine_budgets: list[int] = field(default_factory=lambda: [48])
    engine_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"


@dataclass(frozen=True)
class RunConfig:
    """Everything of a run.

    Attributes:
        work_dir: Where everything of the run is written.
        data_dir: Where prompts and responses are; null: `work_dir/data`. Runs that are
            compared share one.
        more_data: Data folders of earlier runs for the target, trained on too.
        target: Folder or hub name, or "embedded".
    """

    work_dir: str
    data_dir: str | None = None
    more_data: list[str] = field(default_factory=list)
    target: str = EMBEDDED
    target_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0
    draft: DraftOptions = DraftOptions()
    prompts: PromptOptions = PromptOptions()
    generation: GenerationOptions = GenerationOptions()
    training: TrainingOptions = TrainingOptions()
    loss: LossOptions = LossOptions()
    evaluation: EvaluationOptions = EvaluationOptions()

    def folder(self, name: str = "") -> Path:
        """Return a folder of the run."""
        return Path(self.work_dir) / name

    def data_folder(self) -> Path:
        """Return the folder of prompts and responses."""
        return Path(self.data_dir) if self.data_dir else self.folder("data")


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run from YAML.

    Args:
        path: Of the file.
        overrides: `section.key=value` with a YAML value, applied last.

    Raises:
        ValueError: The file or a value is not what a run consists of.
    """
    try:
        words = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise option_error(
            f"the config {path} can't be read ({error})",
            "A YAML file of a training run is allowed",
            "--config training/configs/embedded.yaml",
        ) from error
    if not isinstance(words, dict):
        words = {}
    for override in overrides or []:
        key, equals, text = override.partition("=")
        if not equals:
            raise option_error(
                f"an override must name a key and a value (got {override!r})",
                "section.key=value is allowed",
                "--set training.steps=100",
            )
        set_word(words, key.split("."), yaml.safe_load(text))
    config = parse(RunConfig, words, "")
    check(config)
    return config
