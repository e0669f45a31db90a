# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash show-tree` on a hand-written dump: text, page, and wrong input."""

import argparse
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from math import log
from pathlib import Path

import pytest

from vllm_dflash.cli import main
from vllm_dflash.cli.show_tree import _round_range
from vllm_dflash.cli.tree_page import place_nodes, render_page, render_svg
from vllm_dflash.cli.tree_text import render_round, summarise, visible
from vllm_dflash.metrics.tree_dump import (
    DumpError,
    TreeRound,
    engine_line,
    read_dump,
)

TEXTS = {1: "The", 2: " cat", 3: " <dog>", 4: " sat", 5: "\n", 6: " ran", 7: "!"}
# root -> 1 (cat), 3 (dog); cat -> 2 (sat), 5 (ran); sat -> 4 (newline)
FIRST = TreeRound(
    request="chat-a",
    step=1,
    position=10,
    tokens=[1, 2, 4, 3, 5, 6],
    parents=[-1, 0, 1, 0, 2, 1],
    logprobs=[None, log(0.6), log(0.5), log(0.25), log(0.75), None],
    path=[0, 1, 5],
    emitted=[2, 6, 7],
)
SECOND = TreeRound(
    request="chat-a",
    step=3,
    position=13,
    tokens=[7, 2],
    parents=[-1, 0],
    logprobs=[None, log(0.004)],
    path=[0],
    emitted=[3],
)
OTHER = TreeRound("chat-b", 2, 4, [1, 2], [-1, 0], [None, -1.0], [0, 1], [2, 5])
ENGINE_FACTS = dict(engine=0, model="target", draft="draft", depth=3, budget=5)


def text_of(token: int) -> str:
    return TEXTS[token]


@pytest.fixture
def dump(tmp_path) -> Path:
    path = tmp_path / "trees.jsonl"
    lines = [engine_line(**ENGINE_FACTS)]
    lines += [item.to_json() for item in (FIRST, OTHER, SECOND)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_dump_is_read_as_it_was_written(dump):
    read = read_dump(dump)
    assert read.engine["model"] == "target" and read.engine["budget"] == 5
    assert read.requests == ["chat-a", "chat-b"]
    first, second = read.of_request("chat-a")
    assert second == SECOND.from_values({**vars(SECOND), "logprobs": second.logprobs})
    assert first.logprobs == pytest.approx(FIRST.logprobs, abs=1e-4)
    assert first.probability(1) == pytest.approx(0.6, abs=1e-3)
    assert first.probability(5) is None


def test_line_that_is_still_being_written_is_left_out(dump):
    with dump.open("a", encoding="utf-8") as file:
        file.write(FIRST.to_json()[:40])
    assert len(read_dump(dump).rounds) == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(parents=[-1, 0, 3, 0, 2, 1]), "precede"),
        (dict(parents=[-1, 0, 1, 0, 2]), "length"),
        (dict(path=[0, 3, 5]), "parent to child"),
        (dict(path=[0, 1]), "belong together"),
        (dict(path=[1, 5, 0]), "belong together"),
        (dict(tokens=None), "no field tokens"),
        (dict(kind="tree"), "unknown kind"),
    ],
)
def test_damaged_round_is_refused_by_line(dump, change, reason):
    line = {**json.loads(FIRST.to_json()), **change}
    with dump.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(DumpError, match=f"line 5 of .*{reason}.*Type VLLM_DFLASH"):
        read_dump(dump)


def test_text_of_a_round():
    assert render_round(FIRST, 1, text_of, colour=False).splitlines() == [
        "round 1 · position 10 · 5 nodes · 2 accepted · 3 tokens",
        "● The  (root)",
        "├─ ● ·cat  60%",
        "│  ├─ ○ ·sat  50%",
        "│  │  └─ ○ ⏎  75%",
        "│  └─ ● ·ran",
        "└─ ○ ·<dog>  25%",
        "accepted ·cat ran, then the target's own !",
    ]


