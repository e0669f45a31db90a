# SPDX-License-Identifier: Apache-2.0
"""Requests that join, end and are aborted between two steps of an engine."""

from typing import Any

from engines import model_runner


class Stepper:
    """Requests of an engine that the test steps by itself."""

    def __init__(self, llm: Any):
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

    def slot(self, name: str) -> int:
        return self.states.req_id_to_index[self._internal_ids[name]]

    def committed(self, name: str) -> list[int]:
        """The tokens whose KV the engine counts as computed."""
        slot = self.slot(name)
        num_computed = int(self.states.num_computed_tokens.gpu[slot])
        return self.states.all_token_ids.gpu[slot, :num_computed].tolist()
