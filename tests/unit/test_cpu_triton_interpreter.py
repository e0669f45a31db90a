# SPDX-License-Identifier: Apache-2.0
"""The interpreter is there when asked for, and only then."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs the CPU build of vLLM"),
]

STATE = """
import os, sys
sys.stdout.flush()
print(
    os.environ.get("TRITON_INTERPRET"),
    os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
    "cpu" in sys.modules["triton.backends"].backends,
)
"""

RUN_KERNEL = """
import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

@triton.jit
def row_max(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + block, mask=block < size, other=float("-inf"))
    value, index = tl.max(x, axis=0, return_indices=True)
    tl.store(out_ptr, value + tl.cdiv(size, BLOCK) + index)

out = torch.zeros(1)
row_max[(1,)](torch.tensor([1.0, 7.0, 3.0]), out, 3, BLOCK=4)
print(HAS_TRITON, float(out))
"""


def run(code: str, **environment: str) -> list[str]:
    names = ("VLLM_DFLASH_CPU", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **{k: v for k, v in os.environ.items() if k not in names},
            "VLLM_LOGGING_LEVEL": "ERROR",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.split()


def test_nothing_happens_unless_asked_for():
    code = "import vllm, triton.backends\n"
    code += "from vllm_dflash.plugin import register_platform\n"
    assert run(code + "assert register_platform() is None" + STATE) == [
        "None",
        "None",
        "False",
    ]


def test_kernels_run_although_vllm_has_imported_triton_first():
    """`import vllm` imports Triton, compiled, before a plugin can say otherwise."""
    code = "import vllm, sys\nassert 'triton' in sys.modules\n"
    code += "from vllm_dflash.plugin import register_platform\nregister_platform()\n"
    out = run(code + RUN_KERNEL + STATE, VLLM_DFLASH_CPU="1")
    assert out == ["True", "9.0", "1", "1", "True"]


def test_users_own_settings_win():
    code = "from vllm_dflash.plugin import register_platform\nregister_platform()\n"
    out = run(code + STATE, VLLM_DFLASH_CPU="1", VLLM_USE_V2_MODEL_RUNNER="0")
    assert out == ["1", "0", "True"]


def test_a_gpu_build_is_left_alone():
    code = "import vllm.platforms, triton.backends\n"
    code += "vllm.platforms.vllm_version_matches_substr = lambda text: False\n"
    code += "from vllm_dflash.plugin import register_platform\nregister_platform()\n"
    out = run(code + STATE, VLLM_DFLASH_CPU="1")
    assert out == ["None", "None", "False"]


def test_without_triton_the_environment_stays_as_it_was():
    code = "import sys, os\nfrom vllm_dflash.cpu import triton_interpreter\n"
    code += "sys.modules['triton.backends'] = None\n"
    code += "print(triton_interpreter.install_interpreter(), sorted(\n"
    code += "    n for n in os.environ if n in\n"
    code += "    ('TRITON_INTERPRET', 'VLLM_USE_V2_MODEL_RUNNER')))\n"
    assert run(code) == ["False", "[]"]


def test_wrong_value_does_not_kill_the_process():
    code = "import vllm, triton.backends\n"
    code += "from vllm_dflash.plugin import register, register_platform\n"
    code += "register_platform(); register()\n"
    assert run(code + STATE, VLLM_DFLASH_CPU="maybe") == ["None", "None", "False"]
