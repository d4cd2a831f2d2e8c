# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#     provenance: []
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: accelerator,colab
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/TXL_JAX_OWNER/txl_jax/blob/main/launch/notebooks/own_model.ipynb)
#
# # Attention and memory in your own Flax model
#
# The parts of Transformer-XL can be used alone: `txl_jax.attention` (relative positions, flash attention where the device has
# it), `Memory`, and `scan_segments`, which carries a memory from segment to segment. This notebook builds a Flax module of
# its own from them, checks that it is causal, and trains it on a toy task that needs the memory.
#
# It runs on a TPU, a GPU or a CPU, in Colab and in any other Jupyter. Run the cells from top to bottom.

# %% tags=["parameters"]
# @title Parameters
# @markdown Each token repeats the one `DELAY` tokens before it, which lies in the segment only for the last positions of one.
DELAY = 12  # @param {type:"integer"}
SEGMENT = 16  # @param {type:"integer"}
MEMORY = 32  # @param {type:"integer"}
# @markdown Updates of each of the two models, with and without memory.
STEPS = 200  # @param {type:"integer"}
# @markdown Folder of the figure and of the result. With `DRIVE` it is in Google Drive (only in Colab).
FOLDER = "runs/own_model"  # @param {type:"string"}
DRIVE = False  # @param {type:"boolean"}
# @markdown Show TensorBoard, if it is installed.
TENSORBOARD = True  # @param {type:"boolean"}
# @markdown What Colab installs: a git address, or an archive of the repository that you have uploaded.
PACKAGE = "git+https://github.com/TXL_JAX_OWNER/txl_jax"  # @param {type:"string"}

# %% [markdown]
# ## Installation
#
# Only in Colab; elsewhere the notebook uses what is installed. The installed jax, which fits the device, stays as it is.

# %% tags=["installation"]
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

if "google.colab" in sys.modules:
    kept = [f"{name}=={version(name)}\n" for name in ("jax", "jaxlib", "flax", "numpy")]
    Path("constraints.txt").write_text("".join(kept))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint=constraints.txt"]
    subprocess.run([*pip, PACKAGE], check=True)

# %% [markdown]
# ## Device
#
# The rows of a batch are divided over all devices, one or eight. Matrix products are in bfloat16 on a TPU or a GPU, and in
# float32 on a CPU.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tensorboardX import SummaryWriter

import txl_jax
from launch import notebook
from txl_jax import memory as memories
from txl_jax import sharding

folder = notebook.open_folder(FOLDER, drive=DRIVE)
print(notebook.device_line())
mesh = sharding.make_mesh(txl_jax.MeshConfig())  # All devices, as data-parallel replicas.
dtype = jnp.dtype(notebook.matmul_dtype())

# %% [markdown]
# ## The task
#
# A stream of random symbols in which each one repeats the symbol `DELAY` tokens earlier, with a probability of 0.9. Otherwise
# it is drawn anew. Who sees `DELAY` tokens back needs 0.82 bits per token; who does not needs $\log_2 16 = 4$ bits.

# %%
SYMBOLS, REPEATED = 16, 0.9


def stream(length, seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(SYMBOLS, size=length, dtype=np.int32)
    repeats = random.random(length) < REPEATED
    for t in np.flatnonzero(repeats[DELAY:]) + DELAY:
        tokens[t] = tokens[t - DELAY]
    return tokens


right = REPEATED + (1 - REPEATED) / SYMBOLS  # A symbol that is drawn anew may be the same one.
wrong = (1 - REPEATED) / SYMBOLS
best = -(right * np.log2(right) + (SYMBOLS - 1) * wrong * np.log2(wrong))
chance = np.log2(SYMBOLS)
print("first symbols:", *stream(2 * DELAY, seed=0))
print(f"best possible {best:.2f} bits, without the past {chance:.2f} bits")

# %% [markdown]
# ## The model
#
# A block of attention and a feed-forward part. Its keys are `[memory; segment]`, with the memory first. What a query sees is
# described by a `Visibility`: all filled slots of the memory, and its own segment up to itself. Relative positions come as
# sinusoids of the distances, projected to each head; u and v are the biases of the paper.


# %%
class Block(nn.Module):
    """Attention over memory and segment, and a feed-forward part, each of normalized inputs with a residual."""

    n_head: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, segment, memory, valid):  # [B, L, D], [B, M, D], int32 [B] -> [B, L, D]
        width = segment.shape[-1]
        heads = self.n_head, width // self.n_head
        visibility = txl_jax.Visibility(valid, segment_len=segment.shape[1], mem_len=memory.shape[1])

        def project(states, name):  # [.., T, D] -> [.., H, T, E]
            dense = nn.DenseGeneral(heads, use_bias=False, dtype=self.dtype, name=name)
            return dense(states).swapaxes(-3, -2)

        def bias(name):  # [H, E]
            return self.param(name, nn.initializers.zeros, heads).astype(self.dtype)

        states = nn.LayerNorm(dtype=self.dtype)(jnp.concatenate([memory, segment], axis=1))
        codes = txl_jax.sinusoids(visibility.distances(), width, self.dtype)
        attended = txl_jax.attention(
            project(states[:, memory.shape[1] :], "query"),
            project(states, "key"),
            project(states, "value"),
            project(codes, "position"),
            content_bias=bias("u"),
            position_bias=bias("v"),
            visibility=visibility,
        )
        segment += nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype, name="output")(attended.swapaxes(1, 2))
        inner = nn.gelu(nn.Dense(2 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(segment)))
        return segment + nn.Dense(width, dtype=self.dtype)(inner)


