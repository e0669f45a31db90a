# SPDX-License-Identifier: Apache-2.0
"""Engines too small for a tree, words that are no options, workers without the plugin.

Each is refused in one message with the values in it, before a worker is started.
"""

import argparse
import re
from types import SimpleNamespace

import pytest
import torch
from fake_configs import engine, pretend_cuda
from front_end import build_config
from tiny_models import BLOCK_SIZE, write_draft, write_target

from vllm_dflash import selection, support
from vllm_dflash.config import get_ddtree_config
from vllm_dflash.support_checks import TREE_WORKERS

BUDGET = 16
WIDTH = BUDGET + 1
# A request's rows, and the mask tokens of its draft.
RESERVED = WIDTH + BLOCK_SIZE - 1

# The front end of a CUDA build chooses other defaults.
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU defaults")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return write_target(tmp_path_factory.mktemp("fault_target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    return write_draft(tmp_path_factory.mktemp("fault_draft"))


def spec(draft: str, **words) -> dict:
    return dict(method="dflash", model=draft, ddtree={"budget": BUDGET}, **words)


TOO_SMALL = {
    "step": (
        dict(max_num_batched_tokens=RESERVED - 1),
        f"--max-num-batched-tokens {RESERVED - 1} and a budget of {BUDGET}",
        f"--max-num-batched-tokens {RESERVED} or more",
    ),
    "model length": (
        dict(max_model_len=WIDTH),
        f"got --max-model-len {WIDTH} and a budget of {BUDGET}, which needs "
        f"{WIDTH + 1}",
        "a larger --max-model-len or a smaller budget",
    ),
    "KV cache": (
        dict(num_gpu_blocks_override=8, block_size=32),
        "got --num-gpu-blocks-override 8 with blocks of 32 and --max-model-len 256, "
        "which needs 9",
        "a larger --num-gpu-blocks-override or a smaller --max-model-len",
    ),
}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_engine_too_small_for_a_tree(target, draft, name):
    changes, got, way_out = TOO_SMALL[name]
    with pytest.raises(ValueError) as error:
        build_config(target, spec(draft), **changes)
    message = str(error.value)
    assert got in message
    assert re.search(f"Type [^.]*{re.escape(way_out)}", message)


@pytest.mark.parametrize(
    "changes",
    [
        dict(max_num_batched_tokens=RESERVED),
        dict(max_model_len=WIDTH + 1),
        dict(num_gpu_blocks_override=9, block_size=32),
        dict(num_gpu_blocks_override=2, block_size=32, max_model_len=-1),
    ],
)
def test_smallest_engine_with_a_tree(target, draft, changes):
    assert get_ddtree_config(build_config(target, spec(draft), **changes))


def test_gpu_without_triton(monkeypatch):
    pretend_cuda(monkeypatch)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    # vLLM falls back to Model Runner V1 then; the cause is named, not the effect.
    message = support.find_refusal(engine(use_v2_model_runner=False)).message
    assert "a GPU without Triton (got a CUDA device and no Triton" in message
    assert "Type pip install triton" in message
    assert "Model Runner V1" not in message


