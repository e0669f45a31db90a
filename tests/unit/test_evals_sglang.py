# SPDX-License-Identifier: Apache-2.0
"""The comparison with SGLang, run against a stand-in of both servers."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_sglang_server
import pytest
from evals_modules import EVALS, import_evals
from fake_sglang_server import ACCEPTED, EOS, NUM_TOKENS, NUM_VERIFIES

from vllm_dflash.demo.pair import ModelPair
from vllm_dflash.demo.serve import ServerError, ServerSpec

ROOT = Path(__file__).resolve().parents[2]
FAKE_SERVER = ROOT / "tests/helpers/fake_sglang_server.py"
PAIR = ModelPair("/target", "/draft", "name", is_embedded=True)


@pytest.fixture(scope="module")
def evals():
    return import_evals(
        compare="compare_sglang",
        agreement="sglang_agreement",
        server="sglang_server",
        table="sglang_table",
    )


@pytest.fixture
def sglang_python(tmp_path):
    """An executable that stands for the Python of SGLang's environment."""
    versions = {"sglang": "0.5.23", "torch": "2.14.1"}
    path = tmp_path / "python"
    path.write_text(
        "#!/bin/sh\n"
        f"if [ \"$1\" = -c ]; then echo '{json.dumps(versions)}'; exit; fi\n"
        f'exec "{sys.executable}" "{FAKE_SERVER}" "$@"\n'
    )
    path.chmod(0o755)
    return path


def spec(evals, python="python", depth=15, port=1, **values):
    return evals.server.SGLangSpec(
        label="sglang-dflash",
        pair=PAIR,
        is_cpu=False,
        port=port,
        python=str(python),
        depth=depth,
        max_num_seqs=64,
        **values,
    )


def test_sglang_gets_flags_that_its_parser_knows(evals):
    parser = fake_sglang_server.sglang_parser()
    args = parser.parse_args(spec(evals).serve_args())
    assert args.speculative_algorithm == "DFLASH"
    assert args.speculative_draft_model_path == "/draft"
    # SGLang's block holds the last accepted token and 15 drafts.
    assert args.speculative_num_draft_tokens == 16
    assert (args.max_running_requests, args.cuda_graph_max_bs_decode) == (64, 64)
    assert args.disable_radix_cache and args.enable_metrics
    plain = parser.parse_args(spec(evals, depth=None).serve_args())
    assert plain.speculative_algorithm is None
    assert plain.speculative_num_draft_tokens is None


def test_sglang_does_not_inherit_our_environment(evals, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    env = spec(evals, python="/theirs/bin/python").environment()
    assert "PYTHONPATH" not in env and "VIRTUAL_ENV" not in env
    assert env["PATH"].startswith("/theirs/bin:")
    assert env["HF_HUB_OFFLINE"] == "1"


def test_acceptance_length_leaves_out_tokens_of_prompts(evals):
    names = ("spec_verify_calls", "generation_tokens", "num_requests")
    before = dict.fromkeys((f"sglang:{name}_total" for name in names), 0.0)
    # Ten requests: a token of the prompt each, then 20 verifications of 4 tokens.
    after = dict(zip(before, (20.0, 90.0, 10.0), strict=True))
    assert evals.server.acceptance_length(before, after) == 4.0
    assert evals.server.acceptance_length(after, after) is None


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([], [], None),
    ],
)
def test_first_difference(evals, left, right, position):
    assert evals.agreement.first_difference(left, right) == position


def test_agreement_counts_and_refuses_other_prompts(evals):
    answer = evals.agreement.Answer
    reference = [answer([1], [1, 2, 3]), answer([1], [4, 5])]
    found = evals.agreement.compare(
        [answer([1], [1, 2, 3]), answer([1], [4, 6])], reference
    )
    assert (found["answers"], found["equal"], found["rate"]) == (2, 1, 0.5)
    assert found["earliest_difference"] == found["median_difference"] == 1
    with pytest.raises(RuntimeError, match="tokenized the prompts differently"):
        evals.agreement.compare([answer([9], [1]), answer([1], [4])], reference)


def test_every_server_is_compared_with_decoding_without_speculation(evals):
    assert evals.agreement.references(list(evals.compare.DEFAULT_NAMES)) == [
        ("vllm-chain", "vllm-none"),
        ("vllm-tree-auto", "vllm-none"),
        ("sglang-none", "vllm-none"),
        ("sglang-dflash", "vllm-none"),
        ("sglang-dflash", "sglang-none"),
    ]


class BosTokenizer:
    """Adds `<s>` (token 1), which its chat template may write too."""

    bos_token = "<s>"
    appended: tuple[int, ...] = ()

    def __call__(self, text, add_special_tokens=True):
        has_bos = text.startswith("<s>")
        ids = [1] * has_bos + [ord(c) for c in text.removeprefix("<s>")]
        if add_special_tokens:
            ids = [1, *ids, *self.appended]
        return SimpleNamespace(input_ids=ids)


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    import transformers

    def make(tokenizer, texts):
        monkeypatch.setattr(
            transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer
        )
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
        return path

    return make


def test_a_token_that_sglang_would_add_twice_is_taken_from_prompts(evals, prompts):
    path = prompts(BosTokenizer(), ["<s>ab", "<s>c"])
    assert evals.agreement.same_tokens_prompts("target", path) is True
    texts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    assert texts == ["ab", "c"]


