# SPDX-License-Identifier: Apache-2.0
"""The ledger: everything of vLLM that this plugin replaces, one vLLM module a file.

A patch is applied by name, when its feature is about to be used, and never twice. A
symbol that has moved is an error of that moment, so an engine that uses nothing of
ours is never disturbed by it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MARK = "__vllm_dflash_patch__"


class PatchError(RuntimeError):
    """vLLM does not have the symbol that a patch replaces, or has it twice."""


@dataclass(frozen=True)
class Patch:
    """One replaced symbol of vLLM.

    Attributes:
        name: What the rest of the plugin calls it.
        target: `module:attribute` or `module:Class.attribute`.
        what: What the symbol does in vLLM.
        why: What it can't do for us.
        how: What the replacement does.
        upstream: The hook or fix in vLLM that would make the patch needless.
        remove_when: The test of that day.
        make: `module:function` that gets the original and returns the replacement.
        importers: Modules that bind the symbol by value; rebound if already imported.
    """

    name: str
    target: str
    what: str
    why: str
    how: str
    upstream: str
    remove_when: str
    make: str
    importers: tuple[str, ...] = ()


LEDGER: tuple[Patch, ...] = (
    Patch(
        name="create_speculative_config",
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        what="Builds SpeculativeConfig from the user's speculative_config dict.",
        why="SpeculativeConfig refuses unknown keys, so the options of a tree have no "
        "place, and vLLM must be told the nodes of a tree where the user says depth.",
        how="Takes the key ddtree out, lets vLLM build its config, then sets "
        "num_speculative_tokens to the budget and keeps the options in "
        "additional_config. Other methods fall through.",
        upstream="A dict for plugins in SpeculativeConfig.",
        remove_when="SpeculativeConfig carries keys of plugins to the workers.",
        make="vllm_dflash.patches.arg_utils:wrap_create_speculative_config",
    ),
    Patch(
        name="create_engine_config",
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        what="Builds the VllmConfig of an engine in the front-end process.",
        why="Whether a tree can be served depends on the whole config, and must be "
        "known before a worker is started.",
        how="Checks the finished config against the support table: a demanded tree is "
        "refused, another one gives way to vLLM's chain. Adds the capture sizes of "
        "verify graphs. Engines without a tree get vLLM's config unchanged.",
        upstream="A validation hook for plugins after VllmConfig is built.",
        remove_when="vLLM calls plugins with the finished VllmConfig.",
        make="vllm_dflash.patches.arg_utils:wrap_create_engine_config",
    ),
    Patch(
        name="input_processor",
        target="vllm.v1.engine.input_processor:InputProcessor.__init__",
        what="Keeps what the front end checks the parameters of a request against.",
        why="SamplingParams.verify refuses min_p and logit_bias with any speculation, "
        "and both are exact on a tree.",
        how="Forgets the speculative config of an engine with a tree, so that its "
        "requests are checked as if there were no speculation. Nothing else reads it.",
        upstream="A refusal that asks the rejection method, or the speculator.",
        remove_when="vLLM takes min_p and logit_bias with speculation.",
        make="vllm_dflash.patches.input_processor:wrap_input_processor",
    ),
    Patch(
        name="stat_loggers",
        target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        what="Makes the stat loggers of an engine in the front end.",
        why="Entry points for stat loggers hold for every engine, switch statistics on "
        "against --disable-log-stats, and are not loaded by vllm.LLM; the periodic "
        "line counts nodes as positions.",
        how="Hands vLLM one more stat logger, for engines with a tree only, and gives "
        "its logging one that counts depths.",
        upstream="Stat loggers that a plugin can add for one engine.",
        remove_when="A plugin can add a stat logger by VllmConfig, in LLM too.",
        make="vllm_dflash.patches.stat_loggers:wrap_stat_logger_manager",
    ),
    Patch(
        name="scheduler",
        target="vllm.v1.core.sched.scheduler:Scheduler.__init__",
        what="Makes an engine's scheduler, with its table of drafts by batch size.",
        why="The table stays as it is at the start, chosen by the acceptance of a "
        "calibration. Other traffic may accept so little that no drafts are faster.",
        how="Has each step's scheduled and sampled tokens read before the scheduler "
        "takes them, and the table overwritten in place. Engines with a calibrated "
        "schedule only; for others nothing is wrapped.",
        upstream="A schedule of drafts that a plugin can set while the engine runs.",
        remove_when="A plugin is told what each step accepted and may set the drafts.",
        make="vllm_dflash.patches.scheduler:wrap_scheduler",
    ),
    Patch(
        name="init_speculator",
        target="vllm.v1.worker.gpu.spec_decode:init_speculator",
        what="Chooses the speculator class of Model Runner V2 by method.",
        why="An if/elif over vLLM's own methods without a registry.",
        how="An engine with a tree gets the tree's speculator; others fall through.",
        upstream="A registry of V2 speculators.",
        remove_when="V2 speculators can be registered by method.",
        make="vllm_dflash.patches.spec_decode:wrap_init_speculator",
        importers=("vllm.v1.worker.gpu.model_runner",),
    ),
    Patch(
        name="resolve_model_state_cls",
        target="vllm.v1.worker.gpu.model_states:resolve_model_state_cls",
        what="Chooses the ModelState class of the target model.",
        why="Only a model class can name its own ModelState, a plugin can't.",
        how="Subclasses the class that vLLM chose, for engines with a tree only.",
        upstream="ModelState mix-ins for speculators.",
        remove_when="A speculator can bring hooks of ModelState with it.",
        make="vllm_dflash.patches.model_states:wrap_resolve_model_state_cls",
    ),
    Patch(
        name="draft_slots",
        target="vllm.config.speculative:SpeculativeConfig."
        "max_num_new_slots_for_drafting",
        what="Tokens of a step that the scheduler keeps free for a request's draft.",
        why="It counts a slot for each node of a tree, but the draft model is fed the "
        "mask tokens of its depth only. Requests would wait for a step that has room.",
        how="Answers the depth for an engine with a tree; others are vLLM's.",
        upstream="A speculator that names the slots of its draft.",
        remove_when="vLLM asks the speculator for them.",
        make="vllm_dflash.patches.speculative_config:make_draft_slots",
    ),
    Patch(
        name="init_candidates",
        target="vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        what="Lists, for each number of tokens, the captured graphs that may serve it.",
        why="It lists those of the next captured number only. With several widths that "
        "one may belong to another width, and a verify batch whose size was not "
        "captured exactly runs without its graph.",
        how="Adds the smallest graph of every width that holds the tokens, for engines "
        "with a tree only.",
        upstream="Candidates by width in CudaGraphManager.",
        remove_when="tests/compat/test_graph_candidates.py finds them complete.",
        make="vllm_dflash.patches.cudagraph_utils:wrap_init_candidates",
    ),
    Patch(
        name="set_active_loras",
        target="vllm.v1.worker.lora_model_runner_mixin:"
        "LoRAModelRunnerMixin._set_active_loras",
        what="Says which adapter each token and each row of logits of a step has.",
        why="The runner names one row of logits a request, a verify step has a row for "
        "each node: the adapter of an lm_head would miss most rows and take others of "
        "other requests. On the CPU the numbers don't fit and the engine fails.",
        how="Repeats each request's adapter for all of its rows, for engines with a "
        "tree only.",
        upstream="LoraState.make_lora_inputs that is told the rows of each request.",
        remove_when="tests/compat/test_lora_rows.py finds a row of logits each.",
        make="vllm_dflash.patches.lora_model_runner_mixin:wrap_set_active_loras",
    ),
    Patch(
        name="punica_wrapper",
        target="vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        what="Applies the adapters of a batch on the CPU.",
        why="A row without an adapter has the slot -1, which torch takes for the last "
        "one: beside requests with adapters it gets the adapter that lies there.",
        how="Subclass that hides such rows. Engines with a tree on the CPU only.",
        upstream="CPU operations that leave out the rows of slot -1.",
        remove_when="tests/compat/test_lora_rows.py finds vLLM's wrapper right.",
        make="vllm_dflash.patches.punica_cpu:make_punica_wrapper",
    ),
    Patch(
        name="apply_top_k_top_p",
        target="vllm.v1.sample.ops.topk_topp_triton:apply_top_k_top_p_triton",
        what="Masks what top-k and top-p leave out, on a GPU.",
        why="Up to 64 rows are masked by other kernels than more rows, and those for "
        "more drop the least likely token where top-p keeps all that min-p, a grammar "
        "or allowed tokens have left. A tree has a row for each node, so the same "
        "requests would draw from other tokens than without speculation.",
        how="Raises the limit of 64 rows to 1024 and goes through more rows in parts.",
        upstream="A standalone top-p that keeps the smallest of the nucleus.",
        remove_when="tests/compat/test_top_p_rows.py finds vLLM's kernels alike.",
        make="vllm_dflash.patches.topk_topp_triton:wrap_apply_top_k_top_p",
        importers=("vllm.v1.sample.ops.topk_topp_sampler",),
    ),
    Patch(
        name="normalize_context_k",
        target="vllm.model_executor.models.qwen3_dflash:"
        "DFlashQwen3Model._normalize_context_k",
        what="Normalises the context keys of all draft layers in one call.",
        why="vLLM's CPU rms_norm reads only the first row of a 2-D weight, so every "
        "layer gets layer 0's weight and the draft is accepted less.",
        how="One rms_norm a layer, on the CPU only.",
        upstream="A CPU rms_norm that selects the weight by the outermost index.",
        remove_when="tests/compat/test_patches.py finds vLLM's CPU result right.",
        make="vllm_dflash.patches.qwen3_dflash:make_normalize_context_k",
    ),
    Patch(
        name="environment_variables",
        target="vllm.envs:environment_variables",
        what="The table of VLLM_* variables that vLLM knows.",
        why="vLLM warns about others, or refuses to start if told to.",
        how="Adds our variables, if any is set.",
        upstream="A registry of the variables of plugins.",
        remove_when="vLLM ignores the variables of its plugins.",
        make="vllm_dflash.patches.environment:extend_environment_variables",
    ),
)

_BY_NAME = {patch.name: patch for patch in LEDGER}
_originals: dict[str, Any] = {}


def apply(name: str) -> None:
    """Install one patch of the ledger; a second call does nothing.

    Raises:
        PatchError: vLLM has no such symbol, or another copy has patched it.
    """
    patch = _BY_NAME[name]
    owner, attribute = resolve_target(patch.target)
    current = vars(owner)[attribute]
    mark = getattr(current, _MARK, None)
    if name in _originals and mark == name:
        _rebind(patch, _originals[name], current)
        return
    if mark is not None:
        raise PatchError(
            f"{patch.target} carries the patch {mark} of another vllm_dflash. "
            "Uninstall one of the two copies"
        )
    replacement = _load(patch.make)(current)
    setattr(replacement, _MARK, name)
    setattr(owner, attribute, replacement)
    _originals[name] = current
    _rebind(patch, current, replacement)


def module_of(name: str) -> str:
    """Return the module whose symbol the patch replaces."""
    return _BY_NAME[name].target.partition(":")[0]


def is_applied(name: str) -> bool:
    """Whether the patch is in place in this process."""
    return name in _originals


def original(name: str) -> Any:
    """Return vLLM's own symbol of an applied patch."""
    return _originals[name]


def resolve_target(target: str) -> tuple[Any, str]:
    """Return the object that holds a patched symbol, and the symbol's name.

    Raises:
        PatchError: The module, the class or the symbol does not exist.
    """
    module_name, _, path = target.partition(":")
    *owners, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for part in owners:
            owner = getattr(owner, part)
    except (ImportError, AttributeError) as error:
        raise PatchError(_moved(target)) from error
    if attribute not in vars(owner):
        raise PatchError(_moved(target))
    return owner, attribute


def _rebind(patch: Patch, before: Any, after: Any) -> None:
    for module_name in patch.importers:
        module = sys.modules.get(module_name)
        attribute = patch.target.rpartition(":")[2]
        if module is not None and getattr(module, attribute, None) is before:
            setattr(module, attribute, after)


def _load(path: str) -> Callable[[Any], Any]:
    module_name, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module_name), attribute)


def _moved(target: str) -> str:
    return (
        f"vLLM has no {target}, which vllm-dflash replaces. vllm-dflash supports vLLM "
        "0.32; install that version, or switch trees off with "
        '"ddtree": false in speculative_config'
    )
