# SPDX-License-Identifier: Apache-2.0
"""A draft with more layers, which computes the same until it is trained."""

from __future__ import annotations

from typing import Any

import torch

from vllm_dflash.errors import option_error

# What a layer adds to the residual stream goes through these.
_ADDED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def grow(
    config: dict[str, Any], weights: dict[str, torch.Tensor], num_layers: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Append layers to a draft that add nothing yet.

    They are copies of the last ones, in their order, but for the output projections of
    attention and MLP, which are zero: so the rows pass unchanged. A gradient reaches
    these projections at once, and everything before them from the second step on.

    Args:
        config: The draft's config.json.
        weights: Its tensors.
        num_layers: That it will have; as many as it has change nothing.

    Raises:
        ValueError: It has more.
    """
    before = config["num_hidden_layers"]
    if num_layers < before:
        raise option_error(
            f"draft.num_layers is less than draft.init_from has (got {num_layers}, it "
            f"has {before})",
            f"{before} or more, or null for as many as it has, is allowed",
            f"draft.num_layers: {before}",
        )
    config, weights = dict(config), dict(weights)
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        more = config["layer_types"][-1:] * (num_layers - before)
        config["layer_types"] = [*config["layer_types"], *more]
    if config.get("max_window_layers") == before:
        # All of them, as in the draft before.
        config["max_window_layers"] = num_layers
    for layer in range(before, num_layers):
        # The last ones in order; with more new layers than old ones, again and again.
        source = f"layers.{(before - num_layers + layer) % before}."
        for name in [name for name in weights if name.startswith(source)]:
            part = name.removeprefix(source)
            copy = weights[name].clone()
            if part in _ADDED:
                copy.zero_()
            weights[f"layers.{layer}.{part}"] = copy
    return config, weights
