"""Converts OpenAI's JSON for `/v1/completions` to a request, and results to JSON.

Bodies are parsed by pydantic, whose models are also the server's schema. Do not call these
functions on the event loop.
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
from txl_jax.serving.engine import Piece, Prompt, ServerLimits
from txl_jax.serving.rows import TOP

# Prefix of the names of tokens that are not UTF-8 by themselves.
_BYTES = "bytes:"
_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
# One error is enough: millions of them took a minute.
_Ids = Annotated[list[_Id], Field(fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]
# The lists of an answer's logprobs.
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
# Names that are kept of a vocabulary: those of the most frequent tokens of any text. They take at
# most about 15 MB.
_MOST_NAMES = 1 << 16
_UNSUPPORTED = ("frequency_penalty", "presence_penalty", "logit_bias", "suffix")
# Messages for parameters whose own errors would not help.
_MESSAGES = {
    "prompt": (
        "prompt must be a string, a list of token ids, or a list of strings or of lists "
        "of token ids"
    ),
    "stop": "stop must be a string or a list of strings",
    **{name: f"{name} is not supported. Omit it." for name in _UNSUPPORTED},
}
# Characters of a client's words that are repeated in a message.
_LONGEST_NAME = 40
_LONGEST_MODEL = 80


class Body(pydantic.BaseModel):
    """A body without parameters."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        """Null is the default, as with OpenAI."""
        if not isinstance(content, dict):
            return content
        # Not left to pydantic, which makes an error of each.
        unknown = content.keys() - cls.model_fields
        if unknown:
            known = ", ".join(sorted(cls.model_fields)) or "none"
            raise RequestError(
                f"{min(unknown)[:_LONGEST_NAME]!r} is not a parameter of this request. "
                f"Valid parameters: {known}.",
                code="unknown_parameter",
            )
        return {name: value for name, value in content.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, parameter in schema.get("properties", {}).items():
            schema["properties"][name] = {
                "anyOf": [parameter, {"type": "null"}],
                "default": parameter.get("default"),
            }
        return schema


class _StreamOptions(Body):
    include_usage: bool = False
    # No effect.
    include_obfuscation: bool = False


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
    # No effect.
    user: str | None = None
    # `_UNSUPPORTED`: OpenAI's parameters, with the values that change nothing.
    frequency_penalty: float = Field(0, ge=0, le=0)
    presence_penalty: float = Field(0, ge=0, le=0)
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    suffix: str = Field("", max_length=0)


class TokenizeBody(Body):
    """A body of `/tokenize`."""

    model: str | None = None
    prompt: str = ""
    # No effect: the vocabularies lack such tokens.
    add_special_tokens: bool = False


class DetokenizeBody(Body):
    """A body of `/detokenize`."""

    model: str | None = None
    tokens: _Ids = []


_AnyBody = TypeVar("_AnyBody", bound=Body)


def error_json(error: RequestError) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    content = {
        "message": str(error),
        "type": "invalid_request_error" if error.status < 500 else "server_error",
        "param": error.param,
        "code": error.code,
    }
    return {"error": content}


def parse(content: bytes, kind: type[_AnyBody]) -> _AnyBody:
    """Returns a body, which may be empty. Raises `RequestError` for anything else."""
    try:
        parsed = json.loads(
            content.decode() or "{}", parse_constant=_refuse_constant, object_pairs_hook=_object
        )
        return kind.model_validate(parsed)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _error_of(first) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the body is not valid JSON ({str(error)[:100]})", code="malformed_json"
        ) from None


def _error_of(error: Any) -> RequestError:
    """Returns the error of a field, or of a body that is not an object.

    Args:
      error: One of pydantic's errors. Its "loc" has the names and indices that lead to the value.
    """
    place = error["loc"]
    if not place:
        return RequestError("the body must be a JSON object", code="malformed_json")
    if place[0] in _MESSAGES:
        return RequestError(_MESSAGES[place[0]], param=place[0])
    name = ".".join(str(part) for part in place)
    complaint = error["msg"].replace("Input should", "must")
    complaint = complaint[:1].lower() + complaint[1:]
    return RequestError(f"{name} {complaint}, got {reprlib.repr(error['input'])}", param=name)


def unknown_model(name: str, model: str) -> RequestError:
    """Returns the error of a request for a model with another name."""
    message = f"model must be {model!r}, got {name[:_LONGEST_MODEL]!a}"
    return RequestError(message, status=404, param="model", code="model_not_found")


def prompts_of(body: CompletionBody, vocabulary: Vocabulary, limits: ServerLimits) -> list[Prompt]:
    """Returns the prompts of a body. Raises `RequestError`."""
    _check_parameters(body, limits)
    texts = _separate_prompts(body.prompt)
    num_choices = len(texts) * body.n
    if not 1 <= num_choices <= limits.choices:
        raise RequestError(
            f"a request must have 1 to {limits.choices} choices, got {len(texts)} prompts with "
            f"n = {body.n}",
            param="prompt",
        )
    if body.session is not None and not body.fork and num_choices > 1:
        raise RequestError(
            f"a session continues as one text, got {len(texts)} prompts with n = {body.n}. "
            "Set fork for more.",
            param="session",
        )

    tokens_of_texts = []
    for text in texts:
        tokens = _ids(text, vocabulary)
        # An empty prompt is the token that texts start after. In a session it adds nothing to the
        # tokens before it. `completion` rejects it if the session is empty, too.
        if not len(tokens) and body.session is None:
            tokens = vocabulary.start.astype(np.int32)
        tokens_of_texts.append(tokens)
    num_tokens = sum(len(tokens) for tokens in tokens_of_texts)
    _check_total(_size(body, num_tokens, num_choices), limits)

    seed = secrets.randbelow(1 << 32) if body.seed is None else body.seed
    stop = _stop(body, limits)
    prompts = []
    for tokens in tokens_of_texts:
        prompt = Prompt(
            tokens,
            max_tokens=body.max_tokens,
            n=body.n,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=seed,
            stop=stop,
            logprobs=body.logprobs is not None,
            echo=body.echo,
        )
        prompts.append(prompt)
    return prompts


def _check_parameters(body: CompletionBody, limits: ServerLimits) -> None:
    """Raises `RequestError` for parameters that are incompatible or exceed a limit."""
    if body.best_of not in (None, body.n):
        raise RequestError(f"best_of must be n ({body.n}), got {body.best_of}", param="best_of")
    if body.fork and body.session is None:
        raise RequestError("fork requires a session. Pass the session to fork.", param="fork")
    if body.stream_options != _StreamOptions() and not body.stream:
        raise RequestError("stream_options requires stream = true", param="stream_options")
    if body.max_tokens > limits.new_tokens:
        raise RequestError(
            f"max_tokens must be at most {limits.new_tokens}, got {body.max_tokens}",
            param="max_tokens",
        )
    if not body.max_tokens and not body.echo:
        raise RequestError(
            "max_tokens must be at least 1 unless echo is true, got 0", param="max_tokens"
        )


def _separate_prompts(prompt: Any) -> list[Any]:
    """Returns the prompts of a request, each a string or a list of ids."""
    is_one_text = isinstance(prompt, str)
    is_one_list_of_ids = bool(prompt) and isinstance(prompt[0], int)
    return [prompt] if is_one_text or is_one_list_of_ids else prompt


def tokenizer_info(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the text of the token that texts start after, if it has a text.

    No token ends a text.
    """
    start = vocabulary.start
    text = vocabulary.decode(start).decode(errors="replace")
    has_text = np.array_equal(_ids(text, vocabulary), start)
    return {
        "bos_token": text if has_text else None,
        "bos_token_id": int(start[0]),
        "eos_token": None,
        "vocab_size": vocabulary.size,
    }


