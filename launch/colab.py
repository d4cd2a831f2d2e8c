# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Transformer-XL, small enough to watch
#
# This notebook trains a small [Transformer-XL](https://arxiv.org/abs/1901.02860) on text, one byte after the other, and
# then looks at what its memory is worth. It takes whatever it finds: a TPU, a GPU or a CPU.
#
# Run the cells from top to bottom. A run that is interrupted goes on where it stopped when its cell is run again.

# %% [markdown]
# ## What you may want to change

# %% tags=["parameters"]
TEXT = ""  # A file of yours, to learn from; "": the source text of Python's own standard library.
PROMPT = "def "  # What the model goes on from.
WORKDIR = "runs/colab"  # Checkpoints, log and pictures. In Colab a folder of a mounted Drive outlives the machine.
PACKAGE = "txl_jax.zip"  # Only in Colab: the repository, as an archive that you upload, or as git+https://...
SETTINGS = {}  # Any flags of `python -m experiments.quickstart`, as {"train.steps": 5000, "model.n_layer": 6}.

# %% [markdown]
# ## Installing
#
# Only Colab needs this; elsewhere the notebook uses what is installed. Choose a TPU or a GPU first, under *Runtime → Change
# runtime type*: jax comes in a kind for each, and the kind that Colab brings is the one to update.

# %%
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

if "google.colab" in sys.modules:
    from google.colab import files

    if not PACKAGE.startswith("git+") and not Path(PACKAGE).exists():
        files.upload()  # Asks for the archive.
    kinds = {"jax_cuda12_plugin": "jax[cuda12]", "jax_cuda13_plugin": "jax[cuda13]", "libtpu": "jax[tpu]"}
    wanted = [kind for module, kind in kinds.items() if find_spec(module)]
    wanted += [f"txl_jax[plots] @ {PACKAGE if PACKAGE.startswith('git+') else Path(PACKAGE).resolve().as_uri()}"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)

# %% [markdown]
# ## What it runs on
#
# On a CPU the model is that of the quickstart, of 0.7 million parameters. A TPU or a GPU would be bored with it, and gets
# one that is wider, deeper, and sees more text in each step.

# %%
import jax

from experiments import quickstart
from txl_jax.config import tree as config_tree

platform = jax.devices()[0].platform
print(f"{len(jax.devices())} x {jax.devices()[0].device_kind} ({platform})")

larger = {
    "model.n_layer": 6,
    "model.d_model": 512,
    "model.n_head": 8,
    "model.d_head": 64,
    "model.d_inner": 2048,
    "model.init_std": 0.02,
    "optimizer.learning_rate": 5e-4,
    "train.batch_size": 32,
    "train.segment_len": 256,
    "train.mem_len": 256,
    "eval.segment_len": 256,
    "eval.mem_len": 1024,
}
changes = {"generate.prompt": PROMPT}
if platform != "cpu":
    changes |= larger
if TEXT:
    changes |= {"data.corpus": "text", "data.file": str(Path(TEXT).resolve())}
config = config_tree.from_dict(config_tree.to_dict(quickstart.DEFAULTS) | changes | SETTINGS)
config.validate()

# %% [markdown]
# ## The text
#
# The first 90 % are learned from, the next 5 % tell when the model is at its best, and the last 5 % are the test. A token
# is a byte, so the loss reads as bits per byte, and a compressor is a fair opponent.

# %%
from txl_jax.data.corpus import read_corpus
from txl_jax.jobs.workdir import Workdir

workdir = Workdir(Path(WORKDIR).resolve()).create()
corpus = read_corpus(config.data, data_dir="", cache_dir=str(workdir.path / "prepared"))
print(corpus.description)
print(corpus.vocabulary.decode(corpus.train[:400]).decode(errors="replace"))