class TinyModel(nn.Module):
    """Embedding, blocks and logits; returns the memory for the next segment beside the logits."""

    n_layer: int = 2
    d_model: int = 64
    n_head: int = 4
    dtype: jnp.dtype = dtype

    @nn.compact
    def __call__(self, tokens, memory):  # int [B, L] -> [B, L, V]
        x = nn.Embed(SYMBOLS, self.d_model, dtype=self.dtype)(tokens)
        layer_inputs = []
        for layer in range(self.n_layer):
            layer_inputs.append(x)
            x = Block(self.n_head, self.dtype)(x, memory.hidden[layer], memory.valid)
        logits = nn.Dense(SYMBOLS, dtype=jnp.float32)(nn.LayerNorm()(x))
        return logits, memories.update(memory, jnp.stack(layer_inputs))  # No gradient flows into the memory.

    def init_memory(self, batch_size, mem_len):
        """Returns an empty memory; with `mem_len` 0 it stays empty."""
        sizes = {"n_layer": self.n_layer, "batch_size": batch_size, "mem_len": mem_len, "d_model": self.d_model}
        return memories.init(**sizes, dtype=self.dtype, start=txl_jax.MemoryStart.MASKED)


model = TinyModel()
one_segment = jnp.zeros((1, SEGMENT), jnp.int32)
params = jax.jit(model.init)(jax.random.key(0), one_segment, model.init_memory(1, MEMORY))["params"]
print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")

# %% [markdown]
# ## Is it causal?
#
# A change of one token must change no logits before it, but those after it, in the next segment too: there only the memory
# can carry it.


# %%
@jax.jit
def two_segments(tokens):
    empty = model.init_memory(1, MEMORY)
    first, after = model.apply({"params": params}, tokens[:, :SEGMENT], empty)
    second, _ = model.apply({"params": params}, tokens[:, SEGMENT:], after)
    return jnp.concatenate([first, second], axis=1)


place = SEGMENT // 2
tokens = jnp.asarray(stream(2 * SEGMENT, seed=1))[None]
changed = tokens.at[0, place].set((tokens[0, place] + 1) % SYMBOLS)
difference = np.abs(two_segments(tokens) - two_segments(changed)).max(axis=(0, 2))
print(f"largest change before the token: {difference[:place].max():.1e}")
print(f"largest change in the next segment: {difference[SEGMENT:].max():.1e}")
assert difference[:place].max() == 0 < difference[SEGMENT:].max()

# %% [markdown]
# ## Training
#
# `training_segments` cuts the stream into the rows of a batch and the rows into segments. `scan_segments` runs ten updates in
# a single call of the device, with the memory in its carry. Both models have the same weights at the start and read the same
# tokens; only the length of the memory differs.

# %%
from IPython.display import Image, display

from txl_jax.paper import plots

BATCH, CALL = 32, 10  # Rows; updates per call.
train_tokens = stream(BATCH * SEGMENT * 500, seed=2)
test_tokens = stream(BATCH * SEGMENT * 40, seed=3)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
rows = sharding.named_sharding(mesh, None, sharding.axes.BATCH)  # Of arrays [S, B, ..] and [N, B, ..].
row = sharding.named_sharding(mesh, sharding.axes.BATCH)


def empty_memory(mem_len):
    return jax.device_put(model.init_memory(BATCH, mem_len), memories.Memory(hidden=rows, valid=row))


