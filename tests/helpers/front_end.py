# SPDX-License-Identifier: Apache-2.0
"""What the front end decides about an engine, without starting one."""

from typing import Any

OPTIONS: dict[str, Any] = dict(
    skip_tokenizer_init=True,
    max_model_len=256,
    enforce_eager=True,
    dtype="float32",
    max_num_seqs=4,
    max_num_batched_tokens=256,
)


def build_config(target: str, speculative_config: Any = None, **kwargs: Any) -> Any:
    """Build an engine's config as the front end does, with the plugin registered."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dflash import plugin

    plugin.register()
    args = EngineArgs(
        model=target, speculative_config=speculative_config, **{**OPTIONS, **kwargs}
    )
    return args.create_engine_config()
