# SPDX-License-Identifier: Apache-2.0
"""The image is made of the vLLM that is supported and of files that exist."""

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in TEXT.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


def copied() -> list[str]:
    return [source for rest in arguments("COPY") for source in shlex.split(rest)[:-1]]


def is_ignored(path: str) -> bool:
    """Whether .dockerignore leaves a path out: the last line that matches decides."""
    found = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = [str(p) for p in (Path(path), *Path(path).parents) if str(p) != "."]
        if any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in parts):
            found = not line.startswith("!")
    return found


def test_base_is_the_supported_vllm_with_a_pinned_tag():
    (base,) = arguments("FROM")
    tag = re.fullmatch(r"vllm/vllm-openai:v(\d+\.\d+\.\d+)", base)
    assert tag, base
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]["optional-dependencies"]
    (cuda,) = extras["cuda"]
    lowest, limit = re.fullmatch(r"vllm>=([\d.]+),<([\d.]+)", cuda).groups()

    def numbers(text: str) -> list[int]:
        return list(map(int, text.split(".")))

    assert numbers(lowest) <= numbers(tag[1]) < numbers(limit)
    setup = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    assert f"VLLM_VERSION={tag[1]}\n" in setup


@pytest.mark.parametrize("source", copied())
def test_copied_files_exist_and_reach_the_build(source):
    assert (ROOT / source).exists()
    assert not is_ignored(source)


def test_every_package_is_copied():
    """What setuptools would look for outside the image must be inside too."""
    find = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["packages"]["find"]
    packages = [
        path.parent.relative_to(ROOT).as_posix()
        for where in find["where"]
        for path in (ROOT / where).glob("vllm_dflash*/__init__.py")
    ]
    assert len(packages) == 2
    assert set(packages) <= set(copied())


@pytest.mark.parametrize(
    "path", [".git", "tests", "evals", "docs", ".venv", "kernels/benchmarks"]
)
def test_nothing_else_is_sent_to_the_build(path):
    assert is_ignored(path)


def test_vllm_and_torch_of_the_image_stay():
    (install,) = [rest for rest in arguments("RUN") if "install" in rest]
    assert "--no-deps" in install


def test_server_runs_as_another_user_and_tells_its_health():
    assert arguments("USER")[-1] not in {"root", "0"}
    assert json.loads(arguments("ENTRYPOINT")[0]) == ["vllm", "serve"]
    (check,) = arguments("HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert "/health'" in command[-1]
    compile(command[-1], "healthcheck", "exec")


def test_health_check_asks_the_server(monkeypatch):
    """The command itself, against a server that is there and one that is not."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    (check,) = arguments("HEALTHCHECK")
    code = json.loads(check[check.index("[") :])[-1]
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    here = code.replace(":8000", f":{server.server_address[1]}")
    assert here != code
    exec(here, {})
    server.shutdown()
    server.server_close()
    with pytest.raises(OSError):
        exec(here, {})
