"""Tests many documents and prompts at once against each alone: losses, hidden states, texts; stop
strings, mistakes.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler

import txl_jax
from support import tiny, tiny_model, tiny_run
from support.cases import full_but
from txl_jax.config import DType
from txl_jax.data.vocabulary import TextStream, Vocabulary
from txl_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class WordPieces(Vocabulary):
    """Tokens of several letters, of which the longest that fits is next. Hyphens are dropped."""

    pieces: tuple[str, ...]
    kind = "pieces"

    def _encode(self, text):
        ids, text = [], text.replace("-", "")
        # "c d" takes the end of a word: a continuation then changes a token before the last.
        text = text.replace("abc d", "ab|c d")
        for part in text.split("|"):
            while part:
                piece = max((piece for piece in self.pieces if part.startswith(piece)), key=len)
                ids.append(self.pieces.index(piece))
                part = part.removeprefix(piece)
        return np.array(ids, np.int32)


# L = 5, M = 9: empty, one token, parts of a segment, past the memory.
LENGTHS = [0, 1, 2, 6, 7, 40, 3, 11, 0, 23, 5]


def assert_alone(model, documents, found, *, tolerance):
    for tokens, nats in zip(documents, found, strict=True):
        assert nats.shape == (max(len(tokens) - 1, 0),)
        np.testing.assert_allclose(
            nats, tiny_model.alone(model, tokens), rtol=tolerance, atol=tolerance
        )


CHANGES = [
    {"model__compat__memory_start": "zeros", "model__layer_norm": "pre"},
    {"eval__same_length": True, "eval__clamp_len": 4},
    {"model__cutoffs": (3, 7), "model__div_val": 2},
    {"eval__mem_len": 0, "eval__same_length": False},
    {"model__network": "lstm"},
]


@pytest.mark.parametrize("changes", full_but(CHANGES[:1], CHANGES), ids=str)
def test_losses_are_those_of_each_document_alone(changes, x64):
    """Memories that begin with zeros must be cleared for each document; those that begin masked
    need not.
    """
    model, documents = (
        tiny_model.make(model__dtype=DType.FLOAT64, **changes),
        tiny_model.documents(LENGTHS),
    )
    found = model.score(documents, per_token=True, batch_size=3)
    assert_alone(model, documents, found, tolerance=1e-10)
    totals = model.score(documents, batch_size=3)
    assert [total.tokens for total in totals] == [max(length - 1, 0) for length in LENGTHS]
    assert [total.nats for total in totals] == [nats.sum(dtype="float64") for nats in found]


def test_texts_and_ids_give_the_same_also_as_the_first_token():
    model, text = tiny_model.make(), "abba cab\n"
    [whole] = model.score(["c" + text], per_token=True)
    ids = model.encode(text)
    for first, same in ((4, text), ("c", text.encode()), (b"c", ids), (4, ids.tolist())):
        found = model.score([same, []], per_token=True, first=first)
        np.testing.assert_array_equal(found[0], whole)
        assert [len(nats) for nats in found] == [9, 0]


@pytest.fixture
def compiled(monkeypatch):
    """The names of the programs that jax is asked to compile."""
    names, compile_or_get_cached = [], compiler.compile_or_get_cached

    def counted(backend, module, *arguments, **named):
        names.append(module.operation.attributes["sym_name"].value)
        return compile_or_get_cached(backend, module, *arguments, **named)

    monkeypatch.setattr(compiler, "compile_or_get_cached", counted)
    return names


def test_one_program_serves_all_lengths_and_numbers(compiled):
    model = tiny_model.make()
    model.score(tiny_model.documents([4]), batch_size=5)
    assert compiled
    compiled.clear()
    assert len(model.score(tiny_model.documents([70, 1, 33, 0, 2, 9, 4, 5, 6]), batch_size=5)) == 9
    assert compiled == []


def test_one_program_learns_from_all_lengths_and_numbers(compiled):
    model = tiny_model.make()
    rule = txl_jax.DynamicConfig(rule="sgd", learning_rate=0.1)
    model.score(tiny_model.documents([4]), dynamic=rule)
    assert compiled
    compiled.clear()
    documents = tiny_model.documents([70, 1, 33, 0, 2, 9])
    # An equal rule is the same one.
    again = dataclasses.replace(rule)
    assert len(model.score(documents, dynamic=again, batch_size=3, per_token=True)) == 6
    assert compiled == []


@pytest.mark.full
def test_an_endless_stream_is_read_in_order_and_few_documents_ahead():
    model, given = tiny_model.make(), []

    def endless():
        # The first keeps a row for long.
        for length in itertools.chain([900], itertools.cycle([3, 8, 0, 17])):
            given.extend(tiny_model.documents([length], seed=len(given)))
            yield given[-1]

    found = list(itertools.islice(model.score_stream(endless(), per_token=True, batch_size=2), 60))
    assert len(given) <= 60 + 2 * 16
    assert_alone(model, given[:6], found[:6], tolerance=1e-5)
    assert [len(nats) for nats in found] == [max(len(tokens) - 1, 0) for tokens in given[:60]]
    assert next(iter(model.score_stream(["abc"]))).bytes == model.score(["abc"])[0].bytes == 2


@pytest.mark.full
def test_continuations_are_scored_by_their_logprobs_and_greedily(x64):
    model = tiny_model.make(model__dtype=DType.FLOAT64, model__cutoffs=(3, 7), model__div_val=2)
    contexts = tiny_model.documents([9, 1, 22, 4])
    pairs = []
    for ids in contexts:
        greedy = model.encode(
            model.generate([ids], txl_jax.GenerateConfig(temperature=0, length=6))[0]
        )
        pairs += [(ids, greedy), (ids, np.append(greedy[:-1], (greedy[-1] + 1) % tiny.V))]
    found = model.score_continuations(pairs, batch_size=3)
    assert [each.is_greedy for each in found] == [True, False] * 4 and {
        each.tokens for each in found
    } == {6}
    for (context, continuation), each in zip(pairs, found, strict=True):
        nats = tiny_model.alone(model, np.concatenate([context, continuation]))[len(context) - 1 :]
        assert len(nats) == 6 and each.logprob == pytest.approx(-nats.sum(), rel=1e-10)


def test_continuations_without_context_or_tokens():
    model = tiny_model.make()
    text = "abc dab"
    found = model.score_continuations(
        [("", text), (text, ""), ("", ""), ("abc", " dab")], first="k"
    )
    assert found[0].logprob == pytest.approx(-model.score([text], first="k")[0].nats, rel=1e-6)
    assert found[1] == found[2] == txl_jax.Continuation(0.0, True, 0)
    assert found[3].logprob == pytest.approx(
        -model.score([text], per_token=True)[0][2:].sum(), rel=1e-6
    )
    [default] = model.score_continuations([("", text)])
    assert default == model.score_continuations([("", text)], first="\n")[0]


PIECES = WordPieces(("a", "ab", "abc", "b", "bc", "c", "c d", "d", " ", "x"))
BORDERS = [
    ("x ab", "c", [9, 8, 2], 1),  # The continuation lengthens the context's last token.
    ("ab", "c", [2], 1),  # It lengthens the first token, which `first` then precedes.
    ("abc", " d", [1, 6], 2),  # It changes the last token of two letters too: two tokens differ.
    ("x a", "bcx", [9, 8, 2, 9], 2),  # A token across the border and another.
    ("x", "abx", [9, 1, 9], 2),  # The border of two tokens.
]


@pytest.mark.parametrize(("context", "continuation", "ids", "count"), BORDERS)
def test_a_continuation_is_scored_from_the_first_token_that_differs(
    context, continuation, ids, count
):
    model = dataclasses.replace(tiny_model.make(), vocabulary=PIECES)
    assert model.encode(context + continuation).tolist() == ids
    before = 4 if count == len(ids) else None
    nats = model.score([ids], per_token=True, first=before)[0][-count:]
    found, of_ids = model.score_continuations(
        [(context, continuation), (ids[:-count], ids[-count:])], first=4
    )
    assert found == of_ids
    assert found.tokens == count
    assert found.logprob == pytest.approx(-nats.sum(), rel=1e-6)
    assert found.logprob < -0.1


@pytest.mark.parametrize("pair", [("abc", "-"), ("abc", b"-"), ([2], "-"), ("", "-")], ids=str)
def test_a_continuation_without_a_token_of_its_own_is_an_error(pair):
    """Its logprob would be 0, which wins every comparison. This vocabulary drops hyphens."""
    model = dataclasses.replace(tiny_model.make(), vocabulary=PIECES)
    with pytest.raises(UserError, match="'-' after "):
        model.score_continuations([("a", "b"), pair])


def test_log_probabilities_name_the_way_inside_jax_and_for_rows_of_other_lengths():
    model = tiny_model.make()
    memory = model.init_memory(1)
    tokens = np.array([[1, 2, 3]])
    for inside in (jax.jit, jax.vmap):
        with pytest.raises(
            UserError, match=r"TransformerXL\(model\.config\.model, .*model\.params"
        ):
            inside(lambda tokens: model.log_probabilities(tokens, memory)[0])(jnp.asarray(tokens))
    with pytest.raises(UserError, match=r"TransformerXL\("):
        jax.jit(lambda memory: model.log_probabilities(tokens, memory)[0])(memory)
    for wrong in ([[1, 2], [3]], [1, 2], [[1.0, 2.0]], [["a"]]):
        with pytest.raises(UserError, match=r"\[B, L\].*model\.score.*pad"):
            model.log_probabilities(wrong, memory)

    @jax.jit
    def shown(params, tokens, memory):
        """As the error shows it."""
        net = txl_jax.TransformerXL(model.config.model, vocab_size=model.vocabulary.size)
        lengths = {
            "clamp_len": model.config.eval.clamp_len,
            "same_length": model.config.eval.same_length,
        }
        hidden, memory = net.apply({"params": params}, tokens, memory, **lengths)
        return net.apply({"params": params}, hidden, method=net.log_probabilities)

    expected, _ = model.log_probabilities(tokens, memory)
    np.testing.assert_allclose(shown(model.params, tokens, memory), expected, atol=1e-5)


def test_hidden_states_are_those_of_each_document_alone(x64):
    model = tiny_model.make(model__dtype=DType.FLOAT64)
    documents = tiny_model.documents(LENGTHS)
    found = model.hidden_states(documents, batch_size=3)
    encode = tiny.encoder(model.components.model, same_length=True)
    for tokens, hidden in zip(documents, found, strict=True):
        assert hidden.shape == (len(tokens), tiny.D) and hidden.dtype == np.float64
        # Positions of padding are read after all others.
        padded = np.pad(tokens, (0, -len(tokens) % 5))[None]
        if segments := [5] * (padded.size // 5):
            expected = tiny.stream(
                encode, {"params": model.params}, padded, segments, model.init_memory(1)
            )
            np.testing.assert_allclose(hidden, expected[0, : len(tokens)], rtol=1e-10, atol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["relative", "vaswani"])
def test_embeddings_take_the_place_of_tokens(encoding):
    with pytest.raises(UserError, match=r"model\.network is lstm"):
        tiny_model.make(model__network="lstm").hidden_states(
            embeddings=[np.zeros((3, tiny.D), np.float32)]
        )
    model = tiny_model.make(model__encoding=encoding)
    documents = tiny_model.documents([6, 23, 1])
    embeddings = [model.embed(tokens) for tokens in documents]
    assert [each.shape for each in embeddings] == [(6, tiny.D), (23, tiny.D), (1, tiny.D)]
    expected = model.hidden_states(documents, batch_size=2)
    for found, hidden in zip(
        model.hidden_states(embeddings=embeddings, batch_size=2), expected, strict=True
    ):
        np.testing.assert_allclose(found, hidden, rtol=1e-5, atol=1e-6)
    flax_model, variables = model.components.model, {"params": model.params}
    both = [
        flax_model.apply(variables, each[0][None], model.init_memory(1))[0]
        for each in (documents, embeddings)
    ]
    np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-6)
    assert model.embed("").shape == (0, tiny.D)


PROMPTS = [7, 1, 0, 23, 6, 5, 12]  # The last token of a prompt is not read with its segments.
LENGTH = 21  # Tokens; blocks are of 16.


def settings(**changes):
    return txl_jax.GenerateConfig(**{"length": LENGTH, "seed": 5, "top_k": None} | changes)


def alone(model, prompts, config):
    """The text after each prompt alone, as --mode=generate writes it."""
    generator, texts = tiny_run.generator(model.components.model, model.config.eval), []
    for prompt in prompts:
        blocks = generator.tokens(prompt if len(prompt) else model.vocabulary.start, config)
        texts.append(model.decode(np.concatenate(list(blocks), axis=1)[0]))
    return texts


MODELS_AND_DRAWING = [
    ({}, {}),
    ({"eval__clamp_len": 4, "eval__same_length": False}, {"temperature": 0.0}),
    (
        {"model__compat__memory_start": "zeros", "model__layer_norm": "pre"},
        {"top_k": 3, "top_p": 0.9},
    ),
    ({"model__cutoffs": (3, 7), "model__div_val": 2}, {}),
]


@pytest.mark.parametrize(
    ("changes", "drawing"), full_but(MODELS_AND_DRAWING[2:3], MODELS_AND_DRAWING), ids=str
)
def test_each_prompt_gives_what_it_gives_alone(changes, drawing, x64):
    model = tiny_model.make(model__dtype=DType.FLOAT64, **changes)
    prompts, config = tiny_model.documents(PROMPTS), settings(**drawing)
    found = model.generate(prompts, config, batch_size=4)
    assert found == alone(model, prompts, config)
    assert len(set(found)) > 2 and {len(text) for text in found} == {LENGTH}
    found = model.generate(prompts[:1] * 3, config, seeds=[5, 4, -1])
    assert [[text] for text in found] == [
        alone(model, prompts[:1], settings(**drawing, seed=n)) for n in (5, 4, -1)
    ]


@pytest.mark.full
def test_few_programs_are_compiled_for_any_number_and_lengths(compiled):
    """One for each power of two of rows, here 1, 4 and 5, the most; not for lengths of prompts,
    texts or stops.
    """
    model = tiny_model.make(eval__mem_len=11)
    for lengths in ([3], [40], [3, 8, 0], [1, 2, 3, 4], [9, 17, 2, 33, 6]):
        for length in (2, 30):
            model.generate(
                tiny_model.documents(lengths), settings(length=length), stop=["never written"]
            )
    assert compiled.count("jit_decode_block") == compiled.count("jit_prefill") == 3


def test_stop_strings_end_a_text_wherever_they_are_found():
    model = tiny_model.make()
    prompts = tiny_model.documents([4, 9, 2])
    whole, pieces = ["", "", ""], list(model.generate_stream(prompts, settings(length=40)))
    for number, piece in pieces:
        whole[number] += piece
    assert len(pieces) > 6 and whole == model.generate(prompts, settings(length=40))
    stops = (whole[0][17:20], whole[1][3:5], "never written")
    found = model.generate(prompts, settings(length=40), stop=stops)
    cuts = [
        min((text.find(stop) for stop in stops if stop in text), default=len(text))
        for text in whole
    ]
    assert found == [text[:cut] for text, cut in zip(whole, cuts, strict=True)]
    assert cuts[1] <= 3 and cuts[0] <= 17 and max(cuts) > cuts[1]
    assert model.generate(prompts, settings(length=40), stop=stops[1])[1] == found[1], (
        "one string, not its letters"
    )
    # After its stop string a row is ended on the device too: the longest text has a million tokens
    # otherwise.
    assert model.generate(prompts[:2], settings(length=10**6), stop=list("abcdefghijk \n")) == [
        "",
        "",
    ]


def test_a_stream_of_text_holds_back_the_bytes_of_a_character():
    stream, (first, second) = TextStream(bytes, ["\nend"]), "é".encode()
    assert [stream.add(bytes([first])), stream.add(bytes([second]))] == ["", "é"]
    assert stream.add(b"\nen" + bytes([first])) + stream.finish() == "\nen\N{REPLACEMENT CHARACTER}"


def test_mistakes_are_refused():
    for mistake, words in (
        (lambda model: model.score([[0, 13]]), r"between 0 and 12, got 13"),
        (lambda model: model.score([[0.5, 1.0]]), "float64"),
        (lambda model: model.score("one text"), "one text"),
        (lambda model: model.score(["a"], first="cc"), r"'cc'.*\b2\b"),
        (lambda model: model.score(["a"], first=99), r"\b99\b"),
        (lambda model: model.score(["ab"], batch_size=0), "batch_size .* got 0"),
        (lambda model: model.hidden_states(), "both or neither"),
        (
            lambda model: model.hidden_states(embeddings=[np.zeros((3, 5), np.float32)]),
            rf"{tiny.D}.*\(3, 5\)",
        ),
        (
            lambda model: model.log_probabilities([[3, 999]], model.init_memory(1)),
            r"between 0 and 12, got 999",
        ),
        (
            lambda model: model.log_probabilities([[1, 2], [3, 4]], model.init_memory(1)),
            r"2 rows.*1 rows",
        ),
        (lambda model: model.generate("a prompt"), "a prompt"),
        (lambda model: model.generate(["a"], stop=["b", ""]), r"stop must be .* \['b', ''\]"),
        (lambda model: model.generate(["a"], stop=["b", "\ud800"]), r"stop must be .*surrogates"),
        (lambda model: model.generate(["a", "b"], seeds=[1]), "2 prompts, got 1"),
    ):
        with pytest.raises(UserError, match=words):
            mistake(tiny_model.make())
