# SPDX-License-Identifier: Apache-2.0
"""Faults that only a started engine shows, and what is left when one dies."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engines import (
    TREE_BUDGET,
    chain_config,
    engine,
    generate,
    params,
    random_prompts,
    token_ids,
    tree_config,
)
from safetensors.torch import load_file, save_file
from tiny_models import write_draft
from tiny_server import completion, post, tiny_server, write_pair

from vllm_dflash.demo.pair import ModelPair

pytestmark = pytest.mark.e2e

WIDTH = TREE_BUDGET + 1
LENGTH = 110
BLOCK = 32
cpu_only = pytest.mark.skipif(
    torch.cuda.is_available(), reason="names the CPU's plugin"
)


def test_worker_without_the_plugin_does_not_start(tiny_target, tiny_draft, monkeypatch):
    """vLLM's own choice of speculator would draft 16 mask tokens of a block of 8."""
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.v1.worker.gpu import model_runner

    from vllm_dflash import patches, plugin

    plugin.register()
    # Registering again would put it back.
    monkeypatch.setattr("vllm.plugins.plugins_loaded", True)
    theirs = patches.original("init_speculator")
    monkeypatch.setattr(model_runner, "init_speculator", theirs)
    with (
        pytest.raises(RuntimeError, match="has not loaded the plugin dflash") as error,
        engine(tiny_target, tree_config(tiny_draft)),
    ):
        pass
    assert "got the speculator DFlashSpeculator" in str(error.value)


def test_vllm_itself_loads_a_draft_without_one_of_its_tensors(tiny_target, tmp_path):
    """If this fails, vLLM has begun to track what a DFlash draft has loaded."""
    draft = write_draft(tmp_path / "draft")
    tensors = load_file(f"{draft}/model.safetensors")
    del tensors["layers.1.mlp.down_proj.weight"]
    save_file(tensors, f"{draft}/model.safetensors")
    with engine(tiny_target, chain_config(draft)) as llm:
        assert generate(llm, random_prompts((8,)), params(4))
    with (
        pytest.raises(ValueError, match=r"missing are layers\.1\.mlp\.down_proj"),
        engine(tiny_target, tree_config(draft)),
    ):
        pass


