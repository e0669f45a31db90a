# SPDX-License-Identifier: Apache-2.0
"""The rooms of the source tree: who imports whom, and what belongs where.

Reads the sources with `ast`, so it holds for code that needs a GPU too.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    [
        *ROOT.glob("vllm_dflash/**/*.py"),
        *ROOT.glob("kernels/vllm_dflash_kernels/**/*.py"),
    ]
)
ALL_CODE = [
    *SOURCES,
    *sorted(
        path
        for folder in ("tests", "evals", "scripts", "kernels/benchmarks", "training")
        for path in (ROOT / folder).glob("**/*.py")
    ),
]

MAX_LINES = 400
MAX_TEST_LINES = 600

BASE = "base"
KERNELS = "kernels"
_ARITHMETIC = {"tree", "sample", "kv_cache", "attention"}
# A room may import itself and the rooms listed here.
ALLOWED = {
    KERNELS: set(),
    BASE: set(),
    **{room: {BASE, KERNELS, *_ARITHMETIC} for room in _ARITHMETIC},
    "cpu": {BASE, KERNELS},
    "metrics": {BASE, KERNELS},
    "runner": {BASE, KERNELS, "metrics", *_ARITHMETIC},
    "calibrate": {BASE, KERNELS, "runner"},
    "patches": {BASE, KERNELS, "calibrate", "cpu", "metrics", "runner", *_ARITHMETIC},
    "plugin": {BASE, "cpu", "metrics", "patches"},
    "demo": {BASE},
    "cli": {BASE, "calibrate", "demo", "metrics"},
}
# Besides envs.py, who may touch the environment: those that prepare it for another
# process, or for vLLM before its import, and the report of it.
ENVIRONMENT_USERS = {
    "vllm_dflash/envs.py",
    "vllm_dflash/cpu/triton_interpreter.py",
    "vllm_dflash/demo/serve.py",
    "vllm_dflash/cli/check.py",
    "vllm_dflash/patches/environment.py",
}
VERSIONED_WORDS = {"v2", "new", "fast", "old", "final"}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    at_import_time: bool


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _room(module: str) -> str | None:
    """Return the room of one of our modules, None for anybody else's."""
    package, _, rest = module.partition(".")
    if package == "vllm_dflash_kernels":
        return KERNELS
    if package != "vllm_dflash":
        return None
    first = rest.partition(".")[0]
    return first if first in ALLOWED else BASE


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kernels":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Yield what a file imports, except for type checkers; relative names resolved."""
    package = _module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    def visit(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child, at_import_time)
            return
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, at_import_time)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                prefix = package[: len(package) - node.level + 1]
                base = ".".join([*prefix, *filter(None, [node.module])])
            # `from package import submodule` names a module too.
            for name in node.names:
                submodule = f"{base}.{name.name}"
                module = submodule if _is_our_module(submodule) else base
                yield Import(module, node.lineno, at_import_time)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import_time and not inside)

    yield from visit(_tree(path), True)


def _is_our_module(name: str) -> bool:
    path = Path(*name.split("."))
    roots = (ROOT, ROOT / "kernels")
    return any(
        (root / path).with_suffix(".py").exists() or (root / path).is_dir()
        for root in roots
    )


def _top(module: str) -> str:
    return module.partition(".")[0]


def test_there_are_sources_to_check():
    assert len(SOURCES) > 20


def _may_import(room: str, module: str) -> bool:
    other = _room(module)
    if other is None:
        top = _top(module)
        # cpu/ prepares Triton's interpreter.
        return not (
            (top == "vllm" and room == KERNELS)
            or (top == "triton" and room not in {KERNELS, "cpu"})
        )
    return other == room or other in ALLOWED[room]


def test_rooms_import_in_one_direction():
    wrong = [
        f"{_relative(path)}:{item.line} imports {item.module}"
        for path in SOURCES
        for item in imports_of(path)
        if not _may_import(_room(_module_name(path)), item.module)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("room", "module"),
    [
        (KERNELS, "vllm.config"),
        (KERNELS, "vllm_dflash.config"),
        ("tree", "vllm_dflash.runner.runtime"),
        ("tree", "triton.language"),
        (BASE, "vllm_dflash.tree.builder"),
        ("runner", "vllm_dflash.patches"),
        ("demo", "vllm_dflash.plugin"),
    ],
)
def test_wrong_direction_is_noticed(room, module):
    assert not _may_import(room, module)


def test_references_are_importable_without_triton():
    references = [path for path in SOURCES if path.name == "reference.py"]
    assert references
    for path in references:
        assert "triton" not in _reached_at_import(path), _relative(path)


def test_dispatch_imports_triton_only_when_a_kernel_is_launched():
    packages = ROOT.glob("kernels/vllm_dflash_kernels/*/__init__.py")
    for path in packages:
        assert "triton" not in _reached_at_import(path), _relative(path)


def test_package_import_is_cheap():
    tops = _reached_at_import(ROOT / "vllm_dflash/__init__.py")
    assert not tops & {"torch", "vllm", "triton", "transformers"}


def test_command_line_starts_without_torch_and_vllm():
    tops = _reached_at_import(ROOT / "vllm_dflash/cli/main.py")
    assert not tops & {"torch", "vllm", "triton", "transformers", "gguf"}


def _reached_at_import(start: Path) -> set[str]:
    """Return the top-level packages imported when `start` is, through our modules."""
    files = {_module_name(path): path for path in SOURCES}
    pending, seen, tops = [start], set(), set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        for item in imports_of(path):
            if item.at_import_time:
                tops.add(_top(item.module))
                if item.module in files:
                    pending.append(files[item.module])
    return tops


def test_environment_is_read_in_one_place():
    users = {
        _relative(path)
        for path in SOURCES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    }
    assert users <= ENVIRONMENT_USERS


def test_no_file_is_too_long():
    too_long = {}
    for path in ALL_CODE:
        limit = MAX_LINES if path in SOURCES else MAX_TEST_LINES
        if path.stem == "utils":
            limit = 100
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > limit:
            too_long[_relative(path)] = num_lines
    assert not too_long


def test_every_file_starts_with_its_licence():
    line = "# SPDX-License-Identifier: Apache-2.0\n"
    missing = [
        _relative(path)
        for path in ALL_CODE
        if not path.read_text(encoding="utf-8").startswith(line)
    ]
    assert not missing


def test_every_source_file_says_what_it_is():
    silent = [
        _relative(path)
        for path in SOURCES
        if ast.get_docstring(_tree(path)) is None
        and (path.name != "__init__.py" or len(_tree(path).body) > 0)
    ]
    assert not silent


def test_no_name_tells_history():
    assert not [
        _relative(path)
        for path in SOURCES
        if set(path.stem.lower().split("_")) & VERSIONED_WORDS
    ]


def test_no_exception_is_swallowed_unseen():
    silent = [
        f"{_relative(path)}:{handler.lineno}"
        for path in SOURCES
        for handler in ast.walk(_tree(path))
        if isinstance(handler, ast.ExceptHandler)
        and (handler.type is None or ast.unparse(handler.type).endswith("Exception"))
        and all(isinstance(statement, ast.Pass) for statement in handler.body)
    ]
    assert not silent


def test_second_source_root_and_tests_are_no_packages():
    # `kernels` as a package would hide the distribution of that name on the index.
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not list((ROOT / "tests").glob("**/__init__.py"))
