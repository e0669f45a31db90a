# SPDX-License-Identifier: Apache-2.0
"""What the scheduler has put into each step, and whom it has preempted.

Of engines with trees: the plain one beside them is scheduled too, and says nothing.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm_dflash.config import get_ddtree_config


@dataclass
class ScheduledStep:
    """One step that ran."""

    # Tokens of each request, drafts included.
    num_tokens: dict[str, int]
    # Drafts of those that verify any.
    num_drafts: dict[str, int]

    @property
    def num_prefills(self) -> int:
        """Requests that run a part of their prompt, longer than a decode row."""
        return sum(
            n > 1 for name, n in self.num_tokens.items() if name not in self.num_drafts
        )

    @property
    def is_mixed(self) -> bool:
        return self.num_prefills > 0 and len(self.num_drafts) > 0


@dataclass
class ScheduleLog:
    """Install with ``log.install(monkeypatch)`` before an engine is made."""

    steps: list[ScheduledStep] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    def install(self, monkeypatch: Any) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        log = self
        schedule, preempt = Scheduler.schedule, Scheduler._preempt_request

        def spy_schedule(self, *args, **kwargs):
            output = schedule(self, *args, **kwargs)
            if output.num_scheduled_tokens and _has_trees(self):
                drafts = output.scheduled_spec_decode_tokens
                log.steps.append(
                    ScheduledStep(
                        dict(output.num_scheduled_tokens),
                        {name: len(tokens) for name, tokens in drafts.items()},
                    )
                )
            return output

        def spy_preempt(self, request, *args, **kwargs):
            if _has_trees(self):
                log.preempted.append(request.request_id)
            return preempt(self, request, *args, **kwargs)

        monkeypatch.setattr(Scheduler, "schedule", spy_schedule)
        monkeypatch.setattr(Scheduler, "_preempt_request", spy_preempt)

    def clear(self) -> None:
        self.steps.clear()
        self.preempted.clear()

    @property
    def preempted_requests(self) -> set[str]:
        """Names of requests as their outputs have them, samples left out."""
        # "<sample>_<request>-<random>", where there are several samples.
        return {name.rpartition("-")[0].split("_")[-1] for name in self.preempted}

    @property
    def num_pieces(self) -> dict[str, int]:
        """Steps in which a request ran a part of its prompt."""
        pieces: dict[str, int] = {}
        for step in self.steps:
            for name, count in step.num_tokens.items():
                if count > 1 and name not in step.num_drafts:
                    pieces[name] = pieces.get(name, 0) + 1
        return pieces


def _has_trees(scheduler: Any) -> bool:
    return get_ddtree_config(scheduler.vllm_config) is not None
