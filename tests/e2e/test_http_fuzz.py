# SPDX-License-Identifier: Apache-2.0
"""Arbitrary requests to a server with trees, drawn from its own OpenAPI document.

A status of 500 is vLLM's to explain: the same request gets one from vLLM without the
plugin as well, or the test fails. Nothing hangs, and afterwards the server answers as
before.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from tiny_server import SERVED_NAME, completion, post, tiny_server, write_pair

_NEEDS = "needs the extra test: bash scripts/setup.sh eval bench test"
requests = pytest.importorskip("requests", reason=_NEEDS)
schemathesis = pytest.importorskip("schemathesis", reason=_NEEDS)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TIMEOUT_S = 60
SEED = 7
# Each at random from the document, and again with something wrong in it.
OPERATIONS = {
    ("POST", "/v1/completions"): 250,
    ("POST", "/v1/chat/completions"): 250,
    ("POST", "/tokenize"): 50,
    ("POST", "/detokenize"): 50,
    ("GET", "/health"): 3,
}
# Of an event in a stream whose status was sent before it went wrong.
_SERVER_ERROR = re.compile(rb'"code":\s*5\d\d')
_LIMITS = {"max_tokens": 8, "max_completion_tokens": 8, "min_tokens": 8, "n": 3}


# Nothing is generated without one, and a document calls it optional.
_PROMPTS = {
    "/v1/completions": (
        "prompt",
        ["hello", [20, 30, 40], ["a", "b"], [[7, 8], [9]]],
    ),
    "/v1/chat/completions": (
        "messages",
        [
            [{"role": "user", "content": "hello"}],
            [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            ],
        ],
    ),
}


@dataclass
class Outcome:
    """One request and what came back."""

    request: dict[str, Any]
    status: int
    text: str

    @property
    def path(self) -> str:
        return self.request["path"]

    @property
    def is_server_error(self) -> bool:
        return self.status >= 500


def tame(path: str, body: Any, rng: random.Random) -> Any:
    """Keep the work of a request small, and most requests past the first checks."""
    if not isinstance(body, dict):
        return body
    if rng.random() < 0.7:
        # Among thirty options one is always refused: leave a few.
        kept = {
            "messages",
            "prompt",
            "tokens",
            *rng.sample(sorted(body), len(body) // 5),
        }
        body = {name: value for name, value in body.items() if name in kept}
    for name, limit in _LIMITS.items():
        value = body.get(name)
        if type(value) is int and value > limit:
            body[name] = limit
    if body.get("max_tokens") is None:
        # Without a limit an answer is as long as the model's length.
        body["max_tokens"] = 4
    if rng.random() < 0.9:
        body["model"] = SERVED_NAME
    if path in _PROMPTS and rng.random() < 0.8:
        name, prompts = _PROMPTS[path]
        body[name] = rng.choice(prompts)
    return body


def send(base_url: str, request: dict[str, Any]) -> Outcome:
    arguments = {key: value for key, value in request.items() if key != "path"}
    with requests.Session() as session:
        session.trust_env = False
        response = session.request(
            url=f"{base_url}{request['path']}", timeout=TIMEOUT_S, **arguments
        )
    status = response.status_code
    if status < 500 and _SERVER_ERROR.search(response.content):
        status = 500
    return Outcome(request, status, response.text[:300])


def fuzz(base_url: str) -> list[Outcome]:
    """Send everything; raises what requests raises if the server hangs or goes away."""
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    outcomes: list[Outcome] = []
    for (method, path), count in OPERATIONS.items():
        operation = schema[path][method]
        for mode in schemathesis.GenerationMode:
            # Nothing about a request without parameters can be wrong.
            if method == "POST" or mode is schemathesis.GenerationMode.POSITIVE:
                outcomes += fuzz_operation(base_url, path, operation, mode, count)
    return outcomes


def fuzz_operation(
    base_url: str, path: str, operation: Any, mode: Any, count: int
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    rng = random.Random(SEED)

    @seed(SEED)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send_case(case: Any) -> None:
        case.body = tame(path, case.body, rng)
        arguments = case.as_transport_kwargs(base_url=base_url)
        arguments.pop("url")
        outcomes.append(send(base_url, {"path": path, **arguments}))

    send_case()
    return outcomes


def answers(server: Any) -> list[Any]:
    """Tokens of plain requests, which must not change."""
    bodies = [
        completion(24),
        completion(24, temperature=0.8, seed=5, min_p=0.05),
        completion(8, prompt="hello there", presence_penalty=0.5),
    ]
    results = []
    for body in bodies:
        status, answer = post(server, "/v1/completions", body)
        assert status == 200, answer
        results.append(answer["choices"][0]["token_ids"])
    return results


def test_no_request_breaks_a_server_with_trees(tmp_path, capsys):
    pair = write_pair(tmp_path)
    with tiny_server(pair, tmp_path, ddtree={"budget": 16}) as server:
        before = answers(server)
        drafts = server.client.counters()["vllm:spec_decode_num_drafts_total"]
        assert drafts > 0
        outcomes = fuzz(server.client.base_url)
        assert answers(server) == before
    errors = [outcome for outcome in outcomes if outcome.is_server_error]
    alone = []
    if errors:
        with tiny_server(pair, tmp_path, with_plugin=False) as server:
            base_url = server.client.base_url
            for error in errors:
                if not send(base_url, error.request).is_server_error:
                    alone.append(error)
    with capsys.disabled():
        report(outcomes)
    assert not alone, alone[:3]
    # Requests that got past every check, on both ways to generate.
    succeeded = Counter(outcome.path for outcome in outcomes if outcome.status == 200)
    assert succeeded["/v1/completions"] >= 50
    assert succeeded["/v1/chat/completions"] >= 50


def report(outcomes: list[Outcome]) -> None:
    """Print how many of which status each operation gave."""
    counts = Counter((outcome.path, outcome.status) for outcome in outcomes)
    print()
    for (path, status), count in sorted(counts.items()):
        print(f"{path} {status}: {count}")
    causes = Counter(o.text for o in outcomes if o.is_server_error)
    for text, count in causes.most_common(10):
        print(f"{count} x {text}")
