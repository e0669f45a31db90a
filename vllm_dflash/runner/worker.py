# SPDX-License-Identifier: Apache-2.0
"""Workers of engines with trees: vLLM's own, refusing what would go unnoticed.

The front end puts their names into the engine's config, so a worker process that has
not loaded the plugin, or has no copy of it, can't start. Without this it would draft a
plain chain of as many mask tokens as the tree has nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_dflash.draft_weights import is_checked, require_whole_draft


class TreeWorkerMixin:
    """What a worker checks before the models are loaded."""

    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        self._require_tree_speculator()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("load_dummy_weights"):
            self._require_whole_draft()
        super().load_model(*args, **kwargs)  # type: ignore[misc]

    def _require_tree_speculator(self) -> None:
        from vllm_dflash.runner.speculator import DDTreeSpeculator

        speculator = getattr(self.model_runner, "speculator", None)
        if isinstance(speculator, DDTreeSpeculator):
            return
        raise RuntimeError(
            "this worker process has not loaded the plugin dflash, and its engine is "
            f"configured for trees (got the speculator {type(speculator).__name__}). "
            "Every process of an engine with trees needs the plugin. Type "
            "VLLM_PLUGINS=dflash (on the CPU VLLM_PLUGINS=dflash,dflash_cpu), or unset "
            "VLLM_PLUGINS, in the environment of the workers too; or "
            '"ddtree": false in speculative_config for vLLM\'s chain.'
        )

    def _require_whole_draft(self) -> None:
        from vllm.model_executor.model_loader.utils import get_draft_load_config

        load_config = get_draft_load_config(self.vllm_config)
        if is_checked(load_config.load_format):
            speculative_config = self.vllm_config.speculative_config
            folder = _fetch(speculative_config.draft_model_config, load_config)
            require_whole_draft(speculative_config, load_config.load_format, folder)


def _fetch(draft: Any, load_config: Any) -> Path:
    """Return the draft's folder; vLLM would fetch it after it has loaded the target."""
    from vllm.model_executor.model_loader.weight_utils import (
        download_weights_from_hf,
        maybe_download_from_modelscope,
    )

    folder = Path(draft.model)
    if folder.is_dir():
        return folder
    fetched = maybe_download_from_modelscope(draft.model, draft.revision)
    if fetched is None:
        fetched = download_weights_from_hf(
            draft.model,
            load_config.download_dir,
            ["*.safetensors"],
            draft.revision,
            ignore_patterns=load_config.ignore_patterns,
        )
    return Path(fetched)