def test_text_of_a_round_that_accepts_nothing():
    lines = render_round(SECOND, 2, text_of, colour=False).splitlines()
    assert lines[2] == "└─ ○ ·cat  <1%"
    assert lines[-1] == "accepted ∅, then the target's own ·<dog>"


def test_colour_marks_the_path_and_changes_no_text():
    plain = render_round(FIRST, 1, text_of, colour=False)
    painted = render_round(FIRST, 1, text_of, colour=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == plain
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b", painted)
    assert green == ["● ·cat  60%", "● ·ran", "·cat ran"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" a ", "·a·"),
        ("  ", "··"),
        ("\n\n", "⏎⏎"),
        ("", "∅"),
        ("a b", "a b"),
        ("\x1b[31m", "\\u001b[31m"),
        ("\u202e", "\\u202e"),
    ],
)
def test_white_space_and_control_characters_are_in_sight(text, shown):
    assert visible(text) == shown


def test_summary_counts_ranks_by_siblings():
    assert summarise([FIRST, SECOND]) == (
        "2 rounds, 4 tokens, mean acceptance length 2.00, 3.0 nodes a round; "
        "50% of the accepted nodes were the draft's first choice"
    )


def random_tree(num_nodes, seed):
    import random

    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(node) for node in range(1, num_nodes))]
    return TreeRound("r", 1, 0, [1] * num_nodes, parents, [None] * num_nodes, [0], [1])


@pytest.mark.parametrize("seed", range(5))
def test_no_two_nodes_share_a_place_and_columns_are_depths(seed):
    item = random_tree(40, seed)
    places = place_nodes(item)
    assert len(set(places)) == len(places)
    for node, parent in enumerate(item.parents):
        if node:
            assert places[node][0] == places[parent][0] + 1
            assert places[node][1] >= places[parent][1]


def test_first_choices_form_a_straight_line():
    places = place_nodes(FIRST)
    assert [places[node][1] for node in (0, 1, 2, 4)] == [0, 0, 0, 0]


def svg_nodes(svg):
    space = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(svg)
    groups = root.findall(f"{space}g")
    return root, {
        group.find(f"{space}title").text: (
            group.get("class"),
            group.find(f"{space}rect"),
        )
        for group in groups
    }


def test_svg_shows_every_node_the_path_and_the_targets_token():
    root, nodes = svg_nodes(render_svg(FIRST, text_of))
    kinds = {title: kind for title, (kind, _) in nodes.items()}
    assert kinds == {
        "The (token 1)": "node root",
        "·cat (token 2, draft 60.0%)": "node accepted",
        "·sat (token 4, draft 50.0%)": "node other",
        "·<dog> (token 3, draft 25.0%)": "node other",
        "⏎ (token 5, draft 75.0%)": "node other",
        "·ran (token 6)": "node accepted",
        "! (token 7)": "node bonus",
    }
    width, height = int(root.get("width")), int(root.get("height"))
    places = set()
    for _, rect in nodes.values():
        x, y = int(rect.get("x")), int(rect.get("y"))
        assert x >= 0 and x + int(rect.get("width")) <= width
        assert y >= 0 and y + int(rect.get("height")) <= height
        places.add((x, y))
    assert len(places) == len(nodes), "boxes on top of each other"


@pytest.mark.parametrize("seed", range(8))
def test_the_targets_token_hides_no_node(seed):
    item = random_tree(30, seed)
    root, _ = svg_nodes(render_svg(item, text_of))
    space = "{http://www.w3.org/2000/svg}"
    rects = [group.find(f"{space}rect") for group in root.findall(f"{space}g")]
    assert len({(r.get("x"), r.get("y")) for r in rects}) == len(item.tokens) + 1


