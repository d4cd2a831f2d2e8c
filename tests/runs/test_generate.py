"""Tests generation from a run: prompts of words, what ends a sample, what is printed and saved, and
mistakes.
"""

import contextlib
import dataclasses
import functools
import io
import json
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import txl_jax
from support import drawn_run, hf_tokenizers
from txl_jax.config import CacheDType, Encoding, GenerateConfig, LineMark, Newlines, config_tree
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.encode import find_tokens
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.word_tokens import CharacterVocabulary, WordVocabulary
from txl_jax.errors import UserError
from txl_jax.inference import forward
from txl_jax.inference.generate import BLOCK
from txl_jax.runs.generate import continue_prompts, generate_text, read_prompt, read_stop
from txl_jax.runs.trained import TrainedModel

pytestmark = pytest.mark.usefixtures("traces_kept")

LENGTH = 40  # Without a stop, blocks of 16, 16 and 8.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, corpus, workdir) of a run on few characters, so that each comes soon."""
    folder = tmp_path_factory.mktemp("run")
    settings = GenerateConfig(length=LENGTH, samples=3, top_k=None, seed=4)
    changes = {"data__tokenizer__kind": "char", "generate": settings}
    config, corpus = drawn_run.on_text(folder, b"the cat sat\n" * 100, **changes)
    workdir, _ = drawn_run.make(folder / "run", config, corpus)
    return config, corpus, workdir


def write(run, *, stop_requested=lambda: False, **changes):
    """Returns the texts as strings, and what was printed."""
    config, _, workdir = run
    settings = dataclasses.replace(config.generate, **changes)
    config = dataclasses.replace(config, generate=settings)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        texts = generate_text(config, workdir, stop_requested=stop_requested)
    return [text.decode() for text in texts], printed.getvalue()


@pytest.fixture(scope="module")
def whole(run):
    """The three samples without a stop."""
    texts, printed = write(run)
    assert [len(text) for text in texts] == [LENGTH] * 3
    assert re.search(rf"\b{LENGTH}\b", printed)
    return texts


def letter_of_first_block(texts):
    """Returns a letter that comes in the first block of the first text, but not of all texts."""
    for letter in "the cas":
        is_early = [letter in text[:BLOCK] for text in texts]
        if is_early[0] and not all(is_early):
            return letter
    pytest.fail(f"no such letter: {texts}")


def test_without_a_prompt_a_model_of_documents_begins_a_document(run, whole, tmp_path):
    """It continues the token that ends a document, in every way to generate."""
    config, corpus, _ = run
    config = config_tree.replace(config, {"data.reset_at": "s"})
    workdir, _ = drawn_run.make(tmp_path / "run", config, corpus)

    texts, _ = write((config, corpus, workdir))
    after_end, _ = write((config, corpus, workdir), prompt="s")
    assert texts == [text.removeprefix("s") for text in after_end]
    assert texts != whole, "a model without documents continues a newline"

    records = []
    model = TrainedModel.of(workdir, config)
    continue_prompts(model, [(1, b"")], name="prompts", write=records.append)
    assert [json.loads(record)["text"] for record in records] == texts

    loaded = txl_jax.load(workdir.path)
    first = dataclasses.replace(config.generate, samples=1)
    assert loaded.generate([""], first) == texts[:1]
    pair = ("", "the")
    assert loaded.score_continuations([pair]) == loaded.score_continuations([pair], first="s")
    assert loaded.score_continuations([pair]) != loaded.score_continuations([pair], first="\n")


def test_each_sample_ends_with_its_first_stop(run, whole):
    """With a token, or with the text of several tokens, here from one block to the next."""
    config, _, workdir = run
    across_blocks = whole[0][BLOCK - 3 : BLOCK + 1]
    for stop in (across_blocks, letter_of_first_block(whole)):
        texts, printed = write(run, stop=stop)
        for text, longer in zip(texts, whole, strict=True):
            before, matched, _ = longer.partition(stop)
            assert text == before + matched
        streamed = f" tokens ---\n{texts[0]}\n--- sample 2"
        assert streamed in printed, "the first is streamed up to its stop"
        settings = dataclasses.replace(config.generate, stop=stop)
        [from_python] = txl_jax.load(workdir.path).generate([""], settings)
        assert from_python == texts[0]

    # These texts are the ones up to the letter, the last stop.
    assert len(texts[0]) < LENGTH
    assert any(len(text) > BLOCK for text in texts), "blocks continue for the others"
    path = Path(workdir.path, "sample-seed4.txt")
    assert f" {path}" in printed.splitlines()[-1], "the file is named"
    saved = path.read_text().removesuffix("\n")
    assert re.split("\n\n---.*---\n\n", saved) == texts


@pytest.mark.full
def test_keys_and_values_are_stored_as_the_evaluation_stores_them(run, monkeypatch):
    config, _, workdir = run
    init_cache = forward.init_cache
    dtypes = []

    def note_dtype(*arguments, **options):
        dtypes.append(options["dtype"])
        return init_cache(*arguments, **options)

    monkeypatch.setattr(forward, "init_cache", note_dtype)
    config = config_tree.replace(
        config, {"eval.cache_dtype": CacheDType.BFLOAT16, "generate.length": 1}
    )
    generate_text(config, workdir)
    assert dtypes == [jnp.bfloat16]


