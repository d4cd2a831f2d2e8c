"""Both ends of the vocabulary: the adaptive input embedding and the adaptive softmax."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig
from txl_jax.modules.dropout import is_on
from txl_jax.ops import adaptive_softmax
from txl_jax.ops.adaptive_softmax import Cluster, TailEntries
from txl_jax.sharding import axes


def cluster_sizes(config: ModelConfig, vocab_size: int) -> list[int]:
    """Returns the number of tokens in the head and in each tail."""
    bounds = [0, *config.cutoffs, vocab_size]
    return [end - start for start, end in itertools.pairwise(bounds)]


class Embedding(nn.Module):
    """Embedding with a table and a projection per cluster.

    With div_val 1 all clusters share one table.

    Parameters: `table_c` [rows, width of c] and, where a projection exists, `projection_c` [width,
    D]. A projection exists for every cluster if div_val > 1, even where its width is D, and for the
    single table if d_embed is not d_model. Both are public: a tied softmax uses them.
    """

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        """Creates the parameters."""
        c = self.config
        sizes = cluster_sizes(c, self.vocab_size) if c.div_val > 1 else [self.vocab_size]
        self.tables = [_table(self, i, size) for i, size in enumerate(sizes)]
        self.projections = [
            _projection(self, i) if c.has_projections else None for i in range(len(sizes))
        ]

    def __call__(self, tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Embeds tokens: int [B, L] -> [B, L, D] in the compute type, scaled by sqrt(D).

        With `model.dropout.embedding` the vectors of whole words are zeroed, the same words in all
        rows (Gal and Ghahramani, 2016), but not at the first position of a segment. If a zeroed
        word were all that a row has read, all activations would be 0 as long as the biases are. The
        derivative of a layer norm there is 316, and with two norms in each of 16 layers gradients
        overflow.
        """
        c = self.config
        of_clusters = zip(self.tables, self.projections, strict=True)
        clusters = [Cluster(table, None, projection) for table, projection in of_clusters]
        cutoffs = c.cutoffs if len(clusters) > 1 else ()
        vectors = adaptive_softmax.embed(tokens, clusters, cutoffs, dtype=jnp.dtype(c.dtype))
        embedded = vectors * c.d_model**0.5
        rate = c.dropout.embedding
        if deterministic or not is_on(rate):
            return embedded
        kept = jax.random.bernoulli(self.make_rng("dropout"), 1 - rate, (self.vocab_size,))
        begins = (jnp.arange(tokens.shape[-1]) == 0)[None]
        others = jnp.where(
            kept[tokens][..., None], embedded / jnp.asarray(1 - rate, embedded.dtype), 0
        )
        return jnp.where(begins[..., None], embedded, others)


def _table(module: "Embedding | Softmax", cluster: int, size: int) -> jax.Array:
    """Creates a cluster's table, [size, width]."""
    c = module.config
    init = axes.normal(c.init_std, axes.VOCAB, axes.CLUSTER_EMBED)
    return module.param(f"table_{cluster}", init, (size, c.cluster_width(cluster)))


def _projection(module: "Embedding | Softmax", cluster: int) -> jax.Array:
    """Creates a cluster's projection, [width, D]."""
    c = module.config
    init = axes.normal(c.projection_init_std, axes.CLUSTER_EMBED, axes.EMBED)
    return module.param(f"projection_{cluster}", init, (c.cluster_width(cluster), c.d_model))


class Softmax(nn.Module):
    """Adaptive softmax, with the parameters that are not tied to the embedding.

    Parameters: `bias` [V]; `table_c` as the embedding's unless `tie_weight`; `projection_c` [width,
    D] for each cluster, laid out as the embedding's and applied transposed, unless `tie_projs[c]`,
    and only where div_val > 1 or d_embed is not d_model; with cutoffs `tail_table` [C - 1, d_embed]
    and `tail_bias` [C - 1].
    """

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        """Creates the parameters."""
        c = self.config
        self.sizes = cluster_sizes(c, self.vocab_size)
        self.bias = self.param("bias", axes.zeros(axes.VOCAB), (self.vocab_size,))
        table_sizes = self.sizes if c.div_val > 1 else [self.vocab_size]
        self.own_tables = [
            None if c.tie_weight else _table(self, i, size) for i, size in enumerate(table_sizes)
        ]
        own = [c.has_projections and not tied for tied in c.tie_projs or (False,) * c.n_cluster]
        self.own_projections = [
            _projection(self, i) if is_own else None for i, is_own in enumerate(own)
        ]
        if c.cutoffs:
            n_tail = len(c.cutoffs)
            tail_table = axes.normal(c.init_std, axes.CLUSTERS, axes.CLUSTER_EMBED)
            self.tail_table = self.param("tail_table", tail_table, (n_tail, c.embed_width))
            self.tail_bias = self.param("tail_bias", axes.zeros(axes.CLUSTERS), (n_tail,))

    def nll(self, hidden: jax.Array, targets: jax.Array, embedding: Embedding) -> jax.Array:
        """Computes each target's loss in nats, [B, L]."""
        clusters, tails = self._weights(embedding)
        return adaptive_softmax.negative_log_likelihood(
            hidden, targets, clusters, tails, self.config.cutoffs
        )

    def log_probabilities(self, hidden: jax.Array, embedding: Embedding) -> jax.Array:
        """Computes the log probabilities (logprobs) of all tokens, [B, L, V]."""
        clusters, tails = self._weights(embedding)
        return adaptive_softmax.log_probabilities(hidden, clusters, tails)

    def clusters(self, embedding: Embedding) -> list[Cluster]:
        """Returns the clusters' weights in the compute dtype.

        The head's weights end with the tails' entries.
        """
        clusters, tails = self._weights(embedding)
        return [adaptive_softmax.with_tails(clusters[0], tails), *clusters[1:]]

    def _weights(self, embedding: Embedding) -> tuple[list[Cluster], TailEntries | None]:
        """Returns the clusters' weights in the compute type, tied ones taken from the embedding."""
        c, pairs = self.config, zip(self.own_tables, embedding.tables, strict=True)
        tables = [theirs if own is None else own for own, theirs in pairs]
        clusters, start = [], 0
        for i, size in enumerate(self.sizes):
            table = tables[i] if c.div_val > 1 else tables[0][start : start + size]
            projection = None
            if c.has_projections:
                own, theirs = (
                    self.own_projections[i],
                    embedding.projections[i if c.div_val > 1 else 0],
                )
                projection = jnp.asarray(theirs if own is None else own, c.dtype)
            clusters.append(
                Cluster(table.astype(c.dtype), self.bias[start : start + size], projection)
            )
            start += size
        return clusters, TailEntries(
            self.tail_table.astype(c.dtype), self.tail_bias
        ) if c.cutoffs else None
