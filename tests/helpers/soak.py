# SPDX-License-Identifier: Apache-2.0
"""A soak: many random requests against one engine with trees and a small KV cache.

Every answer is compared with that of an engine without speculation, which has room for
everything: tokens, text, finish and stop reason, logprobs. What a client got before it
left must be the beginning of that answer. At the end all KV blocks must be free again.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engines import acceptance_counts
from graph_replays import GraphReplays
from near_ties import Departure
from rigged_draft import RiggedDraft
from soak_requests import SoakRequest
from stepper import drain, num_free_blocks, phases_of, scheduler

LOGPROB_TOLERANCE = 2e-3


@dataclass
class Answer:
    """One sample of a request, as far as it has come."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, output: Any, is_delta: bool) -> None:
        """Add a part, or replace everything by a longer beginning."""
        tokens = list(output.token_ids)
        logprobs = [
            entry[token].logprob
            for token, entry in zip(tokens, output.logprobs or (), strict=False)
        ]
        if is_delta:
            self.tokens += tokens
            self.text += output.text
            self.logprobs += logprobs
        else:
            self.tokens, self.text, self.logprobs = tokens, output.text, logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason

    def departure(self, right: "Answer") -> int | None:
        """Position of the first token that is another one."""
        pairs = zip(self.tokens, right.tokens, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), None)

    def difference(self, right: "Answer", is_finished: bool) -> str | None:
        """What is wrong with this answer, or None."""
        shared = len(self.tokens)
        if self.tokens != right.tokens[:shared]:
            place = self.departure(right)
            where = "the end" if place is None else place
            return f"another token at {where} of {len(right.tokens)}"
        if not right.text.startswith(self.text):
            return f"text {self.text!r}, not {right.text!r}"
        if any(
            abs(a - b) > LOGPROB_TOLERANCE * max(1, abs(b))
            for a, b in zip(self.logprobs, right.logprobs, strict=False)
        ):
            return f"logprobs {self.logprobs}, not {right.logprobs}"
        if not is_finished:
            return None
        for name in ("tokens", "text", "finish_reason", "stop_reason"):
            ours, theirs = getattr(self, name), getattr(right, name)
            if ours != theirs:
                return f"{name} {ours!r}, not {theirs!r}"
        if len(self.logprobs) != len(right.logprobs):
            return f"{len(self.logprobs)} logprobs, not {len(right.logprobs)}"
        return None


@dataclass
class SoakResult:
    """What a soak has seen."""

    graphs: GraphReplays
    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    mean_acceptance_length: float = 0.0
    num_branching_paths: int = 0
    leaked_blocks: int = 0
    # Phase of the request when its client left -> how often.
    aborts: Counter = field(default_factory=Counter)
    finish_reasons: Counter = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)

    def __str__(self) -> str:
        phases = ", ".join(f"{n} {phase}" for phase, n in sorted(self.aborts.items()))
        return (
            f"{self.num_requests} requests, {self.num_steps} steps, "
            f"{self.num_tokens} tokens, {self.num_preemptions} preemptions, "
            f"{self.aborts.total()} aborts ({phases or 'none'}), "
            f"{self.num_cached_tokens} prompt tokens from the prefix cache, "
            f"acceptance length {self.mean_acceptance_length:.2f}, "
            f"{self.num_branching_paths} paths off the first branch, "
            f"{len(self.differences)} differences, {self.leaked_blocks} leaked blocks"
        )


def right_answers(llm: Any, requests: list[SoakRequest]) -> list[list[Answer]]:
    """Answers of an engine without speculation: samples of each request, in order."""
    outputs = llm.generate(
        [{"prompt_token_ids": request.prompt} for request in requests],
        [request.params("final") for request in requests],
        use_tqdm=False,
    )
    answers = []
    for output in outputs:
        samples = [Answer() for _ in output.outputs]
        for sample, completion in zip(samples, output.outputs, strict=True):
            sample.take(completion, is_delta=False)
        answers.append(samples)
    return answers


