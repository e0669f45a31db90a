# SPDX-License-Identifier: Apache-2.0
"""The frozen target: features of its layers, logits, embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vllm_dflash.errors import option_error
from vllm_dflash_training.config import EMBEDDED


def target_folder(name: str) -> str:
    """Return what to load the target from: a folder or a hub name."""
    if name != EMBEDDED:
        return (
            str(Path(name).expanduser()) if Path(name).expanduser().exists() else name
        )
    from vllm_dflash.demo.pair import embedded_pair

    return embedded_pair(lambda text: None).target


def is_same_target(name: str, other: str) -> bool:
    """Whether two names, of different runs perhaps, lead to the same target."""
    if name == other:
        return True
    folders = [Path(target_folder(n)) for n in (name, other)]
    return all(f.is_dir() for f in folders) and folders[0].samefile(folders[1])


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return a dtype; "auto" is bfloat16 on a GPU and float32 without one."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


class Target:
    """A causal language model of transformers that is only read."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device):
        from transformers import AutoModelForCausalLM

        self.name = name
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
        self.model.eval().requires_grad_(False)
        self.device, self.config = device, self.model.config
        self.decoder = self.model.get_decoder()
        output = self.model.get_output_embeddings()
        if getattr(output, "bias", None) is not None or not hasattr(
            self.decoder, "layers"
        ):
            raise option_error(
                f"the target {name} can't be trained for (got {type(self.model)})",
                "Decoders with `layers` and an lm_head without bias are allowed",
                "target: with another model",
            )
        # [vocab_size, hidden_size], both
        self.embeddings: torch.Tensor = self.model.get_input_embeddings().weight
        self.output: torch.Tensor = output.weight

    @property
    def final_norm(self) -> torch.Tensor | None:
        """Weight of the norm before the output matrix."""
        return getattr(getattr(self.decoder, "norm", None), "weight", None)

    @torch.no_grad()
    def features(
        self,
        # [num_seqs, length], padded on the right
        tokens: torch.Tensor,
        layer_ids: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target over whole sequences.

        What vLLM hands to a DFlash draft as auxiliary hidden states are the outputs of
        the layers with the residual added, before any norm, in ascending order. Hooks
        read just that; `output_hidden_states` would give the last layer's normed.

        Returns:
            Features [num_seqs, length, num_layers * hidden_size], and final normed
            hidden states [num_seqs, length, hidden_size]. Padding has arbitrary ones:
            attention is causal, so it changes nothing before it.
        """
        found: dict[int, torch.Tensor] = {}

        def keep(index: int) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                found[index] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [
            self.decoder.layers[i].register_forward_hook(keep(i)) for i in layer_ids
        ]
        try:
            final = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([found[i] for i in layer_ids], -1), final

    @torch.no_grad()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """Logits of final hidden states."""
        return F.linear(final, self.output)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings as the draft gets them: rows of the table, without a scale."""
        return F.embedding(tokens, self.embeddings)
