# SPDX-License-Identifier: Apache-2.0
"""Generation with the plugin itself: a draft proposes, the target's answers stay."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_dflash.errors import option_error
from vllm_dflash_training.config import EMBEDDED, GenerationOptions, RunConfig

_PLUGIN, _CPU_PLUGIN = "dflash", "dflash_cpu"
# Tokens of prompts that a step takes beside a full batch of trees.
_PREFILL_TOKENS = 8192
# Steps that admit requests hold prompts too: the sizes that they are padded to.
_PREFILL_GRAPHS = (512, 1024, 2048)
_GRAPH_ARGUMENTS = {
    "compilation_config",
    "cudagraph_capture_sizes",
    "enforce_eager",
    "max_cudagraph_capture_size",
}


@dataclass(frozen=True)
class Speculation:
    """A draft that answers are made with.

    Attributes:
        folder: Of the draft.
        nodes: Of a tree, root excluded.
        depth: Tokens that a block drafts.
    """

    folder: Path
    nodes: int
    depth: int

    @property
    def width(self) -> int:
        """Rows of a request in a step."""
        return self.nodes + 1

    def engine_arguments(
        self, options: GenerationOptions, is_cpu: bool
    ) -> dict[str, Any]:
        """Return what `vllm.LLM` is told besides; `engine_args` still win."""
        named = options.engine_args
        num_seqs = named.get("max_num_seqs", options.batch_size)
        arguments: dict[str, Any] = {
            "speculative_config": {
                "method": "dflash",
                "model": str(self.folder),
                "num_speculative_tokens": self.depth,
                # Demanded, so that nothing else is served silently. The same trees at
                # any load: the process that schedules is the limit, not the rows.
                "ddtree": {"budget": self.nodes, "budget_per_batch_size": "fixed"},
            },
            "max_num_batched_tokens": num_seqs * (self.width + self.depth)
            + _PREFILL_TOKENS,
        }
        if not is_cpu and not _GRAPH_ARGUMENTS & set(named):
            arguments["cudagraph_capture_sizes"] = self.graph_sizes(num_seqs)
        return arguments

    def graph_sizes(self, num_seqs: int) -> list[int]:
        """Return the token counts that are captured: few, for a short start.

        A batch is full but for the end of the run, so the sizes below are far apart.
        """
        counts = {1 << i for i in range(num_seqs.bit_length())} | {num_seqs}
        sizes = {count * self.width for count in counts if count <= num_seqs}
        full = num_seqs * self.width
        return sorted(sizes | {full + more for more in _PREFILL_GRAPHS})


def find_speculation(config: RunConfig) -> Speculation | None:
    """Return the draft that the answers of a run are made with, if there is one.

    Raises:
        ValueError: The draft can't be read, or the plugin is not installed.
    """
    options = config.generation.speculative
    if options is None:
        return None
    name = options.model or config.draft.init_from
    assert name is not None, "load_config refuses it"
    folder = draft_folder(name)
    try:
        draft = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        block_size = int(
            draft.get("block_size") or draft["dflash_config"]["block_size"]
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise option_error(
            f"the draft of generation.speculative can't be read (got {folder}: "
            f"{error!r})",
            'The folder of a draft with a block_size, or "embedded", is allowed',
            "generation.speculative: {model: embedded}, or false to go without",
        ) from error
    deepest = min(block_size - 1, options.nodes)
    depth = options.depth or deepest
    if not 1 <= depth <= deepest:
        raise option_error(
            f"generation.speculative.depth is out of range (got {depth})",
            f"1 to {deepest} is allowed with this draft's blocks of {block_size} and "
            f"{options.nodes} nodes",
            f"generation.speculative.depth: {deepest}",
        )
    if not entry_points(group="vllm.general_plugins", name=_PLUGIN):
        raise option_error(
            "generation.speculative needs the plugin in vLLM's environment (got no "
            f"entry point {_PLUGIN!r})",
            "An installed vllm-dflash is allowed",
            "pip install -e . in the repository, or generation.speculative: false",
        )
    return Speculation(folder, options.nodes, depth)


def draft_folder(name: str) -> Path:
    """Return the folder of a draft."""
    if name != EMBEDDED:
        return Path(name).expanduser()
    from vllm_dflash.demo.pair import embedded_draft

    return embedded_draft()


def choose_plugins(is_speculative: bool) -> None:
    """Name the plugins that vLLM loads; before its platform is asked for.

    Without speculation generation needs neither drafts nor this project's plugin.
    """
    if not is_speculative:
        os.environ.setdefault("VLLM_PLUGINS", "")
        return
    named = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name]
    missing = [name for name in (_PLUGIN, _CPU_PLUGIN) if name not in named]
    os.environ["VLLM_PLUGINS"] = ",".join([*named, *missing])
    # The choice of an attention backend may ask CUDA in this process, as it does in
    # `vllm serve`, and a fork could not use the GPU afterwards.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.platforms import vllm_version_matches_substr

    if vllm_version_matches_substr("cpu"):
        os.environ.setdefault("VLLM_DFLASH_CPU", "1")
