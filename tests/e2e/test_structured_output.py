# SPDX-License-Identifier: Apache-2.0
"""Grammars beside trees, and every option of SamplingParams in one batch.

A request with a grammar verifies chains; others in its batch verify trees.
"""

import json
import re

import pytest
from engine_pair import EnginePair, engine_pair
from engines import params
from sampling_checks import (
    SEEDED,
    SETTINGS,
    prompts_of,
    sampling_pair,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def pair(spoken_target, tiny_draft):
    with sampling_pair(spoken_target, tiny_draft) as pair:
        yield pair


@pytest.fixture(scope="module")
def tokenizer(pair):
    return pair.plain.get_tokenizer()


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "b"]},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= "SELECT " word " FROM " word ";"
word ::= [a-z] [a-z]? [a-z]?
"""
STRUCTURED = {
    "regex": dict(regex=r"[0-9]{3}-[a-f]{2,6}\.(org|com)"),
    "choice": dict(choice=["red", "green", "a very long answer", "blue"]),
    "json": dict(json=json.dumps(SCHEMA)),
    "grammar": dict(grammar=GRAMMAR),
}


def is_valid(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(STRUCTURED["regex"]["regex"], text) is not None
    if kind == "choice":
        return text in STRUCTURED["choice"]["choice"]
    if kind == "grammar":
        return re.fullmatch(r"SELECT [a-z]{1,3} FROM [a-z]{1,3};", text) is not None
    value = json.loads(text)
    return set(value) == {"name", "age", "tags"} and 0 <= value["age"] <= 99


def structured(kind: str, **kwargs):
    from vllm.sampling_params import StructuredOutputsParams

    constraint = StructuredOutputsParams(**STRUCTURED[kind])
    options = dict(SEEDED, structured_outputs=constraint, ignore_eos=False)
    return params(120, detokenize=True, **{**options, **kwargs})


def check_structured(pair: EnginePair, kind: str, options: list):
    """Equal answers, and chains where the answer is long enough to verify any.

    The scheduler drops drafts that the grammar forbids; of a short answer it may drop
    all, depending on when the grammar was compiled.
    """
    comparison = pair.compare(prompts_of(len(options)), options)
    comparison.assert_equal()
    assert pair.rig.num_branching_paths == 0
    assert kind != "json" or pair.verified_chains, pair.rig.paths
    return comparison


@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_output(pair, kind):
    options = [structured(kind, seed=s) for s in range(3)]
    options.append(structured(kind, temperature=0.0))
    comparison = check_structured(pair, kind, options)
    for output in comparison.got:
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            assert is_valid(kind, completion.text), completion.text
    assert any(o.outputs[0].finish_reason == "stop" for o in comparison.got)


def test_all_options_in_one_batch(pair, tokenizer):
    word = tokenizer.decode([45, 46])
    options = [
        params(**SEEDED),
        params(**SEEDED, repetition_penalty=1.4),
        structured("json", seed=3),
        params(),
        params(**SEEDED, min_p=0.1, logprobs=2),
        params(**SEEDED, bad_words=[word], allowed_token_ids=list(range(40, 50))),
        params(**SEEDED, thinking_token_budget=3),
        structured("regex", seed=4),
        params(**SEEDED, logit_bias={33: 4.0}, n=2),
        params(temperature=0.6, seed=9, top_k=5, top_p=0.8),
    ]
    comparison = pair.compare(prompts_of(len(options)), options)
    comparison.assert_equal()
    assert pair.rig.num_branching_paths > 5


def test_structured_output_of_guidance(spoken_target, tiny_draft):
    config = dict(backend="guidance")
    with engine_pair(
        spoken_target, tiny_draft, structured_outputs_config=config, **SETTINGS
    ) as pair:
        for kind in ("json", "regex", "choice"):
            check_structured(pair, kind, [structured(kind, seed=s) for s in range(3)])
