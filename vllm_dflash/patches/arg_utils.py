# SPDX-License-Identifier: Apache-2.0
"""`vllm/engine/arg_utils.py`: from the user's words to a config with a tree.

`create_engine_config` builds the VllmConfig and calls `create_speculative_config` on
the way. The choice of tree or chain is final when it returns, before any worker exists.
A tree that turns out to be impossible and was not demanded is undone by building the
config again as vLLM would have, so the chain is exactly vLLM's.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash import (
    draft_fit,
    draft_weights,
    envs,
    graphs,
    selection,
    support,
)
from vllm_dflash.calibrate import store
from vllm_dflash.config import (
    OPTION_KEY,
    DDTreeConfig,
    get_ddtree_config,
    parse_ddtree_option,
)
from vllm_dflash.errors import option_error
from vllm_dflash.logger import init_logger
from vllm_dflash.patches.speculative_config import set_draft_slots
from vllm_dflash.schedule import BudgetSchedule, estimate_parameters

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

logger = init_logger(__name__)

_TOKENS_KEY = "num_speculative_tokens"


def wrap_create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineArgs.create_speculative_config` with the key `ddtree`."""

    @functools.wraps(original)
    def create_speculative_config(
        self: EngineArgs, target_model_config: Any, target_parallel_config: Any
    ) -> SpeculativeConfig | None:
        words = _user_words(self)
        if OPTION_KEY not in words and not _may_be_dflash(self, words):
            return original(self, target_model_config, target_parallel_config)

        given = OPTION_KEY in words
        option = words.pop(OPTION_KEY, None)
        if not _names_method(self, words) and not _will_be_dflash(self, words):
            # vLLM would ask for num_speculative_tokens, which is not what is missing.
            _refuse_other_method(None, option)
        default_depth = (
            words.get(_TOKENS_KEY) is None
            and self.spec_tokens is None
            and _will_be_dflash(self, words)
        )
        if default_depth:
            # Only the draft's config knows the default, and vLLM wants a number
            # before it reads that config.
            words[_TOKENS_KEY] = 1
        self.speculative_config = words or None
        config = original(self, target_model_config, target_parallel_config)
        if config is None or config.method != "dflash":
            _refuse_other_method(config, option)
            return config

        _refuse_misplaced_options(self)
        if option is not False:
            _require_usable_draft(self, config)
        if default_depth:
            depth = support.draft_depth(config)
            config.num_speculative_tokens = depth
            self.speculative_config[_TOKENS_KEY] = depth
        if given:
            # EngineArgs may build its config more than once.
            self.speculative_config[OPTION_KEY] = option
        tree = _decide(self, config, option)
        if tree is not None:
            _tell_vllm(self, config, tree)
        return config

    return create_speculative_config


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineArgs.create_engine_config` with the choice of tree or chain."""

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        _run_eagerly_in_the_interpreter(self)
        before = _snapshot(self)
        tree = backend = None
        try:
            config = original(self, *args, **kwargs)
            tree = get_ddtree_config(config)
            if tree is not None:
                backend = support.find_refusal(config) or selection.select_backend(
                    config
                )
        except ValueError as error:
            # vLLM's own checks may refuse the tree's sizes and not the chain's.
            tree = _pending_tree(self)
            if tree is None or tree.demanded:
                raise
            backend = support.Refusal(" ".join(str(error).split()))
        finally:
            # The config has its own copy; a second call starts from the user's.
            self.additional_config = before["additional_config"]

        if tree is None:
            _give_backends_back()
            return config
        if not isinstance(backend, support.Refusal):
            graphs.cover_verify_widths(
                config,
                tree,
                user_sizes=_has_user_sizes(before),
                user_max_num_seqs=before["max_num_seqs"] is not None,
            )
            if tree.measurement is not None:
                graphs.cover_no_drafts(config)
            selection.select_worker(config)
            support.log_tree(logger, config, tree, backend)
            _name_what_rust_leaves_out(*args, **kwargs)
            return config
        if tree.demanded:
            raise ValueError(backend.message)
        support.warn_chain(logger, backend, tree.depth)
        vars(self).update(before)
        self.speculative_config = {**_user_words(self), OPTION_KEY: False}
        _give_backends_back()
        return original(self, *args, **kwargs)

    return create_engine_config


def _user_words(args: EngineArgs) -> dict[str, Any]:
    """Return a copy of the user's `speculative_config` with vLLM's spelling of keys."""
    words = args.speculative_config
    if words is None:
        return {}
    if not isinstance(words, dict) or not all(isinstance(key, str) for key in words):
        raise option_error(
            f"speculative_config is no set of named options (got {words!r})",
            "A JSON object, or a dict with strings as keys, is allowed",
            '--speculative-config \'{"method": "dflash", "model": ...}\'',
        )
    return {key.replace("-", "_"): value for key, value in words.items()}


def _may_be_dflash(args: EngineArgs, words: dict[str, Any]) -> bool:
    """Whether vLLM may resolve the method to dflash, itself or by detection."""
    method = args.spec_method or words.get("method")
    model = args.spec_model or words.get("model")
    return method == "dflash" or (method is None and model is not None)


def _will_be_dflash(args: EngineArgs, words: dict[str, Any]) -> bool:
    """Whether vLLM resolves the method to dflash, by its own rule for names."""
    method = args.spec_method or words.get("method")
    model = str(args.spec_model or words.get("model")).lower()
    if method is not None:
        return method == "dflash"
    return "dflash" in model and "eagle-" not in model and "eagle3" not in model


def _names_method(args: EngineArgs, words: dict[str, Any]) -> bool:
    return (args.spec_method or words.get("method")) is not None


def _refuse_other_method(config: SpeculativeConfig | None, option: Any) -> None:
    if option is None or option is False:
        return
    method = None if config is None else config.method
    raise ValueError(
        f"ddtree needs the method dflash (got {method}). Trees are built from DFlash "
        'drafts only. Type "method": "dflash" with a DFlash draft, or take ddtree out.'
    )


def _refuse_misplaced_options(args: EngineArgs) -> None:
    additional_config = args.additional_config
    if not isinstance(additional_config, dict):
        raise ValueError(
            "additional_config carries the tree to the workers and is no dict (got "
            f"{type(additional_config).__name__}). A dict is allowed. Take the other "
            "object out, or unload the plugin with VLLM_PLUGINS."
        )
    if OPTION_KEY in additional_config:
        raise ValueError(
            f"ddtree is in additional_config (got {additional_config[OPTION_KEY]!r}). "
            "It belongs into speculative_config. Type --speculative-config "
            '\'{"method": "dflash", "model": ..., "ddtree": {"budget": 47}}\'.'
        )


def _require_usable_draft(args: EngineArgs, config: SpeculativeConfig) -> None:
    """Refuse a draft that could serve neither as a tree nor as a chain.

    A draft on a hub is looked into by the workers, when it is there.
    """
    draft_fit.require_fitting_draft(config)
    folder = Path(config.draft_model_config.model)
    if folder.is_dir():
        load_config = config.draft_load_config
        load_format = (
            args.load_format if load_config is None else load_config.load_format
        )
        draft_weights.require_whole_draft(config, str(load_format), folder)


def _decide(
    args: EngineArgs, config: SpeculativeConfig, option: Any
) -> DDTreeConfig | None:
    """Return the options of the tree to try, None for vLLM's chain.

    Raises:
        ValueError: The user has demanded a tree and this can't be it.
    """
    from vllm.platforms import current_platform

    if option is False:
        return None
    depth = config.num_speculative_tokens
    # Of the schedule, if that is a kept one.
    kept: list[store.Calibration] = []

    def find_measured(budget: int, depth: int) -> BudgetSchedule | None:
        found = store.load_calibration(
            store.describe_setup(
                config,
                kv_cache_dtype=str(args.kv_cache_dtype),
                tensor_parallel_size=args.tensor_parallel_size,
                budget=budget,
                depth=depth,
            )
        )
        if found is None:
            return None
        kept.append(found)
        return found.schedule

    try:
        tree = parse_ddtree_option(
            option,
            num_speculative_tokens=depth,
            block_size=support.draft_block_size(config),
            is_cpu=current_platform.is_cpu(),
            parameters=estimate_parameters(
                config.target_model_config.hf_text_config, args.tensor_parallel_size
            ),
            find_measured=find_measured,
        )
    except ValueError as error:
        if option is not None:
            raise
        support.warn_chain(logger, support.Refusal(str(error)), depth)
        return None
    if kept:
        tree = dataclasses.replace(tree, measurement=kept[0].measurement)
    refusal = support.find_early_refusal(config, tree, args.max_num_batched_tokens)
    if refusal is None:
        return tree
    if option is not None:
        raise ValueError(refusal.message)
    support.warn_chain(logger, refusal, depth)
    return None


def _tell_vllm(args: EngineArgs, config: SpeculativeConfig, tree: DDTreeConfig) -> None:
    """Put the budget where vLLM reads it and the options where workers find them."""
    config.num_speculative_tokens = tree.budget
    set_draft_slots(config, tree.depth)
    if tree.budget_per_batch_size is not None:
        config.num_speculative_tokens_per_batch_size = list(tree.budget_per_batch_size)
    args.additional_config = {**args.additional_config, OPTION_KEY: tree.to_dict()}


def _run_eagerly_in_the_interpreter(args: EngineArgs) -> None:
    """Switch torch.compile off where Triton has no compiler for it to ask."""
    from vllm.platforms import current_platform

    if not envs.VLLM_DFLASH_CPU or not current_platform.is_cpu() or args.enforce_eager:
        return
    args.enforce_eager = True
    logger.info(
        "VLLM_DFLASH_CPU=1 runs Triton in its interpreter; torch.compile finds no "
        "compiler: --enforce-eager is set."
    )


def _name_what_rust_leaves_out(
    usage_context: UsageContext | None = None, headless: bool = False
) -> None:
    """Warn where vLLM starts a front end that no Python plugin can reach."""
    from vllm import envs as vllm_envs
    from vllm.usage.usage_lib import UsageContext

    if usage_context is not UsageContext.OPENAI_API_SERVER or headless:
        return
    if vllm_envs.VLLM_USE_RUST_FRONTEND:
        logger.warning(
            "VLLM_USE_RUST_FRONTEND=1: trees are served, but this front end has no "
            "vllm_dflash metrics and no warning about a draft that is hardly ever "
            "right, and its log lines count nodes as draft tokens. Type "
            "VLLM_USE_RUST_FRONTEND=0 before the command to have them."
        )


def _give_backends_back() -> None:
    """Let an engine without trees have vLLM's attention, after one with trees.

    Only engines of this process can have replaced it, and layers keep what they have.
    """
    registry = sys.modules.get("vllm_dflash.attention.registry")
    if registry is not None:
        registry.remove_tree_backends()


def _snapshot(args: EngineArgs) -> dict[str, Any]:
    """Return the fields as they are, with copies of the dicts that vLLM writes into."""
    fields = dict(vars(args))
    for name in ("speculative_config", "additional_config"):
        if isinstance(fields[name], dict):
            fields[name] = dict(fields[name])
    return fields


def _pending_tree(args: EngineArgs) -> DDTreeConfig | None:
    """Return the tree of a config that vLLM did not finish."""
    additional_config = args.additional_config
    values = (
        additional_config.get(OPTION_KEY)
        if isinstance(additional_config, dict)
        else None
    )
    if not isinstance(values, dict) or "depth" not in values:
        return None
    return DDTreeConfig.from_dict(values)


def _has_user_sizes(fields: dict[str, Any]) -> bool:
    compilation_config = fields["compilation_config"]
    return any(
        value is not None
        for value in (
            fields["cudagraph_capture_sizes"],
            fields["max_cudagraph_capture_size"],
            compilation_config.cudagraph_capture_sizes,
            compilation_config.max_cudagraph_capture_size,
        )
    )
