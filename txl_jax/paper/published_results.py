"""The paper's test scores on whole corpora (Dai et al., 2019, tables 1 to 5), beside which a run is shown."""

from typing import NamedTuple

from txl_jax.config import CorpusName


class PublishedResult(NamedTuple):
    """A score of the paper.

    Attributes:
      corpus: scored whole, in the corpus's usual measure.
      flagfile: the configuration of `experiments/flags` for it.
      layers: of the model.
      parameters: by the paper's count, as it writes it.
      score: of the test text, as printed.
      table: of the paper.
    """

    corpus: CorpusName
    flagfile: str
    layers: int
    parameters: str
    score: str
    table: int


PUBLISHED = (
    PublishedResult(CorpusName.ENWIK8, "enwik8_12l", 12, "41M", "1.06", 2),
    PublishedResult(CorpusName.ENWIK8, "enwik8_18l", 18, "88M", "1.03", 2),
    PublishedResult(CorpusName.ENWIK8, "enwik8_24l", 24, "277M", "0.99", 2),
    PublishedResult(CorpusName.TEXT8, "text8_24l", 24, "277M", "1.08", 3),
    PublishedResult(CorpusName.WIKITEXT103, "wt103_base", 16, "151M", "24.0", 1),
    PublishedResult(CorpusName.WIKITEXT103, "wt103_large", 18, "257M", "18.3", 1),
    PublishedResult(CorpusName.LM1B, "lm1b_base", 20, "0.46B", "23.5", 4),
    PublishedResult(CorpusName.LM1B, "lm1b_large", 24, "0.8B", "21.8", 4),
    PublishedResult(CorpusName.PTB, "ptb", 16, "24M", "54.52", 5),
)


def published_for(corpus: CorpusName) -> list[PublishedResult]:
    """Returns the paper's scores on a corpus, the smallest model first; empty if it has none."""
    return [result for result in PUBLISHED if result.corpus is corpus]
