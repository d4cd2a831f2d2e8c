"""OpenAI's JSON of `/v1/completions`: to a request, and results back to JSON."""

import collections
import dataclasses
import json
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_jax.data import ready_ids
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import RequestError, UserError
from txl_jax.serving.engine import Choice, Limits, Piece
from txl_jax.serving.rows import TOP

# OpenAI's parameters without effect here: other values than these, and null, are refused.
_WITHOUT_EFFECT = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "suffix": ""}
_KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "echo", "logprobs", "stream"),
    *("stream_options", "user", "best_of", "session", *_WITHOUT_EFFECT),
}
_MOST_SEED = (1 << 63) - 1
_BYTES = "bytes:"
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request of several choices."""

    choices: tuple[Choice, ...]
    logprobs: int | None  # Number of most likely tokens, or None for no logprobs.
    stream: bool
    include_usage: bool  # Whether a stream ends with the numbers of tokens.
    session: str | None


def error_json(error: RequestError) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def parse_json(body: bytes) -> dict[str, Any]:
    """Returns the object of a body; raises `RequestError` for anything else."""
    try:
        found = json.loads(body.decode(), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON ({str(error)[:100]})", code="malformed_json") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body must be an object, got {_KINDS.get(type(found), 'null')}", code="malformed_json")
    return found


def check_known(body: dict[str, Any], known: set[str]) -> None:
    """Raises `RequestError` for a field of another name."""
    if unknown := sorted(set(body) - known):
        name = unknown[0][:40].encode(errors="backslashreplace").decode()  # It may have half a surrogate pair.
        message = f"{name!r} is not a parameter here; those are {', '.join(sorted(known)) or 'none'}"
        raise RequestError(message, param=name, code="unknown_parameter")


def unknown_model(given: str, model: str) -> RequestError:
    """Returns the error of a request for another model."""
    message = f"there is no model {given[:80]!r} here, only {model!r}"
    return RequestError(message, status=404, param="model", code="model_not_found")


def parse_completion(body: dict[str, Any], vocabulary: Vocabulary, limits: Limits, *, model: str) -> Completion:
    """Returns a checked request; raises `RequestError`."""
    check_known(body, _KNOWN)
    for name, harmless in _WITHOUT_EFFECT.items():
        if body.get(name) not in (None, harmless):
            raise RequestError(f"{name} is given and has no effect here; leave it out", param=name)
    if (given := _field(body, "model", str, model)) != model:
        raise unknown_model(given, model)
    n = _field(body, "n", int, 1, 1, limits.choices)
    if (best_of := _field(body, "best_of", int, n, 1, limits.choices)) != n:
        raise RequestError(f"best_of must be n ({n}), got {best_of}", param="best_of")
    logprobs = _field(body, "logprobs", int, None, 0, TOP)
    settings: dict[str, Any] = {
        "max_tokens": _field(body, "max_tokens", int, 16, 0, limits.new_tokens),
        "temperature": _field(body, "temperature", float, 1.0, 0, 1e3),
        "top_p": _field(body, "top_p", float, 1.0, 1e-6, 1),
        "seed": _field(body, "seed", int, secrets.randbelow(1 << 32), -_MOST_SEED - 1, _MOST_SEED),
        "stop": _stop(body, limits),
        "echo": _field(body, "echo", bool, False),
        "logprobs": logprobs is not None,
    }
    if not settings["max_tokens"] and not settings["echo"]:
        raise RequestError("max_tokens is 0 and echo is false, so that nothing would come back", param="max_tokens")
    session = _field(body, "session", str, None)
    prompts = _prompts(body, vocabulary, limits, n)
    if session is not None and (n != 1 or len(prompts) != 1):
        message = f"a session continues one text, got {len(prompts)} prompts with n = {n}"
        raise RequestError(message, param="session")
    if session is None:
        prompts = [ids if len(ids) else vocabulary.start.astype(np.int32) for ids in prompts]
    options = _field(body, "stream_options", dict, {})
    check_known(options, {"include_usage", "include_obfuscation"})
    return Completion(
        choices=tuple(Choice(ids, sample=sample, **settings) for ids in prompts for sample in range(n)),
        logprobs=logprobs,
        stream=_field(body, "stream", bool, False),
        include_usage=_field(options, "include_usage", bool, False),
        session=session,
    )


def tokenizer_info(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the text of the token that texts begin after, if it has one; no token ends a text."""
    start, text = vocabulary.start, vocabulary.decode(vocabulary.start).decode(errors="replace")
    bos = text if np.array_equal(_ids(text, vocabulary), start) else None
    return {"bos_token": bos, "bos_token_id": int(start[0]), "eos_token": None, "vocab_size": vocabulary.size}


def tokenize(body: dict[str, Any], vocabulary: Vocabulary) -> np.ndarray:
    """Returns the ids of `prompt`; raises `RequestError`."""
    check_known(body, {"model", "prompt", "add_special_tokens"})
    return _ids(_field(body, "prompt", str, ""), vocabulary)


