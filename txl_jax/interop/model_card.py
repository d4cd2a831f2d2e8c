"""The model card of a portable folder: sizes, scores, and how to use the weights."""

from collections.abc import Iterator, Mapping
from typing import Any

from txl_jax.config import ExperimentConfig
from txl_jax.config.tree import format_value
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.metrics import Measure
from txl_jax.version import __version__

_LENGTHS = ("segment_len", "mem_len", "clamp_len", "same_length", "stride")


def make_card(
    config: ExperimentConfig,
    vocabulary: Vocabulary,
    num_parameters: int,
    description: str,
    scores: Mapping[str, Any],
) -> str:
    """Returns the text of README.md, in Markdown.

    Args:
      scores: `best_valid`, `test` and `eval` of results.json; what is missing is left out.
    """
    sections = (
        _head(config, num_parameters, description),
        _sizes(config, vocabulary, num_parameters),
        _score_lines(scores, vocabulary.measure),
        _use(),
    )
    return "\n".join(line for section in sections for line in section)


def _head(config: ExperimentConfig, num_parameters: int, description: str) -> Iterator[str]:
    yield from ("---", "library_name: txl_jax", "pipeline_tag: text-generation", "tags:", "  - transformer-xl")
    yield from ("  - jax", "---", "", "# Transformer-XL", "")
    yield f"A language model of {num_parameters:,} parameters in the format of txl_jax {__version__}: {description}."
    yield ""


def _sizes(config: ExperimentConfig, vocabulary: Vocabulary, num_parameters: int) -> Iterator[str]:
    model, lengths = config.model, config.eval
    rows = {
        "layers": model.n_layer,
        "width": model.d_model,
        "heads x width of a head": f"{model.n_head} x {model.d_head}",
        "inner width": model.d_inner,
        "parameters": f"{num_parameters:,}",
        "tokens": f"{vocabulary.size:,} ({vocabulary.kind})",
        "position encoding": model.encoding,
        "cutoffs of the adaptive softmax": format_value(model.cutoffs) or "none",
        "div_val": model.div_val,
        "evaluation: segment, memory, clamp": f"{lengths.segment_len}, {lengths.mem_len}, "
        f"{format_value(lengths.clamp_len)}",
    }
    yield from ("## Model", "", "| | |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in rows.items())
    yield ""


def _score_lines(scores: Mapping[str, Any], measure: Measure) -> Iterator[str]:
    """Yields a table of the scores; nothing where there are none."""
    rows = [(label, scores[key]) for key, label in (("best_valid", "validation"), ("test", "test")) if scores.get(key)]
    if not rows:
        return
    name = "bpc" if measure is Measure.BPC else "perplexity"
    yield from ("## Scores", "", f"| text | {name} | nats per token | tokens |", "|---|---|---|---|")
    for label, row in rows:
        yield f"| {label} | {_number(row.get(name))} | {_number(row.get('loss'))} | {_count(row.get('tokens'))} |"
    if lengths := scores.get("eval"):
        settings = ", ".join(f"{key} {format_value(lengths[key])}" for key in _LENGTHS if key in lengths)
        yield from ("", f"Scored with {settings}.")
    yield ""


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _count(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else ""


def _use() -> Iterator[str]:
    yield from ("## Use", "", "```python", "import txl_jax", "", 'model = txl_jax.load("PATH_OF_THIS_FOLDER")')
    yield from ('model.score(["A text."])', "```", "", "To Hugging Face's format:", "")
    yield from ("```sh", "python -m experiments.convert --from=PATH_OF_THIS_FOLDER --to=PATH --to_format=huggingface")
    yield from ("```", "")
