# SPDX-License-Identifier: Apache-2.0
"""Prompts made of the answers of an earlier run; conversations of several turns."""

import dataclasses
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import write_draft, write_target
from tiny_tokenizer import write_tokenizer
from training_runs import ROOT, load_target, tiny_config, trainer

from vllm_dflash_training.answer_prompts import load_follow_ups
from vllm_dflash_training.blocks import draw_anchors
from vllm_dflash_training.config import (
    AnswerShares,
    FromAnswers,
    GenerationOptions,
    PromptOptions,
    RunConfig,
    SelfPrompts,
    load_config,
)
from vllm_dflash_training.data import Responses, load_responses
from vllm_dflash_training.generate import Generation, facts, make_prompts
from vllm_dflash_training.heldout import HeldOut, conversation_hash, prompt_hash
from vllm_dflash_training.shards import read_rows, write_rows
from vllm_dflash_training.tokenise import ChatTokens, load_tokens

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CODE = "def area{0}(width, height):\n    return width * height + {0}"
EOS = 2


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def prose(rng: random.Random, sentences: int) -> str:
    """Sentences that hold no number and seldom a run of words twice."""
    words = "river stone garden lantern winter harvest market signal pocket window"
    return " ".join(
        " ".join(rng.choices(words.split(), k=9)).capitalize() + "."
        for _ in range(sentences)
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = write_target(
        tmp_path_factory.mktemp("target"), max_position_embeddings=4096
    )
    write_tokenizer(folder)
    tokenizer = ChatTokens(folder).tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def heldout() -> HeldOut:
    return HeldOut(ROOT / "evals/prompts/heldout.jsonl")


@pytest.fixture(scope="module")
def source(tmp_path_factory, target) -> Path:
    """A finished data folder: prose, code, and what must not be used."""
    folder, rng = tmp_path_factory.mktemp("first"), random.Random(1)
    tokens = ChatTokens(target)
    asked: list[list[dict[str, str]]] = []
    rows = []

    def add(messages, text: str, kind: str = "chat", end=(EOS,)) -> None:
        response = tokens.tokenizer(text, add_special_tokens=False)["input_ids"]
        row = {"prompt": tokens.prompt(messages), "response": [*response, *end]}
        key = prompt_hash(messages)
        rows.append({**row, "kind": kind, "temperature": 0.0, "hash": key})
        asked.append(messages)

    for i in range(60):
        add([user(f"What is thing {i}?")], prose(rng, 6))
    for i in range(20):
        code = f"Use this:\n\n```python\n{CODE.format(i)}\n```\n\nIt multiplies."
        add([user(f"Write the function {i}.")], code)
    add([user("Tell me a lot.")], prose(rng, 5) + " Unfinished words", end=())
    for i in range(4):
        # The same last message, after different ones.
        earlier = [user(f"Name plant {i}."), assistant(f"Fern {i}.")]
        add([*earlier, user("Why?")], f"Because of shade number {i}.")
    add([user("Sum it up: x")], "STOCK " + prose(rng, 4), "summarise")
    add([user("Loop?")], "LOOP it is the same old words again. " * 9)
    secret = "SECRET " + prose(rng, 4)
    add([user("A held-out prompt of the earlier run.")], secret)
    add([user("Another prompt, answered alike.")], secret + " And more.")
    held = HeldOut(ROOT / "evals/prompts/heldout.jsonl").rows[0]["messages"]
    add(held, "SECRET " + prose(rng, 5))
    write_rows(folder / "responses-00000-0.jsonl", rows)
    write_rows(
        folder / "prompts.jsonl",
        ({"messages": m, "hash": prompt_hash(m), "kind": "chat"} for m in asked),
    )
    said = tokens.tokenizer(secret, add_special_tokens=False)["input_ids"]
    write_rows(
        folder / "heldout.jsonl", [{"prompt": rows[-3]["prompt"], "response": said}]
    )
    (folder / "facts.json").write_text(json.dumps({"target": target}))
    return folder


def run_config(
    folder: Path, source: Path, target: str, count: int = 120, **options
) -> RunConfig:
    return RunConfig(
        work_dir=str(folder),
        target=target,
        prompts=PromptOptions(
            from_answers=FromAnswers(str(source), count, **options), max_tokens=1500
        ),
        generation=GenerationOptions(max_tokens=8, shard_size=50),
    )


def made(config: RunConfig, heldout: HeldOut) -> list[dict]:
    make_prompts(config, heldout)
    return list(read_rows(config.data_folder() / "prompts.jsonl"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory, source, target, heldout) -> list[dict]:
    folder = tmp_path_factory.mktemp("second")
    return made(run_config(folder, source, target, 600), heldout)


def test_prompts_are_the_same_for_a_seed_and_all_different(
    tmp_path, source, target, heldout, rows
):
    again = run_config(tmp_path / "again", source, target, 600)
    assert made(again, heldout) == rows
    other = dataclasses.replace(again, seed=1, work_dir=str(tmp_path / "other"))
    assert made(other, heldout) != rows
    assert len({conversation_hash(row["messages"]) for row in rows}) == 600
    assert all(row["hash"] == prompt_hash(row["messages"]) for row in rows)


def test_kinds_have_their_shares(tmp_path, source, target, heldout, rows):
    counts = Counter(row["kind"] for row in rows)
    for kind, share in dataclasses.asdict(AnswerShares()).items():
        assert abs(counts[kind] / 600 - share) < 0.07
    shares = AnswerShares(text_task=0, code_task=2, second_turn=2)
    config = run_config(tmp_path, source, target, 100, shares=shares)
    counts = Counter(row["kind"] for row in made(config, heldout))
    assert set(counts) == {"code_task", "second_turn"} and min(counts.values()) > 30


def test_each_kind_is_what_it_says(rows):
    kinds = Counter()
    for row in rows:
        *earlier, last = row["messages"]
        assert last["role"] == "user"
        turns = [m["role"] for m in earlier if m["role"] != "system"]
        if row["kind"] == "second_turn":
            assert turns[-2:] == ["user", "assistant"]
            kinds["three turns"] += len(turns) == 4
        else:
            assert not turns
            assert ("def area" in last["content"]) == (row["kind"] == "code_task")
            kinds["before"] += last["content"].startswith("```")
            kinds["after"] += last["content"].endswith("```")
        # No slot was left open.
        assert not re.search(r"\{[a-z]+\}", last["content"])
    assert min(kinds.values()) > 3


def test_prompts_and_their_answers_stay_together(rows):
    for row in rows:
        turns = [m["content"] for m in row["messages"]]
        if len(turns) == 5:
            number = turns[0].removeprefix("Name plant ").removesuffix(".")
            assert turns[1:4] == [
                f"Fern {number}.",
                "Why?",
                f"Because of shade number {number}.",
            ]


@pytest.mark.parametrize("word", ["SECRET", "STOCK", "LOOP", "Unfinished", "</s>"])
def test_some_answers_are_not_used(source, rows, target, word):
    assert word not in json.dumps([row["messages"] for row in rows])
    if word != "</s>":
        tokens = ChatTokens(target)
        answers = read_rows(source / "responses-00000-0.jsonl")
        assert any(word in tokens.text(row["response"]) for row in answers)


def test_long_prompts_are_not_made(tmp_path, source, target, heldout):
    config = run_config(tmp_path, source, target, 40)
    options = dataclasses.replace(config.prompts, max_tokens=250)
    config = dataclasses.replace(config, prompts=options)
    tokens = ChatTokens(target)
    lengths = [len(tokens.prompt(r["messages"])) for r in made(config, heldout)]
    assert len(lengths) == 40 and max(lengths) <= 250


def test_held_out_instructions_are_not_ours(heldout):
    """What stands before or after a held-out text is none of our lines."""

    def plain(text: str) -> str:
        return re.sub(r"\W+", " ", text.casefold()).strip()

    words = load_follow_ups()
    called = "|".join(map(plain, [*words["below"], *words["above"], "this code"]))
    ours = [
        re.escape(plain(line.replace("{x}", "xx"))).replace("xx", f"({called})")
        for part in ("text", "code", "turn")
        for lines in words[part].values()
        for line in lines
        if not re.search(r"\{(?!x)", line)
    ]
    assert len(ours) > 150
    assert re.fullmatch("|".join(ours), plain("Proofread this text:"))
    for row in heldout.rows:
        for part in row["messages"][-1]["content"].split("\n\n"):
            assert not re.fullmatch("|".join(ours), plain(part))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("all", "data_dir is no data folder of a run .*without facts.json.*Type"),
        ("heldout.jsonl", "is no data folder of a run .*without heldout.jsonl"),
        ("responses-00000-0.jsonl", "data_dir holds no answers .*Type"),
    ],
)
def test_a_folder_that_lacks_something_is_refused(
    tmp_path, source, target, heldout, missing, message
):
    other = tmp_path / "first"
    if missing != "all":
        other.mkdir()
        for file in source.iterdir():
            if file.name != missing:
                (other / file.name).write_bytes(file.read_bytes())
    config = run_config(tmp_path / "second", other, target)
    with pytest.raises(ValueError, match=message):
        make_prompts(config, heldout)
    # So that the corrected config can be used in the same folder.
    assert not config.data_folder().exists()


