"""Small tokenizer.json files of several kinds.

The package tokenizers makes them without a file or a network.
"""

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SIZE = 290
TEXT = [
    "one two three\n",
    "the end of the text, once upon a time\n",
    "two and three are five\n",
] * 20


@functools.cache
def byte_level(
    *, special: tuple[str, ...] = ("<|endoftext|>",), size: int = SIZE, pretty: bool = False
) -> str:
    """Byte pair encoding over bytes, like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=ALPHABET,
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str(pretty=pretty)


def _numbered(names) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def word_pieces() -> str:
    """Pieces of words, like BERT's."""
    names = ("[UNK]", "ban", "##ana", "do", "##do")
    tokenizer = Tokenizer(models.WordPiece(_numbered(names), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer.to_str()


def meta_space() -> str:
    """Pieces that begin with a mark for the space, and bytes for other characters, like Llama's."""
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    pieces = (space, "b", "a", "n", f"{space}b", "an", f"{space}ban")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [(space, "b"), ("a", "n"), (f"{space}b", "an")]
    tokenizer = Tokenizer(
        models.BPE(_numbered(names), merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer.to_str()


def whole_words(*, unknown: str | None = "<unk>") -> str:
    """Words between white space, without a decoder."""
    names = {"ba": 0, "do": 1}
    if unknown:
        names[unknown] = 2
    tokenizer = Tokenizer(models.WordLevel(names, unk_token=unknown or "absent"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str()


def few_letters() -> str:
    """Byte pair encoding of only two letters."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer.to_str()
