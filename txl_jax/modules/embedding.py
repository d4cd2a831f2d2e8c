"""The adaptive input embedding."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig
from txl_jax.modules.dropout import DropoutRates, is_on
from txl_jax.ops import adaptive_softmax
from txl_jax.sharding import axes


def cluster_sizes(config: ModelConfig, vocab_size: int) -> list[int]:
    """Returns the number of tokens in the head and in each tail."""
    bounds = [0, *config.cutoffs, vocab_size]
    return [end - start for start, end in itertools.pairwise(bounds)]


class Embedding(nn.Module):
    """Embedding with a table and a projection per cluster; with div_val 1 all clusters share one table.

    Parameters: `table_c` [rows, width of c] and, where a projection exists, `projection_c` [width, D]. A
    projection exists for every cluster if div_val > 1, even where its width is D, and for the single
    table if d_embed is not d_model. Both are public: a tied softmax uses them.
    """

    config: ModelConfig
    vocab_size: int
    rates: DropoutRates | None = None  # None: those of the config.

    def setup(self) -> None:
        """Creates the parameters."""
        c = self.config
        sizes = cluster_sizes(c, self.vocab_size) if c.div_val > 1 else [self.vocab_size]
        widths = [c.cluster_width(i) for i in range(len(sizes))]
        table = axes.normal(c.init_std, axes.VOCAB, axes.CLUSTER_EMBED)
        self.tables = [
            self.param(f"table_{i}", table, (size, width))
            for i, (size, width) in enumerate(zip(sizes, widths, strict=True))
        ]
        projection = axes.normal(c.projection_init_std, axes.CLUSTER_EMBED, axes.EMBED)
        self.projections = [
            self.param(f"projection_{i}", projection, (width, c.d_model)) if c.has_projections else None
            for i, width in enumerate(widths)
        ]

    def __call__(self, tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Embeds tokens: int [B, L] -> [B, L, D] in the compute type, scaled by sqrt(D).

        With `model.dropout.embedding` the vectors of whole words are zeroed, the same words in all rows (Gal and
        Ghahramani, 2016), but not at the first position of a segment. If a zeroed word were all that a row has read,
        all activations would be 0 as long as the biases are; the derivative of a layer norm there is 316, and with
        two norms in each of 16 layers gradients overflow.
        """
        c = self.config
        clusters = [
            adaptive_softmax.Cluster(table, None, projection)
            for table, projection in zip(self.tables, self.projections, strict=True)
        ]
        cutoffs = c.cutoffs if len(clusters) > 1 else ()
        vectors = adaptive_softmax.embed(tokens, clusters, cutoffs, dtype=jnp.dtype(c.dtype))
        embedded = vectors * c.d_model**0.5
        rate = (self.rates or DropoutRates.of(c.dropout)).embedding
        if deterministic or not is_on(rate):
            return embedded
        kept = jax.random.bernoulli(self.make_rng("dropout"), 1 - rate, (self.vocab_size,))
        begins = (jnp.arange(tokens.shape[-1]) == 0)[None]
        others = jnp.where(kept[tokens][..., None], embedded / jnp.asarray(1 - rate, embedded.dtype), 0)
        return jnp.where(begins[..., None], embedded, others)
