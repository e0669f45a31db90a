# SPDX-License-Identifier: Apache-2.0
"""Whether two servers give the same greedy answers, and where they part."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from first_difference import first_difference
from serving.load import LoadError


@dataclass(frozen=True)
class Answer:
    """One greedy answer.

    Attributes:
        prompt_ids: The prompt as the server tokenized it.
        token_ids: The answer, without the token that ended it.
        num_verifies: Verification steps, None where the server does not tell.
        num_accepted: Accepted drafts of these steps.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    num_verifies: int | None = None
    num_accepted: int | None = None


def same_tokens_prompts(target: str, prompts: Path) -> bool:
    """Make both servers see the same tokens, and return ``add_special_tokens``.

    SGLang's completions ignore ``add_special_tokens``: its tokenizer always adds what
    it adds. Where that is a first token that the chat template has written too, it is
    taken from the prompts of ``prompts``, which are rewritten, and both servers add
    it.

    Raises:
        LoadError: the tokenizer adds something else.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    lines = prompts.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    wanted = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    if [tokenizer(text).input_ids for text in texts] == wanted:
        return False
    texts = [text.removeprefix(tokenizer.bos_token or "") for text in texts]
    if [tokenizer(text).input_ids for text in texts] != wanted:
        raise LoadError(
            f"the tokenizer of {target} adds tokens that its chat template does not "
            "write. SGLang can't be told not to add them, so the two servers would "
            "be given different prompts"
        )
    lines = [json.dumps({"prompt": text}) for text in texts]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return True


def end_tokens(target: str) -> set[int]:
    """Return the tokens that end an answer of the target."""
    from transformers import AutoTokenizer, GenerationConfig

    found = [AutoTokenizer.from_pretrained(target).eos_token_id]
    try:
        ends = GenerationConfig.from_pretrained(target).eos_token_id
    except OSError:
        ends = None
    found += ends if isinstance(ends, list) else [ends]
    return {token for token in found if token is not None}


def ask(
    base_url: str,
    model: str,
    prompts: list[str],
    max_tokens: int,
    ends: set[int],
    add_special_tokens: bool,
) -> list[Answer]:
    """Return a server's greedy answers to the prompts, one request at a time."""
    import httpx
    from openai import OpenAI

    # Never through a proxy: the server is on this machine.
    http = httpx.Client(trust_env=False)
    answers = []
    with OpenAI(base_url=f"{base_url}/v1", api_key="-", http_client=http) as client:
        for prompt in prompts:
            reply = client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                timeout=600,
                extra_body={
                    "add_special_tokens": add_special_tokens,
                    "return_token_ids": True,
                    # SGLang's own; vLLM ignores it.
                    "return_spec_tokens_details": True,
                },
            )
            answers.append(_answer(reply.model_dump(), ends))
    return answers


def _answer(reply: dict[str, Any], ends: set[int]) -> Answer:
    choice = reply["choices"][0]
    token_ids = list(choice["token_ids"])
    if token_ids and token_ids[-1] in ends:
        token_ids.pop()
    details = (reply.get("sglext") or {}).get("spec_tokens_details") or {}
    return Answer(
        prompt_ids=list(choice["prompt_token_ids"]),
        token_ids=token_ids,
        num_verifies=details.get("spec_verify_ct"),
        num_accepted=details.get("spec_num_correct_drafts"),
    )


def compare(answers: list[Answer], reference: list[Answer]) -> dict[str, Any]:
    """Return how far the answers of one server are those of another.

    Raises:
        LoadError: the servers were not given the same prompts.
    """
    if [a.prompt_ids for a in answers] != [r.prompt_ids for r in reference]:
        raise LoadError("the two servers tokenized the prompts differently")
    positions = [
        first_difference(a.token_ids, r.token_ids)
        for a, r in zip(answers, reference, strict=True)
    ]
    parted = sorted(position for position in positions if position is not None)
    return {
        "answers": len(answers),
        "equal": len(answers) - len(parted),
        "rate": 1 - len(parted) / len(answers),
        "earliest_difference": parted[0] if parted else None,
        "median_difference": median(parted) if parted else None,
        "first_difference": positions,
    }


def acceptance_length(answers: list[Answer]) -> float | None:
    """Return tokens per verification step, as the answers of SGLang tell it."""
    verifies = sum(answer.num_verifies or 0 for answer in answers)
    if not verifies:
        return None
    return 1 + sum(answer.num_accepted or 0 for answer in answers) / verifies


def references(names: list[str]) -> list[tuple[str, str]]:
    """Return (server, reference) for each comparison of a run.

    Every server is compared with vLLM without speculation, and SGLang's also with
    SGLang without speculation, which is what DFLASH must not change.
    """
    pairs = [(name, "vllm-none") for name in names]
    pairs += [(n, "sglang-none") for n in names if n.startswith("sglang-")]
    return [(name, other) for name, other in pairs if name != other and other in names]
