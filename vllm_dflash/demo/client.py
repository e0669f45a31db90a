# SPDX-License-Identifier: Apache-2.0
"""The few requests the demo makes of an OpenAI-compatible vLLM server."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

Message = dict[str, str]

REQUEST_TIMEOUT_S = 600
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{[^}]*\})?\s+(?P<value>\S+)$")


class RequestError(RuntimeError):
    """The server did not answer, or answered with an error."""


@dataclass(frozen=True)
class Completion:
    """One finished answer at temperature 0."""

    text: str
    token_ids: list[int]


class Client:
    """Requests to one server; uses the standard library only."""

    def __init__(self, base_url: str, model: str) -> None:
        self.base_url = base_url
        self._model = model
        # Never through a proxy: the server is on this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def check_health(self) -> None:
        """Return if the server is ready.

        Raises:
            RequestError: it is not.
        """
        with self._open("/health", timeout_s=5):
            pass

    def complete(self, messages: list[Message], max_tokens: int) -> Completion:
        """Return the greedy answer to a chat, with its token ids."""
        payload = self._payload(messages, max_tokens)
        with self._open("/v1/chat/completions", payload) as response:
            choice = json.load(response)["choices"][0]
        return Completion(choice["message"]["content"] or "", choice["token_ids"])

    def stream(self, messages: list[Message], max_tokens: int) -> Iterator[str]:
        """Yield the greedy answer to a chat piece by piece."""
        payload = {**self._payload(messages, max_tokens), "stream": True}
        with self._open("/v1/chat/completions", payload) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RequestError(f"the server answered {event['error']}")
                for choice in event.get("choices", ()):
                    yield choice["delta"].get("content") or ""

    def counters(self) -> dict[str, float]:
        """Return every metric of the server, summed over its labels."""
        with self._open("/metrics") as response:
            return parse_counters(response.read().decode())

    def _payload(self, messages: list[Message], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }

    @contextmanager
    def _open(
        self,
        path: str,
        payload: dict[str, Any] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Iterator[HTTPResponse]:
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(
            self.base_url + path, body, {"Content-Type": "application/json"}
        )
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise RequestError(f"{path} answered {error.code}: {detail}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise RequestError(f"{path} did not answer: {error}") from error


def parse_counters(text: str) -> dict[str, float]:
    """Return metric name -> value of Prometheus' text format, summed over labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None:
            name = match["name"]
            totals[name] = totals.get(name, 0.0) + float(match["value"])
    return totals
