# SPDX-License-Identifier: Apache-2.0
"""`vllm/lora/punica_wrapper/punica_cpu.py`: rows without an adapter stay so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def make_punica_wrapper(original: type[PunicaWrapperCPU]) -> type[PunicaWrapperCPU]:
    """Return a `PunicaWrapperCPU` that adds nothing to rows of the slot -1."""

    class TreePunicaWrapperCPU(original):  # type: ignore[misc, valid-type]
        """Hides the rows without an adapter: a product with zero adds nothing."""

        def add_shrink(
            self, y: Any, x: torch.Tensor, *args: Any, **kwargs: Any
        ) -> None:
            # What linear layers begin with, fully sharded ones on their own.
            x = _hide(x.view(-1, x.shape[-1]), self.token_lora_indices)
            super().add_shrink(y, x, *args, **kwargs)

        def add_lora_embedding(
            self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any
        ) -> None:
            x = _hide(x, self.token_lora_indices)
            super().add_lora_embedding(y, x, *args, **kwargs)

        def add_lora_logits(
            self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any
        ) -> None:
            x = _hide(x, self.sampler_indices)
            super().add_lora_logits(y, x, *args, **kwargs)

    return TreePunicaWrapperCPU


def _hide(
    # [num_rows, size]
    x: torch.Tensor,
    # [num_rows], slot of the row's adapter, -1: none
    slots: torch.Tensor,
) -> torch.Tensor:
    return x.masked_fill((slots < 0).unsqueeze(1), 0)
