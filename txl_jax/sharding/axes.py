"""Logical names of array axes.

Parameters, memory, activations and batches are labelled with these; `txl_jax.sharding` holds the one table that maps
them to the axes of a device mesh.
"""

BATCH = "batch"  # Rows of text.
LENGTH = "length"  # Positions of a segment or of the memory.
LAYERS = "layers"  # Stacked layers of `nn.scan`.
EMBED = "embed"  # D, the residual stream.
CLUSTER_EMBED = "cluster_embed"  # Width of a cluster's embedding, before its projection.
HEADS = "heads"  # H.
HEAD_DIM = "head_dim"  # E.
INNER = "inner"  # F.
VOCAB = "vocab"  # Rows of an embedding table or of its bias.
CLUSTERS = "clusters"  # Tail clusters in the head of the adaptive softmax.
POSITIONS = "positions"  # Distances of a learned table.
NORM = "norm"  # Scale and bias of a layer norm.
