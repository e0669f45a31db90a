# SPDX-License-Identifier: Apache-2.0
"""Measured schedules on disk, one file for each set-up they hold for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash import __version__, envs
from vllm_dflash.logger import init_logger
from vllm_dflash.schedule import BudgetSchedule, Measurement, parse_schedule

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

logger = init_logger(__name__)

# Read of each file of weights to tell it from others, the first and the last included.
_PIECES, _PIECE_BYTES = 8, 1 << 16


@dataclasses.dataclass(frozen=True)
class Setup:
    """What step times and acceptance depend on."""

    device: str
    target: str
    draft: str
    dtype: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    vllm_version: str
    # Kernels become faster, and are compiled otherwise.
    plugin_version: str
    torch_version: str
    triton_version: str
    budget: int
    depth: int

    @property
    def path(self) -> Path:
        """The file of this set-up's schedule."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return envs.cache_dir() / "schedules" / f"{name}.json"


def describe_setup(
    config: SpeculativeConfig,
    *,
    kv_cache_dtype: str,
    tensor_parallel_size: int,
    budget: int,
    depth: int,
) -> Setup:
    """The set-up of an engine that is about to start."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    target, draft = config.target_model_config, config.draft_model_config
    return Setup(
        device=current_platform.get_device_name(),
        target=_identity(target.model, target.revision),
        draft=_identity(draft.model, draft.revision),
        dtype=str(target.dtype),
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        vllm_version=vllm.__version__,
        plugin_version=__version__,
        torch_version=torch.__version__,
        triton_version=_triton_version(),
        budget=budget,
        depth=depth,
    )


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        # Under another name, as the builds for other GPUs have.
        return "unknown"


def _identity(model: str, revision: str | None) -> str:
    """A checkpoint's path and a digest of it, or its name and revision.

    A draft that was trained further in its folder has the config that it had, and
    other acceptance: pieces of the weights (`*.safetensors`) are part of the digest.
    A name without a revision may come to mean other weights.
    """
    folder = Path(model)
    config = folder / "config.json"
    if not config.is_file():
        return f"{model}@{revision}"
    digest = hashlib.sha256(config.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(_PIECES):
                file.seek(max(size - _PIECE_BYTES, 0) * i // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return f"{folder.resolve()}@{digest.hexdigest()[:16]}"


def save(setup: Setup, schedule: BudgetSchedule, details: dict[str, Any]) -> Path:
    """Write a schedule with what it was made from; returns the file."""
    path = setup.path
    path.parent.mkdir(parents=True, exist_ok=True)
    values = dict(
        setup=dataclasses.asdict(setup),
        budget_per_batch_size=[list(entry) for entry in schedule],
        **details,
    )
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=1) + "\n")
    partial.replace(path)
    return path


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A kept schedule and, unless it was written without, what it was chosen from."""

    schedule: BudgetSchedule
    measurement: Measurement | None


def load(setup: Setup) -> BudgetSchedule | None:
    """The measured schedule of a set-up; None if there is none that can be read."""
    found = load_calibration(setup)
    return None if found is None else found.schedule


def load_calibration(setup: Setup) -> Calibration | None:
    """What was measured for a set-up; None if there is nothing that can be read."""
    path = setup.path
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        if values["setup"] != dataclasses.asdict(setup):
            raise ValueError("it was made for another set-up")
        schedule = parse_schedule(
            values["budget_per_batch_size"], setup.budget, is_cpu=False
        )
        if schedule is None:
            raise ValueError("it holds no ranges")
        measurement = None
        if "step_ms" in values and "tokens_by_nodes" in values:
            measurement = Measurement.from_values(
                values["step_ms"], values["tokens_by_nodes"]
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(
            "The measured budget schedule %s can't be used: %s. The formula by model "
            "size takes its place. Run vllm-dflash calibrate again, or delete it.",
            path,
            error,
        )
        return None
    logger.info("Budget schedule measured by vllm-dflash calibrate: %s", path)
    return Calibration(schedule, measurement)