class PageChecker(HTMLParser):
    """Balanced tags, and everything that could load something."""

    VOID = frozenset({"meta", "link", "input", "br", "img", "hr", "base"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.sections: list[dict] = []
        self.policy = ""

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            if name in values:
                self.loads.append(values[name])
        if tag in {"link", "iframe", "img", "object", "embed", "base"}:
            self.loads.append(tag)
        if tag == "section":
            self.sections.append(values)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_one_whole_file_that_loads_nothing(dump, tmp_path, capsys):
    page = tmp_path / "page.html"
    argv = ["show-tree", str(dump), "--request", "chat-a", "--html", str(page)]
    assert main.main(argv) == 0
    assert "2 rounds, 4 tokens" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    checker = PageChecker()
    checker.feed(text)
    checker.close()
    assert not checker.open and not checker.loads
    assert "url(" not in text and "@import" not in text
    links = set(re.findall(r"https?://[^\"' ]+", text))
    assert links == {"http://www.w3.org/2000/svg"}
    # The first round is seen even without scripts.
    assert [("hidden" in s) for s in checker.sections] == [False, True]
    assert "Target target, draft draft, depth 3, budget 5 nodes" in text


def test_page_escapes_what_models_and_people_write():
    page = render_page([FIRST, SECOND], text_of, title="<b>& $x", facts="</p><script>")
    assert "<dog>" not in page and "&lt;dog&gt;" in page
    assert "&lt;b&gt;&amp; $x" in page and "</p><script>" not in page


def test_text_command_shows_all_requests_and_says_what_it_left_out(dump, capsys):
    assert main.main(["show-tree", str(dump)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("request chat-a: 2 rounds")
    assert "request chat-b: 1 rounds" in out and "\x1b" not in out
    assert main.main(["show-tree", str(dump), "--rounds", "2-9"]) == 0
    out = capsys.readouterr().out
    assert out.count("round 2 ·") == 1 and "round 1 ·" not in out


def test_colour_only_where_it_is_asked_for(dump, capsys):
    main.main(["show-tree", str(dump), "--color", "always"])
    assert "\x1b[1;32m" in capsys.readouterr().out


def test_long_answers_are_cut_with_the_way_to_the_rest(tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text((SECOND.to_json() + "\n") * 9, encoding="utf-8")
    assert main.main(["show-tree", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("round ") == 5 and out.endswith("4 more rounds: --rounds 1-9\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to show .*Type: vllm-dflash show-tree --demo"),
        (["/no/such.jsonl"], "can't be read .*No such file.*VLLM_DFLASH_DUMP_TREES="),
        (["{dump}", "--demo"], "two sources"),
        (["{dump}", "--request", "x"], "no such request .*Type: --request chat-a"),
        (["{dump}", "--html", "{dump}.html"], "one request .*--request chat-a"),
        (["{dump}", "--tokenizer", "/no/such"], "tokenizer can't be loaded"),
        (["{dump}", "--request", "chat-b", "--rounds", "7"], "1-1 is allowed"),
        (
            ["{dump}", "--request", "chat-b", "--html", "/no/such/x.html"],
            "page can't be written",
        ),
        (["--prompt", "hi", "--model", "m"], "only one of the two"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_to_type(dump, argv, message, capsys):
    argv = [word.format(dump=dump) for word in argv]
    assert main.main(["show-tree", *argv]) == main.USAGE_ERROR
    error = capsys.readouterr().err
    assert re.search(message, error, re.DOTALL), error


def test_empty_and_foreign_files_are_refused(tmp_path, capsys):
    path = tmp_path / "dump.jsonl"
    path.write_text(engine_line(**ENGINE_FACTS) + "\n", encoding="utf-8")
    assert main.main(["show-tree", str(path)]) == main.USAGE_ERROR
    assert "no round yet" in capsys.readouterr().err
    path.write_text("hello\nworld\n", encoding="utf-8")
    assert main.main(["show-tree", str(path)]) == main.USAGE_ERROR
    assert "line 1 of" in capsys.readouterr().err
    path.write_text('{"kind":"engine","version":9}\n', encoding="utf-8")
    assert main.main(["show-tree", str(path)]) == main.USAGE_ERROR
    assert "version 9" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "3-2", "a", "1-", "-3", ""])
def test_wrong_ranges_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        _round_range(text)


def test_ranges():
    assert _round_range("3") == (3, 3) and _round_range("2-10") == (2, 10)
