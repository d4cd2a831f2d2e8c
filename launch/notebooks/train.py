# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/TXL_JAX_OWNER/txl_jax/blob/main/launch/notebooks/train.ipynb)
#
# # Train a small Transformer-XL and look inside
#
# This notebook trains a small [Transformer-XL](https://arxiv.org/abs/1901.02860) on the bytes of a text, measures how much
# its memory helps, draws its attention weights, and generates text. It runs on a TPU, a GPU or a CPU, in Colab and in any
# other Jupyter. Run the cells from top to bottom. A run that is interrupted resumes when its cell is run again.

# %% tags=["parameters"]
# @title Parameters
# @markdown Your own text file to train on; empty: the source text of Python's standard library.
TEXT = ""  # @param {type:"string"}
# @markdown The start of the generated text.
PROMPT = "def "  # @param {type:"string"}
# @markdown Folder of the runs: checkpoints, logs and figures. With `DRIVE` it is in Google Drive (only in Colab), and
# @markdown a run resumes after Colab has taken the machine away.
FOLDER = "runs"  # @param {type:"string"}
DRIVE = False  # @param {type:"boolean"}
# @markdown Show TensorBoard, which follows the run, if it is installed.
TENSORBOARD = True  # @param {type:"boolean"}
# @markdown What Colab clones and installs: an address or a path for `git clone`.
REPOSITORY = "https://github.com/TXL_JAX_OWNER/txl_jax"  # @param {type:"string"}
# @markdown Other flags of `experiments.quickstart`, for example `{"train.steps": 5000}`.
SETTINGS = {}  # @param {type:"raw"}

# %% [markdown]
# ## Installation
#
# In Colab the repository is cloned and installed; the installed jax, which fits the device, stays as it is. Elsewhere the
# notebook uses the clone that it is in, and the installed packages.

# %% tags=["installation"]
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

clone = Path("../..").resolve()
if "google.colab" in sys.modules:
    clone = Path("txl_jax_clone").resolve()
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", "--depth=1", REPOSITORY, str(clone)], check=True)
    kept = [f"{name}=={version(name)}\n" for name in ("jax", "jaxlib", "flax", "numpy")]
    Path("constraints.txt").write_text("".join(kept))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint=constraints.txt"]
    subprocess.run([*pip, "--editable", str(clone)], check=True)
sys.path.insert(0, str(clone))

# %% [markdown]
# ## Device, model and text
#
# On a CPU the model is that of the quickstart, with 0.7 million parameters in float32. A TPU or a GPU gets a wider and deeper
# one with larger batches, in bfloat16, whose rows are divided over all devices.
#
# The first 90 % are the training text, the next 5 % the validation text, which selects the best checkpoint, and the last
# 5 % the test text. A token is a byte, so the loss is in bits per byte, and a compressor is a fair baseline.

# %%
from experiments import quickstart
from launch import notebook
from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.data.corpus import read_corpus

folder = notebook.open_folder(FOLDER, drive=DRIVE)
print(notebook.device_line())
if TENSORBOARD:
    notebook.show_tensorboard(folder)

changes = {"generate.prompt": PROMPT, **notebook.device_settings()}
if TEXT:
    changes |= {"data.corpus": "text", "data.file": str(Path(TEXT).expanduser().resolve())}
config = config_tree.from_dict(ExperimentConfig, config_tree.to_dict(quickstart.DEFAULTS) | changes | SETTINGS)
config.validate()
for name in ("model.n_layer", "model.d_model", "model.dtype", "train.batch_size", "train.steps"):
    print(f"{name:<18}{config_tree.get(config, name)}")

workdir = folder / "train"
corpus = read_corpus(config.data, data_dir="", cache_dir="prepared")
print(corpus.description)
print(corpus.vocabulary.decode(corpus.train[:400]).decode(errors="replace"))

# %% [markdown]
# ## Segments and memory
#
# A Transformer reads a segment of $L$ tokens at once, and an ordinary one forgets everything at its end: the first token
# of a segment is predicted without context. Transformer-XL keeps the hidden states of the last $M$ positions of **every
# layer**, and the next segment attends to them as well as to itself:
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
# No gradient flows into the memory, so a step costs little more than without it. But its hidden states were computed with a
# memory too: with $N$ layers, information can come from $N \cdot M$ positions back. For this to work, attention uses
# **relative positions**: a score depends on the contents of query $i$ and key $j$ and on the distance $i - j$.

# %% [markdown]
# ## Training
#
# The text is split into the rows of a batch. Each row is read segment by segment, so that its memory always holds what came
# just before. Stopping the cell (the square button) saves a checkpoint; running it again resumes.

# %%
outcome = notebook.train(config, corpus, workdir, title=f"Transformer-XL on {corpus.name}")

# %% [markdown]
# ## Results with and without the memory
#
# The same weights score the test text twice: with the memory, and without it, where each segment starts without context.
# The baselines are two compressors, which see the test text only.

# %%
from IPython.display import Image, display

from txl_jax import plots
from txl_jax.runs.run import Run
from txl_jax.runtime.log import read_metrics

run, picture = Run.read(workdir), workdir / "learning_curve.png"
rows = quickstart.compare_compressors(config, corpus, run, with_memory=outcome.results["test"]["bpc"])
for name, bpc in rows.items():
    print(f"{name:<36}{bpc:.3f} bits per byte")
plots.learning_curve(read_metrics(workdir), picture, title="Test text: model and compressors", levels=rows)
display(Image(picture))

# %% [markdown]
# ## Attention
#
# In the first figure each line is a head and each column a distance: darker means a higher mean attention weight. Many
# heads attend to the last few bytes; those with weights further to the left use the memory. The second figure shows a single
# prediction: the bytes that three heads with long-range attention attended to.

# %%
from experiments.paper import attention

figures = workdir / "attention"
some_tokens = min(len(corpus.valid), 8 * (config.eval.mem_len + config.eval.segment_len))
attention.draw(config, corpus, run, attention.Plan(tokens=some_tokens, out=str(figures)))
display(Image(figures / "average.png"))
display(Image(max(figures.glob("heads-*.png"))))

# %% [markdown]
# ## Generated text, and a download
#
# Tokens are sampled one by one from the most probable ones. The memory holds what was generated before. Try another prompt
# or another temperature: low temperatures repeat, high ones misspell. The zip has the weights as a portable folder:
# `txl_jax.load` opens it, unpacked, and `fine_tune.ipynb` takes it as `BASE`.

# %%
from txl_jax.runs.generate import generate_text

samples = generate_text(config, run)
archive = notebook.download_model(workdir)

# %% [markdown]
# ## Next steps
#
# `fine_tune.ipynb` continues from this model on a text of yours. `python -m experiments.quickstart` does the same as this
# notebook, and `python -m experiments.text --flagfile=small --workdir=runs/mine --data.file=book.txt` trains on your own
# file. The workdir of this run works with all programs:
#
# ```
# python -m experiments.text --mode=generate --workdir=runs/train --generate.prompt='class '
# python -m experiments.paper.context_length --workdir=runs/train --lengths=64,128,256
# ```
