r"""The scoring job: the negative log-likelihood (logprob) of every token of the validation and test text, as TSV.

    index	token	nats
    1	h	2.3841858
    2	\n	0.017624786

One line per token but the first, in the order of the text, whatever rows and segments it was read in. `token` is its
name in the vocabulary with the vocabulary's own escapes, \\ \n \r; further \t, \uNNNN for any other control character
or line separator, and \xNN for a byte that is no character by itself. `nats` is minus the logprob of the token; it
reads back as exactly the number that was computed. Like all scores it depends on the evaluation lengths and on
`eval.batch_size`: every row of the batch begins with an empty memory.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.tokens.vocabulary import Vocabulary, escape
from txl_jax.jobs.restore import load_to_score
from txl_jax.jobs.score import SPLITS, score_split
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.metrics import Totals
from txl_jax.runtime import distributed
from txl_jax.runtime.files import write_lines

_TOKENS_PER_BLOCK = 1 << 16
# Control characters and line separators: a reader may end a line there, and a terminal may obey them.
_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}]")


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    *,
    trained_on: TextInfo,
    log: Callable[[str], None] = print,
    stop_requested: Callable[[], Any] = lambda: False,
) -> dict[str, Totals]:
    """Scores both texts as `evaluate.run` does; writes scores-valid.tsv and scores-test.tsv, each when it is done.

    Args:
      trained_on: what the run was trained on; another text may be scored if its vocabulary is the same.

    Raises:
      UserError: the text has another vocabulary, or the workdir holds no checkpoint.
      Interrupted: a stop was requested.
    """
    components, _, params = load_to_score(config, corpus, workdir, trained_on=trained_on, log=log)
    totals = {}
    for split in SPLITS:
        tokens = getattr(corpus, split)
        nats = np.zeros(len(tokens), jnp.promote_types(jnp.float32, config.model.dtype))
        totals[split] = score_split(
            components, params, corpus, split, log=log, stop_requested=stop_requested, token_nats=nats
        )
        path = scores_file(workdir, split)
        text = lines(tokens, nats, corpus.vocabulary)
        distributed.broadcast_from_primary(functools.partial(write_lines, path, text))
        log(f"scores    {path}")
    return totals


def scores_file(workdir: Workdir, split: str) -> Path:
    """Returns the path of a text's scores."""
    return workdir.outputs / f"scores-{split}.tsv"


def lines(tokens: np.ndarray, nats: np.ndarray, vocabulary: Vocabulary) -> Iterator[str]:
    """Yields the lines of the file for integer ids [T] and the nats [T] of each; the first token is left out."""
    names = list(map(printable, vocabulary.names()))
    yield "index\ttoken\tnats\n"
    for first in range(1, len(tokens), _TOKENS_PER_BLOCK):
        block = slice(first, first + _TOKENS_PER_BLOCK)
        # numpy writes the fewest digits that give the number back.
        rows = zip(itertools.count(first), tokens[block].tolist(), nats[block].astype(str).tolist(), strict=False)
        yield from (f"{index}\t{names[token]}\t{value}\n" for index, token, value in rows)


def printable(name: bytes) -> str:
    r"""Escapes tabs, line breaks, control characters and invalid UTF-8 in a token's name.

    >>> printable(b"a\tb"), printable("\n\N{LINE SEPARATOR}".encode()), printable("é".encode()[:1])
    ('a\\tb', '\\n\\u2028', '\\xc3')
    """
    text = escape(name.decode(errors="surrogateescape")).replace("\t", "\\t")
    text = _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
