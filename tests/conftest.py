# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels on whatever is there: compiled with CUDA, interpreted without."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

# Tiny models: a second thread has nothing to do and spins while it waits, which takes
# the core away from whoever else is there. Torch reads this when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch

# Triton reads these when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# vLLM's fp32 attention would multiply in TF32, and near ties would flip.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

_ROOT = Path(__file__).resolve().parent.parent
for _package, _folder in (
    ("vllm_dflash_kernels", _ROOT / "kernels"),
    ("vllm_dflash", _ROOT),
):
    if importlib.util.find_spec(_package) is None:
        sys.path.insert(0, str(_folder))

if not torch.cuda.is_available():
    # In-process engines run Model Runner V2 under Triton's interpreter; its driver
    # must be in place before the first import of vllm.
    os.environ.setdefault("VLLM_DFLASH_CPU", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm_dflash import plugin  # noqa: E402

plugin.register_platform()


def pytest_configure(config: pytest.Config) -> None:
    # Who ends the tests ends the servers that they started too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # numpy reports what a GPU does silently.
    config.addinivalue_line(
        "filterwarnings", "ignore:overflow encountered:RuntimeWarning:triton"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["reference", "triton"])
def impl(request: pytest.FixtureRequest) -> str:
    """Both implementations of a kernel; Triton is interpreted without CUDA."""
    return request.param


@pytest.fixture(autouse=True)
def _poison_kernel_memory(request: pytest.FixtureRequest):
    """Fill `torch.empty` with NaN in kernel tests, so that unwritten outputs fail."""
    if "kernels" not in request.path.parts[len(_ROOT.parts) :]:
        yield
        return
    from vllm_dflash_kernels.testing import poisoned_empty

    with poisoned_empty():
        yield
