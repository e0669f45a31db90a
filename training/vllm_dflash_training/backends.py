# SPDX-License-Identifier: Apache-2.0
"""Who generates: vLLM's offline engine, or transformers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_dflash_training.config import GenerationOptions


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    min_p: float
    # Of the first prompt; the following ones count on from it.
    seed: int


class Backend(Protocol):
    """Answers prompts."""

    # Tokens that end a response.
    stop_ids: list[int]

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        """Return one response a prompt, with the token that ended it."""


def vllm_device() -> torch.device:
    """Return what vLLM will run on; to be asked before anything else of CUDA.

    vLLM forks its engine's process. Nothing may have asked torch's CUDA library by
    then, not even whether there is a device, or the fork can't use it. vLLM asks the
    driver, and once it is imported torch does so too.
    """
    # Generation needs neither drafts nor this project's plugin.
    os.environ.setdefault("VLLM_PLUGINS", "")
    from vllm.platforms import current_platform

    return torch.device("cpu" if current_platform.is_cpu() else "cuda")


class VllmBackend:
    """The engine that will serve: no padding, continuous batching."""

    def __init__(
        self,
        target: str,
        dtype: torch.dtype,
        max_length: int,
        stop_ids: list[int],
        options: GenerationOptions,
    ):
        is_cpu = vllm_device().type == "cpu"
        if is_cpu:
            # In GiB. vLLM's default is half of the memory.
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM

        self.stop_ids = stop_ids
        engine_args: dict[str, Any] = {
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": max_length,
            "max_num_seqs": options.batch_size,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "skip_tokenizer_init": True,
            "enforce_eager": is_cpu,
            "seed": 0,
            **options.engine_args,
        }
        self.llm = LLM(model=target, **engine_args)

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        """See `Backend`."""
        from vllm import SamplingParams

        is_greedy = sampling.temperature == 0
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                min_p=sampling.min_p if not is_greedy else 0.0,
                seed=None if is_greedy else sampling.seed + index,
                stop_token_ids=self.stop_ids,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params)
        return [list(output.outputs[0].token_ids) for output in outputs]


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

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        """See `Backend`."""
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
