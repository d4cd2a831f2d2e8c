"""Data configs by flat field names, for tests that name only what they change."""

import dataclasses
from typing import Any

from txl_jax.config import CorpusName, DataConfig, TokenizerConfig

_TOKENIZER_FIELDS = {field.name for field in dataclasses.fields(TokenizerConfig)}


def data_config(**fields: Any) -> DataConfig:
    """Builds a config; fields of the tokenizer (`kind`, `line_mark`, ...) go to its group."""
    of_tokenizer = {name: fields.pop(name) for name in _TOKENIZER_FIELDS & fields.keys()}
    return DataConfig(tokenizer=TokenizerConfig(**of_tokenizer), **fields)


def own_text(**fields: Any) -> DataConfig:
    return data_config(corpus=CorpusName.TEXT, **fields)