def detokenize(body: dict[str, Any], vocabulary: Vocabulary) -> str:
    """Returns the text of `tokens`; raises `RequestError`."""
    check_known(body, {"model", "tokens"})
    return vocabulary.decode(_ids(_field(body, "tokens", list, []), vocabulary)).decode(errors="replace")


class ChoiceWriter:
    """Makes the JSON of one choice's pieces."""

    def __init__(self, index: int, completion: Completion, vocabulary: Vocabulary):
        """Begins at the choice's first token."""
        choice = completion.choices[index]
        self._index, self._logprobs, self._vocabulary = index, completion.logprobs, vocabulary
        prompt = vocabulary.decode(choice.prompt).decode(errors="replace")
        self._before = prompt if choice.echo else ""  # What the first piece's text follows.
        self._offset = 0 if choice.echo else len(prompt)  # Of the next token in the text.
        self.written = 0  # Tokens, without the prompt's.

    def json_of(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the JSON of successive pieces."""
        text, self._before = self._before + "".join(piece.text for piece in pieces), ""
        self.written += sum(len(piece.tokens) for piece in pieces if not piece.is_prompt)
        return {
            "text": text,
            "index": self._index,
            "logprobs": None if self._logprobs is None else self._logprobs_of(pieces),
            "finish_reason": pieces[-1].end,
        }

    def _logprobs_of(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns tokens and their logprobs."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
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
        """Returns the most likely tokens in place of one, by their texts.

        The logprob of that one itself is the one beside it, to the last bit: lm-evaluation-harness compares them.
        """
        count = min(self._logprobs or 0, self._vocabulary.size)
        tokens, logprobs = scores.top_tokens[place, :count].tolist(), scores.top_logprobs[place, :count].tolist()
        found: dict[str, float] = {}
        for token, logprob in zip(tokens, logprobs, strict=True):
            if math.isfinite(logprob):
                found.setdefault(self._name(token), -float(scores.nats[place]) if token == own else logprob)
        return found

    def _name(self, token: int) -> str:
        """Returns the text of a token, or the values of its bytes if they are not UTF-8 by themselves, as OpenAI."""
        content = self._vocabulary.decode([token])
        try:
            return content.decode()
        except UnicodeDecodeError:
            return _BYTES + "".join(f"\\x{byte:02x}" for byte in content)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object; raises `ValueError` for a key that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, times)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:40]!r} is given {times} times")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _field(body: dict[str, Any], name: str, kind: type, default: Any, least: float = 0, most: float = math.inf) -> Any:
    """Returns a field of a type, in a range if it is a number, or the default if missing or null; 2.0 is an integer."""
    value = body.get(name)
    if value is None:
        return default
    is_whole = kind is int and isinstance(value, float) and value.is_integer()
    if type(value) is not kind and not is_whole and (kind, type(value)) != (float, int):
        raise RequestError(f"{name} must be of type {_KINDS[kind]}, got {_KINDS[type(value)]}", param=name)
    if kind in (int, float) and not least <= value <= most:
        raise RequestError(f"{name} must be from {least:g} to {most:g}, got {str(value)[:40]}", param=name)
    return kind(value)


def _is_text(value: Any) -> bool:
    """Returns whether a value is a string that can be encoded; JSON may hold halves of surrogate pairs."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _stop(body: dict[str, Any], limits: Limits) -> tuple[str, ...]:
    value = body.get("stop")
    strings = [] if value is None else value if isinstance(value, list) else [value]
    are_texts = len(strings) <= limits.stop_strings and all(map(_is_text, strings))
    if not are_texts or max(map(len, strings), default=0) > limits.stop_length:
        each = f"each at most {limits.stop_length} characters of Unicode without lone surrogates"
        raise RequestError(f"stop must be a string or at most {limits.stop_strings} of them, {each}", param="stop")
    return tuple(each for each in strings if each)


def _prompts(body: dict[str, Any], vocabulary: Vocabulary, limits: Limits, n: int) -> list[np.ndarray]:
    """Returns the ids of each prompt: of a text, of ids, or of a list of either."""
    value = "" if body.get("prompt") is None else body["prompt"]
    are_several = isinstance(value, list) and not (value and all(map(_is_id, value)))
    several = value if are_several else [value]
    if not 1 <= len(several) * n <= limits.choices:
        message = f"a request must have 1 to {limits.choices // n} prompts with n = {n}, got {len(several)}"
        raise RequestError(message, param="prompt")
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


def _ids(prompt: Any, vocabulary: Vocabulary) -> np.ndarray:
    is_ids = isinstance(prompt, list) and all(map(_is_id, prompt))
    if not is_ids and not _is_text(prompt):
        kinds = f"Unicode text without lone surrogates, or a list of token ids from 0 to {vocabulary.size - 1}"
        raise RequestError(f"a prompt must be {kinds}", param="prompt")
    try:
        return ready_ids.token_ids(vocabulary, prompt).astype(np.int32)
    except UserError as error:
        raise RequestError(str(error), param="prompt") from None
