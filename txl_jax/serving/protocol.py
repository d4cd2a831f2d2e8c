"""OpenAI's JSON of `/v1/completions`: to a request, and results back to JSON."""

import collections
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_jax.data import ready_ids
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.serving.requests import Choice, Completion, Limits, Piece, RequestError, Sampling, draw_seed
from txl_jax.serving.rows import TOP

# Parameters of OpenAI's that have no effect here; given with another value than these they are refused.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
}
_KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "echo", "logprobs", "stream"),
    *("stream_options", "user", "best_of", "session", *_WITHOUT_EFFECT),
}
_MOST_SEED = 1 << 63


def error_json(error: RequestError) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def parse_json(body: bytes) -> dict[str, Any]:
    """Returns the object of a body; raises `RequestError` for anything else."""
    if not body:
        raise RequestError("the body is empty; send a JSON object", code="malformed_json")
    try:
        found = json.loads(body.decode(), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON ({str(error)[:100]})", code="malformed_json") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body is {_kind(found)}; give an object", code="malformed_json")
    return found


def check_known(body: dict[str, Any], known: set[str]) -> None:
    """Raises `RequestError` for a field of another name."""
    if unknown := sorted(set(body) - known):
        raise RequestError(
            f"{unknown[0][:40]!r} is no parameter here; those are {', '.join(sorted(known)) or 'none'}",
            param=unknown[0][:40],
            code="unknown_parameter",
        )


def parse_completion(body: dict[str, Any], vocabulary: Vocabulary, limits: Limits, *, model: str) -> Completion:
    """Returns a checked request; raises `RequestError`."""
    check_known(body, _KNOWN)
    _check_without_effect(body)
    given_model = _field(body, "model", str, None)
    if given_model not in (None, model):
        missing = f"there is no model {given_model[:80]!r} here, only {model!r}"
        raise RequestError(missing, status=404, param="model", code="model_not_found")
    n = _number(body, "n", int, 1, 1, limits.choices)
    if (best_of := _number(body, "best_of", int, n, 1, limits.choices)) != n:
        raise RequestError(f"best_of is {best_of} and n is {n}; they must be the same", param="best_of")
    echo = _field(body, "echo", bool, False)
    logprobs = _number(body, "logprobs", int, None, 0, TOP)
    sampling = Sampling(
        temperature=_number(body, "temperature", float, 1.0, 0, 1e3),
        top_p=_number(body, "top_p", float, 1.0, 1e-6, 1),
        seed=_number(body, "seed", int, draw_seed(), -_MOST_SEED, _MOST_SEED - 1),
    )
    max_tokens = _number(body, "max_tokens", int, 16, 0, limits.new_tokens)
    if not max_tokens and not echo:
        raise RequestError("max_tokens is 0 and echo is false, so that nothing would come back", param="max_tokens")
    stop = _stop(body, limits)
    session = _field(body, "session", str, None)
    prompts = _prompts(body, vocabulary, limits, n)
    if session is not None and (n != 1 or len(prompts) != 1):
        raise RequestError(
            f"a session goes on with one text, and {len(prompts)} prompts with n = {n} were given", param="session"
        )
    if session is None:
        prompts = [ids if len(ids) else vocabulary.start.astype(np.int32) for ids in prompts]
    choices = tuple(
        Choice(
            prompt=ids,
            max_tokens=max_tokens,
            sampling=Sampling(sampling.temperature, sampling.top_p, sampling.seed, sample),
            stop=stop,
            logprobs=logprobs is not None,
            echo=echo,
        )
        for ids in prompts
        for sample in range(n)
    )
    options = _field(body, "stream_options", dict, None) or {}
    check_known(options, {"include_usage", "include_obfuscation"})
    return Completion(
        choices=choices,
        echo=echo,
        logprobs=logprobs,
        stream=_field(body, "stream", bool, False),
        include_usage=_field(options, "include_usage", bool, False),
        session=session,
    )


