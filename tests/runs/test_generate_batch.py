"""Tests generation after many prompts: each text against that of its prompt alone, stop strings, and streaming."""

import numpy as np
import pytest
from jax._src import compiler

import txl_jax
from support import tiny_model
from support.cases import full_but
from txl_jax.config import DType
from txl_jax.data.vocabulary import TextStream
from txl_jax.errors import UserError
from txl_jax.inference.generator import Generator

LENGTHS = [7, 1, 0, 23, 6, 5, 12]  # L = 5, M = 9: the last token of a prompt is not read with its segments.
LENGTH = 21  # Tokens; blocks are of 16.


def settings(**changes):
    return txl_jax.GenerateConfig(**{"length": LENGTH, "seed": 5, "top_k": None} | changes)


def alone(model, prompts, config):
    """The text after each prompt alone, as --mode=generate writes it."""
    generator = Generator(model.components.model, model.config.eval, config)
    weights, texts = generator.prepare_params(model.params), []
    for prompt in prompts:
        prompt = prompt if len(prompt) else model.vocabulary.start
        texts.append(model.decode(np.concatenate(list(generator.tokens(weights, prompt)), axis=1)[0]))
    return texts


MODELS_AND_DRAWING = [
    ({}, {}),
    ({"eval__clamp_len": 4, "eval__same_length": False}, {"temperature": 0.0}),
    ({"compat__memory_start": "zeros", "model__layer_norm": "pre"}, {"top_k": 3, "top_p": 0.9}),
    ({"model__cutoffs": (3, 7), "model__div_val": 2}, {}),
]


@pytest.mark.parametrize(("changes", "drawing"), full_but(MODELS_AND_DRAWING[2:3], MODELS_AND_DRAWING), ids=str)
def test_each_prompt_gives_what_it_gives_alone(changes, drawing, x64):
    model = tiny_model.make(model__dtype=DType.FLOAT64, **changes)
    prompts, config = tiny_model.documents(LENGTHS), settings(**drawing)
    found = model.generate(prompts, config, batch_size=4)
    assert found == alone(model, prompts, config)
    assert len(set(found)) > 2 and {len(text) for text in found} == {LENGTH}


@pytest.mark.full
def test_seeds_of_prompts_and_any_number_of_rows():
    model, [prompt] = tiny_model.make(), tiny_model.documents([8])
    found = model.generate([prompt] * 4, settings(), seeds=[3, 4, 4, -1], batch_size=3)
    assert [[text] for text in found[2:]] == [alone(model, [prompt], settings(seed=seed)) for seed in (4, -1)]
    assert len(set(found)) == 3 and model.generate([prompt], settings(), seeds=[4]) == found[1:2]


@pytest.mark.full
def test_few_programs_are_compiled_for_any_number_and_lengths(monkeypatch):
    """One for each power of two of rows, here 1, 4 and 5, the most; not for lengths of prompts, texts or stops."""
    model, compiled = tiny_model.make(eval__mem_len=11), []
    monkeypatch.setattr(compiler, "compile_or_get_cached", count_compiled(compiled))
    for lengths in ([3], [40], [3, 8, 0], [1, 2, 3, 4], [9, 17, 2, 33, 6]):
        for length in (2, 30):
            model.generate(tiny_model.documents(lengths), settings(length=length), stop=["never written"])
    assert compiled.count("jit__write_block") == compiled.count("jit__read_segment") == 3


def count_compiled(names):
    """Returns the compilation of jax, which adds the name of each program that it is asked for."""
    compile_or_get_cached = compiler.compile_or_get_cached

    def counted(backend, module, *arguments, **named):
        names.append(module.operation.attributes["sym_name"].value)
        return compile_or_get_cached(backend, module, *arguments, **named)

    return counted


def test_stop_strings_end_a_text_wherever_they_are_found():
    model = tiny_model.make()
    prompts = tiny_model.documents([4, 9, 2])
    whole = model.generate(prompts, settings(length=40))
    stops = (whole[0][17:20], whole[1][3:5], "never written")
    found = model.generate(prompts, settings(length=40), stop=stops)
    cuts = [min((text.find(stop) for stop in stops if stop in text), default=len(text)) for text in whole]
    assert found == [text[:cut] for text, cut in zip(whole, cuts, strict=True)]
    assert cuts[1] <= 3 and cuts[0] <= 17 and max(cuts) > cuts[1]
    assert model.generate(prompts, settings(length=40), stop=stops[1])[1] == found[1], "one string, not its letters"


def test_a_stop_token_is_part_of_the_text_and_a_stop_string_is_not():
    model = tiny_model.make()
    [prompt] = tiny_model.documents([4])
    [whole] = model.generate([prompt], settings())
    letter = whole[9]
    cut = whole.index(letter)
    assert model.generate([prompt], settings(stop=letter)) == [whole[: cut + 1]]
    assert model.generate([prompt], settings(stop=letter), stop=letter) == [whole[:cut]]


def test_texts_come_piece_by_piece():
    model, prompts = tiny_model.make(), tiny_model.documents([4, 9, 2])
    pieces, found = [], list(model.generate_stream(prompts, settings(length=40)))
    whole = model.generate(prompts, settings(length=40), stream=lambda *piece: pieces.append(piece))
    assert found == pieces and len(pieces) > 6
    joined = ["".join(text for number, text in pieces if number == prompt) for prompt in range(3)]
    assert joined == whole


def test_generation_ends_with_the_last_text_that_goes_on():
    """After its stop string a row is ended on the device too: the longest text has a million tokens otherwise."""
    model, prompts = tiny_model.make(), tiny_model.documents([4, 9])
    assert model.generate(prompts, settings(length=10**6), stop=list("abcdefghijk \n")) == ["", ""]


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stream_of_text_holds_back_what_may_be_a_stop_string(size):
    text = "aé the en the\n en then\nend and end".encode()
    stream = TextStream(bytes, ["\nend", "endless"])
    pieces = [stream.add(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(pieces) == "aé the en the\n en then" and stream.ended
    stream = TextStream(bytes, ["\nend", "endless"])
    whole = b"".join([text[: text.index(b"\nend")], b"\nen", "é".encode()[:1]])
    pieces = [stream.add(whole[start : start + size]) for start in range(0, len(whole), size)]
    assert "".join([*pieces, stream.finish()]) == "aé the en the\n en then\nen\N{REPLACEMENT CHARACTER}"
    assert size != 1 or pieces[-4:] == ["en", "", "", "\nen"]


def test_the_stop_string_that_is_complete_first_counts():
    for cut in range(1, 6):
        stream = TextStream(bytes, ["bcde", "cd"])
        assert stream.add(b"abcdef"[:cut]) + stream.add(b"abcdef"[cut:]) == "ab"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda model: model.generate(["a"], stop=["b", ""]), "stop is"),
        (lambda model: model.generate(["a", "b"], seeds=[1]), "1 seeds and 2 prompts"),
    ],
)
def test_mistakes_are_refused(mistake, words):
    with pytest.raises(UserError, match=words):
        mistake(tiny_model.make())
