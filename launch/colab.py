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
# # A small Transformer-XL
#
# This notebook trains a small [Transformer-XL](https://arxiv.org/abs/1901.02860) on the bytes of a text, and then measures
# how much its memory helps. It runs on a TPU, a GPU or a CPU.
#
# Run the cells from top to bottom. A run that is interrupted resumes when its cell is run again.

# %% [markdown]
# ## Parameters

# %% tags=["parameters"]
TEXT = ""  # Your own text file to train on; "": the source text of Python's standard library.
PROMPT = "def "  # The start of the generated text.
WORKDIR = "runs/colab"  # Checkpoints, logs and figures; in Colab better a folder of a mounted Drive.
PACKAGE = "txl_jax.zip"  # Only in Colab: the repository as an archive that you upload, or git+https://...
SETTINGS: dict[str, object] = {}  # Flags of `experiments.quickstart`, for example {"train.steps": 5000}.

# %% [markdown]
# ## Installation
#
# Only Colab needs this; elsewhere the notebook uses what is installed. First choose a TPU or a GPU under *Runtime → Change
# runtime type*: jax has a package for each kind of device, and the one that Colab has installed is updated.

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
# ## Device and model
#
# On a CPU the model is that of the quickstart, with 0.7 million parameters. A TPU or a GPU gets a wider and deeper one with
# larger batches.

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
changes: dict[str, object] = {"generate.prompt": PROMPT}
if platform != "cpu":
    changes |= larger
if TEXT:
    changes |= {"data.corpus": "text", "data.file": str(Path(TEXT).resolve())}
config = config_tree.from_dict(config_tree.to_dict(quickstart.DEFAULTS) | changes | SETTINGS)
config.validate()

# %% [markdown]
# ## The text
#
# The first 90 % are the training text, the next 5 % the validation text, which selects the best checkpoint, and the last
# 5 % the test text. A token is a byte, so the loss is in bits per byte, and a compressor is a fair baseline.

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
# segment boundary: the first token of a segment is predicted without context.
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
# No gradient flows into the memory, so a step costs little more than without it. But the hidden states in the memory were
# themselves computed with a memory: with $N$ layers, information can come from $N \cdot M$ positions back.
#
# For this to work, positions must be consistent between segments. Attention therefore uses **relative positions**: the
# score of query $i$ and key $j$ depends on their content and on the distance $i - j$.

# %% [markdown]
# ## Training
#
# The text is split into the rows of a batch. Each row is read segment by segment, so that its memory always holds what came
# just before. Stopping the cell (the square button) saves a checkpoint; running it again resumes.

# %%
from txl_jax.jobs import train
from txl_jax.runtime.preemption import StopRequest

with StopRequest() as stop:
    outcome = train.run(config, corpus, workdir, stop_requested=lambda: stop)
if outcome.results is None:
    raise SystemExit("Run this cell again to resume; the cells below need a finished run.")

# %% [markdown]
# ## Results with and without the memory
#
# The same weights score the test text twice: with the memory, and without it, where each segment starts without context.
# The baselines are two compressors, which see the test text only.

# %%
from txl_jax.jobs import compare_compressors

rows = compare_compressors.run(config, corpus, workdir, with_memory=outcome.results["test"]["bpc"])
for name, bpc in rows.items():
    print(f"{name:<36}{bpc:.3f} bits per byte")

# %%
from IPython.display import Image, display

from txl_jax.paper import plots
from txl_jax.runtime.metrics_log import read_metrics

compressors = {name: rows[name] for name in compare_compressors.COMPRESSORS}
curve = workdir.path / "learning_curve.png"
plots.learning_curve(read_metrics(workdir.path), curve, title=corpus.name, levels=compressors)
display(Image(curve))

# %% [markdown]
# ## Attention
#
# In the first figure each line is a head and each column a distance: darker means a higher mean attention weight. Many
# heads attend to the last few bytes; those with weights further to the left use the memory. The second figure shows a single
# prediction: the bytes that three heads with long-range attention attended to.

# %%
from txl_jax.jobs.workdir import TextInfo
from txl_jax.paper import attention_maps

figures = workdir.path / "attention"
some_tokens = min(len(corpus.valid), 8 * (config.eval.mem_len + config.eval.segment_len))
plan = attention_maps.Plan(tokens=some_tokens, out=str(figures))
attention_maps.run(config, corpus, workdir, plan, trained_on=TextInfo.of(corpus))
display(Image(figures / "average.png"))
display(Image(max(figures.glob("heads-*.png"))))

# %% [markdown]
# ## Generated text
#
# Tokens are sampled one by one from the most probable ones. The memory holds what was generated before. Try another prompt
# or another temperature: low temperatures repeat, high ones misspell.

# %%
from txl_jax.jobs import generate

samples = generate.run(config, corpus.vocabulary, workdir)

# %% [markdown]
# ## Next steps
#
# Everything above is also a program: `python -m experiments.quickstart` does the same as this notebook, and
# `python -m experiments.text --flagfile=small --workdir=runs/mine --data.file=book.txt` trains on your own file. The workdir
# of this run works with all programs:
#
# ```
# python -m experiments.text --mode=generate --workdir=runs/colab --generate.prompt='class '
# python -m experiments.paper.context_length --workdir=runs/colab --lengths=64,128,256
# ```