class Soak:
    """Sends the requests step by step, as clients would, and checks what comes back."""

    def __init__(
        self,
        llm: Any,
        requests: list[SoakRequest],
        right: list[list[Answer]],
        rig: RiggedDraft,
        report: Callable[[str], None] = lambda line: None,
    ):
        self.engine = llm.llm_engine
        self.llm = llm
        self.pending = list(reversed(requests))
        self.right = {r.name: a for r, a in zip(requests, right, strict=True)}
        self.running: dict[str, SoakRequest] = {}
        self.answers: dict[str, list[Answer]] = {}
        self.steps_in_phase: Counter = Counter()
        self.internal_ids: dict[str, str] = {}
        self.rig = rig
        self.report = report
        self.result = SoakResult(graphs=GraphReplays(llm))

    def run(self) -> SoakResult:
        assert self.llm.reset_prefix_cache()
        free_blocks = num_free_blocks(self.llm)
        now = 0
        while self.pending or self.engine.has_unfinished_requests():
            if not self.engine.has_unfinished_requests():
                now = max(now, self.pending[-1].arrival)
            while self.pending and self.pending[-1].arrival <= now:
                self._send(self.pending.pop())
            for request in list(self.running.values()):
                self._leave_if_due(request)
            if self.engine.has_unfinished_requests():
                self._step()
            now += 1
        drain(self.llm)
        self.result.leaked_blocks = free_blocks - num_free_blocks(self.llm)
        if not self.llm.reset_prefix_cache():
            self.result.differences.append("blocks are in use with no request left")
        forgotten = sorted(scheduler(self.llm).requests)
        if forgotten:
            self.result.differences.append(f"the scheduler still knows {forgotten}")
        self._count()
        return self.result

    def _send(self, request: SoakRequest) -> None:
        self.running[request.name] = request
        self.answers[request.name] = [Answer() for _ in self.right[request.name]]
        self.internal_ids[request.name] = self.engine.add_request(
            request.name, {"prompt_token_ids": request.prompt}, request.params()
        )
        if request.options.get("regex"):
            self._await_grammars()

    def _await_grammars(self) -> None:
        """Grammars are compiled in a thread; who waits gets the steps of the seed."""
        for state in scheduler(self.llm).requests.values():
            grammar = state.structured_output_request
            while grammar is not None and not grammar.is_grammar_ready:
                time.sleep(1e-3)

    def _step(self) -> None:
        self.result.num_steps += 1
        for output in self.engine.step():
            name = output.request_id
            request = self.running[name]
            for completion in output.outputs:
                answer = self.answers[name][completion.index]
                answer.take(completion, request.stream == "delta")
            if output.finished:
                self.result.num_cached_tokens += output.num_cached_tokens or 0
                self._close(request, is_finished=True)

    def _leave_if_due(self, request: SoakRequest) -> None:
        phases = phases_of(self.llm, self.internal_ids[request.name])
        if request.leaves_when not in phases:
            return
        self.steps_in_phase[request.name] += 1
        if self.steps_in_phase[request.name] <= request.leaves_after:
            return
        self.engine.abort_request([request.name])
        self.result.aborts[request.leaves_when] += 1
        self._close(request, is_finished=False)

    def _close(self, request: SoakRequest, is_finished: bool) -> None:
        """Compare what the client has got; a line every hundred requests."""
        del self.running[request.name]
        result = self.result
        result.num_requests += 1
        pairs = zip(self.answers[request.name], self.right[request.name], strict=True)
        for index, (ours, theirs) in enumerate(pairs):
            result.num_tokens += len(ours.tokens)
            if is_finished:
                result.finish_reasons[ours.finish_reason] += 1
            difference = ours.difference(theirs, is_finished)
            if difference is not None:
                result.differences.append(
                    f"{request.name}, sample {index}: {difference}; {request.options}"
                )
                self.report(f"DIFFERENCE {result.differences[-1]}")
                place = ours.departure(theirs)
                if place is not None:
                    result.departures.append(
                        Departure(
                            request.name,
                            index,
                            ours.tokens[:place],
                            right=theirs.tokens[place],
                            said=ours.tokens[place],
                        )
                    )
        if result.num_requests % 100 == 0:
            self._count()
            self.report(str(result))

    def _count(self) -> None:
        metrics = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        self.result.num_preemptions = metrics["vllm:num_preemptions"]
        steps, accepted = acceptance_counts(self.llm)
        self.result.mean_acceptance_length = 1 + accepted / max(1, steps)
        self.result.num_branching_paths = self.rig.num_branching_paths


def rig_to(
    rig: RiggedDraft, requests: list[SoakRequest], right: list[list[Answer]]
) -> None:
    """Let the draft know what is going to be said."""
    for request, answers in zip(requests, right, strict=True):
        for answer in answers:
            rig.add_reference(request.prompt, answer.tokens)
