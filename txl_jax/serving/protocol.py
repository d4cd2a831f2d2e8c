"""OpenAI's JSON of `/v1/completions`: to a request, and results back to JSON.

Bodies are read by pydantic, whose models are also the server's schema. Call nothing here on the
event loop.
"""

import codecs
import collections
import json
import math
import reprlib
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
import pydantic
from pydantic import ConfigDict, Field

from txl_jax.data import encode
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import RequestError
from txl_jax.inference.decode import Scores
from txl_jax.serving.engine import Limits, Piece, Prompt
from txl_jax.serving.rows import TOP

_BYTES = "bytes:"
_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
# One error is enough: millions of them took a minute.
_Ids = Annotated[list[_Id], Field(fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")  # Of an answer's logprobs.
# Names that are kept of a vocabulary: those of the most frequent tokens of any text. They take at
# most about 15 MB.
_MOST_NAMES = 1 << 16
_UNSUPPORTED = ("frequency_penalty", "presence_penalty", "logit_bias", "suffix")
_MESSAGES = {
    "prompt": (
        "prompt must be a string, a list of token ids, or a list of strings or of lists "
        "of token ids"
    ),
    "stop": "stop must be a string or a list of strings",
} | {name: f"{name} is not supported. Omit it." for name in _UNSUPPORTED}


class Body(pydantic.BaseModel):
    """A body without parameters."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, found: Any) -> Any:
        """Null is the default, as with OpenAI."""
        if not isinstance(found, dict):
            return found
        # Not left to pydantic, which makes an error of each.
        if unknown := found.keys() - cls.model_fields:
            known = ", ".join(sorted(cls.model_fields)) or "none"
            message = (
                f"{min(unknown)[:40]!r} is not a parameter of this request. Valid parameters: "
                f"{known}."
            )
            raise RequestError(message, code="unknown_parameter")
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, each in schema.get("properties", {}).items():
            schema["properties"][name] = {
                "anyOf": [each, {"type": "null"}],
                "default": each.get("default"),
            }
        return schema


class _StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # No effect.


class CompletionBody(Body):
    """A body of `/v1/completions`."""

    model: str | None = None
    prompt: str | _Texts | _Ids | Annotated[list[_Ids], Field(fail_fast=True)] = ""
    max_tokens: int = Field(16, ge=0)
    temperature: float = Field(1.0, ge=0, le=1e3)
    top_p: float = Field(1.0, ge=1e-6, le=1)
    n: int = Field(1, ge=1)
    best_of: int | None = None
    stop: str | _Texts = []
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=TOP)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    session: str | None = None
    fork: bool = False
    user: str | None = None  # No effect.
    # `_UNSUPPORTED`: OpenAI's parameters, with the values that change nothing.
    frequency_penalty: float = Field(0, ge=0, le=0)
    presence_penalty: float = Field(0, ge=0, le=0)
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    suffix: str = Field("", max_length=0)


class TokenizeBody(Body):
    """A body of `/tokenize`."""

    model: str | None = None
    prompt: str = ""
    add_special_tokens: bool = False  # No effect: the vocabularies lack such tokens.


class DetokenizeBody(Body):
    """A body of `/detokenize`."""

    model: str | None = None
    tokens: _Ids = []


_AnyBody = TypeVar("_AnyBody", bound=Body)


def error_json(error: RequestError) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    }


def parse(content: bytes, kind: type[_AnyBody]) -> _AnyBody:
    """Returns a body, which may be empty. Raises `RequestError` for anything else."""
    try:
        found = json.loads(
            content.decode() or "{}", parse_constant=_refuse_constant, object_pairs_hook=_object
        )
        return kind.model_validate(found)
    except pydantic.ValidationError as error:
        raise _error_of(error.errors(include_url=False, include_context=False)[0]) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the body is not valid JSON ({str(error)[:100]})", code="malformed_json"
        ) from None


def _error_of(error: Any) -> RequestError:
    """Returns the error of a field, or of a body that is not an object."""
    if not error["loc"]:
        return RequestError("the body must be a JSON object", code="malformed_json")
    name = ".".join(map(str, error["loc"][: 1 if error["loc"][0] in _MESSAGES else None]))
    said = error["msg"].replace("Input should", "must")
    message = _MESSAGES.get(
        name, f"{name} {said[:1].lower()}{said[1:]}, got {reprlib.repr(error['input'])}"
    )
    return RequestError(message, param=name)


def unknown_model(given: str, model: str) -> RequestError:
    """Returns the error of a request for another model."""
    message = f"model must be {model!r}, got {given[:80]!a}"
    return RequestError(message, status=404, param="model", code="model_not_found")


def prompts_of(body: CompletionBody, vocabulary: Vocabulary, limits: Limits) -> list[Prompt]:
    """Returns the prompts of a body. Raises `RequestError`."""
    if body.best_of not in (None, body.n):
        raise RequestError(f"best_of must be n ({body.n}), got {body.best_of}", param="best_of")
    if body.fork and body.session is None:
        raise RequestError("fork requires a session. Pass the session to fork.", param="fork")
    if body.stream_options != _StreamOptions() and not body.stream:
        raise RequestError("stream_options requires stream = true", param="stream_options")
    if body.max_tokens > limits.new_tokens:
        message = f"max_tokens must be at most {limits.new_tokens}, got {body.max_tokens}"
        raise RequestError(message, param="max_tokens")
    if not body.max_tokens and not body.echo:
        raise RequestError(
            "max_tokens must be at least 1 unless echo is true, got 0", param="max_tokens"
        )
    given: Any = body.prompt
    several = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    count = len(several) * body.n
    if not 1 <= count <= limits.choices:
        message = (
            f"a request must have 1 to {limits.choices} choices, got {len(several)} prompts with "
            f"n = {body.n}"
        )
        raise RequestError(message, param="prompt")
    if body.session is not None and not body.fork and count > 1:
        message = (
            f"a session continues as one text, got {len(several)} prompts with n = {body.n}. "
            "Set fork for more."
        )
        raise RequestError(message, param="session")
    found = [_ids(each, vocabulary) for each in several]
    if body.session is None:
        found = [ids if len(ids) else vocabulary.start.astype(np.int32) for ids in found]
    _check_total(_size(body, sum(map(len, found)), count), limits)
    settings = body.model_dump(include={"n", "max_tokens", "temperature", "top_p", "echo"})
    settings["seed"] = secrets.randbelow(1 << 32) if body.seed is None else body.seed
    settings |= {"stop": _stop(body, limits), "logprobs": body.logprobs is not None}
    return [Prompt(ids, **settings) for ids in found]


def tokenizer_info(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the text of the token that texts start after, if it has a text.

    No token ends a text.
    """
    start, text = vocabulary.start, vocabulary.decode(vocabulary.start).decode(errors="replace")
    bos = text if np.array_equal(_ids(text, vocabulary), start) else None
    return {
        "bos_token": bos,
        "bos_token_id": int(start[0]),
        "eos_token": None,
        "vocab_size": vocabulary.size,
    }


def tokenize(body: TokenizeBody, vocabulary: Vocabulary, limits: Limits) -> dict[str, Any]:
    """Returns the ids of a text. Raises `RequestError`."""
    ids = _ids(body.prompt, vocabulary)
    _check_total(len(ids), limits)
    return {"tokens": ids.tolist(), "count": len(ids)}


def detokenize(body: DetokenizeBody, vocabulary: Vocabulary, limits: Limits) -> dict[str, Any]:
    """Returns the text of ids. Raises `RequestError`."""
    _check_total(len(body.tokens), limits)
    return {"prompt": vocabulary.decode(_ids(body.tokens, vocabulary)).decode(errors="replace")}


class TokenNames:
    """The bytes and names of a vocabulary's tokens, each made on first use and then kept.

    Threads may share them: two that find a token missing keep equal values.
    """

    def __init__(self, vocabulary: Vocabulary):
        """Starts without names."""
        self._vocabulary = vocabulary
        self._kept: dict[int, tuple[bytes, str]] = {}

    def of(self, token: int) -> tuple[bytes, str]:
        """Returns the bytes of a token, and its name.

        The name is its text, or the values of its bytes if they are not UTF-8 by themselves, as
        with OpenAI.
        """
        found = self._kept.get(token)
        if found is not None:
            return found
        content = self._vocabulary.decode([token])
        try:
            name = content.decode()
        except UnicodeDecodeError:
            name = _BYTES + "".join(f"\\x{byte:02x}" for byte in content)
        if len(self._kept) < _MOST_NAMES:
            self._kept[token] = content, name
        return content, name


def prompt_text(prompt: Prompt, vocabulary: Vocabulary) -> str:
    """Returns the text of a prompt's tokens."""
    return vocabulary.decode(prompt.tokens).decode(errors="replace")


class ChoiceWriter:
    """Makes the JSON of one choice's pieces."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        vocabulary: Vocabulary,
        logprobs: int | None,
        *,
        names: TokenNames | None = None,
        text: str | None = None,
    ):
        """Begins at the choice's first token.

        Args:
          index: Number of the choice in its request.
          prompt: The prompt that it continues.
          vocabulary: The model's.
          logprobs: Number of most likely tokens at each place, or None for no logprobs.
          names: The names of the vocabulary's tokens, which writers share, or None for names of its
            own.
          text: `prompt_text` of the prompt, which its samples share, or None to make it here.
        """
        self._index = index
        self._logprobs = logprobs
        self._names = names or TokenNames(vocabulary)
        self._num_top = min(logprobs or 0, vocabulary.size)
        if text is None:
            text = prompt_text(prompt, vocabulary)
        # What the first piece's text follows.
        self._before = text if prompt.echo else ""
        # Of the next token in the text.
        self._offset = 0 if prompt.echo else len(text)
        # A token may be half of one.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        # Tokens, without the prompt's.
        self.written = 0

    def whole(self, pieces: Sequence[Piece], check: Callable[[], None]) -> bytes:
        """Returns the JSON of all pieces of the choice.

        It is made piece by piece: `json.dumps` of a large answer would hold the interpreter's lock
        until its end, and its objects take five times the memory of the text. `check` is called
        before each piece and may raise.
        """
        texts: list[str] = []
        columns: dict[str, list[str]] = {name: [] for name in _COLUMNS}
        for piece in pieces:
            check()
            found = self.json_of([piece])
            texts.append(found["text"])
            for name, values in (found["logprobs"] or {}).items():
                if values:
                    columns[name].append(json.dumps(values)[1:-1])

        logprobs = "null"
        if self._logprobs is not None:
            lists = [f'"{name}": [{", ".join(parts)}]' for name, parts in columns.items()]
            logprobs = "{" + ", ".join(lists) + "}"
        text = json.dumps("".join(texts))
        end = json.dumps(pieces[-1].end)
        beginning = f'{{"text": {text}, "index": {self._index}, '
        return f'{beginning}"logprobs": {logprobs}, "finish_reason": {end}}}'.encode()

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
        found: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for piece in pieces:
            tokens = piece.tokens.tolist()
            for token in tokens:
                content, name = self._names.of(token)
                found["tokens"].append(name)
                found["text_offset"].append(self._offset)
                self._offset += len(self._characters.decode(content))
            if piece.scores is None:
                found["token_logprobs"] += [None] * len(tokens)
                found["top_logprobs"] += [None] * len(tokens)
            else:
                logprobs = [-nats for nats in piece.scores.nats.tolist()]
                found["token_logprobs"] += logprobs
                found["top_logprobs"] += self._tops(piece.scores, tokens, logprobs)
        return found

    def _tops(
        self, scores: Scores, tokens: list[int], logprobs: list[float]
    ) -> list[dict[str, float]]:
        """Returns the most likely tokens at each place, by their texts.

        The generated token's logprob equals `token_logprobs` to the last bit: lm-evaluation-harness
        compares them.
        """
        found = []
        top_tokens = scores.top_tokens[:, : self._num_top].tolist()
        top_logprobs = scores.top_logprobs[:, : self._num_top].tolist()
        for place, own in enumerate(tokens):
            top: dict[str, float] = {}
            for token, logprob in zip(top_tokens[place], top_logprobs[place], strict=True):
                if math.isfinite(logprob):
                    _, name = self._names.of(token)
                    top.setdefault(name, logprobs[place] if token == own else logprob)
            found.append(top)
        return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object. Raises `ValueError` for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, times)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:40]!r} appears {times} times")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _stop(body: CompletionBody, limits: Limits) -> tuple[str, ...]:
    strings = [body.stop] if isinstance(body.stop, str) else body.stop
    if len(strings) > limits.stop_strings or max(map(len, strings), default=0) > limits.stop_length:
        most = f"{limits.stop_strings} strings of at most {limits.stop_length} characters"
        raise RequestError(f"stop must have at most {most}", param="stop")
    try:
        "".join(strings).encode()
    except UnicodeEncodeError as error:
        # JSON may hold half of a surrogate pair, which no text has.
        raise RequestError(f"stop cannot be read ({error.reason})", param="stop") from None
    return tuple(filter(None, strings))


def _size(body: CompletionBody, prompt_tokens: int, count: int) -> int:
    """Returns the tokens of a request, by what is read and by what is written.

    A token of an answer counts once, and once more for each entry of its logprobs: with five most
    likely tokens it takes 157 bytes and 6 microseconds (byte tokens, 2026-11-29, a core of an Intel
    Xeon), without logprobs 1 byte.

    Args:
      body: The request.
      prompt_tokens: Tokens of its prompts together.
      count: Number of its choices.
    """
    per_token = 1
    if body.logprobs is not None:
        per_token += max(1, body.logprobs)
    sampled = count * body.max_tokens * per_token
    if not body.echo:
        return prompt_tokens + sampled
    # Each sample begins with its prompt.
    return prompt_tokens * body.n * per_token + sampled


def _check_total(total: int, limits: Limits) -> None:
    if total > limits.tokens:
        most = (
            "the prompts plus max_tokens of all choices must be at most "
            f"{limits.tokens} tokens, got {total}"
        )
        counted = (
            "With echo a prompt counts n times, and with logprobs each entry of a token counts too."
        )
        advice = (
            "Shorten the prompts, lower max_tokens, n or logprobs, or continue a session over "
            "several requests."
        )
        raise RequestError(f"{most}. {counted} {advice}", param="prompt", code="too_many_tokens")


def _ids(prompt: str | list[int], vocabulary: Vocabulary) -> np.ndarray:
    try:
        return encode.token_ids(vocabulary, prompt).astype(np.int32)
    except ValueError as error:
        # Of the vocabulary, or of halves of surrogate pairs, which JSON may hold.
        raise RequestError(str(error), param="prompt") from None
