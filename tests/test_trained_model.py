"""Tests that many documents and prompts at once have the losses, hidden states and texts that each
has by itself, and stop strings and callers' mistakes.
"""

import dataclasses
import functools
import itertools

import jax
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
        ids = []
        # "c d" takes the end of a word: a continuation then changes a token before the last.
        parts = text.replace("-", "").replace("abc d", "ab|c d").split("|")
        for part in parts:
            while part:
                piece = max((piece for piece in self.pieces if part.startswith(piece)), key=len)
                ids.append(self.pieces.index(piece))
                part = part.removeprefix(piece)
        return np.array(ids, np.int32)


# L = 5, M = 9: empty, one token, parts of a segment, past the memory.
LENGTHS = [0, 1, 2, 6, 7, 40, 3, 11, 0, 23, 5]
# Tokens that have a loss: all but a document's first.
LOSSES = [0, 0, 1, 5, 6, 39, 2, 10, 0, 22, 4]


def assert_as_by_itself(model, tokens, nats, *, tolerance):
    """Compares the losses of a document with its losses when it is read by itself."""
    expected = tiny_model.alone(model, tokens)
    assert nats.shape == expected.shape
    np.testing.assert_allclose(
        nats, expected, rtol=tolerance, atol=tolerance, err_msg=f"document of {len(tokens)} tokens"
    )


# What changes in a model, by the case's name. Memories that begin with zeros must be cleared for
# each document. Memories that begin masked need not be.
MODELS = {
    "zeros, pre-norm": {"model__compat__memory_start": "zeros", "model__layer_norm": "pre"},
    "same_length, clamp_len": {"eval__same_length": True, "eval__clamp_len": 4},
    "clusters": {"model__cutoffs": (3, 7), "model__div_val": 2},
    "no memory": {"eval__mem_len": 0, "eval__same_length": False},
    "lstm": {"model__network": "lstm"},
}


@pytest.mark.parametrize("name", full_but(["zeros, pre-norm"], MODELS))
def test_losses_are_those_of_each_document_alone(name, x64):
    """And their sums are the totals of the documents."""
    model = tiny_model.make(model__dtype=DType.FLOAT64, **MODELS[name])
    documents = tiny_model.documents(LENGTHS)

    losses = model.score(documents, per_token=True, batch_size=3)
    totals = model.score(documents, batch_size=3)

    for tokens, nats in zip(documents, losses, strict=True):
        assert_as_by_itself(model, tokens, nats, tolerance=1e-10)
    assert [total.tokens for total in totals] == LOSSES
    assert [total.nats for total in totals] == [nats.sum(dtype="float64") for nats in losses]


def test_texts_and_ids_give_the_same_also_as_the_first_token():
    model = tiny_model.make()
    text = "abba cab\n"
    ids = model.encode(text)
    [whole] = model.score(["c" + text], per_token=True)

    for first, document in ((4, text), ("c", text.encode()), (b"c", ids), (4, ids.tolist())):
        losses, of_nothing = model.score([document, []], per_token=True, first=first)
        np.testing.assert_array_equal(losses, whole, err_msg=repr((first, document)))
        assert len(losses) == 9
        assert len(of_nothing) == 0


@pytest.fixture
def compiled(monkeypatch):
    """The names of the programs that jax is asked to compile."""
    names = []
    compile_or_get_cached = compiler.compile_or_get_cached

    def counted(backend, module, *arguments, **options):
        names.append(module.operation.attributes["sym_name"].value)
        return compile_or_get_cached(backend, module, *arguments, **options)

    monkeypatch.setattr(compiler, "compile_or_get_cached", counted)
    return names


def test_one_program_serves_all_lengths_and_numbers(compiled):
    model = tiny_model.make()
    model.score(tiny_model.documents([4]), batch_size=5)
    assert compiled
    compiled.clear()

    totals = model.score(tiny_model.documents([70, 1, 33, 0, 2, 9, 4, 5, 6]), batch_size=5)

    assert len(totals) == 9
    assert compiled == []


