# SPDX-License-Identifier: Apache-2.0
"""Sampling and structured output of the embedded pair: what it says without trees."""

import json

import jsonschema
import pytest
from engine_pair import engine_pair
from engines import params

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SETTINGS = dict(
    skip_tokenizer_init=False,
    max_model_len=512,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    num_gpu_blocks_override=128,
)
TOPICS = (
    "a lighthouse keeper",
    "the city of Lisbon",
    "a recipe for lentil soup",
    "a chess tournament",
    "the planet Saturn",
    "a violin teacher",
    "an old railway bridge",
    "a garden in March",
    "the invention of paper",
    "a lost umbrella",
)


def bounded(text: int) -> dict:
    return {"type": "string", "maxLength": text}


def record(**properties) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = (
    record(name=bounded(12), age={"type": "integer", "minimum": 0, "maximum": 120}),
    record(
        color={"enum": ["red", "green", "blue"]},
        tags={"type": "array", "items": bounded(8), "minItems": 1, "maxItems": 3},
    ),
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 999},
        "minItems": 2,
        "maxItems": 5,
    },
    record(
        title=bounded(16),
        address=record(
            city=bounded(10), zip={"type": "string", "pattern": "^[0-9]{5}$"}
        ),
    ),
    record(
        known={"type": "boolean"},
        since={"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 2999}]},
    ),
)


@pytest.fixture(scope="module")
def pair():
    from vllm_dflash.demo.pair import embedded_pair

    models = embedded_pair(print)
    config = dict(backend="xgrammar", disable_any_whitespace=True)
    with engine_pair(
        models.target,
        models.draft,
        structured_outputs_config=config,
        **SETTINGS,
    ) as pair:
        yield pair


def chats(pair, texts) -> list[list[int]]:
    tokenizer = pair.plain.get_tokenizer()
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for text in texts
    ]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_seeded_answers_equal_no_speculation(pair, temperature):
    texts = [f"Tell me about {topic}." for topic in TOPICS]
    texts += [f"List three facts about {topic}." for topic in TOPICS]
    options = [
        params(
            32, temperature=temperature, seed=seed, ignore_eos=False, detokenize=True
        )
        for seed in range(len(texts))
    ]
    comparison = pair.compare(chats(pair, texts), options, rigged=False)
    comparison.assert_equal()
    assert pair.rig.num_branching_paths > 20
    assert pair.rig.mean_tokens > 1.3


def test_json_of_five_schemas_is_valid_and_equals_no_speculation(pair):
    from vllm.sampling_params import StructuredOutputsParams

    texts, options, schemas = [], [], []
    for topic in TOPICS:
        for schema in SCHEMAS:
            texts.append(f"Describe {topic} as JSON: {json.dumps(schema)}")
            schemas.append(schema)
            options.append(
                params(
                    96,
                    temperature=0.0 if len(texts) % 2 else 0.8,
                    seed=len(texts),
                    ignore_eos=False,
                    detokenize=True,
                    structured_outputs=StructuredOutputsParams(json=schema),
                )
            )
    comparison = pair.compare(chats(pair, texts), options, rigged=False)
    comparison.assert_equal()
    assert pair.verified_chains
    for output, schema in zip(comparison.got, schemas, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason == "stop", completion.text
        jsonschema.validate(json.loads(completion.text), schema)
