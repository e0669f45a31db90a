# SPDX-License-Identifier: Apache-2.0
"""What vLLM's classes do that are subclassed, overridden or called: as it was read.

A failure says: look at the difference (the message has the command), check the use that
it names, then record the new digest. docs/upgrading-vllm.md has the whole way.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import depends_on
import pytest

pytestmark = pytest.mark.compat

ROOT = Path(__file__).resolve().parents[2]
TARGETS = depends_on.targets()
# Imported from vLLM and documented there, or no more than a name: a change of theirs
# shows as an ImportError or in other tests.
PUBLIC = {
    "AttentionBackendEnum",
    "AttentionLayer",
    "AttentionSpec",
    "AttentionType",
    "CUDAGraphMode",
    "EngineArgs",
    "FlexibleArgumentParser",
    "HAS_TRITON",
    "KVCacheConfig",
    "KVCacheSpec",
    "LLM",
    "NewRequestData",
    "PROCESSED_LOGPROBS_MODES",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculativeConfig",
    "StatLoggerManager",
    "UsageContext",
    "VllmConfig",
    "_custom_ops",
    "current_platform",
    "envs",
    "get_tensor_model_parallel_rank",
    "gumbel",
    "selector",
    "set_current_vllm_config",
    "vllm_version_matches_substr",
    # Of the CUDA wheel only.
    "flash_attn_varlen_func",
}


@pytest.fixture(scope="module")
def vllm_folder():
    return depends_on.installed()


@pytest.mark.parametrize("target", TARGETS)
def test_source_is_the_one_that_was_read(target, vllm_folder):
    text = depends_on.source(target, vllm_folder)
    recorded = depends_on.recorded()
    assert text is not None, (
        f"vLLM has no {target} any more. It matters because: {TARGETS[target]}. Find "
        "what took its place, change what uses it, and the list in "
        "tests/helpers/depends_on.py"
    )
    assert target in recorded, (
        f"{target} is not recorded. Type python tests/helpers/depends_on.py --record"
    )
    assert depends_on.digest(text) == recorded[target], (
        f"vLLM has changed {target}. It matters because: {TARGETS[target]}. Type "
        "python tests/helpers/depends_on.py --diff FOLDER_OF_THE_OLD_VLLM, check the "
        "use, then python tests/helpers/depends_on.py --record"
    )


def test_nothing_is_recorded_that_is_not_listed():
    assert set(depends_on.recorded()) == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_every_entry_has_a_reason(target):
    assert len(TARGETS[target]) >= 7


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "vllm_dflash").glob("**/*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.Module) -> dict[str, str]:
    """Name -> module of what a file imports from vLLM, except for type checkers."""
    found: dict[str, str] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module == "vllm" or module.startswith("vllm."):
                found.update({alias.name: module for alias in node.names})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def _listed() -> set[str]:
    """First and full names of the listed symbols, and the last part of modules."""
    symbols = {target.partition(":")[2] for target in TARGETS}
    return symbols | {symbol.partition(".")[0] for symbol in symbols}


def test_whatever_is_imported_from_vllm_is_listed_or_public():
    unlisted = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path, tree in _sources()
        for name, module in _imports(tree).items()
        if name not in _listed() | PUBLIC
    ]
    assert not unlisted, (
        f"{unlisted}: add them to tests/helpers/depends_on.py with the reason, and "
        "type python tests/helpers/depends_on.py --record"
    )


def test_public_names_are_in_use():
    used = {name for _, tree in _sources() for name in _imports(tree)}
    assert used >= PUBLIC


def _overrides() -> Iterator[tuple[str, str, str]]:
    """(file, class of vLLM, method of ours) for each subclass of one of its classes."""
    for path, tree in _sources():
        imported = _imports(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in imported:
                    for item in node.body:
                        if isinstance(item, ast.FunctionDef):
                            yield path.name, base.id, item.name


def test_overridden_methods_of_vllm_are_listed(vllm_folder):
    """By class and method where vLLM's class has it, or by the whole class."""
    listed = {target.partition(":")[2]: target for target in TARGETS}
    modules = {target.partition(":")[0] for target in TARGETS}
    missing = []
    for file, cls, method in _overrides():
        symbol = f"{cls}.{method}"
        exists = any(depends_on.source(f"{m}:{symbol}", vllm_folder) for m in modules)
        if exists and symbol not in listed and cls not in listed:
            missing.append(f"{file}: {symbol}")
    assert not missing
    assert len(list(_overrides())) > 10


def test_a_change_is_noticed_and_shown(tmp_path, monkeypatch, capsys, vllm_folder):
    """A vLLM with one changed and one missing symbol, in a folder of its own."""
    changed = "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample"
    gone = "vllm.v1.worker.gpu.sample.logprob:compute_topk_scores"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    for target in TARGETS:
        for relative in _files(target):
            original = vllm_folder / relative
            if original.is_file():
                copy = tmp_path / "vllm" / relative
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(original.read_text(encoding="utf-8"))
    _edit(tmp_path / "vllm/v1/worker/gpu/sample/gumbel.py", "is_drafting", "is_draft")
    _edit(
        tmp_path / "vllm/v1/worker/gpu/sample/logprob.py",
        "def compute_topk_scores",
        "def compute_scores",
    )
    assert depends_on.changes(tmp_path / "vllm") == {changed: "changed", gone: "gone"}
    argv = ["depends_on.py", "--vllm", str(tmp_path / "vllm")]
    monkeypatch.setattr("sys.argv", [*argv, "--diff", str(vllm_folder)])
    assert depends_on.main() == 1
    text = capsys.readouterr().out
    assert f"changed: {changed}\n    {TARGETS[changed]}" in text
    assert "-" in text and "is_draft" in text
    assert f"2 of {len(TARGETS)} symbols differ" in text


def test_a_symbol_that_is_gone_is_not_recorded(tmp_path, monkeypatch, capsys):
    digests = tmp_path / "digests.json"
    digests.write_text(json.dumps({}))
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(depends_on, "DIGESTS", digests)
    argv = ["depends_on.py", "--record", "--vllm", str(tmp_path)]
    monkeypatch.setattr("sys.argv", argv)
    assert depends_on.main() == 1
    assert json.loads(digests.read_text()) == {}
    assert "take them out of the list" in capsys.readouterr().out


def test_a_wrong_folder_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["depends_on.py", "--vllm", str(tmp_path)])
    with pytest.raises(SystemExit):
        depends_on.main()
    assert "no folder of vLLM's package" in capsys.readouterr().err


def _files(target: str) -> tuple[str, str]:
    path = "/".join(target.partition(":")[0].split(".")[1:])
    return f"{path}.py", f"{path}/__init__.py"


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
