# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter as the CPU back end of vLLM's Model Runner V2.

vLLM decides at the first import of `vllm.triton_utils` whether Triton may be used.
Its CPU build asks for an entry `"cpu"` in `triton.backends.backends`, which only the
triton-cpu fork has. The interpreter needs no compiler, so an entry with a driver that
calls itself active is all that is missing.
"""

import os
from typing import Any

from vllm_dflash.logger import init_logger

logger = init_logger(__name__)


def install_interpreter() -> bool:
    """Switch Triton to its interpreter and register it as vLLM's CPU back end.

    Must run before `vllm.triton_utils` and before any `@triton.jit` is evaluated.
    Values that the user has set in the environment win.

    Returns:
        Whether Triton could be set up; False leaves the environment alone.
    """
    previous = os.environ.get("TRITON_INTERPRET")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        from triton.backends import Backend, backends
    except ImportError as error:
        if previous is None:
            del os.environ["TRITON_INTERPRET"]
        logger.warning(
            "VLLM_DFLASH_CPU=1 needs Triton's interpreter, and triton is not "
            "importable (%s). Type `pip install triton==3.9.0`. vLLM stays on its "
            "own CPU runner.",
            error,
        )
        return False
    if os.environ["TRITON_INTERPRET"] == "1":
        _interpret_standard_library()
        # Some functions of vLLM are compiled even under --enforce-eager, the embedding
        # under tensor parallelism for one; Inductor asks our back end for a compiler.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    backends.setdefault("cpu", Backend(compiler=None, driver=_driver_class()))
    return True


def _interpret_standard_library() -> None:
    """Redo the jit decorations of `triton.language` for the interpreter.

    `import vllm` imports Triton (by way of torch.compile) before any plugin runs, so
    in the user's own process `tl.max` and its like are already compiled functions,
    which interpreted kernels can't call. Child processes inherit the variable.
    """
    import importlib

    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if isinstance(tl.max, InterpretedFunction):
        return
    for name in ("standard", "random"):
        importlib.reload(importlib.import_module(f"triton.language.{name}"))
    importlib.reload(tl)


def _driver_class() -> type[Any]:
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        """The driver vLLM and Triton ask for; interpreted kernels never use it."""

        def __init__(self) -> None:
            # The base class would look for a compiler.
            pass

        @staticmethod
        def is_active() -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            from triton.backends.compiler import GPUTarget

            return GPUTarget("cpu", 0, 32)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            # Autotuned kernels keep their first configuration.
            return lambda kernel_call, **kwargs: 0.0

    return InterpreterDriver
