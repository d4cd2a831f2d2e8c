"""Transformer-XL: embedding, N layers that attend to the memory, softmax (Dai et al., 2019).

    >>> config = ModelConfig(n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=16)
    >>> model = TransformerXL(config, vocab_size=10)
    >>> tokens = jnp.zeros((3, 5), jnp.int32)
    >>> memory = model.init_memory(batch_size=3, mem_len=4)
    >>> variables = model.init(jax.random.key(0), tokens, memory)
    >>> hidden, memory = model.apply(variables, tokens, memory)
    >>> nll = model.apply(variables, hidden, tokens, method=model.nll)
    >>> hidden.shape, nll.shape
    ((3, 5, 8), (3, 5))

Parameters do not depend on lengths: L is `tokens.shape[1]`, M is the memory's length, and both may
change between calls. Inference computes the same with prepared parameters and a KV cache:
`txl_jax.inference.forward`.

Letters: B batch size, L segment length, M memory length, N layers, D model size, V vocabulary size.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import MemoryStart, ModelConfig, NormPlace
from txl_jax.errors import UserError
from txl_jax.memory import Memory
from txl_jax.modules.attention import LayerContext, sow_if_asked
from txl_jax.modules.block import Stack, layer_norm
from txl_jax.modules.dropout import dropout
from txl_jax.modules.embedding import Embedding, Softmax
from txl_jax.modules.positions import encoding_of
from txl_jax.ops import adaptive_softmax
from txl_jax.ops.attention import AttentionPaths, Implementation, Visibility


class TransformerXL(nn.Module):
    """The language model.

    With M = 0 and absolute positions this is a vanilla Transformer. Al-Rfou et al. add learned
    positions in each layer.
    """

    config: ModelConfig
    vocab_size: int
    # The token that ends a document and resets the memory, or None if documents are not separated.
    end_token: int | None = None
    # Implementations of attention, or None if each call chooses by `config.attention`.
    attention: AttentionPaths[Implementation | str] | None = None

    def setup(self) -> None:
        """Creates the submodules."""
        c = self.config
        self.embedding = Embedding(c, self.vocab_size)
        self.stack = Stack(c)
        if c.layer_norm is NormPlace.PRE and c.compat.final_norm:
            self.final_norm = layer_norm("final_norm", c)
        self.softmax = Softmax(c, self.vocab_size)
        self.drop_input = dropout(c, c.dropout.input_rate)
        self.drop_output = dropout(c, c.dropout.output_rate)

    @property
    def implementations(self) -> AttentionPaths[Implementation | str]:
        """The implementations of attention, chosen or to be chosen."""
        if self.attention is not None:
            return self.attention
        path = str(self.config.attention)
        return AttentionPaths(training=path, cached=path)

    def __call__(
        self,
        tokens: jax.Array,
        memory: Memory,
        *,
        clamp_len: int | None = None,
        same_length: bool = False,
        deterministic: bool = True,
        lengths: jax.Array | None = None,
        ended: jax.Array | None = None,
    ) -> tuple[jax.Array, Memory]:
        """Computes a segment's hidden states [B, L, D] and the memory after it.

        The hidden states are the last layer's outputs. The memory is advanced by L positions, or
        by `lengths`.

        Args:
          tokens: int [B, L], below V. As usual in JAX, larger ids are clipped, not rejected. You
            can also pass embeddings [B, L, D] as floats (`embed_tokens`). `init` with floats
            creates only the layers, without embedding and softmax.
          memory: The memory before the segment, from `init_memory` or the previous call.
          clamp_len: Distances above this share one encoding. None disables clamping.
          same_length: Whether every query attends to the same number of keys, M (or M + 1, see
            `model.compat`).
          deterministic: Whether dropout is off. Dropout needs an rng named "dropout".
          lengths: int [B], the number of tokens in each row, or None for L in each. The rest of a
            row is padding, of any ids: it does not enter the memory, and no token attends to it.
            Its hidden states are meaningless, so its targets must not count (-1 in `nll`).
          ended: bool [B, L], the positions that end a document or an episode, or None to find them
            by `end_token`. Later positions, and the next segment, do not attend to it or to
            anything before it. Embeddings have no end token, so they need this.

        Raises:
          UserError: If tokens or embeddings have another shape, the memory has another number of
            layers or rows, lengths are not integers [B], or `ended` is not bool [B, L] or the
            memory starts with zeros, which an end within the segment cannot bring back.
        """
        memory.check(tokens, n_layer=self.config.n_layer, d_model=self.config.d_model)
        batch_size, segment_len = tokens.shape[:2]
        lengths = memory_lib.token_counts(lengths, batch_size=batch_size, segment_len=segment_len)
        mem_len = memory.mem_len

        # The keys that each query attends to. Without same_length the window is None (no limit).
        window = self.config.compat.window(mem_len, same_length=same_length)
        # None unless data.reset_at or `ended` separates documents.
        if ended is None:
            documents = memory_lib.documents(tokens, self.end_token, lengths)
        else:
            is_end = _checked_ends(ended, tokens, memory)
            documents = memory_lib.documents_by_ends(is_end, lengths)
        document_start = None if documents is None else documents.start
        visibility = Visibility(
            valid=memory.valid,
            segment_len=segment_len,
            mem_len=mem_len,
            window=window,
            document_start=document_start,
        )

        # The input dropout samples two masks: first for the codes, then for the embeddings.
        drop = functools.partial(self.drop_input, deterministic=deterministic)
        n_keys = mem_len + segment_len
        # `model.encoding` determines the encodings: for relative positions, sinusoids [K, D].
        encoding = encoding_of(self.config)
        codes = encoding.shared_codes(n_keys, clamp_len=clamp_len, drop=drop)
        context = LayerContext(
            codes,
            visibility,
            implementation=self.implementations.training,
            deterministic=deterministic,
        )
        embedded = self.embed(tokens, clamp_len=clamp_len, deterministic=deterministic)
        hidden, layer_inputs = self.stack(drop(embedded), memory.hidden, context)
        hidden = self.finish(hidden)
        # For callers of `apply` with mutable=["activations"], such as the loss with its penalties.
        sow_if_asked(self, "activations", "last", hidden)
        hidden = self.drop_output(hidden, deterministic=deterministic)

        if self.is_initializing() and not _are_embeddings(tokens):
            self.nll(hidden, tokens)  # Creates the softmax's parameters.

        memory = memory_lib.update(memory, layer_inputs, lengths)
        if documents is not None:
            # The next segment attends only to slots of the last document.
            memory = memory.replace(valid=documents.valid(memory.valid, lengths))
        return hidden, memory

    def embed(
        self, tokens: jax.Array, *, clamp_len: int | None, deterministic: bool = True
    ) -> jax.Array:
        """Computes the input of the first layer before dropout, [B, L, D].

        `tokens` is int [B, L], or embeddings [B, L, D].
        """
        if _are_embeddings(tokens):
            embedded = tokens.astype(self.config.dtype)
        else:
            embedded = self.embed_tokens(tokens, deterministic=deterministic)
        # Only absolute sinusoids are added here. Other encodings return the embeddings unchanged.
        return encoding_of(self.config).add_to_embedding(embedded, clamp_len=clamp_len)

    def embed_tokens(self, tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Computes the embeddings of tokens, without positions: int [B, L] -> [B, L, D].

        The embeddings are multiplied by sqrt(D).
        """
        return self.embedding(tokens, deterministic=deterministic)

    def finish(self, hidden: jax.Array) -> jax.Array:
        """Computes the softmax's input from the last layer's outputs [B, L, D].

        Dropout is not applied.
        """
        if self.config.layer_norm is NormPlace.PRE and self.config.compat.final_norm:
            return self.final_norm(hidden)
        return hidden

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Computes each target's loss in nats: [B, L, D] and int [B, L] -> [B, L].

        Negative targets are ignored: their loss is 0. For a mean, divide the sum by the number of
        other targets. A target of V or more has the loss nan.
        """
        return self.softmax.nll(hidden, targets, self.embedding)

    def log_probabilities(self, hidden: jax.Array) -> jax.Array:
        """Computes log probabilities of all tokens: [B, L, D] -> [B, L, V]."""
        return self.softmax.log_probabilities(hidden, self.embedding)

    def clusters(self) -> list[adaptive_softmax.Cluster]:
        """Returns the weights of the softmax, in the layout of `ops.adaptive_softmax`."""
        return self.softmax.clusters(self.embedding)

    def init_memory(self, *, batch_size: int, mem_len: int) -> Memory:
        """Returns the memory before the first segment, in the compute dtype."""
        return memory_lib.init(
            n_layer=self.config.n_layer,
            batch_size=batch_size,
            mem_len=mem_len,
            d_model=self.config.d_model,
            dtype=jnp.dtype(self.config.dtype),
            start=self.config.compat.memory_start,
        )


def _checked_ends(ended: jax.Array, tokens: jax.Array, memory: Memory) -> jax.Array:
    """Returns `ended` as an array.

    Raises:
      UserError: If it is not bool [B, L], or the memory does not start masked: the keys of a
        document that has ended are masked, so the next one cannot begin with zeros.
    """
    if memory.start is not MemoryStart.MASKED:
        raise UserError(
            f"ended must be None for a memory that starts with {memory.start}, got an array. Call "
            "reset_memory between segments, or set model.compat.memory_start to masked"
        )
    ended = jnp.asarray(ended)
    if ended.shape != tokens.shape[:2] or ended.dtype != jnp.bool_:
        raise UserError(
            f"ended must be bool {list(tokens.shape[:2])}, one per position, got {ended.dtype} of "
            f"shape {ended.shape}"
        )
    return ended


def _are_embeddings(tokens: jax.Array) -> bool:
    """Returns whether the inputs are vectors instead of token ids."""
    return bool(jnp.issubdtype(tokens.dtype, jnp.floating))
