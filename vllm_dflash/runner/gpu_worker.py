# SPDX-License-Identifier: Apache-2.0
"""The GPU worker of an engine with trees."""

from vllm.v1.worker.gpu_worker import Worker

from vllm_dflash.runner.worker import TreeWorkerMixin


class TreeGPUWorker(TreeWorkerMixin, Worker):
    """vLLM's GPU worker, which starts only if it can verify trees."""