def test_another_vllm(target, draft, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    with pytest.raises(ValueError) as error:
        build_config(target, spec(draft))
    message = str(error.value)
    assert "another vLLM than 0.32 (got vLLM 0.33.1)" in message
    assert "Type pip install vllm==0.32.0" in message


def test_moved_symbol_of_vllm(monkeypatch):
    from vllm_dflash import patches

    monkeypatch.delattr("vllm.v1.worker.gpu.spec_decode.init_speculator")
    with pytest.raises(patches.PatchError) as error:
        patches.resolve_target("vllm.v1.worker.gpu.spec_decode:init_speculator")
    message = str(error.value)
    assert "vLLM has no vllm.v1.worker.gpu.spec_decode:init_speculator" in message
    assert "install that version" in message
    assert '"ddtree": false' in message


class TestWords:
    """What is typed after --speculative-config."""

    @pytest.fixture
    def parse(self):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())

        def parse(words: str) -> argparse.Namespace:
            return parser.parse_args(["--speculative-config", words])

        return parse

    @pytest.mark.parametrize("words", ['{"method": "dflash"', "{'ddtree': true}", "x"])
    def test_no_json(self, parse, words, capsys):
        with pytest.raises(SystemExit):
            parse(words)
        error = capsys.readouterr().err
        assert "--speculative-config" in error
        assert words in error

    @pytest.mark.parametrize("words", ["[1]", "3", '"dflash"', "false", "[]", "0"])
    def test_json_that_is_no_object(self, target, parse, words):
        given = parse(words).speculative_config
        with pytest.raises(ValueError) as error:
            build_config(target, given)
        message = str(error.value)
        assert f"speculative_config is no set of named options (got {given!r})" in (
            message
        )
        assert 'Type --speculative-config \'{"method": "dflash"' in message

    def test_keys_that_are_no_names(self, target):
        with pytest.raises(ValueError, match=r"named options \(got \{1: 2\}\)"):
            build_config(target, {1: 2})

    @pytest.mark.parametrize("key", ["budget", "tree", "ddtree_budget", "max_children"])
    def test_key_of_nobody(self, target, draft, key):
        with pytest.raises(ValueError) as error:
            build_config(target, spec(draft, **{key: 3}))
        assert key in str(error.value)
        assert "Unexpected keyword argument" in str(error.value)

    @pytest.mark.parametrize("option", [True, {"budget": 16}])
    def test_no_method(self, target, draft, option):
        assert "dflash" not in draft.lower()
        with pytest.raises(ValueError) as error:
            build_config(target, dict(model=draft, ddtree=option))
        assert "ddtree needs the method dflash (got None)" in str(error.value)
        assert 'Type "method": "dflash" with a DFlash draft' in str(error.value)

    @pytest.mark.parametrize("depth", ["x", [7], 7.5, {}, 0, -1])
    def test_depth_of_a_wrong_type(self, target, draft, depth):
        with pytest.raises(ValueError, match="num_speculative_tokens"):
            build_config(target, spec(draft, num_speculative_tokens=depth))

    @pytest.mark.parametrize(
        ("option", "got"),
        [
            ({"budget": "48"}, "ddtree.budget is out of range (got '48')"),
            ({"max_children": None}, "ddtree.max_children is out of range (got None)"),
            ({"scale_by_temperature": "yes"}, "is not a switch (got 'yes')"),
            ({"budget_per_batch_size": 3}, "is not a schedule (got 3)"),
            ({"nodes": 3}, "ddtree has no option nodes (got {'nodes': 3})"),
            ("on", "ddtree is neither a switch nor a set of options (got 'on')"),
        ],
    )
    def test_option_of_a_wrong_type(self, target, draft, option, got):
        words = dict(method="dflash", model=draft, ddtree=option)
        with pytest.raises(ValueError) as error:
            build_config(target, words)
        assert got in str(error.value)
        assert ". Type " in str(error.value)