def test_one_program_learns_from_all_lengths_and_numbers(compiled):
    model = tiny_model.make()
    rule = txl_jax.DynamicConfig(rule="sgd", learning_rate=0.1)
    model.score(tiny_model.documents([4]), dynamic=rule)
    assert compiled
    compiled.clear()

    documents = tiny_model.documents([70, 1, 33, 0, 2, 9])
    equal_rule = dataclasses.replace(rule)  # An equal rule is the same one.
    losses = model.score(documents, dynamic=equal_rule, batch_size=3, per_token=True)

    assert len(losses) == 6
    assert compiled == []


@pytest.mark.full
def test_an_endless_stream_is_read_in_order_and_few_documents_ahead():
    model = tiny_model.make()
    documents = []

    def endless():
        # The first keeps a row for long.
        for length in itertools.chain([900], itertools.cycle([3, 8, 0, 17])):
            documents.extend(tiny_model.documents([length], seed=len(documents)))
            yield documents[-1]

    stream = model.score_stream(endless(), per_token=True, batch_size=2)
    losses = list(itertools.islice(stream, 60))

    assert len(documents) <= 60 + 2 * 16, "up to 16 documents per row are read ahead"
    for tokens, nats in zip(documents[:6], losses[:6], strict=True):
        assert_as_by_itself(model, tokens, nats, tolerance=1e-5)
    for number, nats in enumerate(losses):
        assert len(nats) == max(len(documents[number]) - 1, 0), f"document {number}"

    total = next(iter(model.score_stream(["abc"])))
    # The first token has no loss, so its byte does not count.
    assert total.bytes == model.score(["abc"])[0].bytes == 2


@pytest.mark.full
def test_continuations_are_scored_by_their_logprobs_and_greedily(x64):
    model = tiny_model.make(model__dtype=DType.FLOAT64, model__cutoffs=(3, 7), model__div_val=2)
    settings = txl_jax.GenerateConfig(temperature=0, length=6)
    pairs = []
    for context in tiny_model.documents([9, 1, 22, 4]):
        greedy = model.encode(model.generate([context], settings)[0])
        other_end = np.append(greedy[:-1], (greedy[-1] + 1) % tiny.V)
        pairs.append((context, greedy))
        pairs.append((context, other_end))

    scores = model.score_continuations(pairs, batch_size=3)

    assert [score.is_greedy for score in scores] == [True, False] * 4
    assert [score.tokens for score in scores] == [6] * 8
    for (context, continuation), score in zip(pairs, scores, strict=True):
        whole = np.concatenate([context, continuation])
        nats = tiny_model.alone(model, whole)[len(context) - 1 :]
        assert len(nats) == 6
        assert score.logprob == pytest.approx(-nats.sum(), rel=1e-10)


def test_continuations_without_context_or_tokens():
    model = tiny_model.make()
    text = "abc dab"
    pairs = [("", text), (text, ""), ("", ""), ("abc", " dab")]

    of_text, empty, of_nothing, of_end = model.score_continuations(pairs, first="k")
    [by_default] = model.score_continuations([("", text)])

    total = model.score([text], first="k")[0]
    end_nats = model.score([text], per_token=True)[0][2:]  # The losses after "abc".
    assert of_text.logprob == pytest.approx(-total.nats, rel=1e-6)
    assert empty == of_nothing == txl_jax.Continuation(0.0, True, 0)
    assert of_end.logprob == pytest.approx(-end_nats.sum(), rel=1e-6)
    assert by_default == model.score_continuations([("", text)], first="\n")[0]


PIECES = WordPieces(("a", "ab", "abc", "b", "bc", "c", "c d", "d", " ", "x"))


@functools.cache
def model_of_pieces():
    """The tiny model with another vocabulary. Its programs are kept."""
    return dataclasses.replace(tiny_model.make(), vocabulary=PIECES)