# %% [markdown]
# ## Segments and memory
#
# A Transformer reads a segment of $L$ tokens at once, and attention costs $L^2$. An ordinary one forgets everything at a
# segment's border: its first token is predicted from nothing.
#
# Transformer-XL keeps the hidden states of the last $M$ positions of **every layer**, and the next segment attends to them
# as well as to itself:
#
# ```
#             memory, M positions      segment, L tokens
#  layer 2   · · · · · · · · · · ·  →  o o o o o o o o
#                     ╲ ╲ ╲ ╲ ╲        │ │ │ │ │ │ │ │
#  layer 1   · · · · · · · · · · ·  →  o o o o o o o o
#                     ╲ ╲ ╲ ╲ ╲        │ │ │ │ │ │ │ │
#  tokens    a b c d e f g h i j k     l m n o p q r s
# ```
#
# No gradient flows into the memory, so a step costs little more than without it. But what a layer remembers was itself
# computed with a memory: with $N$ layers, information can come from $N \cdot M$ positions back.
#
# For this to work, a position must mean the same in every segment. Attention therefore knows only **distances**: the score
# of query $i$ and key $j$ is made of what they hold and of $i - j$.

# %% [markdown]
# ## Training
#
# Text is read in rows, each row segment after segment, so that the memory of a row is always what came just before.
# Stopping the cell (the square button) saves everything; running it again goes on.

# %%
from txl_jax.jobs import train
from txl_jax.runtime.preemption import StopRequest

with StopRequest() as stop:
    outcome = train.run(config, corpus, workdir, stop_requested=lambda: stop)
if not outcome.finished:
    raise SystemExit("Run this cell again to go on; the cells below need a run that has finished.")

# %% [markdown]
# ## What it has learned, and what the memory is worth
#
# The same weights read the test text twice: with the memory, and with none, where each segment starts from nothing. Beside
# them stand two compressors that had the test text alone to learn from.

# %%
rows = quickstart.compare(config, corpus, workdir, with_memory=outcome.results["test"]["bpc"])
for name, bpc in rows.items():
    print(f"{name:<36}{bpc:.3f} bits per byte")

# %%
from IPython.display import Image, display

from txl_jax.paper import plots
from txl_jax.runtime.metrics_log import read_metrics

compressors = {name: bpc for name, bpc in rows.items() if name.startswith(("zlib", "lzma"))}
curve = workdir.path / "learning_curve.png"
plots.learning_curve(read_metrics(workdir.path), curve, title=corpus.name, levels=compressors)
display(Image(curve))

# %% [markdown]
# ## Where it looks
#
# Each line of the first picture is a head, each column a distance: dark means that the head looks there on average. Many
# heads look at the last few bytes; those whose grey reaches to the left use the memory. The second picture is a single
# prediction: the bytes that three far-sighted heads looked at.

# %%
from txl_jax.jobs.workdir import TextInfo
from txl_jax.paper import attention_maps

pictures = workdir.path / "attention"
some_tokens = min(len(corpus.valid), 8 * (config.eval.mem_len + config.eval.segment_len))
attention_maps.run(config, corpus, workdir, trained_on=TextInfo.of(corpus), folder=pictures, n_token=some_tokens)
display(Image(pictures / "average.png"))
display(Image(max(pictures.glob("heads-*.png"))))

# %% [markdown]
# ## What it writes
#
# Token after token, each drawn from the likeliest ones. Here too the memory is what it has written before. Try another
# prompt, or another temperature: low ones repeat themselves, high ones spell badly.

# %%
from txl_jax.jobs import generate

samples = generate.run(config, corpus.vocabulary, workdir)

# %% [markdown]
# ## Where to go from here
#
# Everything above is also a program: `python -m experiments.quickstart` is this notebook without the talk, and
# `python -m experiments.text --flagfile=small --workdir=runs/mine --data.file=book.txt` trains on a file of yours. The
# folder of this run works with all of them:
#
# ```
# python -m experiments.text --mode=generate --workdir=runs/colab --generate.prompt='class '
# python -m experiments.paper.context_length --workdir=runs/colab --context_lengths=64,128,256
# ```
