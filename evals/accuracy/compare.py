# SPDX-License-Identifier: Apache-2.0
"""Compares the responses and scores of an engine with the baseline's, item by item."""

from statistics import mean
from typing import Any

from accuracy.config import BASELINE, EvalConfig

Result = dict[str, Any]
# Two means of the same scores, added in another order.
_ROUNDING = 1e-9


def compare_items(
    ours: list[dict[str, Any]], baseline: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return how the items of one task differ between two engines.

    Text must be equal. What is no text (log-probabilities of given answers) differs by
    rounding between any two batches, so there only scores count.
    """
    theirs = {_key(item): item for item in baseline}
    if {_key(item) for item in ours} != set(theirs):
        raise RuntimeError("the engines were asked different items")
    different, changed_scores = [], []
    num_texts = 0
    for item in ours:
        expected = theirs[_key(item)]
        if _is_text(expected["responses"]):
            num_texts += 1
            if item["responses"] != expected["responses"]:
                different.append(_describe(item, expected))
        if item["scores"] != expected["scores"]:
            changed_scores.append(
                {
                    "id": item["id"],
                    "scores": item["scores"],
                    "baseline": expected["scores"],
                }
            )
    return {
        "num_items": len(ours),
        "num_texts": num_texts,
        "different_responses": different,
        "different_scores": changed_scores,
    }


def mean_scores(items: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each numeric metric over the items, filters apart."""
    values: dict[str, list[float]] = {}
    for item in items:
        for metric, value in item["scores"].items():
            if isinstance(value, bool | int | float):
                values.setdefault(f"{metric},{item['filter']}", []).append(value)
    return {metric: mean(scores) for metric, scores in values.items()}


def means(results: dict[str, Result]) -> dict[str, dict[str, Any]]:
    """Return the figures of each engine: ``tokens_per_step``, and ``scores`` by task.

    lm-eval's name for no filter is left out of the names of metrics.
    """
    return {
        engine: {
            "tokens_per_step": result["acceptance_length"],
            "scores": {
                task: {
                    metric.removesuffix(",none"): value
                    for metric, value in mean_scores(items).items()
                }
                for task, items in result["items"].items()
            },
        }
        for engine, result in results.items()
    }


def check(config: EvalConfig, results: dict[str, Result]) -> dict[str, Any]:
    """Compare all engines with the baseline.

    Returns:
        ``engines`` (what differs by engine and task) and ``failures`` (one line for
        each condition of the configuration that does not hold).
    """
    failures: list[str] = []
    engines: dict[str, Any] = {}
    baseline = results[BASELINE]["items"]
    for name, result in results.items():
        for task, items in result["items"].items():
            failures += _check_floors(config, name, task, mean_scores(items))
            if name == BASELINE:
                continue
            row = compare_items(items, baseline[task])
            engines.setdefault(name, {})[task] = row
            where = f"{name}, {task}"
            if config.responses == "equal":
                failures += [
                    f"{where}, item {item['id']}: the response differs at character "
                    f"{item['position']}"
                    for item in row["different_responses"]
                ]
                failures += [
                    f"{where}, item {item['id']}: scores {item['scores']} instead of "
                    f"{item['baseline']}"
                    for item in row["different_scores"]
                ]
            failures += _check_means(
                config, where, task, mean_scores(items), mean_scores(baseline[task])
            )
    return {"engines": engines, "failures": failures}


def _check_means(
    config: EvalConfig,
    where: str,
    task: str,
    ours: dict[str, float],
    baseline: dict[str, float],
) -> list[str]:
    allowed = config.allowed_difference(task)
    return [
        f"{where}: mean {metric} is {value:.4f}, the baseline's is "
        f"{baseline[metric]:.4f}; {allowed} may lie between them"
        for metric, value in ours.items()
        if abs(value - baseline[metric]) > allowed + _ROUNDING
    ]


def _check_floors(
    config: EvalConfig, engine: str, task: str, scores: dict[str, float]
) -> list[str]:
    failures = []
    for metric, floor in config.min_scores.get(task, {}).items():
        found = [
            value
            for name, value in scores.items()
            if name == metric or name.partition(",")[0] == metric
        ]
        if not found:
            failures.append(f"{engine}, {task}: no metric {metric}; has {list(scores)}")
        elif min(found) < floor:
            failures.append(
                f"{engine}, {task}: mean {metric} is {min(found):.4f}, at least "
                f"{floor} is asked for"
            )
    return failures


def format_table(results: dict[str, Result], comparison: dict[str, Any]) -> str:
    """Return scores, differing items and acceptance lengths as a Markdown table."""
    lines = [
        "| engine | task | scores | items | responses that differ | scores that differ "
        "| tokens per step |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    found = means(results)
    for name, result in results.items():
        for task, items in result["items"].items():
            scores = ", ".join(
                f"{metric} {value:.3f}"
                for metric, value in found[name]["scores"][task].items()
            )
            row = comparison["engines"].get(name, {}).get(task)
            counts = ["-", "-"]
            if row is not None:
                counts = [
                    str(len(row["different_responses"])) if row["num_texts"] else "-",
                    str(len(row["different_scores"])),
                ]
            length = result["acceptance_length"]
            lines.append(
                f"| {name} | {task} | {scores} | {len(items)} | {' | '.join(counts)} | "
                f"{'-' if length is None else format(length, '.2f')} |"
            )
    return "\n".join(lines)


def _key(item: dict[str, Any]) -> tuple[Any, str, Any]:
    return item["id"], item["filter"], item["prompt_hash"]


def _is_text(responses: Any) -> bool:
    if isinstance(responses, list):
        return bool(responses) and all(map(_is_text, responses))
    return isinstance(responses, str)


def _describe(item: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = _flatten(item["responses"]), _flatten(expected["responses"])
    pairs = zip(ours, theirs, strict=False)
    unequal = (index for index, (a, b) in enumerate(pairs) if a != b)
    position = next(unequal, min(len(ours), len(theirs)))
    return {
        "id": item["id"],
        "position": position,
        "response": ours,
        "baseline": theirs,
    }


def _flatten(responses: Any) -> str:
    if isinstance(responses, str):
        return responses
    return "\n".join(map(_flatten, responses))