def nats_of(params, memory, segment):  # [B, L], and the memory after the segment
    logits, memory = model.apply({"params": params}, segment.inputs, memory)
    return optax.softmax_cross_entropy_with_integer_labels(logits, segment.targets), memory


def update(state, memory, segment):
    def loss(params):
        nats, after = nats_of(params, memory, segment)
        return nats.mean(), after

    (nats, memory), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    updates, adam = optimizer.update(grads, state["adam"])
    return {"params": optax.apply_updates(state["params"], updates), "adam": adam}, memory, nats


def score(params, memory, segment):
    nats, memory = nats_of(params, memory, segment)
    return params, memory, nats


def over_segments(body):
    return jax.jit(lambda *inputs: txl_jax.scan_segments(body, *inputs, reset=txl_jax.reset_memory))


def segments_of(reader, first, count):
    return jax.device_put(reader.segments(first, count), rows)


def train(mem_len, name):
    reader = txl_jax.training_segments(train_tokens, batch_size=BATCH, segment_len=SEGMENT)
    state, memory = {"params": params, "adam": optimizer.init(params)}, empty_memory(mem_len)
    run, scalars = over_segments(update), SummaryWriter(str(folder / name.replace(" ", "_")))
    for step in range(0, STEPS, CALL):
        state, memory, nats = run(state, memory, segments_of(reader, step, CALL))
        bits = curves[name][step + CALL] = float(nats.mean() / np.log(2))
        scalars.add_scalar("train/bits_per_token", bits, step + CALL)
        if (step + CALL) % 50 == 0 or step + CALL >= STEPS:
            draw()
    scalars.close()
    return state["params"]


def test_bits(params, mem_len):
    """Returns bits per token [L], by the position in the segment."""
    reader = txl_jax.training_segments(test_tokens, batch_size=BATCH, segment_len=SEGMENT)
    segments = segments_of(reader, 0, reader.n_segments)
    *_, nats = over_segments(score)(params, empty_memory(mem_len), segments)
    return np.asarray(nats[4:]).mean(axis=(0, 1)) / np.log(2)  # The memory is full after four segments.


# %%
with_memory, without = f"memory of {MEMORY}", "no memory"
curves = {with_memory: {}, without: {}}
picture = folder / "curves.png"
shown = None


def draw():
    """Draws the curves so far; the picture below the cell is updated."""
    global shown
    last = max(max(curve, default=1) for curve in curves.values())
    levels = {f"{name} {bits:.2f}": {1: bits, last: bits} for name, bits in (("chance", chance), ("best", best))}
    drawn = {name: curve for name, curve in curves.items() if curve} | levels
    plots.curves(drawn, picture, title="A token that repeats", xlabel="updates", ylabel="bits per token")
    if shown is None:
        shown = display(Image(picture), display_id=True)
    else:
        shown.update(Image(picture))


if TENSORBOARD:
    notebook.show_tensorboard(folder)
with sharding.use_mesh(mesh):
    trained = {name: train(mem_len, name) for name, mem_len in ((with_memory, MEMORY), (without, 0))}
    tested = {with_memory: test_bits(trained[with_memory], MEMORY), without: test_bits(trained[without], 0)}

# %% [markdown]
# ## What the memory is worth
#
# On another stream of the same kind. Both models find the token to repeat where it lies in the segment, from position `DELAY`
# on. At the positions before, it lies in the segment before: only the model with a memory finds it.

# %%
for name, bits in tested.items():
    print(f"{name:<16}{bits.mean():.2f} bits per token")

by_position = {name: dict(enumerate(bits.tolist(), start=1)) for name, bits in tested.items()}
picture = folder / "positions.png"
labels = {"title": "Test, by the position in the segment", "xlabel": "position", "ylabel": "bits per token"}
plots.curves(by_position, picture, **labels)
display(Image(picture))

# %% [markdown]
# ## Download
#
# The parameters of the model with memory, by name, as an archive that `numpy.load` reads.

# %%
from flax.traverse_util import flatten_dict

result = folder / "own_model.npz"
np.savez(result, **flatten_dict(jax.device_get(trained[with_memory]), sep="/"))
archive = notebook.download(result)

# %% [markdown]
# ## Next steps
#
# - Attention for padded rows on both sides, as in speech encoders, windows, dropout and kernels: the page *Attention* of the
#   documentation.
# - Try `DELAY = 40`: now even a memory of 32 tokens is too short. Or is it? The second layer reads a memory whose states have
#   read a memory themselves; does it learn to use that?
