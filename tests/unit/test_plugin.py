# SPDX-License-Identifier: Apache-2.0
"""The door: what registration changes, and what the front end decides."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from tiny_models import BLOCK_SIZE, write_draft, write_target

from vllm_dflash import patches, plugin
from vllm_dflash.config import get_ddtree_config

DEPTH = BLOCK_SIZE - 1
CPU_BUDGET = 16

# The front end of a CUDA build chooses other defaults; tests on a GPU cover it.
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU defaults")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return write_target(tmp_path_factory.mktemp("plugin_target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    # vLLM recognises a DFlash draft without a method by its name.
    return write_draft(tmp_path_factory.mktemp("models") / "tiny-dflash")


@pytest.fixture
def build(target):
    """Build an engine's config as the front end does."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()

    def build(speculative_config=None, **kwargs):
        options = dict(
            skip_tokenizer_init=True,
            max_model_len=256,
            enforce_eager=True,
            dtype="float32",
            max_num_seqs=4,
            max_num_batched_tokens=256,
        )
        args = EngineArgs(
            model=target, speculative_config=speculative_config, **options | kwargs
        )
        return args, args.create_engine_config()

    return build


@pytest.fixture
def log():
    """Messages of the front end; vLLM's loggers do not propagate."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("vllm.vllm_dflash.patches.arg_utils")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda level: [r.getMessage() for r in records if r.levelname == level]
    logger.removeHandler(handler)
    logger.setLevel(level)


def spec(draft, **kwargs):
    return dict(method="dflash", model=draft, **kwargs)


def test_no_speculation_is_untouched(build, log):
    args, config = build(None)
    assert config.speculative_config is None
    assert config.additional_config == {}
    assert not log("INFO")


def test_ngram_is_untouched(build, log):
    words = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    _, config = build(words)
    assert config.speculative_config.num_speculative_tokens == 3
    assert config.additional_config == {}
    assert get_ddtree_config(config) is None
    assert not log("INFO")


@cpu_only
def test_absent_key_gives_a_tree(build, draft, log):
    args, config = build(spec(draft))
    tree = get_ddtree_config(config)
    assert (tree.depth, tree.budget, tree.demanded) == (DEPTH, CPU_BUDGET, False)
    assert config.speculative_config.num_speculative_tokens == CPU_BUDGET
    assert config.num_speculative_tokens == CPU_BUDGET
    (line,) = log("INFO")
    for word in ("depth 7", "budget 16", "width 17", "CPU_ATTN"):
        assert word in line
    assert not log("WARNING")
    assert args.additional_config == {}


@cpu_only
def test_depth_of_the_user_is_kept(build, draft):
    _, config = build(spec(draft, num_speculative_tokens=3))
    tree = get_ddtree_config(config)
    assert (tree.depth, config.speculative_config.num_speculative_tokens) == (3, 16)


def test_options_reach_the_config(build, draft):
    options = {
        "budget": 20,
        "max_children": 3,
        "scale_by_temperature": False,
        "budget_per_batch_size": [[1, 2, 20], [3, 8, 7]],
    }
    _, config = build(spec(draft, ddtree=options))
    tree = get_ddtree_config(config)
    assert tree.to_dict() == {**options, "depth": DEPTH, "demanded": True}
    schedule = config.speculative_config.num_speculative_tokens_per_batch_size
    assert schedule == [(1, 2, 20), (3, 8, 7)]
    assert config.speculative_config.num_speculative_tokens == 20


def test_false_is_vllms_chain(build, draft, log):
    _, config = build(spec(draft, num_speculative_tokens=5, ddtree=False))
    assert config.speculative_config.num_speculative_tokens == 5
    assert config.additional_config == {}
    assert not log("INFO")
    assert not log("WARNING")


def test_chain_has_the_default_depth_too(build, draft):
    _, config = build(spec(draft, ddtree=False))
    assert config.speculative_config.num_speculative_tokens == DEPTH


@cpu_only
def test_method_is_detected_as_vllm_detects_it(build, draft):
    _, config = build(dict(model=draft))
    assert config.speculative_config.method == "dflash"
    assert get_ddtree_config(config).depth == DEPTH


@cpu_only
@pytest.mark.parametrize("tokens", [None, 5])
def test_flags_instead_of_a_dict(build, draft, tokens):
    _, config = build(spec_method="dflash", spec_model=draft, spec_tokens=tokens)
    assert get_ddtree_config(config).depth == (tokens or DEPTH)


@cpu_only
def test_flags_beside_the_key(build, draft):
    _, config = build(
        {"ddtree": {"budget": 20}}, spec_method="dflash", spec_model=draft
    )
    assert get_ddtree_config(config).budget == 20


@cpu_only
def test_a_second_config_of_the_same_arguments_is_equal(build, draft):
    args, first = build(spec(draft, ddtree={"budget": 20}))
    second = args.create_engine_config()
    assert second.additional_config == first.additional_config
    assert second.speculative_config.num_speculative_tokens == 20


def test_the_users_dict_is_not_written_to(build, draft):
    words = spec(draft, ddtree={"budget": 20})
    build(words)
    assert words == spec(draft, ddtree={"budget": 20})


def test_other_additional_config_is_kept(build, draft):
    _, config = build(spec(draft, ddtree=True), additional_config={"mine": 1})
    assert config.additional_config["mine"] == 1
    assert "ddtree" in config.additional_config


@pytest.mark.parametrize(
    ("words", "kwargs", "message"),
    [
        ({"ddtree": {"nodes": 3}}, {}, "has no option nodes"),
        ({"ddtree": {"budget": 3}}, {}, "7 to 255 is allowed"),
        ({"ddtree": 5}, {}, "neither a switch"),
        (
            {"ddtree": True, "num_speculative_tokens": 8},
            {},
            r"got 8.*1 to 7 is allowed",
        ),
        (
            {"ddtree": {"budget": 200}},
            {},
            "--max-num-batched-tokens 401 or more",
        ),
        (
            {"ddtree": True, "draft_sample_method": "probabilistic"},
            {},
            "sampled drafts",
        ),
        ({"ddtree": True}, {"enable_lora": True}, "LoRA"),
        (
            {
                "ddtree": True,
                "num_speculative_tokens": 7,
                "num_speculative_tokens_per_batch_size": [[1, 4, 7]],
            },
            {},
            "drafts of a chain",
        ),
        ({}, {"additional_config": {"ddtree": {}}}, "belongs into speculative_config"),
    ],
)
def test_demanded_tree_is_refused_by_name(build, draft, words, kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        build(spec(draft, **words), **kwargs)
    assert "Type" in str(error.value)


@pytest.mark.parametrize(
    ("words", "kwargs", "reason", "depth"),
    [
        ({"draft_sample_method": "probabilistic"}, {}, "sampled drafts", DEPTH),
        ({}, {"enable_lora": True}, "LoRA", DEPTH),
        ({}, {"max_num_batched_tokens": 24}, "step smaller than a tree", DEPTH),
        ({"num_speculative_tokens": 8}, {}, "got 8", 8),
        (
            {
                "num_speculative_tokens": 7,
                "num_speculative_tokens_per_batch_size": [[1, 4, 5]],
            },
            {},
            "drafts of a chain",
            7,
        ),
    ],
)
def test_tree_that_nobody_demanded_gives_way(
    build, draft, log, words, kwargs, reason, depth
):
    _, config = build(spec(draft, **words), **kwargs)
    assert config.speculative_config.num_speculative_tokens == depth
    assert config.num_speculative_tokens == depth
    assert get_ddtree_config(config) is None
    assert "ddtree" not in config.additional_config
    (warning,) = log("WARNING")
    assert reason in warning
    assert '"ddtree": false' in warning
    assert not log("INFO")


def test_fallback_works_with_flags(build, draft):
    """vLLM merges flags into the dict it was given, so a second build could clash."""
    _, config = build(spec_method="dflash", spec_model=draft, enable_lora=True)
    assert config.speculative_config.num_speculative_tokens == DEPTH


def test_fallback_equals_the_config_of_the_chain(build, draft):
    words = dict(draft_sample_method="probabilistic", num_speculative_tokens=DEPTH)
    _, fallback = build(spec(draft, **words))
    _, chain = build(spec(draft, ddtree=False, **words))
    assert fallback.compute_hash() == chain.compute_hash()
    for section in ("scheduler_config", "compilation_config", "cache_config"):
        assert repr(getattr(fallback, section)) == repr(getattr(chain, section))


def test_key_with_another_method_is_refused(build):
    words = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    with pytest.raises(ValueError, match=r"method dflash \(got ngram\)"):
        build({**words, "ddtree": True})
    _, config = build({**words, "ddtree": False})
    assert config.speculative_config.method == "ngram"


def test_errors_of_vllm_pass(build, draft):
    with pytest.raises(ValueError, match="no_such_key"):
        build(spec(draft, no_such_key=1))


def test_registering_again_changes_nothing():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    before = EngineArgs.create_engine_config, EngineArgs.create_speculative_config
    plugin.register()
    assert before == (
        EngineArgs.create_engine_config,
        EngineArgs.create_speculative_config,
    )


def test_registration_never_raises(monkeypatch):
    def fail(name):
        raise RuntimeError(name)

    monkeypatch.setattr(patches, "apply", fail)
    plugin.register()
    monkeypatch.setenv("VLLM_DFLASH_CPU", "maybe")
    plugin.register()
    plugin.register_platform()


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


@pytest.mark.slow
def test_registration_changes_three_symbols_of_vllm():
    changed, cost = run(
        CHANGED.format(cpu=not torch.cuda.is_available()), VLLM_PLUGINS=""
    )
    assert changed.split() == [
        "EngineArgs.create_engine_config",
        "EngineArgs.create_speculative_config",
        "init_speculator",
    ]
    assert float(cost) < 1


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [None, dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)]
)
def test_config_is_the_one_without_the_plugin(target, words):
    """Through the entry point, as in a user's environment."""
    code = HASH.format(target=target, words=words)
    loaded, with_plugin = run(code)
    not_loaded, without = run(code, VLLM_PLUGINS="")
    assert (loaded, not_loaded) == ("True", "False")
    assert with_plugin == without