def test_smallest_pool_serves_one_request_to_its_end(tiny_target, tiny_draft, rig):
    """The blocks of one full request and the one that vLLM keeps back."""
    prompts = random_prompts((35, 40), seed=3)
    options = params(max_tokens=500)
    pool = dict(max_model_len=LENGTH, num_gpu_blocks_override=-(-LENGTH // BLOCK) + 1)
    with engine(tiny_target, **pool) as llm:
        expected = token_ids(generate(llm, prompts, options))
    for prompt, tokens in zip(prompts, expected, strict=True):
        rig.add_reference(prompt, tokens)
    with engine(tiny_target, tree_config(tiny_draft), **pool) as llm:
        assert token_ids(generate(llm, prompts, options)) == expected
    assert [len(p) + len(t) for p, t in zip(prompts, expected, strict=True)] == (
        [LENGTH] * 2
    )


def test_smallest_model_length_serves_a_request(tiny_target, tiny_draft, rig):
    prompts = random_prompts((1, 5), seed=4)
    options = params(max_tokens=500)
    with engine(tiny_target, max_model_len=WIDTH + 1) as llm:
        expected = token_ids(generate(llm, prompts, options))
    for prompt, tokens in zip(prompts, expected, strict=True):
        rig.add_reference(prompt, tokens)
    config = tree_config(tiny_draft)
    with engine(tiny_target, config, max_model_len=WIDTH + 1) as llm:
        assert token_ids(generate(llm, prompts, options)) == expected


WORKER_WITHOUT_PLUGIN = """
import os
from vllm import LLM
from vllm.plugins import load_general_plugins

if __name__ == "__main__":
    load_general_plugins()
    # What the processes inherit that are started from now on.
    os.environ["VLLM_PLUGINS"] = "dflash_cpu"
    LLM({target!r}, speculative_config={words!r}, skip_tokenizer_init=True,
        dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4,
        num_gpu_blocks_override=64, distributed_executor_backend="mp")
    print("STARTED")
"""


@cpu_only
@pytest.mark.slow
def test_worker_process_without_the_plugin_ends_the_start(
    tiny_target, tiny_draft, tmp_path
):
    script = tmp_path / "serve.py"
    script.write_text(
        WORKER_WITHOUT_PLUGIN.format(target=tiny_target, words=tree_config(tiny_draft))
    )
    result = subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_LOGGING_LEVEL": "INFO",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert "STARTED" not in output
    assert "this worker process has not loaded the plugin dflash" in output
    assert "VLLM_PLUGINS=dflash,dflash_cpu" in output


@pytest.mark.slow
def test_every_api_server_takes_min_p_and_logit_bias(tmp_path):
    pair = write_pair(tmp_path)
    body = completion(min_p=0.1, logit_bias={"30": 5.0}, temperature=0.8, seed=3)
    with tiny_server(
        pair, tmp_path, ddtree=True, extra_args=("--api-server-count", "2")
    ) as server:
        # Each request is a connection of its own, which the kernel gives to either.
        answers = [post(server, "/v1/completions", body) for _ in range(16)]
        log = server.log_path.read_text()
    assert [status for status, _ in answers] == [200] * 16
    tokens = [answer["choices"][0]["token_ids"] for _, answer in answers]
    assert tokens == tokens[:1] * 16
    assert "ApiServer_0" in log
    assert "ApiServer_1" in log


@dataclass
class Remains:
    """What was left of a server some seconds after one of its processes was killed.

    Names have no digits or random parts, so that two servers can be compared.
    """

    answer: Any
    processes: list[str]
    files: list[str]
    shared_memory: list[str]


def kill(
    pair: ModelPair, folder: Path, temporary: Path, victim: str, with_plugin: bool
) -> Remains:
    """Kill one process of a server in the middle of an answer."""
    workers = ("--tensor-parallel-size", "2") if "Worker" in victim else ()
    outcome: list[Any] = []
    with tiny_server(
        pair,
        folder,
        ddtree=True if with_plugin else None,
        with_plugin=with_plugin,
        extra_args=workers,
    ) as server:
        assert post(server, "/v1/completions", completion())[0] == 200
        process = server._process
        assert process is not None
        family = psutil.Process(process.pid).children(recursive=True)
        names = {p.pid: _title(p) for p in family}
        if victim == "front end":
            victims = [process.pid]
        else:
            victims = [pid for pid, name in names.items() if victim in name]
        assert len(victims) == 1, names
        shared = {path for p in family for path in _shared_memory(p)}

        def long_request() -> None:
            try:
                body = completion(900, n=8, temperature=1.0)
                outcome.append(post(server, "/v1/completions", body)[0])
            except OSError as error:
                outcome.append(type(error).__name__)

        thread = threading.Thread(target=long_request)
        thread.start()
        while not server.client.counters()["vllm:num_requests_running"]:
            assert thread.is_alive(), f"over before the kill: {outcome}"
        os.kill(victims[0], signal.SIGKILL)
        thread.join(timeout=60)
        assert not thread.is_alive(), "the request hangs"
        # vLLM ends the server when a part of it is dead.
        assert process.wait(timeout=60) is not None
        log = server.log_path.read_text()
        _, alive = psutil.wait_procs(family, timeout=30)
        remains = Remains(
            answer=outcome[0],
            processes=sorted(_kind(names[p.pid]) for p in alive),
            files=sorted(_kind(path.name) for path in temporary.iterdir()),
            shared_memory=sorted(_kind(p.name) for p in shared if p.exists()),
        )
    if victim != "front end":
        assert "EngineDeadError" in log or "died unexpectedly" in log
    for path in shared:
        path.unlink(missing_ok=True)
    return remains


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    [
        "EngineCore",
        "front end",
        pytest.param(
            "Worker_TP1",
            marks=pytest.mark.skipif(
                torch.cuda.is_available() and torch.cuda.device_count() < 2,
                reason="needs two GPUs, or none",
            ),
        ),
    ],
)
def test_killed_process_leaves_what_vllm_leaves(tmp_path, monkeypatch, victim):
    pair = write_pair(tmp_path)
    found = {}
    for with_plugin in (False, True):
        # Short, for the sockets in it have long names.
        folder = Path(tempfile.mkdtemp())
        try:
            monkeypatch.setenv("TMPDIR", str(folder))
            found[with_plugin] = kill(pair, tmp_path, folder, victim, with_plugin)
            print("with" if with_plugin else "without", "trees:", found[with_plugin])
            # What the next server does at its start.
            code = "from vllm_dflash.metrics.exchange import FrontEndFolder as F; F()"
            subprocess.run([sys.executable, "-c", code], check=True)
            assert not list(folder.glob("vllm-dflash*"))
        finally:
            shutil.rmtree(folder)
    ours, theirs = found[True], found[False]
    if victim == "front end":
        # The folder for counters, until there is another server.
        ours.files.remove("vllm-dflash-#-#.#")
    assert ours == theirs
    assert isinstance(ours.answer, str) == (victim == "front end")
    assert ours.answer != 200


def _title(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()]).strip()
    except psutil.NoSuchProcess:
        return ""


def _kind(name: str) -> str:
    """A name without what differs from run to run."""
    name = re.sub(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", "<uuid>", name)
    return re.sub(r"[0-9]+", "#", name)


def _shared_memory(process: psutil.Process) -> set[Path]:
    """Files of shared memory that a process has mapped or open."""
    with contextlib.suppress(psutil.NoSuchProcess):
        paths = {m.path for m in process.memory_maps()}
        paths |= {f.path for f in process.open_files()}
        return {Path(path) for path in paths if path.startswith("/dev/shm/")}
    return set()
