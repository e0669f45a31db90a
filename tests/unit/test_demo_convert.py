# SPDX-License-Identifier: Apache-2.0
"""The demo's conversion, on a tiny GGUF made here and, slow, on the real one."""

import json

import numpy as np
import pytest
import torch

from vllm_dflash.demo import convert, fetch

gguf = pytest.importorskip("gguf")
from tokenizers import Tokenizer  # noqa: E402

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ a", "1 2", "i n"]


def _ignore(text: str) -> None:
    del text


def _tokens() -> list[str]:
    alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    return SPECIAL + alphabet + [merge.replace(" ", "") for merge in MERGES]


def _interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The permutation of llama.cpp's export, written out row by row."""
    head_dim = weight.shape[0] // num_heads
    rows = []
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            rows += [head * head_dim + pair, head * head_dim + head_dim // 2 + pair]
    return weight[rows]


@pytest.fixture
def tiny(tmp_path):
    """A GGUF of two layers, and the Hugging Face weights it was made from."""
    rng = np.random.default_rng(0)
    kv_size = KV_HEADS * HEAD_DIM
    shapes = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv_size, HIDDEN),
        "attn_v": (kv_size, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    names = {
        f"blk.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    tokens = _tokens()
    names["token_embd.weight"] = (len(tokens), HIDDEN)
    names["output_norm.weight"] = (HIDDEN,)
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}

    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_license("apache-2.0")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    weights = {}
    for name, shape in names.items():
        weight = rng.standard_normal(shape).astype(np.float32)
        weights[convert.hf_name(name)] = weight
        kind = name.split(".")[-2]
        writer.add_tensor(
            name, _interleave(weight, heads.get(kind, 0)) if kind in heads else weight
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf", weights


@pytest.fixture
def converted(tiny, tmp_path, monkeypatch):
    path, weights = tiny
    expected = {
        name: torch.from_numpy(weight).to(torch.bfloat16)
        for name, weight in weights.items()
    }
    digest = convert.tensors_sha256(expected)
    monkeypatch.setattr(convert, "TENSORS_SHA256", digest)
    directory = tmp_path / "model"
    convert.convert(path, directory, _ignore)
    return directory, expected


def test_weights_are_those_before_the_export(converted):
    from safetensors.torch import load_file

    directory, expected = converted
    weights = load_file(directory / convert.WEIGHTS_NAME)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_configuration_describes_the_model(converted):
    config = json.loads((converted[0] / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["head_dim"]) == (HIDDEN, HEAD_DIM)
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(converted):
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    text = "<|im_start|>in 12 a\n<|im_end|>"
    encoding = tokenizer.encode(text)
    expected = [SPECIAL[1], "in", "Ġ", "1", "2", "Ġa", "Ċ", SPECIAL[2]]
    assert encoding.tokens == expected
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def test_complete_conversion_is_recognised_and_a_damaged_one_is_not(converted):
    directory = converted[0]
    assert convert.is_converted(directory)
    with (directory / convert.WEIGHTS_NAME).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert not convert.is_converted(directory)
    (directory / convert.WEIGHTS_NAME).unlink()
    assert not convert.is_converted(directory)


def test_missing_directory_is_not_converted(tmp_path):
    assert not convert.is_converted(tmp_path / "nowhere")


def test_unexpected_weights_leave_no_model(tiny, tmp_path):
    # The fixture's weights are not the published model's.
    with pytest.raises(convert.ConversionError, match=r"SHA-256"):
        convert.convert(tiny[0], tmp_path / "model", _ignore)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf"}


def test_remains_of_an_interrupted_conversion_are_replaced(tiny, tmp_path, monkeypatch):
    remains = tmp_path / "model.partial"
    remains.mkdir()
    (remains / "stray").write_text("")
    with pytest.raises(convert.ConversionError):
        convert.convert(tiny[0], tmp_path / "model", _ignore)
    assert not remains.exists()


def test_unknown_tensor_is_named():
    with pytest.raises(convert.ConversionError, match=r"blk\.0\.ssm_a"):
        convert.hf_name("blk.0.ssm_a")


@pytest.mark.slow
def test_real_weights_equal_those_of_transformers(tmp_path):
    """Bit for bit in bf16, against the GGUF loader of transformers.

    Its from_pretrained wants the package accelerate; the loader below does not.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = fetch.fetch_gguf(tmp_path, _ignore)
    convert.convert(path, tmp_path / "model", _ignore)
    assert convert.is_converted(tmp_path / "model")
    config = LlamaConfig.from_pretrained(tmp_path / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "model" / convert.WEIGHTS_NAME)
    assert weights.keys() == expected["tensors"].keys()
    for name, weight in expected["tensors"].items():
        assert torch.equal(weights[name], weight.to(torch.bfloat16)), name
