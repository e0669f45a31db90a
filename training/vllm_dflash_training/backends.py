# SPDX-License-Identifier: Apache-2.0
"""Who generates: vLLM's offline engine, or transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vllm_dflash_training.config import GenerationOptions
from vllm_dflash_training.speculation import Speculation, choose_plugins


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    min_p: float
    # Of the first prompt; the following ones count on from it.
    seed: int


@dataclass(frozen=True)
class Job:
    """Prompts that are answered alike, and what is done with their responses.

    A response is all tokens of an answer, with the one that ended it.
    """

    prompts: list[list[int]]
    sampling: Sampling
    finish: Callable[[list[list[int]]], None]


class Backend(Protocol):
    """Answers prompts."""

    # Tokens that end a response.
    stop_ids: list[int]

    def run(self, jobs: Iterable[Job]) -> None:
        """Finish all jobs; one that was begun is finished. They are asked for late."""


def vllm_device(is_speculative: bool = False) -> torch.device:
    """Return what vLLM will run on; to be asked before anything else of CUDA.

    vLLM forks its engine's process. Nothing may have asked torch's CUDA library by
    then, not even whether there is a device, or the fork can't use it. vLLM asks the
    driver, and once it is imported torch does so too.

    Args:
        is_speculative: Whether it will answer with a draft, and so needs the plugin.
    """
    choose_plugins(is_speculative)
    from vllm.platforms import current_platform

    return torch.device("cpu" if current_platform.is_cpu() else "cuda")


def engine_arguments(
    dtype: torch.dtype,
    max_length: int,
    options: GenerationOptions,
    is_cpu: bool,
    total_memory: Callable[[], int],
    speculation: Speculation | None = None,
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`.

    Several engines share `gpu_memory_utilization`, each with its KV cache named: one
    that measured what is left would find the others there, or gone. Half of an engine's
    share is KV cache; weights, activations and graphs have the rest.

    Args:
        total_memory: Asked for the bytes of the GPU if they are needed.
        speculation: The draft that answers are made with; its cache is in the same
            pool.
    """
    drafts = speculation.engine_arguments(options, is_cpu) if speculation else {}
    memory: dict[str, Any] = {
        "gpu_memory_utilization": options.gpu_memory_utilization / options.engines,
        **drafts,
        **options.engine_args,
    }
    if options.engines > 1 and not is_cpu and "kv_cache_memory_bytes" not in memory:
        share = memory["gpu_memory_utilization"] * total_memory()
        memory["kv_cache_memory_bytes"] = int(share / 2)
    if is_cpu and speculation is None:
        # vLLM 0.32's runner there can't prefill a part of a prompt that has a seed; the
        # one that trees run on can.
        memory.setdefault("enable_chunked_prefill", False)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_length,
        "max_num_seqs": options.batch_size,
        "skip_tokenizer_init": True,
        "enforce_eager": is_cpu,
        "seed": 0,
        # Prompts are all different, and what is found in a cache depends on when.
        "enable_prefix_caching": False,
        **memory,
    }


@dataclass
class _Begun:
    """A job in the engine."""

    job: Job
    responses: list[list[int]]
    num_missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_missing = len(self.responses)


class VllmBackend:
    """The engine that will serve: no padding, continuous batching."""

    def __init__(
        self,
        target: str,
        dtype: torch.dtype,
        max_length: int,
        stop_ids: list[int],
        options: GenerationOptions,
        speculation: Speculation | None = None,
    ):
        is_cpu = vllm_device(speculation is not None).type == "cpu"
        if is_cpu:
            # In GiB. vLLM's default is half of the memory.
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM
        from vllm.platforms import current_platform

        self.stop_ids = stop_ids
        # As many again wait as run, so that an engine is full while it is given more.
        self.low_water = 2 * options.batch_size
        self._num_requests = 0
        arguments = engine_arguments(
            dtype,
            max_length,
            options,
            is_cpu,
            current_platform.get_device_total_memory,
            speculation,
        )
        self.llm = LLM(model=target, **arguments)

    def run(self, jobs: Iterable[Job]) -> None:
        """See `Backend`. The next jobs begin while the last answers of one are made."""
        waiting, is_more = iter(jobs), True
        running: dict[str, tuple[_Begun, int]] = {}
        while is_more or running:
            while is_more and len(running) < self.low_water:
                job = next(waiting, None)
                if job is None:
                    is_more = False
                elif job.prompts:
                    running |= self._begin(job)
                else:
                    job.finish([])
            # Without a request there is no step to wait for.
            for output in self.llm.llm_engine.step() if running else []:
                if not output.finished:
                    continue
                begun, index = running.pop(output.request_id)
                begun.responses[index] = list(output.outputs[0].token_ids)
                begun.num_missing -= 1
                if not begun.num_missing:
                    begun.job.finish(begun.responses)

    def _begin(self, job: Job) -> dict[str, tuple[_Begun, int]]:
        """Give a job's requests to the engine, and return them by id."""
        from vllm.inputs import tokens_input

        begun = _Begun(job, [[] for _ in job.prompts])
        requests = {}
        for index, prompt in enumerate(job.prompts):
            name = str(self._num_requests)
            self._num_requests += 1
            self.llm.llm_engine.add_request(
                name, tokens_input(prompt), self._params(job.sampling, index)
            )
            requests[name] = (begun, index)
        return requests

    def _params(self, sampling: Sampling, index: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        is_greedy = sampling.temperature == 0
        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            min_p=sampling.min_p if not is_greedy else 0.0,
            seed=None if is_greedy else sampling.seed + index,
            stop_token_ids=self.stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


class TransformersBackend:
    """Padded batches: slower, and needs no vLLM."""

    def __init__(
        self,
        target: str,
        dtype: torch.dtype,
        device: torch.device,
        stop_ids: list[int],
        options: GenerationOptions,
    ):
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
        self.model = self.model.to(device).eval()
        self.device, self.stop_ids = device, stop_ids
        self.batch_size = options.batch_size

    def run(self, jobs: Iterable[Job]) -> None:
        """See `Backend`."""
        for job in jobs:
            job.finish(self._generate(job.prompts, job.sampling))

    @torch.inference_mode()
    def _generate(
        self, prompts: list[list[int]], sampling: Sampling
    ) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        responses: list[list[int]] = [[] for _ in prompts]
        torch.manual_seed(sampling.seed)
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            found = self._batch([prompts[i] for i in rows], sampling)
            for row, response in zip(rows, found, strict=True):
                responses[row] = response
        return responses

    def _batch(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        length = max(map(len, prompts))
        # Any token does: it is masked.
        pad = self.stop_ids[0] if self.stop_ids else 0
        tokens = torch.full((len(prompts), length), pad)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            options = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "min_p": sampling.min_p or None,
                "top_k": 0,
                "top_p": 1.0,
            }
        out = self.model.generate(
            input_ids=tokens.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=sampling.max_tokens,
            eos_token_id=self.stop_ids or None,
            pad_token_id=pad,
            **options,
        )
        return [self._cut(row) for row in out[:, length:].tolist()]

    def _cut(self, response: list[int]) -> list[int]:
        """Drop what follows the first stop token."""
        for index, token in enumerate(response):
            if token in self.stop_ids:
                return response[: index + 1]
        return response
