"""Tests pieces of words: what is learnt, round trips, line marks, and every model or text that cannot be used."""

import io
import random
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_jax.config import LineMark
from txl_jax.data.sources.text import File
from txl_jax.data.tokens import sentencepiece as pieces_lib
from txl_jax.data.tokens.build_vocabulary import KINDS
from txl_jax.data.tokens.sentencepiece import PieceVocabulary
from txl_jax.data.tokens.vocabulary import digest, dumps, loads
from txl_jax.errors import UserError

pytestmark = pytest.mark.full

SYLLABLES = ("ba", "do", "ki", "lu", "me", "po", "ra", "ti")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
SIZE = 330  # 256 bytes, three marks, and a few pieces that are learnt.
SIZES = st.integers(1, 20)


def made_up_text(seed=0, lines=400):
    """Lines of words of a few syllables."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(200)]
    return "".join(" ".join(draw.choices(words, k=draw.randint(1, 9))) + "\n" for _ in range(lines))


TEXT = made_up_text()


def in_blocks(content, size=1000, *, name="some.txt"):
    """A file that comes in blocks of a size."""
    return File(name, len(content), lambda: (content[i : i + size] for i in range(0, len(content), size)))


def learn(text=TEXT, *, size=SIZE, line_mark=LineMark.EOS, lower_case=False, block=1000):
    files = [in_blocks(text.encode(), block)]
    return pieces_lib.train(files, size=size, line_mark=line_mark, lower_case=lower_case)


@pytest.fixture(scope="module")
def learnt():
    return learn()


@pytest.fixture(scope="module")
def joined(learnt):
    """The same pieces without line marks."""
    return PieceVocabulary(learnt.model, LineMark.NONE)


def all_of(blocks):
    return [token for block in blocks for token in block.tolist()]


def test_a_text_gives_pieces_of_the_size_asked_for(learnt):
    assert (learnt.size, learnt.mark, learnt.kind) == (SIZE, 2, "sentencepiece")
    ids = learnt.encode(TEXT.encode())
    assert ids.dtype == np.uint16 and ids.min() >= 0 and ids.max() < SIZE
    assert len(ids) < len(TEXT) / 2, "pieces are longer than characters"


def test_learning_twice_gives_the_same_model(learnt):
    assert learn().model == learnt.model
    assert learn(block=77).model == learnt.model, "however the text is cut into blocks"


@given(text=st.text(st.characters(codec="utf-8", exclude_characters=f"\n{SPACE}")))
def test_what_was_never_seen_is_spelt_in_bytes(learnt, text):
    import sentencepiece

    normal = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc").normalize(text)
    ids = learnt.encode(text.encode())
    assert learnt.decode(ids).decode() == normal.replace(SPACE, " ")
    assert 0 not in ids, "nothing is unknown"


def test_an_emoji_comes_back(learnt):
    assert learnt.decode(learnt.encode("balu 日本 😀!".encode())).decode() == " balu 日本 😀!"


@given(lines=st.lists(st.lists(st.sampled_from(["balu", "do", "kiki", "Unseen", "é"]))), size=SIZES)
def test_every_line_comes_back_and_ends_in_a_mark(learnt, joined, lines, size):
    text = "".join(" ".join(line) + "\n" for line in lines)
    files = [in_blocks(text.encode(), size)] * 2
    marked = learnt.decode(all_of(learnt.blocks(files))).decode()
    assert [line.split(" ")[1:] for line in marked.split("\n")] == [*lines, *lines, []]
    unmarked = joined.decode(all_of(joined.blocks(files))).decode()
    assert unmarked.split(" ")[1:] == [word for line in [*lines, *lines] for word in line]


@given(words=st.lists(st.sampled_from(["balu", "do", "kiki", "é", "\n", "\n\n"])), open_end=st.booleans(), size=SIZES)
def test_blocks_do_not_change_the_pieces(learnt, words, open_end, size):
    text = " ".join(words) + "\n" * (not open_end)
    expected = [token for line in text.split("\n")[:-1] for token in [*learnt.encode(line.encode()).tolist(), 2]]
    if open_end and (last := text.split("\n")[-1]):
        expected += [*learnt.encode(last.encode()).tolist(), 2]
    assert all_of(learnt.blocks([in_blocks(text.encode(), size)])) == expected


def test_a_line_that_is_open_at_a_files_end_is_closed(learnt):
    files = [in_blocks(b"balu do"), in_blocks(b"do balu")]
    assert learnt.decode(all_of(learnt.blocks(files))) == b" balu do\n do balu\n"


def test_the_end_of_a_prompt_is_open(learnt):
    assert learnt.decode(learnt.encode(b"balu\ndo")) == b" balu\n do"
    assert learnt.encode(b"balu\n").tolist()[-1] == learnt.mark
    assert learnt.encode(b"").tolist() == []


def test_what_an_unprompted_text_follows(learnt, joined):
    assert (learnt.start.tolist(), joined.start.tolist()) == ([2], [0])
    assert (learnt.mark, joined.mark) == (2, None)


def test_a_piece_is_called_what_it_prints_and_a_mark_by_its_name(learnt, joined):
    for vocabulary in (learnt, joined):
        names, controls = vocabulary.names(), {1: b"<s>", 2: b"</s>"}
        assert names == [controls.get(token, vocabulary.decode([token])) for token in range(SIZE)]
        assert names[vocabulary.unknown_id] == b"<unk>"


def test_marks_in_the_text_are_text(learnt):
    assert learnt.mark not in learnt.encode(b"</s> <s> <unk> <0x41>")
    assert learnt.decode(learnt.encode(b"</s> <s> <unk> <0x41>")) == b" </s> <s> <unk> <0x41>"


def test_decoding_takes_any_shape_and_names_a_foreign_id(learnt):
    ids = learnt.encode(b"balu\ndo kiki\n")
    assert learnt.decode(np.stack([ids, ids])) == b" balu\n do kiki\n" * 2
    assert learnt.decode([]) == b""
    with pytest.raises(UserError, match=rf"\b{SIZE}\b.*\b0\b.*\b{SIZE - 1}\b"):
        learnt.decode([SIZE])


def test_lower_case():
    lower = learn(TEXT.upper(), lower_case=True)
    assert lower.lower_case and lower.model == learn().model
    assert lower.decode(lower.encode(b"BALU Do")) == b" balu do"
    assert all_of(lower.blocks([in_blocks(b"BALU\n")])) == all_of(lower.blocks([in_blocks(b"balu\n")]))


# The saved form


def test_the_saved_form_is_text_and_gives_the_same(learnt, joined):
    for own in (learnt, joined, PieceVocabulary(learnt.model, lower_case=True)):
        text = dumps(own)
        assert text.isascii() and text.count("\n") == 2
        assert loads(text, KINDS) == own
        assert loads(text, KINDS).encode(b"Balu\ndo").tolist() == own.encode(b"Balu\ndo").tolist()
    assert len({digest(own) for own in (learnt, joined, PieceVocabulary(learnt.model, lower_case=True))}) == 3


@pytest.mark.parametrize("line_mark", ["eos", "none"])
@pytest.mark.parametrize("damage", ["", "QUJD", "no base64", "half"])
def test_a_damaged_form_is_one_clear_error(learnt, line_mark, damage):
    title, model = dumps(learnt).replace('"eos"', f'"{line_mark}"').splitlines()
    damaged = model[: len(model) // 8 * 4] if damage == "half" else damage
    with pytest.raises(UserError, match="'txl_jax vocabulary sentencepiece "):
        loads(f"{title}\n{damaged}\n", KINDS)


# What cannot be used


def test_a_vocabulary_that_the_text_cannot_fill():
    with pytest.raises(UserError, match=r"\b8000\b.*<= \d+.*--data\.tokenizer\.sentencepiece_vocab\b") as caught:
        learn(size=8000)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_too_small_for_the_bytes():
    with pytest.raises(UserError, match=r"\b100\b.*\b100 vs \d+.*--data\.tokenizer\.sentencepiece_vocab\b"):
        learn(size=100)


def test_a_text_without_words():
    with pytest.raises(UserError, match=r"\b330\b.*--data\.tokenizer\.sentencepiece_vocab\b"):
        learn(" \n\n")


@pytest.mark.parametrize("bad", [b"\xff", b"\0"])
def test_a_training_text_that_is_no_text_is_named(bad):
    content = TEXT.encode() + bad
    with pytest.raises(UserError, match=rf"^some\.txt\b.*\b{len(content) - 1}\b"):
        pieces_lib.train([in_blocks(content)], size=SIZE, line_mark=LineMark.EOS, lower_case=False)


def test_long_lines_are_learnt_from_too():
    assert learn(TEXT.replace("\n", " "), block=1 << 20).size == SIZE


@pytest.mark.parametrize("line_mark", [LineMark.EOS, LineMark.NONE])
@pytest.mark.parametrize("model", [b"", b"no model"])
def test_what_is_no_model_is_noticed_at_once(model, line_mark):
    with pytest.raises(RuntimeError):
        PieceVocabulary(model, line_mark)


def test_a_model_without_an_end_marks_no_lines():
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, vocab_size=60, eos_id=-1, minloglevel=2
    )
    with pytest.raises(UserError, match=r"</s>.*--data\.tokenizer\.line_mark=none"):
        PieceVocabulary(model.getvalue(), LineMark.EOS)
    own = PieceVocabulary(model.getvalue(), LineMark.NONE)
    assert own.mark is None and own.size == 60
    assert own.decode(all_of(own.blocks([in_blocks(b"balu\ndo\n")]))) == b" balu do"


def test_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"--data\.tokenizer\.kind=sentencepiece.*'\.\[sentencepiece\]'"):
        learn()