def test_another_target_is_refused_by_name(tmp_path, source, target, heldout):
    link = tmp_path / "link"
    link.symlink_to(target)
    assert made(run_config(tmp_path / "a", source, str(link), 5), heldout)
    copy = tmp_path / "first"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "facts.json").write_text('{"target": "some/other-model"}')
    with pytest.raises(ValueError, match=r"another target \(got 'some/other-model'"):
        make_prompts(run_config(tmp_path / "b", copy, target), heldout)


def test_what_the_answers_do_not_give_is_refused(tmp_path, source, target, heldout):
    only = AnswerShares(text_task=0, code_task=0)
    config = run_config(tmp_path, source, target, 100_000, shares=only)
    with pytest.raises(ValueError, match="count is more than the answers give .*Type"):
        make_prompts(
            dataclasses.replace(
                config, prompts=dataclasses.replace(config.prompts, max_tokens=60)
            ),
            heldout,
        )
    other = tmp_path / "first"
    other.mkdir()
    for file in source.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    rows = list(read_rows(source / "responses-00000-0.jsonl"))[:60]
    write_rows(other / "responses-00000-0.jsonl", rows)
    with pytest.raises(ValueError, match=r"nothing for code_task .*code_task: 0"):
        make_prompts(run_config(tmp_path / "c", other, target), heldout)


