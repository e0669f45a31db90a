# SPDX-License-Identifier: Apache-2.0
"""Requests that join, end and are aborted between two steps of an engine."""

from typing import Any

from engines import model_runner

# Where a request can be between two steps.
WAITING, PREFILLING, DECODING, PREEMPTED = PHASES = (
    "waiting",
    "prefilling",
    "decoding",
    "preempted",
)


def scheduler(llm: Any) -> Any:
    """The scheduler of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def num_free_blocks(llm: Any) -> int:
    """KV blocks that no request uses; some may be remembered by the prefix cache."""
    return scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def drain(llm: Any) -> None:
    """End what an engine that schedules ahead has under way after its last request."""
    for _ in range(2):
        llm.llm_engine.step()


def phases_of(llm: Any, internal_id: str) -> set[str]:
    """Phases of the samples of a request; none if the engine has forgotten it."""
    from vllm.v1.request import RequestStatus

    phases = set()
    for request_id, request in scheduler(llm).requests.items():
        # Samples of one request are numbered in front.
        if request_id != internal_id and not request_id.endswith(f"_{internal_id}"):
            continue
        if request.status == RequestStatus.PREEMPTED:
            phases.add(PREEMPTED)
        elif request.status != RequestStatus.RUNNING:
            phases.add(WAITING)
        elif request.num_computed_tokens < request.num_prompt_tokens - 1:
            phases.add(PREFILLING)
        else:
            phases.add(DECODING)
    return phases


class Stepper:
    """Requests of an engine that the test steps by itself."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.engine = llm.llm_engine
        self.states = model_runner(llm).req_states
        self.tokens: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self._internal_ids: dict[str, str] = {}

    def add(self, name: str, prompt: list[int], options: Any) -> None:
        self._internal_ids[name] = self.engine.add_request(
            name, {"prompt_token_ids": prompt}, options
        )

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.finished.add(output.request_id)

    def run(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def phases(self, name: str) -> set[str]:
        return phases_of(self.llm, self._internal_ids[name])

    def slot(self, name: str) -> int:
        return self.states.req_id_to_index[self._internal_ids[name]]

    def committed(self, name: str) -> list[int]:
        """The tokens whose KV the engine counts as computed."""
        slot = self.slot(name)
        num_computed = int(self.states.num_computed_tokens.gpu[slot])
        return self.states.all_token_ids.gpu[slot, :num_computed].tolist()