def test_a_stop_ends_after_a_block_and_while_the_prompt_is_read(run):
    """A request to stop, as by Ctrl-C. Blocks that are complete are kept."""
    questions = iter([False, False])
    texts, _ = write(run, stop_requested=lambda: next(questions, True))
    assert len(texts[0]) == 2 * BLOCK, "a question after each block"

    texts, _ = write(run, prompt="the cat " * 20, stop_requested=lambda: True)
    assert texts == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.encoding": Encoding.VASWANI}, r"model\.encoding.*\bvaswani\b"),
        ({"eval.mem_len": 0, "eval.same_length": False}, r"eval\.mem_len\D*\b0\b"),
    ],
    ids=["sinusoids", "no memory"],
)
def test_models_that_cannot_generate_are_an_error(run, changes, message):
    config, _, workdir = run
    with pytest.raises(UserError, match=message):
        generate_text(config_tree.replace(config, changes), workdir)


# A vocabulary with this mark at the end of a line.
words = functools.partial(WordVocabulary, ("<eos>", "the", "<unk>", "cat", "<S>", "<s>"))


def test_a_stop_is_a_token_or_the_text_of_several():
    r"""The id of a token, which is its place in the vocabulary, or bytes that are looked for.

    As in a prompt, \n, \t and \\ are typed for a newline, a tab and a backslash.
    """
    for vocabulary, stop, token in (
        (ByteVocabulary(b"\n a"), "", None),
        (ByteVocabulary(b"\n a"), "a", 2),
        (ByteVocabulary(b"\n\\n"), "\\\\", 1),  # A backslash.
        # Python passes a byte of the command line that is not UTF-8 as a surrogate.
        (ByteVocabulary(b"\n\xff"), "\udcff", 1),
        (CharacterVocabulary("a\né\N{REPLACEMENT CHARACTER}"), "a", 0),
        # The mark of a line's end, by its own word or as a newline.
        (words(LineMark.EOS), "<eos>", 0),
        (words(LineMark.DOUBLE_S), "\\n", 4),
        (words(LineMark.S, lower_case=True), "The", 1),  # Read as "the", like a prompt.
        (ByteVocabulary(b"\t\n a"), "\\t", 0),
        (ByteVocabulary(b"\n a"), "a a", b"a a"),  # Several tokens are a text.
        (ByteVocabulary(b"\n a"), " \\n", b" \n"),
        # A word is decoded with the space after it.
        (words(LineMark.EOS), "the cat", b"the cat "),
        (words(LineMark.EOS), "the\\n", b"the \n"),
        (SubwordVocabulary(hf_tokenizers.byte_level()), "a", b"a"),  # It may be inside of a token.
    ):
        assert read_stop(GenerateConfig(stop=stop), vocabulary) == token, (vocabulary, stop)


def test_the_error_for_a_stop_without_a_known_token_names_its_tokens():
    """And how many there are: a vocabulary that drops newlines, or has no mark for them, reads a
    newline as no token.
    """
    for vocabulary, stop, pattern in (
        (words(LineMark.EOS), "the zebra", r"\b2\b.*'the', '<unk>'"),
        (ByteVocabulary.all_bytes(Newlines.DROP), "\\n", r"'\\\\n'.*\b0\b"),
        (words(LineMark.EOS), "<unk>", "'<unk>'.*'<unk>'"),
        (words(LineMark.NONE), "\\n", r"generate\.stop.*\b0\b"),
        (words(LineMark.EOS), "\udcff", r"generate\.stop.*\b0xff\b"),
    ):
        with pytest.raises(UserError, match=pattern) as error:
            read_stop(GenerateConfig(stop=stop), vocabulary)
        assert "\n" not in str(error.value)


def test_a_prompt_file_has_no_byte_order_mark_unless_the_tokens_are_bytes(run, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfthe cat\r\n")
    config = GenerateConfig(prompt_file=str(tmp_path / "prompt.txt"))
    assert read_prompt(config) == b"the cat\r\n"
    assert read_prompt(config, as_bytes=True) == b"\xef\xbb\xbfthe cat\r\n"
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfthe cat")
    texts, printed = write(run, prompt_file=str(tmp_path / "prompt.txt"))
    assert all(text.startswith("the cat") for text in texts)
    assert "unknown" not in printed


def test_unknown_tokens_of_a_prompt_are_noted(run):
    _, printed = write(run, prompt="the dog")
    assert re.search(r"(?m)^note .*42\.86%", printed)  # Three of seven characters.


def test_escapes_mean_the_same_in_prompt_and_stop_and_at_documents_ends():
    typed = r"a\n\tb\\n"
    meant = b"a\n\tb\\n"
    vocabulary = ByteVocabulary(bytes(range(256)))
    assert read_prompt(GenerateConfig(prompt=typed)) == meant
    assert read_stop(GenerateConfig(stop=typed), vocabulary) == meant
    # Documents end with a single token.
    assert find_tokens(vocabulary, r"\t", name="data.reset_at") == [ord("\t")]
    assert find_tokens(vocabulary, r"\\", name="data.reset_at") == [ord("\\")]
    with pytest.raises(UserError, match=r"data\.reset_at.*'a a'.*\b3\b.*'a', ' ', 'a'"):
        find_tokens(vocabulary, "a a", name="data.reset_at")
