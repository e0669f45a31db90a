# SPDX-License-Identifier: Apache-2.0
"""Without a tree the plugin changes nothing: seen from processes of their own."""

import os
import subprocess
import sys

import pytest
import torch
from tiny_models import write_target

pytestmark = pytest.mark.slow


def run(code: str, **environment: str) -> list[str]:
    names = ("VLLM_DFLASH_CPU", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **{k: v for k, v in os.environ.items() if k not in names},
            "VLLM_LOGGING_LEVEL": "ERROR",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


CHANGED = """
import sys, time
import vllm.engine.arg_utils, vllm.envs
import vllm.v1.worker.gpu.spec_decode
if sys.platform and "{cpu}" == "True":
    import vllm.v1.worker.cpu.shm
import vllm.v1.worker.gpu.model_states, vllm.v1.worker.gpu.sample.sampler
import vllm.model_executor.models.qwen3_dflash

def snapshot():
    seen = {{}}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("vllm", "torch", "triton"):
            continue
        for attribute, value in list(vars(module).items()):
            seen[name, attribute] = id(value)
            if isinstance(value, type) and value.__module__.startswith("vllm."):
                for member, inner in vars(value).items():
                    if not member.startswith("__"):
                        seen[value.__module__, value.__name__, member] = id(inner)
    return seen

from vllm_dflash.plugin import register
before = snapshot()
started = time.perf_counter()
register()
cost = time.perf_counter() - started
after = snapshot()
changed = sorted(
    ".".join(key[1:]) for key in before if after.get(key) != before[key]
)
print(*dict.fromkeys(changed))
print(cost)
"""


def test_registration_changes_four_symbols_of_vllm():
    changed, cost = run(
        CHANGED.format(cpu=not torch.cuda.is_available()), VLLM_PLUGINS=""
    )
    assert changed.split() == [
        "EngineArgs.create_engine_config",
        "EngineArgs.create_speculative_config",
        "SpeculativeConfig.max_num_new_slots_for_drafting",
        "init_speculator",
    ]
    assert float(cost) < 1


FRONT_END = """
import sys
import vllm.engine.arg_utils
from vllm_dflash.plugin import register

FRONT_END = ("vllm.v1.engine.input_processor", "vllm.v1.metrics.loggers")
before = set(sys.modules)
register()
print(*sorted(name for name in FRONT_END if name in sys.modules))
print(*sorted(name for name in set(sys.modules) - before if "dflash" not in name))
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager
for cls in (InputProcessor, StatLoggerManager):
    print(getattr(cls.__init__, "__vllm_dflash_patch__", None))
"""


def test_registration_imports_nothing_of_the_front_end():
    """Which is patched all the same, in a process that imports it."""
    modules, others, *patched = run(FRONT_END, VLLM_PLUGINS="")
    assert modules == ""
    assert not [name for name in others.split() if name.startswith("vllm.v1.engine")]
    assert patched == ["input_processor", "stat_loggers"]


SAME_OBJECTS = """
import vllm.engine.arg_utils as arg_utils
import vllm.v1.worker.gpu.spec_decode as spec_decode
from types import SimpleNamespace as Namespace

config, speculative, speculator = object(), Namespace(method="ngram"), object()
engine = Namespace(speculative_config=None, additional_config={})
arg_utils.EngineArgs.create_speculative_config = lambda self, *args: speculative
arg_utils.EngineArgs.create_engine_config = lambda self, *args: engine
spec_decode.init_speculator = lambda *args: speculator

from vllm_dflash.plugin import register
register()
args = object.__new__(arg_utils.EngineArgs)
args.speculative_config, args.additional_config = {"method": "ngram"}, {}
args.spec_method = args.spec_model = args.spec_tokens = None
assert args.create_speculative_config(None, None) is speculative
assert args.speculative_config == {"method": "ngram"}
assert args.create_engine_config() is engine
ngram = Namespace(speculative_config=Namespace(method="ngram"), additional_config={})
device = Namespace(type="cpu")
assert spec_decode.init_speculator(ngram, device, None) is speculator
chain = Namespace(speculative_config=Namespace(method="dflash"), additional_config={})
device = Namespace(type="cuda")
assert spec_decode.init_speculator(chain, device, None) is speculator
print("same")
"""


def test_without_a_tree_vllms_own_objects_come_back():
    assert run(SAME_OBJECTS, VLLM_PLUGINS="") == ["same"]


HASH = """
from vllm.engine.arg_utils import EngineArgs
args = EngineArgs(
    model={target!r}, skip_tokenizer_init=True, max_model_len=256, dtype="float32",
    speculative_config={words!r},
)
import sys
print("vllm_dflash.patches.arg_utils" in sys.modules)
print(args.create_engine_config().compute_hash())
"""


@pytest.mark.parametrize(
    "words", [None, dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)]
)
def test_config_is_the_one_without_the_plugin(tmp_path, words):
    """Through the entry point, as in a user's environment."""
    code = HASH.format(target=write_target(tmp_path), words=words)
    loaded, with_plugin = run(code)
    not_loaded, without = run(code, VLLM_PLUGINS="")
    assert (loaded, not_loaded) == ("True", "False")
    assert with_plugin == without