def test_other_added_tokens_are_an_error(evals, prompts):
    tokenizer = BosTokenizer()
    tokenizer.appended = (7,)
    path = prompts(tokenizer, ["<s>ab"])
    with pytest.raises(RuntimeError, match="given different prompts"):
        evals.agreement.same_tokens_prompts("target", path)


def test_other_versions_of_sglang_are_refused(evals, tmp_path):
    with pytest.raises(ValueError, match=r"does not run.*0\.5\.23.*sglang_envs"):
        evals.server.environment_versions(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="has sglang None"):
        evals.server.environment_versions(sys.executable)


def test_a_server_without_its_counters_is_an_error(evals, tmp_path):
    server = evals.server.SGLangServer(spec(evals), tmp_path / "log", print)
    server.client.counters = lambda: {"vllm:x_total": 1.0}
    with pytest.raises(ServerError, match="no counter of SGLang.*--enable-metrics"):
        server.counters()


def test_the_end_of_a_server_is_told_by_its_name(evals, sglang_python, tmp_path):
    from vllm_dflash.demo.serve import free_port

    bad = spec(evals, sglang_python, port=free_port(), extra_args=["--no-such-flag"])
    server = evals.server.SGLangServer(bad, tmp_path / "log", lambda text: None)
    with (
        pytest.raises(ServerError, match=r"(?s)^sglang.launch_server .*no-such-flag"),
        server,
    ):
        pass


def write_target(folder: Path) -> str:
    """A tokenizer with a chat template, and what ends an answer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1, "</s>": 2}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    return str(folder)


def test_comparison_from_start_to_table(
    evals, sglang_python, tmp_path, monkeypatch, capsys
):
    """Real clients, load generator and tables; only the two servers are stand-ins."""
    pytest.importorskip("pandas")
    target = write_target(tmp_path / "target")
    output = tmp_path / "result.json"
    monkeypatch.setattr(evals.compare.provenance, "has_gpu", lambda: True)
    monkeypatch.setattr(
        evals.compare.provenance, "collect", lambda *names: {"versions": {}}
    )
    monkeypatch.setattr(
        ServerSpec,
        "command",
        lambda self: [sys.executable, str(FAKE_SERVER), "vllm", *self.serve_args()],
    )
    argv = ["compare_sglang.py", "--model", target, "--draft-model", target]
    argv += ["--sglang-python", str(sglang_python), "--output", str(output)]
    argv += ["--servers", "vllm-none,vllm-tree-auto,sglang-none,sglang-dflash"]
    argv += ["--concurrency", "2", "--temperatures", "0", "--min-prompts", "4"]
    argv += ["--rounds", "1", "--repeats", "1", "--prompts-per-slot", "1"]
    monkeypatch.setattr(sys, "argv", [*argv, "--agreement", "20"])
    assert evals.compare.main() == 0
    report = json.loads(output.read_text())
    lengths = {
        row["server"]: row["result"].get("spec_decode_acceptance_length")
        for row in report["rows"]
    }
    assert lengths == {
        "vllm-none": None,
        "vllm-tree-auto": ACCEPTED + 1,
        "sglang-none": None,
        "sglang-dflash": ACCEPTED + 1,
    }
    assert {row["result"]["total_output_tokens"] for row in report["rows"]} == {
        4 * NUM_TOKENS
    }
    assert report["acceptance_by_answer"]["sglang-dflash"] == ACCEPTED + 1
    info = report["server_info"]["sglang-dflash"]
    assert info["speculative_algorithm"] == "DFLASH"
    assert info["avg_spec_accept_length"] == ACCEPTED + 1
    shares = {(i["server"], i["reference"]): i for i in report["agreement"]}
    assert shares["vllm-tree-auto", "vllm-none"]["rate"] == 1
    assert shares["sglang-dflash", "sglang-none"]["rate"] == 1
    differing = shares["sglang-dflash", "vllm-none"]
    prompts = [bytes(a["prompt_ids"]) for a in report["answers"]["sglang-dflash"]]
    expected = sum(len(prompt) % 5 == 0 for prompt in prompts)
    assert 0 < expected < 20
    assert differing["equal"] == 20 - expected
    assert differing["earliest_difference"] == differing["median_difference"] == 4
    answers = report["answers"]["sglang-dflash"]
    assert all(EOS not in answer["token_ids"] for answer in answers)
    assert {answer["num_verifies"] for answer in answers} == {NUM_VERIFIES}
    table = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| 0 | 2 |") for line in table) == 4
    assert any(line.startswith("| sglang-dflash | vllm-none | 20 |") for line in table)
    assert all("tokens/s to sglang-dflash" in line for line in table[:1])


def test_sglang_is_refused_without_cuda(evals, sglang_python, monkeypatch, capsys):
    monkeypatch.setattr(evals.compare.provenance, "has_gpu", lambda: False)
    argv = ["compare_sglang.py", "--sglang-python", str(sglang_python)]
    monkeypatch.setattr(sys, "argv", argv)
    assert evals.compare.main() == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_script_pins_the_version_that_was_read_and_refuses_early(evals):
    path = EVALS / "sglang_envs.sh"
    text = path.read_text()
    assert f"SGLANG_VERSION={evals.server.SGLANG_VERSION}\n" in text
    assert "http" not in text
    subprocess.run(["bash", "-n", str(path)], check=True)
    result = subprocess.run(
        ["bash", str(path), "other"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "'other' is not known" in result.stderr