# A context and its continuation, the ids of both, and how many of the last ids are scored.
BORDERS = {
    "lengthens the last token": ("x ab", "c", [9, 8, 2], 1),
    # `first` then precedes it.
    "lengthens the first token": ("ab", "c", [2], 1),
    # Two tokens differ.
    "changes the last token of two letters too": ("abc", " d", [1, 6], 2),
    "a token across the border and another": ("x a", "bcx", [9, 8, 2, 9], 2),
    "between two tokens": ("x", "abx", [9, 1, 9], 2),
}


@pytest.mark.parametrize(("context", "continuation", "ids", "count"), BORDERS.values(), ids=BORDERS)
def test_a_continuation_is_scored_from_the_first_token_that_differs(
    context, continuation, ids, count
):
    model = model_of_pieces()
    assert model.encode(context + continuation).tolist() == ids
    all_are_scored = count == len(ids)
    nats = model.score([ids], per_token=True, first=4 if all_are_scored else None)[0][-count:]

    pairs = [(context, continuation), (ids[:-count], ids[-count:])]
    of_text, of_ids = model.score_continuations(pairs, first=4)

    assert of_text == of_ids
    assert of_text.tokens == count
    assert of_text.logprob == pytest.approx(-nats.sum(), rel=1e-6)
    assert of_text.logprob < -0.1


@pytest.mark.parametrize("pair", [("abc", "-"), ("abc", b"-"), ([2], "-"), ("", "-")], ids=str)
def test_a_continuation_without_a_token_of_its_own_is_an_error(pair):
    """Its logprob would be 0, which wins every comparison. This vocabulary drops hyphens."""
    model = model_of_pieces()
    with pytest.raises(UserError, match="'-' after "):
        model.score_continuations([("a", "b"), pair])


def test_log_probabilities_name_the_way_inside_jax_and_for_rows_of_other_lengths():
    model = tiny_model.make()
    memory = model.init_memory(1)
    tokens = np.array([[1, 2, 3]])
    advice = r"TransformerXL\(model\.config\.model, .*model\.params"

    for transform in (jax.jit, jax.vmap):
        with pytest.raises(UserError, match=advice):
            transform(lambda tokens: model.log_probabilities(tokens, memory)[0])(tokens)
    with pytest.raises(UserError, match=r"TransformerXL\("):
        jax.jit(lambda memory: model.log_probabilities(tokens, memory)[0])(memory)
    for bad_tokens in ([[1, 2], [3]], [1, 2], [[1.0, 2.0]], [["a"]]):
        with pytest.raises(UserError, match=r"\[B, L\].*model\.score.*pad"):
            model.log_probabilities(bad_tokens, memory)

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
    encode = tiny.encoder(model.components.model, same_length=True)
    variables = {"params": model.params}

    states = model.hidden_states(documents, batch_size=3)

    for tokens, hidden in zip(documents, states, strict=True):
        assert hidden.shape == (len(tokens), tiny.D)
        assert hidden.dtype == np.float64
        if len(tokens) == 0:
            continue
        # Segments of five tokens. Padding is read after the document, and changes no state of it.
        padded = np.pad(tokens, (0, -len(tokens) % 5))[None]
        segments = [5] * (padded.size // 5)
        expected = tiny.stream(encode, variables, padded, segments, model.init_memory(1))
        np.testing.assert_allclose(
            hidden,
            expected[0, : len(tokens)],
            rtol=1e-10,
            atol=1e-10,
            err_msg=f"document of {len(tokens)} tokens",
        )


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["relative", "vaswani"])
def test_embeddings_take_the_place_of_tokens(encoding):
    lstm = tiny_model.make(model__network="lstm")
    with pytest.raises(UserError, match=r"model\.network=lstm"):
        lstm.hidden_states(embeddings=[np.zeros((3, tiny.D), np.float32)])

    model = tiny_model.make(model__encoding=encoding)
    documents = tiny_model.documents([6, 23, 1])
    embeddings = [model.embed(tokens) for tokens in documents]
    shapes = [vectors.shape for vectors in embeddings]
    assert shapes == [(6, tiny.D), (23, tiny.D), (1, tiny.D)]
    assert model.embed("").shape == (0, tiny.D)

    expected = model.hidden_states(documents, batch_size=2)
    states = model.hidden_states(embeddings=embeddings, batch_size=2)
    for of_embeddings, of_tokens in zip(states, expected, strict=True):
        np.testing.assert_allclose(of_embeddings, of_tokens, rtol=1e-5, atol=1e-6)

    # The module takes either too.
    module = model.components.model
    variables = {"params": model.params}
    of_tokens, _ = module.apply(variables, documents[0][None], model.init_memory(1))
    of_embeddings, _ = module.apply(variables, embeddings[0][None], model.init_memory(1))
    np.testing.assert_allclose(of_tokens, of_embeddings, rtol=1e-5, atol=1e-6)


