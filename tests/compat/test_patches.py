# SPDX-License-Identifier: Apache-2.0
"""The ledger against the installed vLLM: what is patched is there, and as it was read.

A failing hash says: read the new source, check that the replacement still does what
vLLM does, then record the new hash.
"""

import hashlib
import importlib
import inspect
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from vllm_dflash import patches
from vllm_dflash.patches import LEDGER, Patch, PatchError

pytestmark = pytest.mark.compat

# Target -> start of the SHA-256 of its source in vLLM 0.32.0.
SOURCE_HASHES = {
    "create_speculative_config": "489aa2fc045a5095",
    "create_engine_config": "b9b94288f46d2f67",
    "input_processor": "5137c92ffb9254d2",
    "stat_loggers": "6e75cf036af8369b",
    "scheduler": "c026802456720b43",
    "init_speculator": "e86cedd1d4c3e0e2",
    "resolve_model_state_cls": "c330e5807024a93a",
    "draft_slots": "cf11081232bfd2b0",
    "init_candidates": "c017d0137f301ae0",
    "set_active_loras": "9fc864a554db5746",
    "punica_wrapper": "acc9bc9cf24eb2db",
    "apply_top_k_top_p": "eda8949f42671d5f",
    "normalize_context_k": "7c4a2d8bb98a4c7f",
}
SIGNATURES = {
    "create_speculative_config": [
        "self",
        "target_model_config",
        "target_parallel_config",
    ],
    "create_engine_config": ["self", "usage_context", "headless"],
    "input_processor": ["self", "vllm_config", "renderer", "mm_registry"],
    "stat_loggers": [
        "self",
        "vllm_config",
        "engine_idxs",
        "custom_stat_loggers",
        "enable_default_loggers",
        "aggregate_engine_logging",
        "client_count",
    ],
    "scheduler": [
        "self",
        "vllm_config",
        "kv_cache_config",
        "structured_output_manager",
        "block_size",
        "hash_block_size",
        "mm_registry",
        "include_finished_set",
        "log_stats",
    ],
    "init_speculator": ["vllm_config", "device", "req_states"],
    "resolve_model_state_cls": ["vllm_config", "model"],
    "draft_slots": ["self"],
    "init_candidates": ["self"],
    "set_active_loras": [
        "self",
        "prompt_lora_mapping",
        "token_lora_mapping",
        "lora_requests",
        "mapping_type",
    ],
    "punica_wrapper": ["max_num_batched_tokens", "max_batches", "device", "kwargs"],
    "apply_top_k_top_p": ["logits", "k", "p", "mask_value"],
    "normalize_context_k": ["self", "all_k"],
}
# What reads the speculative config that the front end forgets for a tree.
READERS_HASHES = {
    "verify": "ae287ee645ce2c22",
    "_validate_spec_decode": "13f2065aad2612ad",
    "_validate_trace_replay": "619e282f15f54e44",
}
# RMSNorm in fp32, in another order of additions.
NORM_TOLERANCE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _patched_torch():
    """On the CPU vLLM patches torch before it imports the runner's modules."""
    if not torch.cuda.is_available():
        importlib.import_module("vllm.v1.worker.cpu.shm")


def upstream(patch: Patch):
    """Return vLLM's own object, whatever has been applied in this process."""
    if patches.is_applied(patch.name):
        return patches.original(patch.name)
    owner, attribute = patches.resolve_target(patch.target)
    return vars(owner)[attribute]


def function_of(symbol):
    """The function behind a property, or the symbol."""
    return symbol.fget if isinstance(symbol, property) else symbol


FUNCTIONS = [patch for patch in LEDGER if patch.name in SIGNATURES]


def by_name(patch: Patch) -> str:
    return patch.name


@pytest.mark.parametrize("patch", LEDGER, ids=by_name)
def test_target_is_there(patch):
    assert upstream(patch) is not None


@pytest.mark.parametrize("patch", FUNCTIONS, ids=by_name)
def test_signature_is_the_recorded_one(patch):
    parameters = inspect.signature(function_of(upstream(patch))).parameters
    assert list(parameters) == SIGNATURES[patch.name]


