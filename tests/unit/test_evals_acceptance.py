# SPDX-License-Identifier: Apache-2.0
"""The held-out prompts, and the arithmetic of the acceptance evaluations."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_dflash.metrics.tree_dump import TreeRound

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "evals"))
import acceptance_engine as engine
import acceptance_prompts
import acceptance_tables as tables
import run_acceptance
import run_temperature
from acceptance_scores import survivor_logprobs

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

# root 0 -> 1, 2, 5; 1 -> 3; 2 -> 4
PARENTS = [-1, 0, 0, 1, 2, 0]


def tree_round(path: list[int], request: str = "0-ab") -> TreeRound:
    return TreeRound(
        request=request,
        step=1,
        position=0,
        tokens=list(range(6)),
        parents=PARENTS,
        logprobs=[None] * 6,
        path=path,
        emitted=[1] * len(path),
    )


class TestPrompts:
    def test_held_out_are_fifty_chats_of_four_kinds(self):
        prompts = acceptance_prompts.load_prompts()
        assert len({prompt["id"] for prompt in prompts}) == 50
        assert len({json.dumps(prompt["messages"]) for prompt in prompts}) == 50
        kinds = Counter(prompt["kind"] for prompt in prompts)
        assert kinds.keys() == {"chat", "code", "arithmetic", "summarise"}
        assert min(kinds.values()) >= 12
        for prompt in prompts:
            roles = [message["role"] for message in prompt["messages"]]
            assert roles[-1] == "user"
            assert set(roles) <= {"system", "user", "assistant"}
            assert all(message["content"].strip() for message in prompt["messages"])

    @pytest.mark.parametrize("limit", [1, 4, 7])
    def test_limit_takes_the_kinds_in_turn(self, limit):
        prompts = acceptance_prompts.load_prompts(limit=limit)
        assert len(prompts) == limit
        kinds = Counter(prompt["kind"] for prompt in prompts)
        assert max(kinds.values()) - min(kinds.values()) <= 1
        assert len(kinds) == min(limit, 4)

    def test_a_file_is_a_task(self, tmp_path):
        (tmp_path / "gsm8k.jsonl").write_text('{"prompt": "1 + 1?"}\n\n{"prompt": "?"}')
        (tmp_path / "alpaca.jsonl").write_text(
            '{"id": 7, "messages": [{"role": "user", "content": "Hi"}]}'
        )
        files = [tmp_path / "gsm8k.jsonl", tmp_path / "alpaca.jsonl"]
        prompts = acceptance_prompts.load_prompts(files)
        assert [p["id"] for p in prompts] == ["gsm8k-1", "gsm8k-3", "7"]
        assert acceptance_prompts.tasks(prompts) == ["gsm8k", "alpaca"]
        assert prompts[0]["messages"] == [{"role": "user", "content": "1 + 1?"}]

    @pytest.mark.parametrize("line", ['{"question": "1"}', "nothing", '["a"]'])
    def test_a_line_that_is_no_prompt(self, tmp_path, line):
        path = tmp_path / "bad.jsonl"
        path.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(ValueError, match=r"bad\.jsonl:2 is no prompt.*Type"):
            acceptance_prompts.load_prompts([path])

    def test_ids_must_differ(self, tmp_path):
        path = tmp_path / "twice.jsonl"
        path.write_text('{"id": "a", "prompt": "1"}\n{"id": "a", "prompt": "2"}')
        with pytest.raises(ValueError, match="two prompts have the same id"):
            acceptance_prompts.load_prompts([path])


class TestEngine:
    def test_difference_is_located(self):
        baseline = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3]}
        outputs = {"a": [1, 2, 3], "b": [1, 9, 3], "c": [1, 2]}
        assert engine.differences(outputs, baseline) == [
            "b differs at token 1 of 3",
            "c differs at token 2 of 3",
        ]

    def test_counters_are_added_by_position(self):
        total = engine.add_counters(
            [{DRAFTS: 2, PER_POSITION: [2, 1]}, {DRAFTS: 3, PER_POSITION: [1, 0]}]
        )
        assert total == {DRAFTS: 5, PER_POSITION: [3, 1]}

    def test_waves_are_tasks_and_seeds_are_the_prompts_numbers(self):
        prompts = [{"id": i, "kind": "ab"[i > 2]} for i in range(5)]
        waves = run_acceptance.make_waves(prompts, [0.0, 0.7], max_tokens=9)
        assert [w.name for w in waves] == ["0/a", "0/b", "0.7/a", "0.7/b"]
        assert [w.first_seed for w in waves] == [0, 3, 0, 3]
        assert waves[3].sampling == {"temperature": 0.7, "max_tokens": 9}


@pytest.mark.parametrize(
    ("measured", "budgets"),
    [(["no speculation", "chain 15", "tree 16", "tree 64"], [16, 64]), ([], None)],
)
def test_an_interrupted_run_reports_what_was_measured(monkeypatch, measured, budgets):
    """The first tree and all before it are there, or there is nothing to report."""
    done = iter(measured)

    def run(job, is_local):
        name = next(done, None)
        if name is None:
            raise KeyboardInterrupt
        return {"waves": {"0/chat": {"name": name}}}

    monkeypatch.setattr(run_acceptance, "run", run)
    monkeypatch.setattr(run_acceptance, "engine_options", lambda *args: {})
    dump = SimpleNamespace(rounds=[])
    monkeypatch.setattr(run_acceptance, "read_dump", lambda path: dump)
    monkeypatch.setattr(run_acceptance, "rounds_by_wave", lambda rounds, waves: waves)
    args = run_acceptance._parser().parse_args(["--budgets", "16", "64", "48"])
    pair = SimpleNamespace(is_embedded=True)
    if budgets is None:
        with pytest.raises(KeyboardInterrupt):
            run_acceptance.measure(args, pair, [])
        return
    results, trees = run_acceptance.measure(args, pair, [])
    assert list(results) == measured and list(trees) == measured[2:]
    assert all(r["waves"]["0/chat"]["name"] == name for name, r in results.items())
    assert args.budgets == budgets


def test_summary_pools_verifies_and_counts_equal_answers():
    baseline = {
        "chat": {"outputs": {"a": [1, 2]}, "counters": {}},
        "code": {"outputs": {"b": [3, 4]}, "counters": {}},
    }
    waves = {
        "chat": {"outputs": {"a": [1, 2]}, "counters": {DRAFTS: 1, ACCEPTED: 1}},
        "code": {"outputs": {"b": [3, 5]}, "counters": {DRAFTS: 3, ACCEPTED: 9}},
    }
    summary = run_acceptance.summarise(waves, baseline)
    assert summary["acceptance_length"] == {"chat": 2.0, "code": 4.0, "all": 3.5}
    assert (summary["num_equal"], summary["num_prompts"]) == (1, 2)


class TestTables:
    def test_rounds_go_to_the_wave_of_their_request(self):
        waves = {"x": {"requests": {"1": "a"}}, "y": {"requests": {"2": "b"}}}
        rounds = [tree_round([0], f"{n}-c0ffee") for n in (0, 1, 2, 1)]
        found = tables.rounds_by_wave(rounds, waves)
        assert [len(found["x"]), len(found["y"])] == [2, 1]

    def test_curve_counts_a_path_up_to_the_budget(self):
        rounds = [tree_round([0, 2, 4]), tree_round([0, 1]), tree_round([0])]
        curve = tables.budget_curve(rounds, budget=5, depth=3)
        expected = [1, 1 + 1 / 3, 1 + 2 / 3, 1 + 2 / 3, 2, 2]
        assert curve == pytest.approx(expected)

    def test_depths_of_trees_and_of_a_chain(self):
        rounds = [tree_round([0, 2, 4]), tree_round([0, 1]), tree_round([0])]
        assert tables.reached_depths(rounds, 3) == pytest.approx([2 / 3, 1 / 3, 0])
        counters = {DRAFTS: 4, PER_POSITION: [3.0, 1.0, 0.0, 0.0]}
        assert tables.reached_by_chain(counters, 3) == [0.75, 0.25, 0]

    def test_ranks_are_counted_along_the_path(self):
        counts = tables.rank_counts([tree_round([0, 2, 4]), tree_round([0, 5])])
        # Offered: the root twice has ranks 0 to 2; node 2 has rank 0; 4 and 5 none.
        assert counts == [
            tables.RankCount(offered=3, accepted=1),
            tables.RankCount(offered=2, accepted=1),
            tables.RankCount(offered=2, accepted=1),
        ]

    def test_dump_and_counters_must_be_about_the_same_rounds(self):
        rounds = [tree_round([0, 2, 4]), tree_round([0, 1])]
        assert tables.counts_agree(rounds, {DRAFTS: 2, ACCEPTED: 3})
        assert not tables.counts_agree(rounds, {DRAFTS: 3, ACCEPTED: 3})
        assert not tables.counts_agree(rounds, {DRAFTS: 2, ACCEPTED: 4})

    def test_tasks_have_their_best_tree_and_their_mean(self):
        def row(chat, code, everything):
            lengths = {"chat": chat, "code": code, "all": everything}
            return {"acceptance_length": lengths, "num_equal": 2, "num_prompts": 2}

        summary = {
            "none": row(None, None, None),
            "chain 15": row(2.0, 3.0, 2.2),
            "tree 16": row(3.0, 3.0, 3.3),
            "tree 64": row(2.5, 6.0, 4.4),
        }
        text = tables.format_tasks(summary)
        assert "| chat | 2.00 | 3.00 | 2.50 | 1.50 |" in text
        assert "| *mean of 2* | 2.50 | 3.00 | 4.25 | 1.70 |" in text
        assert "| all tokens | 2.20 | 3.30 | 4.40 | 2.00 |" in text

    def test_curve_stands_above_the_runs_that_check_it(self):
        curves = {"all": [1.0, 1.5, 1.75, 1.8, 2.0]}
        text = tables.format_curve(curves, {"all": {2: 1.7}})
        assert "| nodes | 1 | 2 | 4 |" in text
        assert "| all | 1.50 | 1.75 | 2.00 |" in text
        assert "| all, a run of its own |  | 1.70 |  |" in text


class TestScores:
    def test_survivors_are_those_of_vllms_filters(self):
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(5, 700, generator=generator) * 2
        temperature = torch.tensor([0.0, 0.7, 1.3, 1.0, 1.0])
        top_k = torch.tensor([700, 20, 20, 700, 3])
        top_p = torch.tensor([0.9, 0.9, 0.5, 0.8, 1.0])
        tokens, logprobs = survivor_logprobs(logits, temperature, top_k, top_p, 8)
        scale = torch.where(temperature > 0, temperature, 1.0)
        filtered = apply_top_k_top_p_pytorch(logits / scale[:, None], top_k, top_p)
        expected = filtered.log_softmax(-1).gather(-1, tokens)
        assert 5 <= logprobs.isinf().sum() < 20
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)

    def test_a_nucleus_of_more_than_is_sorted_has_the_mass_of_top_p(self):
        logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 0.1
        one = torch.ones(1)
        _, logprobs = survivor_logprobs(logits, one, one.int() * 5000, one * 0.9, 4)
        expected = logits.log_softmax(-1).topk(4).values - torch.tensor(0.9).log()
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)

    def test_configurations_name_how_candidates_are_scored(self):
        args = run_temperature._parser().parse_args(
            ["--budgets", "16", "--scores", "1", "the temperature", "survivors at 1"]
            + ["the noise"]
        )
        found = run_temperature.configurations(args)
        assert list(found) == [
            "no speculation",
            "budget 16, scores at 1",
            "budget 16, scores at the temperature",
            "budget 16, scores of survivors at 1",
            "budget 16, scores with the noise",
        ]
        assert found["budget 16, scores of survivors at 1"][1] == "survivors at 1"
        scaled = found["budget 16, scores at the temperature"][0]
        assert scaled == {
            "ddtree": {"budget": 16, "scale_by_temperature": True, "use_noise": False}
        }
        noisy = found["budget 16, scores with the noise"][0]["ddtree"]
        assert noisy["use_noise"] and not noisy["scale_by_temperature"]
