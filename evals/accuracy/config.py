# SPDX-License-Identifier: Apache-2.0
"""The YAML configuration of an accuracy run."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm_dflash.errors import option_error

BASELINE = "ar"
EMBEDDED = "embedded"
OFFLINE_BACKEND = "vllm"
SERVER_BACKENDS = ("local-completions", "local-chat-completions")
BACKENDS = (OFFLINE_BACKEND, *SERVER_BACKENDS)
RESPONSE_RULES = ("equal", "report")


@dataclass
class EvalConfig:
    """What to evaluate, and what must hold.

    Attributes:
        model: Target: a path, a name on a model hub, or ``embedded``.
        draft: Its DFlash draft, likewise.
        tasks: Names of lm-eval tasks, or of the local ones (``local_...``).
        engines: ``speculative_config`` by name, without the draft. The engine ``ar``
            has none and is what the others are compared with.
        backend: ``vllm`` (in the same process), or how to ask a server that is
            started for it: ``local-completions`` or ``local-chat-completions``.
        dtype: The target's type, as vLLM takes it.
        limit: Items per task; all if absent.
        num_fewshot: Examples in the prompt; the task's own number if absent.
        apply_chat_template: Whether prompts are chats.
        max_new_tokens: Upper limit of a response; the task's own if absent.
        engine_args: Arguments of ``vllm.LLM``, which become flags of ``vllm serve``.
        model_args: More arguments of lm-eval's model class, as ``enable_thinking``.
        num_concurrent: Requests at once to a server.
        offline: Whether look-ups on a hub are switched off.
        responses: ``equal`` (each response must be the baseline's) or ``report``.
        max_mean_difference: By how much the mean of a metric may leave the
            baseline's: a number, or a number by task with ``default``.
        min_scores: Lowest mean that any engine may have: task -> metric -> number.
    """

    model: str
    draft: str
    tasks: list[str]
    engines: dict[str, dict[str, Any] | None]
    backend: str = OFFLINE_BACKEND
    dtype: str = "bfloat16"
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = True
    max_new_tokens: int | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    model_args: dict[str, Any] = field(default_factory=dict)
    num_concurrent: int = 4
    offline: bool = False
    responses: str = "report"
    max_mean_difference: float | dict[str, float] = 0.0
    min_scores: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _choose("backend", self.backend, BACKENDS)
        _choose("responses", self.responses, RESPONSE_RULES)
        if not self.tasks:
            raise option_error(
                "'tasks' is empty", "At least one task is needed", "tasks: [gsm8k]"
            )
        if self.engines.get(BASELINE, {}) is not None:
            raise option_error(
                f"'engines' has no '{BASELINE}' without speculation",
                "The other engines are compared with it",
                f"engines: {{{BASELINE}: null, ...}}",
            )
        if unknown := sorted(set(self.min_scores) - set(self.tasks)):
            raise option_error(
                f"'min_scores' names tasks that are not evaluated: {unknown}",
                f"Allowed are those of 'tasks': {self.tasks}",
                "one of these, or drop the key",
            )

    def allowed_difference(self, task: str) -> float:
        """Return by how much the mean of a metric of ``task`` may differ."""
        if isinstance(self.max_mean_difference, dict):
            default = self.max_mean_difference.get("default", 0.0)
            return self.max_mean_difference.get(task, default)
        return self.max_mean_difference


def load(path: Path, overrides: dict[str, Any]) -> EvalConfig:
    """Read a configuration; values of ``overrides`` that are not None win.

    Raises:
        ValueError: a key is unknown or missing, or a value is not allowed.
    """
    import yaml

    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values |= {key: value for key, value in overrides.items() if value is not None}
    known = {item.name: item for item in fields(EvalConfig)}
    if unknown := sorted(set(values) - set(known)):
        raise option_error(
            f"{path} has unknown keys: {unknown}",
            f"Allowed are {sorted(known)}",
            "one of these",
        )
    required = ("model", "draft", "tasks", "engines")
    if missing := [name for name in required if name not in values]:
        raise option_error(
            f"{path} lacks {missing}", f"Needed are {list(required)}", "these keys"
        )
    return EvalConfig(**values)


def select_engines(config: EvalConfig, names: list[str] | None) -> None:
    """Keep the named engines and the baseline."""
    if names is None:
        return
    for name in names:
        _choose("--engines", name, tuple(config.engines))
    kept = [name for name in config.engines if name in {BASELINE, *names}]
    config.engines = {name: config.engines[name] for name in kept}


def _choose(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise option_error(
            f"'{key}' is {value!r}",
            f"Allowed are {list(allowed)}",
            f"{key} {allowed[0]}",
        )