@pytest.mark.parametrize("patch", FUNCTIONS, ids=by_name)
def test_source_is_the_one_that_was_read(patch):
    source = inspect.getsource(function_of(upstream(patch)))
    digest = hashlib.sha256(source.encode()).hexdigest()
    assert digest[:16] == SOURCE_HASHES[patch.name]


@pytest.mark.parametrize("patch", FUNCTIONS, ids=by_name)
def test_replacement_takes_the_arguments(patch):
    module, _, name = patch.make.partition(":")
    make = getattr(importlib.import_module(module), name)
    replacement = make(upstream(patch))
    assert replacement is not upstream(patch)
    own = inspect.signature(function_of(replacement), follow_wrapped=False)
    own.bind(*[name for name in SIGNATURES[patch.name] if name != "kwargs"])


def test_functions_and_table_are_all_of_the_ledger():
    rest = [patch.name for patch in LEDGER if patch.name not in SIGNATURES]
    assert rest == ["environment_variables"]
    assert set(SIGNATURES) == set(SOURCE_HASHES)


@pytest.mark.parametrize("patch", LEDGER, ids=by_name)
def test_entry_is_complete(patch):
    for field in ("what", "why", "how", "upstream", "remove_when"):
        assert len(getattr(patch, field)) > 10, field


def test_no_symbol_is_patched_twice():
    assert len({patch.target for patch in LEDGER}) == len(LEDGER)
    assert len({patch.name for patch in LEDGER}) == len(LEDGER)


def test_every_file_has_its_entry():
    from pathlib import Path

    folder = Path(patches.__file__).parent
    others = {"__init__", "after_import", "cpu_kernels"}
    assert {path.stem for path in folder.glob("*.py")} - others == {
        patch.make.partition(":")[0].rpartition(".")[2] for patch in LEDGER
    }


@pytest.fixture
def fake_module(monkeypatch):
    """A module with a function, one that imports it by value, and a ledger entry."""
    module = types.ModuleType("fake_vllm")
    module.function = lambda: "original"
    importer = types.ModuleType("fake_importer")
    importer.function = module.function
    maker = types.ModuleType("fake_maker")
    maker.make = lambda original: lambda: f"patched {original()}"
    for each in (module, importer, maker):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    text = "a text that is long enough"
    patch = Patch(
        "fake",
        "fake_vllm:function",
        text,
        text,
        text,
        text,
        text,
        make="fake_maker:make",
        importers=("fake_importer",),
    )
    monkeypatch.setitem(patches._BY_NAME, "fake", patch)
    monkeypatch.setattr(patches, "_originals", dict(patches._originals))
    return SimpleNamespace(module=module, importer=importer)


def test_patch_reaches_importers_by_value(fake_module):
    patches.apply("fake")
    assert fake_module.module.function() == "patched original"
    assert fake_module.importer.function() == "patched original"
    assert patches.is_applied("fake")
    assert patches.original("fake")() == "original"


def test_patch_is_applied_once(fake_module):
    patches.apply("fake")
    patches.apply("fake")
    assert fake_module.module.function() == "patched original"


def test_late_importer_is_rebound_by_the_next_call(fake_module):
    patches.apply("fake")
    fake_module.importer.function = patches.original("fake")
    patches.apply("fake")
    assert fake_module.importer.function() == "patched original"


def test_patch_of_another_copy_is_refused(fake_module):
    patches.apply("fake")
    patches._originals.clear()
    with pytest.raises(PatchError, match="another vllm_dflash"):
        patches.apply("fake")


@pytest.mark.parametrize(
    "target",
    [
        "fake_vllm:moved",
        "fake_vllm:Moved.method",
        "no_such_module:function",
        "vllm.envs:NO_SUCH_NAME",
    ],
)
def test_moved_symbol_is_an_error_with_a_way_out(fake_module, target):
    with pytest.raises(PatchError, match=r'0\.32.*"ddtree": false'):
        patches.resolve_target(target)


def test_inherited_symbol_does_not_count():
    """Patching a subclass would miss the class that owns the method."""
    with pytest.raises(PatchError):
        patches.resolve_target(
            "vllm.engine.arg_utils:AsyncEngineArgs.create_load_config"
        )