def tokenizer_info(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the text of the token that texts begin after, if it has one; no token ends a text."""
    text = vocabulary.decode(vocabulary.start).decode(errors="replace")
    is_its_text = np.array_equal(_ids(text, vocabulary), vocabulary.start)
    return {
        "bos_token": text if is_its_text else None,
        "bos_token_id": int(vocabulary.start[0]),
        "eos_token": None,
        "vocab_size": vocabulary.size,
    }


def tokenize(body: dict[str, Any], vocabulary: Vocabulary) -> list[int]:
    """Returns the ids of `prompt`; raises `RequestError`."""
    check_known(body, {"model", "prompt", "add_special_tokens"})
    ids: list[int] = _ids(_field(body, "prompt", str, ""), vocabulary).tolist()
    return ids


def detokenize(body: dict[str, Any], vocabulary: Vocabulary) -> str:
    """Returns the text of `tokens`; raises `RequestError`."""
    check_known(body, {"model", "tokens"})
    return vocabulary.decode(_ids(_field(body, "tokens", list, []), vocabulary)).decode(errors="replace")


class ChoiceWriter:
    """Makes the JSON of one choice's pieces."""

    def __init__(self, index: int, choice: Choice, completion: Completion, vocabulary: Vocabulary):
        """Begins at the choice's first token."""
        self._index, self._choice, self._completion = index, choice, completion
        self._vocabulary = vocabulary
        self._offset = 0  # Of the next token in the text.
        self._prompt = vocabulary.decode(choice.prompt).decode(errors="replace")
        if not completion.echo:
            self._offset = len(self._prompt)
        self._begun = False
        self.written = 0  # Tokens, without the prompt's.

    def json_of(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the JSON of successive pieces."""
        text = "".join(piece.text for piece in pieces)
        if self._completion.echo and not self._begun:
            text = self._prompt + text
        self._begun = True
        self.written += sum(len(piece.tokens) for piece in pieces if not piece.is_prompt)
        return {
            "text": text,
            "index": self._index,
            "logprobs": None if self._completion.logprobs is None else self._logprobs(pieces),
            "finish_reason": pieces[-1].end if pieces else None,
        }

    def count(self, piece: Piece) -> None:
        """Counts the tokens of a piece of which nothing is sent."""
        self.written += len(piece.tokens)

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns tokens and their logprobs."""
        found: dict[str, list[Any]] = {name: [] for name in _OF_LOGPROBS}
        for piece in pieces:
            for place, token in enumerate(piece.tokens.tolist()):
                name = self._name(token)
                found["tokens"].append(name)
                found["text_offset"].append(self._offset)
                self._offset += 0 if name.startswith(_BYTES) else len(name)
                scores = piece.scores
                found["token_logprobs"].append(None if scores is None else -float(scores.nats[place]))
                found["top_logprobs"].append(None if scores is None else self._top(scores, place, token))
        return found

    def _top(self, scores: Any, place: int, own: int) -> dict[str, float]:
        """Returns the likeliest tokens in place of one, by their texts.

        The logprob of that one itself is the one beside it, to the last bit: lm-evaluation-harness compares them.
        """
        count = min(self._completion.logprobs or 0, self._vocabulary.size)
        found: dict[str, float] = {}
        for token, logprob in zip(
            scores.top_tokens[place, :count].tolist(), scores.top_logprobs[place, :count].tolist(), strict=True
        ):
            if math.isfinite(logprob):
                found.setdefault(self._name(token), -float(scores.nats[place]) if token == own else logprob)
        return found

    def _name(self, token: int) -> str:
        """Returns the text of a token; of bytes that are no text by themselves their values, as OpenAI does."""
        content = self._vocabulary.decode([token])
        try:
            return content.decode()
        except UnicodeDecodeError:
            return _BYTES + "".join(f"\\x{byte:02x}" for byte in content)


_OF_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_BYTES = "bytes:"


def usage(completion: Completion, written: int) -> dict[str, int]:
    """Returns the numbers of tokens: of each prompt once, and of all samples."""
    prompt = sum(len(choice.prompt) for choice in completion.choices if choice.sampling.sample == 0)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object; raises `ValueError` for a key that it has twice."""
    for name, times in collections.Counter(name for name, _ in pairs).most_common(1):
        if times > 1:
            raise ValueError(f"{name[:40]!r} is given {times} times")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_without_effect(body: dict[str, Any]) -> None:
    for name, values in _WITHOUT_EFFECT.items():
        value = body.get(name)
        if value is not None and value not in values:
            raise RequestError(f"{name} is given and has no effect here; leave it out", param=name)


def _field(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """Returns a field of a type; the default if it is not there, or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise RequestError(f"{name} is {_kind(value)}; give {_KINDS[kind]}", param=name)
    return value


def _number(body: dict[str, Any], name: str, kind: type, default: Any, least: float, most: float) -> Any:
    """Returns a number in a range; an integer may be given as a float of the same value."""
    value = body.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (kind is int and isinstance(value, float) and not value.is_integer()):
        raise RequestError(f"{name} is {json.dumps(value)[:40]}; give {_KINDS[kind]}", param=name)
    if not least <= value <= most:
        raise RequestError(f"{name} is {str(value)[:40]}; give {_KINDS[kind]} from {least:g} to {most:g}", param=name)
    return kind(value)


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def _kind(value: Any) -> str:
    """Returns the name of a value's type in JSON."""
    return _KINDS[type(value)]


def _stop(body: dict[str, Any], limits: Limits) -> tuple[str, ...]:
    value = body.get("stop")
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise RequestError("stop has another type; give a string or a list of strings", param="stop")
    if len(strings) > limits.stop_strings:
        raise RequestError(f"stop has {len(strings)} strings; give at most {limits.stop_strings}", param="stop")
    longest = max(map(len, strings), default=0)
    if longest > limits.stop_length:
        raise RequestError(f"a stop string has {longest} characters; give at most {limits.stop_length}", param="stop")
    if not all(map(_is_text, strings)):
        raise RequestError("a stop string is no Unicode text (it has a lone surrogate)", param="stop")
    return tuple(each for each in strings if each)


def _is_text(value: str) -> bool:
    """Returns whether a string can be encoded; JSON may hold halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _prompts(body: dict[str, Any], vocabulary: Vocabulary, limits: Limits, n: int) -> list[np.ndarray]:
    """Returns the ids of each prompt: of a text, of ids, or of a list of either."""
    value = body.get("prompt")
    if value is None:
        value = ""
    several: list[Any]
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_id, value))):
        several = [value]
    elif isinstance(value, list) and value:
        several = value
    else:
        raise RequestError("prompt must be a text, a list of token ids, or a list of such", param="prompt")
    if len(several) * n > limits.choices:
        raise RequestError(
            f"{len(several)} prompts with n = {n} were given; a request may have {limits.choices} choices",
            param="prompt",
        )
    found = [_ids(each, vocabulary) for each in several]
    total = sum(map(len, found)) * n  # Each choice reads its prompt.
    if total > limits.prompt_tokens:
        raise RequestError(
            f"the prompts of all {len(found) * n} choices must have at most {limits.prompt_tokens} tokens together, "
            f"got {total}. Send fewer choices, or continue a session over several requests.",
            param="prompt",
            code="prompt_too_long",
        )
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(prompt: Any, vocabulary: Vocabulary) -> np.ndarray:
    is_ids = isinstance(prompt, list) and all(map(_is_id, prompt))
    if not isinstance(prompt, str) and not is_ids:
        raise RequestError("a prompt must be a text or a list of token ids", param="prompt")
    if isinstance(prompt, str) and not _is_text(prompt):
        raise RequestError("the prompt is no Unicode text (it has a lone surrogate)", param="prompt")
    if is_ids and (outside := [each for each in prompt if not 0 <= each < vocabulary.size]):
        raise RequestError(
            f"the token id {str(outside[0])[:40]} is outside the vocabulary; ids run from 0 to {vocabulary.size - 1}",
            param="prompt",
        )
    try:
        return ready_ids.token_ids(vocabulary, prompt).astype(np.int32)
    except UserError as error:
        raise RequestError(str(error), param="prompt") from None
