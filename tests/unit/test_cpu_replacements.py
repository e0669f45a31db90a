# SPDX-License-Identifier: Apache-2.0
"""The registry of torch twins, and how they get into vLLM."""

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from vllm_dflash.cpu.replacements import REPLACEMENTS, TwinKernel, load, originals

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the twins are for the CPU"
)


@pytest.fixture(autouse=True, scope="module")
def _patched_torch():
    """On the CPU vLLM patches torch before it imports the runner's modules."""
    importlib.import_module("vllm.v1.worker.cpu.shm")


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=lambda r: r.attribute)
def test_target_exists_and_twin_has_its_signature(replacement):
    target = originals.get(replacement.target)
    if target is None:
        target = load(replacement.target)
    twin = load(replacement.twin)
    if replacement.is_kernel:
        assert hasattr(target, "__getitem__")
        return
    expected = inspect.signature(target).parameters
    actual = inspect.signature(twin).parameters
    assert list(actual) == list(expected)
    for name, parameter in expected.items():
        assert actual[name].default == parameter.default, name


def test_targets_are_unique():
    assert len({r.target for r in REPLACEMENTS}) == len(REPLACEMENTS)


def test_kernel_twin_gets_grid_and_arguments():
    calls = []
    kernel = TwinKernel(
        lambda grid, *args, **kwargs: calls.append((grid, args, kwargs))
    )
    kernel[(2, 3)](1, 2, BLOCK=4)
    assert calls == [((2, 3), (1, 2), {"BLOCK": 4})]


def run(code: str, **environment: str) -> str:
    import os

    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("VLLM_DFLASH")},
            "VLLM_LOGGING_LEVEL": "ERROR",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip()


CHECK = """
from vllm_dflash.plugin import register, register_platform
register_platform(); register(); register()
import sys
early = [n for n in sys.modules if n.startswith("vllm.v1.worker.gpu.")
         and not n.startswith("vllm.v1.worker.gpu.spec_decode")]
import vllm.v1.worker.cpu.shm
from vllm.v1.worker.gpu.sample import gumbel, states
from vllm.v1.worker.gpu import input_batch, block_table
from vllm_dflash.cpu.replacements import originals
print(
    early,
    gumbel.gumbel_sample.__module__,
    states.apply_temperature.__module__,
    block_table.BlockTables.compute_slot_mappings.__module__,
    len(originals) > 5,
)
"""


@pytest.mark.slow
def test_twins_replace_at_import_and_reach_importers_by_value():
    early, *places = run(CHECK, VLLM_DFLASH_CPU="1").rsplit(" ", 4)
    # register() itself must not import the runner's modules.
    assert early == "[]"
    assert places == [
        "vllm_dflash.cpu.gumbel",
        "vllm_dflash.cpu.logits",
        "vllm_dflash.cpu.block_table",
        "True",
    ]


@pytest.mark.slow
def test_nothing_is_replaced_unless_asked_for():
    _, *places = run(CHECK).rsplit(" ", 4)
    assert places == [
        "vllm.v1.worker.gpu.sample.gumbel",
        "vllm.v1.worker.gpu.sample.gumbel",
        "vllm.v1.worker.gpu.block_table",
        "False",
    ]


LATE = """
import vllm.v1.worker.cpu.shm
from vllm.v1.worker.gpu.sample import states
from vllm_dflash.plugin import register
register()
print(states.apply_temperature.__module__)
"""


@pytest.mark.slow
def test_modules_imported_before_the_plugin_are_rebound():
    assert run(LATE, VLLM_DFLASH_CPU="1") == "vllm_dflash.cpu.logits"