@pytest.mark.parametrize("name", READERS_HASHES)
def test_front_end_refuses_with_speculation_what_was_read(name):
    """Another refusal would be lifted unseen."""
    from vllm import SamplingParams

    source = inspect.getsource(getattr(SamplingParams, name))
    digest = hashlib.sha256(source.encode()).hexdigest()
    assert digest[:16] == READERS_HASHES[name]


def test_front_end_has_one_reader_of_the_speculative_config():
    from vllm.v1.engine.input_processor import InputProcessor

    source = inspect.getsource(InputProcessor)
    assert source.count("self.speculative_config,") == 1
    assert source.count("speculative_config") == 3


@pytest.mark.parametrize("tree", [None, {"some": "tree"}])
def test_front_end_forgets_speculation_for_trees_only(tree, monkeypatch):
    from vllm_dflash.patches import input_processor

    monkeypatch.setattr(input_processor, "get_ddtree_config", lambda config: tree)

    def original(self, vllm_config, renderer=None, *, mm_registry=None):
        self.speculative_config = vllm_config.speculative_config
        self.rest = renderer, mm_registry

    processor = SimpleNamespace()
    make = input_processor.wrap_input_processor(original)
    make(processor, SimpleNamespace(speculative_config="dflash"), 1, mm_registry=2)
    assert processor.speculative_config == (None if tree else "dflash")
    assert processor.rest == (1, 2)


def context_keys(num_layers=3, num_ctx=5, num_heads=2, head_dim=16):
    """A model that carries only what the normalisation reads."""
    generator = torch.Generator().manual_seed(0)
    all_k = torch.randn(num_layers, num_ctx, num_heads, head_dim, generator=generator)
    weights = 1 + torch.randn(num_layers, head_dim, generator=generator)
    return SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6), all_k


def normalised(model, all_k):
    scale = torch.rsqrt(all_k.pow(2).mean(-1, keepdim=True) + model._rms_norm_eps)
    return all_k * scale * model._k_norm_weights[:, None, None]


def patch_named(name: str) -> Patch:
    return next(patch for patch in LEDGER if patch.name == name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the CPU build of vLLM")
@pytest.mark.parametrize("num_ctx", [1, 7])
def test_context_keys_are_normalised_by_their_own_layer(num_ctx):
    from vllm_dflash.patches.qwen3_dflash import make_normalize_context_k

    model, all_k = context_keys(num_ctx=num_ctx)
    before = all_k.clone()
    normalize = make_normalize_context_k(upstream(patch_named("normalize_context_k")))
    torch.testing.assert_close(
        normalize(model, all_k),
        normalised(model, all_k),
        atol=NORM_TOLERANCE,
        rtol=NORM_TOLERANCE,
    )
    assert torch.equal(all_k, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the CPU build of vLLM")
def test_upstream_still_normalises_every_layer_with_the_first():
    """Fails on the day vLLM mends it: then the patch goes."""
    model, all_k = context_keys()
    actual = upstream(patch_named("normalize_context_k"))(model, all_k)
    expected = normalised(model, all_k)
    assert torch.allclose(actual[0], expected[0], atol=NORM_TOLERANCE)
    assert not torch.allclose(actual[1], expected[1], atol=0.1)
    model._k_norm_weights = model._k_norm_weights[:1].expand(3, -1)
    assert torch.allclose(actual, normalised(model, all_k), atol=NORM_TOLERANCE)


def test_other_devices_keep_upstreams_normalisation():
    from vllm_dflash.patches.qwen3_dflash import make_normalize_context_k

    keys = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    normalize = make_normalize_context_k(lambda self, all_k: ("upstream", all_k))
    assert normalize(None, keys) == ("upstream", keys)


def test_variables_of_ours_are_known_once_they_are_set(monkeypatch):
    from vllm_dflash.patches.environment import extend_environment_variables

    monkeypatch.delenv("VLLM_DFLASH_CPU", raising=False)
    vllms = {"VLLM_PORT": lambda: 1}
    assert set(extend_environment_variables(vllms)) == {"VLLM_PORT"}
    monkeypatch.setenv("VLLM_DFLASH_CPU", "1")
    known = extend_environment_variables(vllms)
    assert set(known) == {"VLLM_PORT", "VLLM_DFLASH_CPU"}
    assert known["VLLM_DFLASH_CPU"]() is True
    assert set(vllms) == {"VLLM_PORT"}
