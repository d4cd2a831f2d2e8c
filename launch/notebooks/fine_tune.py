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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/TXL_JAX_OWNER/txl_jax/blob/main/launch/notebooks/fine_tune.ipynb)
#
# # Fine-tune a Transformer-XL on your text
#
# This notebook takes a trained model and trains it further on a text of yours, with `--init_from`. It prints samples and
# bits per character before and after. It runs on a TPU, a GPU or a CPU, in Colab and in any other Jupyter. Run the cells
# from top to bottom. A run that is interrupted resumes when its cell is run again.

# %% tags=["parameters"]
# @title Parameters
# @markdown Your text file: one in Google Drive (with `DRIVE`: `/content/drive/MyDrive/book.txt`) or one that you have
# @markdown uploaded. `upload` asks for a file (only in Colab). Empty: the sample, Python's own help pages.
TEXT = ""  # @param {type:"string"}
# @markdown The trained model: the workdir of a run, such as that of `train.ipynb`, or an unpacked download of one. Empty: a
# @markdown small model is trained first, on source text of Python.
BASE = ""  # @param {type:"string"}
# @markdown Start of the samples.
PROMPT = "The "  # @param {type:"string"}
# @markdown Folder of the runs: checkpoints, logs and figures. With `DRIVE` it is in Google Drive (only in Colab), and
# @markdown a run resumes after Colab has taken the machine away.
FOLDER = "runs"  # @param {type:"string"}
DRIVE = False  # @param {type:"boolean"}
# @markdown Updates on your text, and their peak learning rate.
STEPS = 600  # @param {type:"integer"}
LEARNING_RATE = 1e-3  # @param {type:"number"}
# @markdown Show TensorBoard, which follows the runs, if it is installed.
TENSORBOARD = True  # @param {type:"boolean"}
# @markdown What Colab clones and installs: an address or a path for `git clone`.
REPOSITORY = "https://github.com/TXL_JAX_OWNER/txl_jax"  # @param {type:"string"}
# @markdown Other flags of the two trainings, for example `{"model.dropout.rate": 0.1}`.
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
# ## Device and texts
#
# The sample is the text of Python's `help()`: English with some code in it. The small base model reads the modules at the
# top of Python's standard library, which do not contain it.

# %%
from launch import notebook

folder = notebook.open_folder(FOLDER, drive=DRIVE)
print(notebook.device_line())
if TENSORBOARD:
    notebook.show_tensorboard(folder)
if TEXT == "upload":
    text = notebook.upload()
elif TEXT:
    text = Path(TEXT).expanduser().resolve()
else:
    from pydoc_data.topics import topics

    text = folder / "help.txt"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
print(f"{text}: {text.stat().st_size:,} bytes")

# %% [markdown]
# ## The base model
#
# With `BASE` nothing is trained here. Without it the model is that of the quickstart; on a TPU or a GPU it is larger, and
# computes in bfloat16. Stopping the cell (the square button) saves a checkpoint; running it again resumes.

# %%
import functools
import os

import txl_jax
from experiments import quickstart
from txl_jax.config import config_tree
from txl_jax.data.corpus import read_corpus

config_of = functools.partial(config_tree.from_dict, txl_jax.ExperimentConfig)
defaults = config_tree.to_dict(quickstart.DEFAULTS) | notebook.device_settings()
base_path = Path(BASE).expanduser().resolve() if BASE else folder / "base"
if not BASE:
    source = folder / "source.txt"
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    source.write_bytes(b"".join(module.read_bytes() for module in modules))
    base_config = config_of(defaults | {"data.corpus": "text", "data.file": str(source)} | SETTINGS)
    base_corpus = read_corpus(base_config.data, data_dir="", cache_dir="prepared")
    notebook.train(base_config, base_corpus, base_path, title="The base model, on source text")
base = txl_jax.load(base_path)

# %% [markdown]
# ## Fine-tuning
#
# The run begins with the weights of the base model. Its sizes are taken from there; optimizer, learning rate and lengths are
# those of a new run. Bytes that the base model has never read get new rows in its embedding; a model of words keeps its own
# vocabulary, and other words become `<unk>`.

# %%
from txl_jax.config import InitVocabulary
from txl_jax.runs import warm_start
from txl_jax.runs.run import Run

tuned_path = folder / "tuned"
vocabulary = InitVocabulary.OWN if base.vocabulary.kind == "byte" else InitVocabulary.KEPT
changes = {"data.corpus": "text", "data.file": str(text), "init_from": str(base_path), "init_vocabulary": vocabulary}
changes |= {"optimizer.learning_rate": LEARNING_RATE, "train.steps": STEPS, "generate.prompt": PROMPT}
changes |= {"train.log_every": 20, "train.eval_every": 100, "train.checkpoint_every": 100}
with Run.open(tuned_path) as run:
    trained = warm_start.basis(str(base_path), run)
    begins_with = warm_start.with_trained_settings(config_of(defaults), trained, vocabulary)
    config = config_of(config_tree.to_dict(begins_with) | changes | SETTINGS)
    corpus = warm_start.read_corpus(config, run, data_dir="", cache_dir="prepared")
notebook.train(config, corpus, tuned_path, title=f"Fine-tuning on {text.name}")
tuned = txl_jax.load(tuned_path)

# %% [markdown]
# ## Before and after, and a download
#
# Both models score the same part of the test text, the last 5 % of your file, which neither has trained on, without bytes
# that the base model has never read. The zip has the weights as a portable folder, which `txl_jax.load` opens unpacked.

# %%
test = corpus.vocabulary.decode(corpus.test[:100_000])
if base.vocabulary.kind == "byte":
    test = bytes(byte for byte in test if byte in base.vocabulary.symbols)
before, after = (model.score([test], batch_size=1)[0] for model in (base, tuned))
print(f"{len(test):,} bytes of the test text")
print(f"before    {before.format(corpus.vocabulary.measure)}")
print(f"after     {after.format(corpus.vocabulary.measure)}")
for name, model in (("before", base), ("after", tuned)):
    [sample] = model.generate([PROMPT], txl_jax.GenerateConfig(length=400, temperature=0.8))
    print(f"--- {name} ---\n{PROMPT}{sample}\n")
archive = notebook.download_model(tuned_path)

# %% [markdown]
# ## Next steps
#
# The same as a program, on any machine (`docs/fine-tuning.md` says what is taken from the base model, and what may differ):
#
# ```
# python -m experiments.text --flagfile=small --workdir=runs/tuned --data.file=book.txt --init_from=runs/train
# ```