class TestWorker:
    """A worker process that lacks the plugin does not start."""

    @cpu_only
    def test_engine_with_a_tree_names_its_own_worker(self, target, draft):
        config = build_config(target, spec(draft))
        assert config.parallel_config.worker_cls == (
            "vllm_dflash.runner.cpu_worker.TreeCPUWorker"
        )
        # Copies of a config go through the platform's choice again.
        from vllm.config import replace

        again = replace(config, parallel_config=config.parallel_config)
        assert again.parallel_config.worker_cls == config.parallel_config.worker_cls

    @cpu_only
    def test_other_engines_keep_vllms(self, target, draft):
        for words in (None, {**spec(draft), "ddtree": False}):
            config = build_config(target, words)
            assert config.parallel_config.worker_cls in TREE_WORKERS

    def test_workers_are_vllms_own(self):
        """Each is the class whose place it takes, with the mix-in before it."""
        from vllm.utils.import_utils import resolve_obj_by_qualname

        from vllm_dflash.runner.worker import TreeWorkerMixin

        for theirs, ours in TREE_WORKERS.items():
            if torch.cuda.is_available() and "cpu_worker" in theirs:
                continue
            worker = resolve_obj_by_qualname(ours)
            assert worker.__mro__[1:3] == (
                TreeWorkerMixin,
                resolve_obj_by_qualname(theirs),
            )

    def test_worker_can_be_extended_as_vllm_does_it(self):
        """`--worker-extension-cls` becomes one more base of the worker."""
        import vllm.v1.worker.cpu.shm  # noqa: F401
        from vllm.v1.worker.gpu_worker import Worker

        from vllm_dflash.runner.worker import TreeWorkerMixin

        class TreeWorker(TreeWorkerMixin, Worker):
            pass

        class Extension:
            def answer(self):
                return 42

        assert not hasattr(TreeWorker, "answer")
        TreeWorker.__bases__ += (Extension,)
        assert TreeWorker.answer(None) == 42
        assert TreeWorker.init_device is TreeWorkerMixin.init_device

    def test_chosen_worker_is_known_to_the_table(self, monkeypatch):
        pretend_cuda(monkeypatch)
        config = engine()
        selection.select_worker(config)
        assert config.parallel_config.worker_cls in TREE_WORKERS.values()
        assert support.find_refusal(config) is None

    @pytest.mark.parametrize("speculator", [None, object()])
    def test_runner_without_a_tree_speculator(self, speculator):
        import vllm.v1.worker.cpu.shm  # noqa: F401

        from vllm_dflash.runner.worker import TreeWorkerMixin

        class Base:
            def init_device(self):
                self.model_runner = SimpleNamespace(speculator=speculator)

        class Worker(TreeWorkerMixin, Base):
            pass

        with pytest.raises(RuntimeError) as error:
            Worker().init_device()
        message = str(error.value)
        assert f"got the speculator {type(speculator).__name__}" in message
        assert (
            "Type VLLM_PLUGINS=dflash (on the CPU VLLM_PLUGINS=dflash,dflash_cpu)"
            in (message)
        )

    def test_draft_is_looked_into_before_the_target_is_loaded(
        self, target, tmp_path, monkeypatch
    ):
        """A hub's draft is fetched first; here the fetch finds a damaged one."""
        import vllm.v1.worker.cpu.shm  # noqa: F401

        from vllm_dflash.runner import worker

        damaged = write_draft(tmp_path / "draft")
        config = build_config(target, spec(damaged))
        (tmp_path / "draft/model.safetensors").write_bytes(b"cut")
        config.speculative_config.draft_model_config.model = "somebody/some-draft"
        fetched = []

        def fetch(name, cache_dir, patterns, revision, ignore_patterns):
            fetched.append((name, patterns))
            return damaged

        monkeypatch.setattr(
            "vllm.model_executor.model_loader.weight_utils.download_weights_from_hf",
            fetch,
        )
        loaded = []

        class Base:
            vllm_config = config

            def load_model(self, *, load_dummy_weights=False):
                loaded.append(load_dummy_weights)

        class Worker(worker.TreeWorkerMixin, Base):
            pass

        with pytest.raises(ValueError, match="can't be read"):
            Worker().load_model()
        assert fetched == [("somebody/some-draft", ["*.safetensors"])]
        assert not loaded
        Worker().load_model(load_dummy_weights=True)
        assert loaded == [True]


def test_building_a_config_lifts_the_refusal_of_min_p(target, draft):
    """Every API server builds the config by itself before it checks requests."""
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_dflash import patches

    build_config(target, spec(draft))
    assert patches.is_applied("input_processor")
    theirs = patches.original("input_processor")
    assert vars(InputProcessor)["__init__"] is not theirs
