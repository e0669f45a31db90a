# SPDX-License-Identifier: Apache-2.0
"""docs/security.md names every file that the package writes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs/security.md"
SOURCES = [
    *ROOT.glob("vllm_dflash/**/*.py"),
    *ROOT.glob("kernels/vllm_dflash_kernels/**/*.py"),
]

# Who writes, and the row of the page's table about it.
WRITERS = {
    "vllm_dflash/calibrate/store.py": "`$VLLM_DFLASH_CACHE/schedules/*.json`",
    "vllm_dflash/cli/show_tree.py": "`show-tree --html FILE`",
    "vllm_dflash/demo/convert.py": "`$VLLM_DFLASH_CACHE/…` (demo only)",
    "vllm_dflash/demo/fetch.py": "`$VLLM_DFLASH_CACHE/…` (demo only)",
    "vllm_dflash/demo/serve.py": "`$VLLM_DFLASH_CACHE/logs/*.log`",
    "vllm_dflash/metrics/exchange.py": "a folder for counters",
    "vllm_dflash/metrics/tree_dumper.py": "`VLLM_DFLASH_DUMP_TREES`",
}

# Names of functions and methods that make a file or a folder.
WRITES = {
    "write_text",
    "write_bytes",
    "touch",
    "mkdir",
    "makedirs",
    "mkdtemp",
    "mkstemp",
    "symlink_to",
    "save_file",
    "savez",
    "FileHandler",
    "NamedTemporaryFile",
    "TemporaryDirectory",
    "TemporaryFile",
    "copy",
    "copy2",
    "copyfile",
    "copytree",
    "memmap",
}
# `copy` of a dictionary or a context, not of a file.
NO_FILES = {"copy": ("shutil",)}


def find_writes(tree: ast.AST) -> Iterator[str]:
    """Yield the calls of a source that make a file, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _writes(node):
            yield f"{node.lineno}: {ast.unparse(node.func)}"


def _writes(call: ast.Call) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    if name in WRITES:
        return owner in NO_FILES.get(name, (owner,))
    # A mode is the first argument of a path's, and the second of the builtin.
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return name in ("open", "fdopen") and any(
        isinstance(argument, ast.Constant)
        and isinstance(argument.value, str)
        and set(argument.value) <= set("rwaxbt+")
        and set(argument.value) & set("wax+")
        for argument in arguments
    )


def test_every_writer_is_on_the_page():
    found = {
        path.relative_to(ROOT).as_posix(): calls
        for path in SOURCES
        if (calls := list(find_writes(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found.keys() == WRITERS.keys(), found
    page = DOCS.read_text(encoding="utf-8")
    table = page.partition("## Files it writes")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    for row in WRITERS.values():
        assert sum(row in line for line in rows) == 1, row
    assert "a dump in the temporary folder" in table


@pytest.mark.parametrize(
    "source",
    [
        "path.write_text(text)",
        "path.open('w')",
        "open(path, mode='ab')",
        "open(path, 'x')",
        "os.fdopen(handle, 'wb')",
        "tempfile.mkdtemp()",
        "shutil.copy(a, b)",
        "save_file(tensors, path)",
    ],
)
def test_a_write_is_found(source):
    assert list(find_writes(ast.parse(source)))


@pytest.mark.parametrize("source", ["path.open()", "open(path, 'rb')", "words.copy()"])
def test_what_only_reads_is_not(source):
    assert not list(find_writes(ast.parse(source)))
