# SPDX-License-Identifier: Apache-2.0
"""Messages to tokens, with the target's chat template where it has one."""

from __future__ import annotations

from typing import Any

from vllm_dflash_training.heldout import Messages

_MARK = "\u2603"


class ChatTokens:
    """The target's tokenizer."""

    def __init__(self, target: str):
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(target)
        self.has_template = bool(getattr(self.tokenizer, "chat_template", None))

    def prompt(self, messages: Messages) -> list[int]:
        """Return the tokens that serving would see for these messages."""
        if not self.has_template:
            return self._encode("\n\n".join(m["content"] for m in messages))
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self._encode(text)

    def opening(self, words: str) -> list[int]:
        """Return the tokens up to where a user has begun to write."""
        if not self.has_template:
            return self._encode(words) or [self.tokenizer.bos_token_id or 0]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False
        )
        return self._encode(text.split(_MARK)[0] + words)

    def text(self, tokens: list[int]) -> str:
        """Return tokens as text, without special ones."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def stop_ids(self, config: Any) -> list[int]:
        """Return the tokens that end a response."""
        ends = config.eos_token_id
        found = set(ends if isinstance(ends, list) else [ends])
        found.add(self.tokenizer.eos_token_id)
        return sorted(token for token in found if token is not None)

    def _encode(self, text: str) -> list[int]:
        # The template already wrote the special tokens.
        special = not self.has_template
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]


def load_tokens(target: str) -> tuple[ChatTokens, list[int]]:
    """Return the target's tokenizer, and the tokens that end a response."""
    from transformers import AutoConfig

    tokens = ChatTokens(target)
    return tokens, tokens.stop_ids(AutoConfig.from_pretrained(target))