def test_the_option_makes_other_data(tmp_path, source, target):
    config = run_config(tmp_path, source, target)
    one = facts(config)
    for change in (
        FromAnswers(str(source), 121),
        FromAnswers("elsewhere", 120),
        FromAnswers(str(source), 120, AnswerShares(code_task=0)),
        None,
    ):
        prompts = dataclasses.replace(config.prompts, from_answers=change)
        assert facts(dataclasses.replace(config, prompts=prompts)) != one
    # Folders that were begun before there was the option go on.
    assert "from_answers" not in facts(RunConfig(work_dir="x"))["prompts"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("true", "from_answers.data_dir is wrong .*it has no default"),
        ("{data_dir: x}", "from_answers.count is wrong"),
        ("{data_dir: x, count: 0}", "count is wrong .*1 or more"),
        ("{data_dir: y/../x/data, count: 1}", "data_dir is wrong .*not this run's own"),
        ("{data_dir: x, count: 1, shares: {poems: 1}}", "Allowed: text_task, code_ta"),
        (
            "{data_dir: x, count: 1, shares: {text_task: -1}}",
            "text_task is wrong .*0 or",
        ),
        (
            "{data_dir: x, count: 1, "
            "shares: {text_task: 0, code_task: 0, second_turn: 0}}",
            "shares is wrong .*at least one above 0",
        ),
    ],
)
def test_wrong_options_are_refused(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    words = (
        f"work_dir: x\ndraft: {{mask_token_id: 4}}\nprompts: {{from_answers: {text}}}"
    )
    path.write_text(words)
    with pytest.raises(ValueError, match=message):
        load_config(path)


class Echo:
    """Answers with the length of the prompt, as letters."""

    stop_ids = [EOS]

    def run(self, jobs) -> None:
        for job in jobs:
            found = [[10 + len(p) % 40 + i for i in range(9)] for p in job.prompts]
            job.finish([[*one, EOS] for one in found])


def test_several_turns_are_answered_and_trained_on(
    tmp_path, source, target, heldout, tmp_path_factory
):
    config = run_config(tmp_path / "run", source, target, 60)
    prompts = dataclasses.replace(config.prompts, self_generated=SelfPrompts(count=0))
    config = dataclasses.replace(config, prompts=prompts)
    rows = made(config, heldout)
    tokens, stops = load_tokens(target)
    assert stops == [EOS]
    Generation(config, heldout).run(tokens, Echo())
    answered = [
        row
        for path in sorted(config.data_folder().glob("responses-*.jsonl"))
        for row in read_rows(path)
    ]
    assert Counter(row["kind"] for row in answered) == Counter(r["kind"] for r in rows)
    # A prompt holds every turn, and nothing of it is cut off.
    expected = sorted(tokens.prompt(row["messages"]) for row in rows)
    assert sorted(row["prompt"] for row in answered) == expected
    turns = [row for row in answered if row["kind"] == "second_turn"]
    assert turns
    for row in turns:
        text = tokens.tokenizer.decode(row["prompt"])
        assert text.count("<s>assistant\n") >= 2 and text.endswith("<s>assistant\n")

    responses = load_responses([config.data_folder()], 1600, heldout)
    assert len(responses) == 60 and responses.num_response_tokens == 60 * 10
    batch = responses.batch(range(60), 8)
    anchors, is_used = draw_anchors(batch, 4, torch.Generator().manual_seed(0))
    for seq in range(60):
        assert (anchors[seq][is_used[seq]] >= int(batch.prompt_lens[seq])).all()
    few = sorted(turns, key=lambda row: len(row["prompt"]))[:8]
    pairs = [(row["prompt"], row["response"]) for row in few]
    draft = write_draft(tmp_path_factory.mktemp("draft"))
    training = trainer(
        tiny_config(tmp_path / "train", draft, steps=2, max_length=1600),
        load_target(target),
        pairs,
    )
    before = [w.clone() for _, w in training.average.named().items()]
    assert training.train(Responses(pairs[:2]))
    after = [w for _, w in training.average.named().items()]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
