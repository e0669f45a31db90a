# SPDX-License-Identifier: Apache-2.0
"""Where a result comes from: commit, device, versions, command, time."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

# `git archive` puts the commit here (.gitattributes).
_ARCHIVED = "$Format:%H$"
_DISTRIBUTIONS = ("vllm", "torch", "triton", "transformers", "vllm-dflash")


def collect(*distributions: str) -> dict[str, Any]:
    """Return the provenance of a run that starts now.

    Args:
        distributions: Names of packages that matter besides vLLM's own.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git": git_state(),
        "device": device_name(),
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in (*_DISTRIBUTIONS, *distributions)
        },
    }


def git_state() -> str:
    """Return the commit, with ``-dirty`` if files differ from it.

    Of an exported archive, the commit it was made from.
    """
    if not _ARCHIVED.startswith("$"):
        return _ARCHIVED
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe"]
    try:
        result = subprocess.run(
            [*command, "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def has_gpu() -> bool:
    """Return whether PyTorch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def device_name() -> str:
    """Return the name of the GPU, or of the CPU where there is none."""
    if has_gpu():
        import torch

        return torch.cuda.get_device_name(0)
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} x {line.partition(':')[2].strip()}"
    return f"{os.cpu_count()} x {platform.machine()}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
