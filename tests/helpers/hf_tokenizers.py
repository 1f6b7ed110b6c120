"""Write small Hugging Face tokenizer folders, one of each kind of tokenizer, trained offline on a text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from helpers.hf_models import write_llama_tokenizer
from helpers.pairs import TEXT
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megazpp.data.text import train_sentencepiece

SPACE = "\u2581"
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def definition(text: str, **files: Any) -> dict[str, bytes]:
    """Return the files of a tokenizer folder, as bytes by file name.

    Args:
        text: content of tokenizer.json.
        files: contents of further JSON files, by name without ".json".
    """
    return {"tokenizer.json": text.encode()} | {f"{name}.json": json.dumps(x).encode() for name, x in files.items()}


def write(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any], model_type: str | None = None) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 64}))


def byte_level(special: list[str], *, prefix: bool = False, split: str | None = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)
    isolated = [] if split is None else [pre_tokenizers.Split(tokenizers.Regex(split), "isolated")]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([*isolated, level]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    return tokenizer


def gpt2(folder: Path) -> None:
    write(folder, byte_level(["<|endoftext|>"]), {"tokenizer_class": "GPT2Tokenizer"}, "gpt2")


def gpt2_merges(folder: Path) -> None:
    """Write vocab.json and merges.txt instead of a tokenizer.json."""
    byte_level(["<|endoftext|>"]).model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "pad_token": "[PAD]", "add_bos_token": True})
    )


def gpt2_of_llama(folder: Path) -> None:
    """Write a GPT-2 tokenizer next to a config.json with model type "llama".

    transformers' class GPT2Tokenizer then replaces the pre-tokenizer of the tokenizer.json.
    """
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    write(folder, byte_level(["<|endoftext|>"], split=r"\d|\s+|[^\s\d]+"), config, "llama")


def qwen2(folder: Path) -> None:
    tokenizer = byte_level(CHATML, split=r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.normalizer = normalizers.NFC()
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    decoder = {str(i): {"content": name, "special": True, "normalized": False} for i, name in enumerate(CHATML)}
    write(folder, tokenizer, config | {"added_tokens_decoder": decoder}, "qwen2")


def llama3(folder: Path) -> None:
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer = byte_level(names, split=r"\p{N}{1,3}|\s+|[^\s\p{N}]+")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(f"{names[0]} $A", special_tokens=[(names[0], 0)]),
        ]
    )
    write(
        folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": names[0], "eos_token": names[1]}
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))


def llama2(folder: Path, **config: Any) -> None:
    write_llama_tokenizer(folder, TEXT, **config)


def llama_class(folder: Path) -> None:
    llama2(folder, tokenizer_class="LlamaTokenizer", legacy=False, add_prefix_space=False)


def added(folder: Path) -> None:
    """Write a tokenizer with three added tokens: one special, one normal, and one that strips spaces on its left."""
    extra = {"200": {"content": "[PAD]", "special": True}, "201": {"content": "money", "special": False}}
    extra["202"] = {"content": "<|im_end|>", "special": True, "lstrip": True}
    llama2(folder, added_tokens_decoder=extra, pad_token="[PAD]", extra_special_tokens=["<|im_end|>"])


def byte_fallback(folder: Path) -> None:
    names = dict.fromkeys(["<unk>", "<s>", "</s>", *BYTES, SPACE, *"abcdefghijklmnopqrstuvwxyz"])
    tokenizer = tokenizers.Tokenizer(
        models.BPE({x: i for i, x in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    write(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})


def sentencepiece_llama(folder: Path) -> None:
    """Write Llama's original format: a SentencePiece model without a tokenizer.json."""
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(iter([TEXT]), 300))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<eod>", "eos_token": "<eod>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"unk_token": "<unk>", "add_prefix_space": False})
    )


def unigram(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    names = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        [TEXT], trainers.UnigramTrainer(vocab_size=200, special_tokens=names, unk_token="<unk>")
    )
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    config = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "extra_ids": 0}
    write(folder, tokenizer, config, "t5")


def wordpiece(folder: Path) -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator([TEXT], trainers.WordPieceTrainer(vocab_size=300, special_tokens=names))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    write(folder, tokenizer, {"tokenizer_class": "BertTokenizer", "do_lower_case": True}, "bert")


def split_special(folder: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "split_special_tokens": True}
    write(folder, byte_level(["<|endoftext|>"]), config)


def word_level(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "money": 5, "never": 9}, "[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.Whitespace(), normalizers.Lowercase()
    write(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})


KINDS: list[Callable[[Path], None]] = [
    *(gpt2, gpt2_merges, gpt2_of_llama, qwen2, llama3, llama2, llama_class, added, byte_fallback),
    *(sentencepiece_llama, unigram, wordpiece, split_special, word_level),
]
