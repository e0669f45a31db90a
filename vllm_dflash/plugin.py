# SPDX-License-Identifier: Apache-2.0
"""The door: what vLLM calls, and what gets installed then.

`register_platform` runs while vLLM looks for its platform, `register` in every process
of vLLM before a runner is imported. vLLM lets an exception of either kill every engine
of the environment, so neither raises.
"""

from vllm_dflash import envs, patches
from vllm_dflash.logger import init_logger
from vllm_dflash.patches.after_import import call_after_import

logger = init_logger(__name__)


def register_platform() -> None:
    """Entry point `vllm.platform_plugins`: Triton's interpreter, if asked for.

    Does nothing unless VLLM_DFLASH_CPU=1 on a CPU build of vLLM. Returns None, which
    tells vLLM that this is no platform of its own.
    """
    try:
        if not envs.VLLM_DFLASH_CPU:
            return
        from vllm.platforms import vllm_version_matches_substr

        if not vllm_version_matches_substr("cpu"):
            logger.warning(
                "VLLM_DFLASH_CPU=1 is ignored: this vLLM is not a CPU build. "
                "Unset it to serve on the GPU."
            )
            return
        from vllm_dflash.cpu.triton_interpreter import install_interpreter

        install_interpreter()
    except Exception:
        logger.exception("vllm-dflash could not prepare the CPU")


def register() -> None:
    """Entry point `vllm.general_plugins`: install what falls through without a tree.

    Runs in the API server, the engine core, every worker and the model-inspection
    process, possibly more than once.
    """
    for name in ("create_speculative_config", "create_engine_config"):
        _apply(name, "the key ddtree is refused by vLLM")
    _apply("init_speculator", "an engine with trees can't start its workers")
    _apply("draft_slots", "fewer requests with trees fit a step")
    # Also for a process that is handed a finished config: an engine core, or another
    # front end.
    for name, consequence in (
        ("input_processor", "vLLM goes on refusing min_p and logit_bias"),
        ("stat_loggers", "there are no vllm_dflash metrics"),
        ("scheduler", "a calibrated budget schedule stays as it was measured"),
    ):
        _apply_after_import(name, consequence)
    if envs.any_is_set():
        _apply("environment_variables", "vLLM warns about VLLM_DFLASH_*")
    try:
        if envs.VLLM_DFLASH_CPU:
            from vllm_dflash.patches.cpu_kernels import install_when_imported

            install_when_imported()
    except Exception:
        logger.exception("vllm-dflash could not prepare the CPU")


def _apply(name: str, consequence: str) -> None:
    try:
        patches.apply(name)
    except Exception:
        logger.exception("vllm-dflash could not install %s: %s", name, consequence)


def _apply_after_import(name: str, consequence: str) -> None:
    call_after_import(patches.module_of(name), lambda module: _apply(name, consequence))
