# SPDX-License-Identifier: Apache-2.0
"""Patches that wait for an import, and a front end that gets a finished config."""

import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys

import pytest
from tiny_models import write_draft, write_target

from vllm_dflash import plugin
from vllm_dflash.patches.after_import import call_after_import


@pytest.fixture
def name(tmp_path, monkeypatch):
    """A module that nobody has imported yet; it counts its own runs."""
    path = tmp_path / "watched_module.py"
    path.write_text(
        "import os\n"
        "if os.environ.get('WATCHED_MODULE_FAILS'):\n"
        "    raise RuntimeError('not now')\n"
        "loader = type(__loader__).__name__, type(__spec__.loader).__name__\n"
        "def function():\n"
        "    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield path.stem
    sys.modules.pop(path.stem, None)


@pytest.fixture
def calls(name):
    calls = []
    call_after_import(name, lambda module: calls.append(module.function()))
    return calls


def test_action_follows_the_import(name, calls):
    assert calls == []
    module = importlib.import_module(name)
    assert calls == [1]
    importlib.import_module(name)
    importlib.reload(module)
    assert calls == [1]


def test_imported_module_is_acted_on_at_once(name):
    module = importlib.import_module(name)
    seen = []
    call_after_import(name, seen.append)
    assert seen == [module]


def test_every_action_is_called(name, calls):
    call_after_import(name, lambda module: calls.append(module.__name__))
    importlib.import_module(name)
    assert calls == [1, name]


def test_being_asked_for_its_spec_is_no_import(name, calls):
    assert importlib.util.find_spec(name) is not None
    assert calls == []
    importlib.import_module(name)
    assert calls == [1]


def test_failed_import_may_come_again(name, calls, monkeypatch):
    monkeypatch.setenv("WATCHED_MODULE_FAILS", "1")
    with pytest.raises(RuntimeError, match="not now"):
        importlib.import_module(name)
    assert calls == []
    monkeypatch.delenv("WATCHED_MODULE_FAILS")
    importlib.import_module(name)
    assert calls == [1]


def test_module_looks_as_if_nobody_had_watched(name, calls):
    module = importlib.import_module(name)
    assert module.loader == ("SourceFileLoader", "SourceFileLoader")
    assert module.__spec__.loader is module.__loader__
    assert "return 1" in inspect.getsource(module.function)


def test_missing_module_stays_missing():
    call_after_import("no_such_module_of_ours", pytest.fail)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_of_ours")


HANDED_OVER = """
import pickle, sys
from unittest import mock
from vllm.plugins import load_general_plugins

load_general_plugins()
with open(sys.argv[1], "rb") as file:
    config = pickle.load(file)

from vllm import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager

processor = InputProcessor(config, mock.MagicMock())
for options in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}):
    try:
        processor._validate_params(SamplingParams(**options), ("generate",))
        print("taken")
    except Exception as error:
        print("refused" if "speculative decoding" in str(error) else error)
manager = StatLoggerManager(config, [0])
print(*sorted(type(each).__name__ for each in manager.stat_loggers))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugins", "answer", "has_metrics"),
    [("dflash,dflash_cpu", "taken", True), ("dflash_cpu", "refused", False)],
)
def test_front_end_that_is_handed_a_config(tmp_path, plugins, answer, has_metrics):
    """Another process made it: no choice of tree or chain is made in this one."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    args = EngineArgs(
        model=write_target(tmp_path / "target"),
        speculative_config=dict(
            method="dflash", model=write_draft(tmp_path / "draft"), ddtree=True
        ),
        skip_tokenizer_init=True,
        max_model_len=256,
        enforce_eager=True,
        dtype="float32",
        max_num_batched_tokens=256,
    )
    path = tmp_path / "config.pickle"
    path.write_bytes(pickle.dumps(args.create_engine_config()))
    result = subprocess.run(
        [sys.executable, "-c", HANDED_OVER, path],
        env={**os.environ, "VLLM_PLUGINS": plugins},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    *answers, loggers = result.stdout.splitlines()[-3:]
    assert answers == [answer, answer]
    assert ("TreeStatLogger" in loggers) is has_metrics
