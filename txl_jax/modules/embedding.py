"""Both ends of the vocabulary: the adaptive input embedding and the adaptive softmax.

Letters: B batch size, L segment length, D model size, V vocabulary size, C clusters. Cluster 0 is
the head, the others are the tails.
"""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig
from txl_jax.modules.dropout import is_on, sample_seed
from txl_jax.ops import adaptive_softmax, random_masks, table_layout
from txl_jax.ops.adaptive_softmax import Cluster, TailEntries
from txl_jax.sharding import axes


def cluster_sizes(config: ModelConfig, vocab_size: int) -> list[int]:
    """Returns the number of tokens in the head and in each tail."""
    bounds = [0, *config.cutoffs, vocab_size]
    return [end - start for start, end in itertools.pairwise(bounds)]


class Embedding(nn.Module):
    """Embedding with a table and a projection per cluster.

    With div_val 1 all clusters share one table.

    Cluster c has the parameters `table_c` [rows, width of c] and, where a projection exists,
    `projection_c` [width, D]. A projection exists for every cluster if div_val > 1, even where its
    width is D, and for the single table if d_embed is not d_model. `tables` and `projections` are
    public, because a tied softmax uses them.
    """

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        """Creates the parameters. Their order determines their initial values."""
        table_sizes = _table_sizes(self.config, self.vocab_size)
        self.tables = [_create_table(self, i, size) for i, size in enumerate(table_sizes)]
        projections: list[jax.Array | None] = [None] * len(table_sizes)
        if self.config.has_projections:
            projections = [_create_projection(self, i) for i in range(len(table_sizes))]
        self.projections = projections

    def __call__(self, tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Embeds tokens: int [B, L] -> [B, L, D] in the compute dtype, scaled by sqrt(D).

        Whole words are dropped at the rate `model.dropout.embedding` (`_drop_words`).
        """
        c = self.config
        clusters = [
            Cluster(table=table, bias=None, projection=projection)
            for table, projection in zip(self.tables, self.projections, strict=True)
        ]
        # A table that all clusters share is a single cluster, without cutoffs.
        cutoffs = c.cutoffs if len(clusters) > 1 else ()
        vectors = adaptive_softmax.embed(tokens, clusters, cutoffs, dtype=jnp.dtype(c.dtype))
        embedded = vectors * c.d_model**0.5
        if deterministic or not is_on(c.dropout.embedding):
            return embedded
        return self._drop_words(embedded, tokens)

    def _drop_words(self, embedded: jax.Array, tokens: jax.Array) -> jax.Array:
        """Zeros the vectors of whole words, and scales up the others: [B, L, D] -> [B, L, D].

        They are the same words in all rows (Gal and Ghahramani, 2016), but the first position of a
        segment is not changed. If a row had read only a zeroed word, all activations would be 0 as
        long as the biases are 0. The derivative of a layer norm at 0 is 316, and with two norms in
        each of 16 layers gradients overflow.
        """
        rate = self.config.dropout.embedding
        is_first_L = jnp.arange(tokens.shape[-1]) == 0

        def drop(embedded: jax.Array, seed: jax.Array, tokens: jax.Array) -> jax.Array:
            # The hash of a token id determines its mask, so no mask of V words is needed.
            is_kept_BxL = random_masks.is_kept(seed, rate, tokens)
            return random_masks.scale_kept(embedded, is_kept_BxL[..., None], rate)

        dropped = random_masks.recomputed(drop)(embedded, sample_seed(self), tokens)
        return jnp.where(is_first_L[None, :, None], embedded, dropped)


class Softmax(nn.Module):
    """Adaptive softmax, with the parameters that are not tied to the embedding.

    Its parameters are:

    - `bias` [V].
    - `table_c` like the embedding's, unless `tie_weight`.
    - `projection_c` [width, D] for each cluster c, unless `tie_projs[c]`, and only where
      div_val > 1 or d_embed is not d_model. It is laid out like the embedding's and applied
      transposed.
    - With cutoffs, `tail_table` [C - 1, d_embed] and `tail_bias` [C - 1].
    """

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        """Creates the parameters. Their order determines their initial values."""
        c = self.config
        self.bias = self.param("bias", axes.zeros(axes.VOCAB), (self.vocab_size,))

        if not c.tie_weight:
            table_sizes = _table_sizes(c, self.vocab_size)
            self.untied_tables = [
                _create_table(self, i, size) for i, size in enumerate(table_sizes)
            ]

        # None for each cluster that uses the embedding's projection, or has none.
        untied_projections: list[jax.Array | None] = [None] * c.n_cluster
        if c.has_projections:
            # If the setting is empty, no projection is tied.
            is_tied = c.tie_projs or (False,) * c.n_cluster
            for i in range(c.n_cluster):
                if not is_tied[i]:
                    untied_projections[i] = _create_projection(self, i)
        self.untied_projections = untied_projections

        if c.cutoffs:
            n_tail = len(c.cutoffs)
            tail_init = axes.normal(c.init_std, axes.CLUSTERS, axes.CLUSTER_EMBED)
            self.tail_table = self.param("tail_table", tail_init, (n_tail, c.embed_width))
            self.tail_bias = self.param("tail_bias", axes.zeros(axes.CLUSTERS), (n_tail,))

    def nll(self, hidden: jax.Array, targets: jax.Array, embedding: Embedding) -> jax.Array:
        """Computes each target's loss in nats: [B, L, D] and int [B, L] -> [B, L]."""
        clusters, tails = self._clusters_and_tails(embedding)
        return adaptive_softmax.negative_log_likelihood(
            hidden, targets, clusters, tails, self.config.cutoffs
        )

    def log_probabilities(self, hidden: jax.Array, embedding: Embedding) -> jax.Array:
        """Computes the log probabilities (logprobs) of all tokens: [B, L, D] -> [B, L, V]."""
        clusters, tails = self._clusters_and_tails(embedding)
        return adaptive_softmax.log_probabilities(hidden, clusters, tails)

    def clusters(self, embedding: Embedding) -> list[Cluster]:
        """Returns the clusters' weights, tables and projections in the compute dtype.

        The head's weights end with the tails' entries.
        """
        clusters, tails = self._clusters_and_tails(embedding)
        return [adaptive_softmax.with_tails(clusters[0], tails), *clusters[1:]]

    def _clusters_and_tails(self, embedding: Embedding) -> tuple[list[Cluster], TailEntries | None]:
        """Returns the clusters' weights, and the head's entries for the tails if there are tails.

        Tied tables and projections are the embedding's. Tables and projections are cast to the
        compute dtype. Biases keep their own, because they are added to logits in at least float32.
        """
        c = self.config
        # The embedding is a submodule of the same model, so its parameters can be read from here.
        tables = embedding.tables if c.tie_weight else self.untied_tables

        clusters = []
        start = 0
        for i, size in enumerate(cluster_sizes(c, self.vocab_size)):
            end = start + size
            # With div_val 1 the clusters are slices of one table.
            table = tables[i] if c.div_val > 1 else tables[0][start:end]
            projection = self._projection_of(i, embedding)
            clusters.append(Cluster(table.astype(c.dtype), self.bias[start:end], projection))
            start = end

        if not c.cutoffs:
            return clusters, None
        return clusters, TailEntries(self.tail_table.astype(c.dtype), self.tail_bias)

    def _projection_of(self, cluster: int, embedding: Embedding) -> jax.Array | None:
        """Returns a cluster's projection [width, D] in the compute dtype, or None without one."""
        c = self.config
        if not c.has_projections:
            return None
        projection = self.untied_projections[cluster]
        if projection is None:
            # With div_val 1 the embedding has a single table, and a single projection.
            number = cluster if c.div_val > 1 else 0
            projection = embedding.projections[number]
        return jnp.asarray(projection, c.dtype)


def _table_sizes(config: ModelConfig, vocab_size: int) -> list[int]:
    """Returns the rows of each table: one table per cluster, or with div_val 1 one for all."""
    if config.div_val > 1:
        return cluster_sizes(config, vocab_size)
    return [vocab_size]


def _create_table(module: Embedding | Softmax, cluster: int, size: int) -> jax.Array:
    """Creates a cluster's table, [size, width]."""
    c = module.config
    init = axes.normal(c.init_std, axes.VOCAB, axes.CLUSTER_EMBED)
    table = module.param(f"table_{cluster}", init, (size, c.cluster_width(cluster)))
    return table_layout.turn_gradient(table)


def _create_projection(module: Embedding | Softmax, cluster: int) -> jax.Array:
    """Creates a cluster's projection, [width, D]."""
    c = module.config
    init = axes.normal(c.projection_init_std, axes.CLUSTER_EMBED, axes.EMBED)
    return module.param(f"projection_{cluster}", init, (c.cluster_width(cluster), c.d_model))