PROMPTS = [7, 1, 0, 23, 6, 5, 12]  # The last token of a prompt is not read with its segments.
LENGTH = 21  # Tokens. A block has 16.


def settings(**changes):
    return txl_jax.GenerateConfig(**{"length": LENGTH, "seed": 5, "top_k": None} | changes)


def written_alone(generator, model, prompts, config):
    """The text after each prompt by itself, as --mode=generate writes it."""
    texts = []
    for prompt in prompts:
        start = prompt if len(prompt) else model.vocabulary.start
        blocks = generator.tokens(start, config)
        texts.append(model.decode(np.concatenate(list(blocks), axis=1)[0]))
    return texts


# What changes in a model, and the limits of sampling, by the case's name.
MODELS_AND_SAMPLING = {
    "usual": ({}, {}),
    "clamp_len, greedy": (
        {"eval__clamp_len": 4, "eval__same_length": False},
        {"temperature": 0.0},
    ),
    "zeros, pre-norm, top_k, top_p": (MODELS["zeros, pre-norm"], {"top_k": 3, "top_p": 0.9}),
    "clusters": (MODELS["clusters"], {}),
}


@pytest.mark.parametrize("name", full_but(["zeros, pre-norm, top_k, top_p"], MODELS_AND_SAMPLING))
def test_each_prompt_gives_what_it_gives_alone(name, x64):
    """Also with a seed of its own for each prompt."""
    changes, limits = MODELS_AND_SAMPLING[name]
    model = tiny_model.make(model__dtype=DType.FLOAT64, **changes)
    generator = tiny_run.generator(model.components.model, model.config.eval)
    prompts = tiny_model.documents(PROMPTS)
    config = settings(**limits)

    texts = model.generate(prompts, config, batch_size=4)
    of_seeds = model.generate(prompts[:1] * 3, config, seeds=[5, 4, -1])

    assert texts == written_alone(generator, model, prompts, config)
    assert len(set(texts)) > 2
    assert {len(text) for text in texts} == {LENGTH}
    for seed, text in zip((5, 4, -1), of_seeds, strict=True):
        of_seed = settings(**limits, seed=seed)
        assert [text] == written_alone(generator, model, prompts[:1], of_seed), f"seed {seed}"


@pytest.mark.full
def test_few_programs_are_compiled_for_any_number_and_lengths(compiled):
    """One for each power of two of rows, here 1, 4 and 5, the most.

    Lengths of prompts and texts and stop strings compile nothing.
    """
    model = tiny_model.make(eval__mem_len=11)
    for lengths in ([3], [40], [3, 8, 0], [1, 2, 3, 4], [9, 17, 2, 33, 6]):
        prompts = tiny_model.documents(lengths)
        for length in (2, 30):
            model.generate(prompts, settings(length=length), stop=["never written"])
    assert compiled.count("jit_decode_block") == 3
    assert compiled.count("jit_prefill") == 3


def end_of_text(text, stops):
    """The place of the first stop string in a text, or the text's length."""
    places = [text.find(stop) for stop in stops if stop in text]
    return min(places, default=len(text))


