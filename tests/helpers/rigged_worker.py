# SPDX-License-Identifier: Apache-2.0
"""The rigged draft in an engine of another process, as a worker extension of vLLM.

``worker_extension_cls="rigged_worker.RiggedWorker"``, with this folder on PYTHONPATH.
The methods are called through ``collective_rpc``.
"""

from types import SimpleNamespace

from rigged_draft import RiggedDraft

_rig = RiggedDraft(strict=False)
_rig.install(SimpleNamespace(setattr=setattr))


class RiggedWorker:
    """Mixed into the worker; vLLM wants no name of it to be the worker's."""

    def rig_to(self, prompts: list[list[int]], outputs: list[list[int]]) -> None:
        _rig.add_references(prompts, outputs)

    def rig_counts(self) -> tuple[int, int]:
        """(verified drafts, accepted paths off the first branch)."""
        return len(_rig.paths), _rig.num_branching_paths
