# SPDX-License-Identifier: Apache-2.0
"""The CPU worker of an engine with trees."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dflash.runner.worker import TreeWorkerMixin


class TreeCPUWorker(TreeWorkerMixin, CPUWorker):
    """vLLM's CPU worker, which starts only if it can verify trees."""