def test_stop_strings_end_a_text_wherever_they_are_found():
    model = tiny_model.make()
    prompts = tiny_model.documents([4, 9, 2])
    config = settings(length=40)
    pieces = list(model.generate_stream(prompts, config))
    whole = ["", "", ""]
    for number, piece in pieces:
        whole[number] += piece
    assert len(pieces) > 6, "more than two pieces of each text"
    assert whole == model.generate(prompts, config)

    stops = (whole[0][17:20], whole[1][3:5], "never written")
    texts = model.generate(prompts, config, stop=stops)

    cuts = [end_of_text(text, stops) for text in whole]
    for number, text in enumerate(texts):
        assert text == whole[number][: cuts[number]], f"prompt {number}"
    # The stop strings were taken from these places. One may occur before its place.
    assert cuts[0] <= 17
    assert cuts[1] <= 3
    assert max(cuts) > cuts[1], "texts end at different places"
    text = model.generate(prompts, config, stop=stops[1])[1]
    assert text == texts[1], "one string, not its letters"


def test_a_row_ends_on_the_device_too_after_its_stop_string():
    """Otherwise the longest text would have a million tokens. Every token is a stop string."""
    model = tiny_model.make()
    prompts = tiny_model.documents([4, 9, 2])
    texts = model.generate(prompts, settings(length=10**6), stop=list("abcdefghijk \n"))
    assert texts == ["", "", ""]


def test_a_stream_of_text_holds_back_the_bytes_of_a_character():
    stream = TextStream(bytes, ["\nend"])
    first, second = "é".encode()
    assert stream.add(bytes([first])) == ""
    assert stream.add(bytes([second])) == "é"
    assert stream.add(b"\nen" + bytes([first])) + stream.finish() == "\nen\N{REPLACEMENT CHARACTER}"


NARROW = [np.zeros((3, 5), np.float32)]  # Embeddings of another size than the model's.


# What a caller does with a model, and words of the error.
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        pytest.param(
            lambda model: model.score([[0, 13]]), r"between 0 and 12, got 13", id="an unknown id"
        ),
        pytest.param(lambda model: model.score([[0.5, 1.0]]), "float64", id="floats as ids"),
        pytest.param(lambda model: model.score("one text"), "one text", id="a text for a list"),
        pytest.param(
            lambda model: model.score(["a"], first="cc"), r"'cc'.*\b2\b", id="two first tokens"
        ),
        pytest.param(
            lambda model: model.score(["a"], first=99), r"\b99\b", id="an unknown first token"
        ),
        pytest.param(
            lambda model: model.score(["ab"], batch_size=0), "batch_size .* got 0", id="no rows"
        ),
        pytest.param(lambda model: model.hidden_states(), "both or neither", id="no documents"),
        pytest.param(
            lambda model: model.hidden_states(embeddings=NARROW),
            rf"{tiny.D}.*\(3, 5\)",
            id="narrow embeddings",
        ),
        pytest.param(
            lambda model: model.log_probabilities([[3, 999]], model.init_memory(1)),
            r"between 0 and 12, got 999",
            id="an unknown id in a segment",
        ),
        pytest.param(
            lambda model: model.log_probabilities([[1, 2], [3, 4]], model.init_memory(1)),
            r"2 rows.*1 rows",
            id="a memory of other rows",
        ),
        pytest.param(
            lambda model: model.generate("a prompt"), "a prompt", id="a prompt for a list"
        ),
        pytest.param(
            lambda model: model.generate(["a"], stop=["b", ""]),
            r"stop must be .* \['b', ''\]",
            id="an empty stop string",
        ),
        pytest.param(
            lambda model: model.generate(["a"], stop=["b", "\ud800"]),
            r"stop must be .*surrogates",
            id="half a character to stop at",
        ),
        pytest.param(
            lambda model: model.generate(["a", "b"], seeds=[1]),
            "2 prompts, got 1",
            id="too few seeds",
        ),
    ],
)
def test_mistakes_of_callers_are_errors_that_name_them(mistake, words):
    with pytest.raises(UserError, match=words):
        mistake(tiny_model.make())
