# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer whose vocabulary is that of the tiny models.

Every id has a text of its own, so random tokens have one to stop at, to forbid, and to
constrain by a grammar.
"""

from tiny_models import MASK_TOKEN, VOCAB_SIZE

BOS, EOS, THINK, END_THINK = "<s>", "</s>", "<think>", "</think>"
SPECIALS = ("<pad>", BOS, EOS, THINK, END_THINK, "<mask>")
assert SPECIALS[MASK_TOKEN] == "<mask>"


def write_tokenizer(path: str) -> None:
    """Add the tokenizer to a checkpoint."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet]
    letters = [c for c in "etaoinsrhldcumfpgwybvk"]
    merges = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - len(tokens)]
    tokens += [a + b for a, b in merges]
    assert len(tokens) == VOCAB_SIZE
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=SPECIALS[0],
    ).save_pretrained(path)
