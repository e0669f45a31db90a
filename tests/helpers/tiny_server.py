# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on the tiny models, as a subprocess."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import gpu_memory_args
from tiny_models import write_draft, write_target
from tiny_tokenizer import write_tokenizer

from vllm_dflash.demo.pair import ModelPair
from vllm_dflash.demo.serve import ServerSpec, VLLMServer, free_port

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAX_MODEL_LEN = 1024
SERVED_NAME = "tiny"
_ARGS = (
    *("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "256"),
    # vLLM's default on a GPU would make it capture graphs of dozens of batch sizes.
    *("--max-num-seqs", "8"),
)


def write_pair(folder: Path) -> ModelPair:
    """A tiny target with a tokenizer and a chat template, and a draft for it."""
    target = write_target(folder / "target")
    write_tokenizer(target)
    (folder / "target/chat_template.jinja").write_text(TEMPLATE)
    draft = write_draft(folder / "draft")
    return ModelPair(target, draft, SERVED_NAME, is_embedded=True)


@contextmanager
def tiny_server(
    pair: ModelPair,
    folder: Path,
    *,
    ddtree: Any = None,
    with_plugin: bool = True,
    extra_args: tuple[str, ...] = (),
) -> Iterator[VLLMServer]:
    """A server on a free port; `ddtree` None is no speculation."""
    speculative_config = None
    if ddtree is not None:
        speculative_config = dict(method="dflash", model=pair.draft, ddtree=ddtree)
    spec = ServerSpec(
        label="tiny",
        pair=pair,
        is_cpu=not torch.cuda.is_available(),
        port=free_port(),
        speculative_config=speculative_config,
        with_plugin=with_plugin,
        max_model_len=MAX_MODEL_LEN,
        extra_args=[*_ARGS, *gpu_memory_args(), *extra_args],
    )
    log_path = folder / f"server-{spec.port}.log"
    with VLLMServer(spec, log_path, lambda text: None) as server:
        yield server


def post(server: VLLMServer, path: str, body: Any, timeout_s: float = 60) -> Any:
    """Return status and JSON of one request; errors of HTTP are answers too."""
    request = urllib.request.Request(
        f"{server.client.base_url}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def stream(server: VLLMServer, body: Any) -> Iterator[Iterator[list[int]]]:
    """Token ids of the parts of a completion; leaving closes the connection."""

    def parts(response: Any) -> Iterator[list[int]]:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]["token_ids"] or []

    request = urllib.request.Request(
        f"{server.client.base_url}/v1/completions",
        data=json.dumps({**body, "stream": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        yield parts(response)


def completion(max_tokens: int = 16, **options: Any) -> dict[str, Any]:
    """The body of a greedy completion of a fixed prompt."""
    body = dict(
        model=SERVED_NAME,
        prompt=list(range(20, 40)),
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    return {**body, **options}