def tokenize(body: TokenizeBody, vocabulary: Vocabulary, limits: ServerLimits) -> dict[str, Any]:
    """Returns the ids of a text. Raises `RequestError`."""
    ids = _ids(body.prompt, vocabulary)
    _check_total(len(ids), limits)
    return {"tokens": ids.tolist(), "count": len(ids)}


def detokenize(
    body: DetokenizeBody, vocabulary: Vocabulary, limits: ServerLimits
) -> dict[str, Any]:
    """Returns the text of ids. Raises `RequestError`."""
    _check_total(len(body.tokens), limits)
    text = vocabulary.decode(_ids(body.tokens, vocabulary))
    return {"prompt": text.decode(errors="replace")}


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
        kept = self._kept.get(token)
        if kept is not None:
            return kept
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
        # With echo, the prompt's text, until the first piece has taken it.
        self._echo = text if prompt.echo else ""
        # Characters of the text before the next token.
        self._offset = 0 if prompt.echo else len(text)
        # Decodes the tokens' bytes, as a token may be half of a character.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        # Tokens that were written, without the prompt's.
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
            choice = self.json_of([piece])
            texts.append(choice["text"])
            for name, values in (choice["logprobs"] or {}).items():
                if values:
                    # Without its brackets, so that the lists of all pieces become one.
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
        text = self._echo + "".join(piece.text for piece in pieces)
        self._echo = ""
        self.written += sum(len(piece.tokens) for piece in pieces if not piece.is_prompt)
        return {
            "text": text,
            "index": self._index,
            "logprobs": None if self._logprobs is None else self._logprobs_of(pieces),
            "finish_reason": pieces[-1].end,
        }

    def _logprobs_of(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for piece in pieces:
            tokens = piece.tokens.tolist()
            for token in tokens:
                content, name = self._names.of(token)
                columns["tokens"].append(name)
                columns["text_offset"].append(self._offset)
                self._offset += len(self._characters.decode(content))
            if piece.scores is None:
                columns["token_logprobs"] += [None] * len(tokens)
                columns["top_logprobs"] += [None] * len(tokens)
            else:
                logprobs = [-nats for nats in piece.scores.nats.tolist()]
                columns["token_logprobs"] += logprobs
                columns["top_logprobs"] += self._tops(piece.scores, tokens, logprobs)
        return columns

    def _tops(
        self, scores: Scores, tokens: list[int], logprobs: list[float]
    ) -> list[dict[str, float]]:
        """Returns the most likely tokens at each place, by their texts.

        The generated token's logprob equals `token_logprobs` to the last bit: lm-evaluation-harness
        compares them.
        """
        tops = []
        top_tokens = scores.top_tokens[:, : self._num_top].tolist()
        top_logprobs = scores.top_logprobs[:, : self._num_top].tolist()
        for place, generated in enumerate(tokens):
            top: dict[str, float] = {}
            for token, logprob in zip(top_tokens[place], top_logprobs[place], strict=True):
                if not math.isfinite(logprob):
                    continue
                _, name = self._names.of(token)
                # If two tokens have one name, the more likely one comes first and stays.
                top.setdefault(name, logprobs[place] if token == generated else logprob)
            tops.append(top)
        return tops


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object. Raises `ValueError` for a duplicate key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        [(name, times)] = counts.most_common(1)
        raise ValueError(f"{name[:_LONGEST_NAME]!r} appears {times} times")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _stop(body: CompletionBody, limits: ServerLimits) -> tuple[str, ...]:
    """Returns the strings that end a text, without empty ones."""
    strings = [body.stop] if isinstance(body.stop, str) else body.stop
    longest = max((len(string) for string in strings), default=0)
    if len(strings) > limits.stop_strings or longest > limits.stop_length:
        raise RequestError(
            f"stop must have at most {limits.stop_strings} strings of at most "
            f"{limits.stop_length} characters",
            param="stop",
        )
    try:
        "".join(strings).encode()
    except UnicodeEncodeError as error:
        # JSON may hold half of a surrogate pair, which no text has.
        raise RequestError(f"stop cannot be read ({error.reason})", param="stop") from None
    return tuple(string for string in strings if string)


def _size(body: CompletionBody, prompt_tokens: int, num_choices: int) -> int:
    """Returns the number of tokens that a request reads and writes.

    A token of an answer counts once, and once more for each entry of its logprobs: with five most
    likely tokens it takes 157 bytes and 6 microseconds (byte tokens, 2026-11-29, a core of an Intel
    Xeon), without logprobs 1 byte.

    Args:
      body: The request.
      prompt_tokens: Tokens of its prompts together.
      num_choices: Number of its choices.
    """
    per_token = 1
    if body.logprobs is not None:
        per_token += max(1, body.logprobs)
    sampled = num_choices * body.max_tokens * per_token
    if not body.echo:
        return prompt_tokens + sampled
    # Each sample begins with its prompt.
    return prompt_tokens * body.n * per_token + sampled


def _check_total(total: int, limits: ServerLimits) -> None:
    if total > limits.tokens:
        raise RequestError(
            "the prompts plus max_tokens of all choices must be at most "
            f"{limits.tokens} tokens, got {total}. "
            "With echo a prompt counts n times, and with logprobs each entry of a token counts "
            "too. Shorten the prompts, lower max_tokens, n or logprobs, or continue a session "
            "over several requests.",
            param="prompt",
            code="too_many_tokens",
        )


def _ids(prompt: str | list[int], vocabulary: Vocabulary) -> np.ndarray:
    try:
        return encode.token_ids(vocabulary, prompt).astype(np.int32)
    except ValueError as error:
        # An id or a character that the vocabulary lacks, or half of a surrogate pair, which JSON
        # may hold.
        raise RequestError(str(error), param="prompt") from None
