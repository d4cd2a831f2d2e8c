"""Parts of a run in which settings show: lowered programs, batches, texts, files.

Each probe takes a config and returns something that can be compared; `BASE` is a run in which every setting matters.
"""

import functools
import os
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np

from support import drawn_run, runs
from txl_jax.config import (
    CorpusName,
    DataConfig,
    DropoutConfig,
    EvalConfig,
    ExperimentConfig,
    GenerateConfig,
    InitVocabulary,
    ModelConfig,
    NormPlace,
    OptimizerConfig,
    TrainConfig,
    config_tree,
)
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import read_corpus
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.data.vocabulary import dumps
from txl_jax.runs import score, warm_start
from txl_jax.runs.build import build, build_for
from txl_jax.runs.generate import read_prompt, read_stop
from txl_jax.runs.run import Run
from txl_jax.runs.train import training_reader
from txl_jax.runtime.log import read_metrics
from txl_jax.training.step import init_params, init_state, make_train_step

EVERY = dict.fromkeys(("log_every", "eval_every", "checkpoint_every"), 4)
# Chosen so that every setting matters: clusters, pre layer norm, same_length, a clamp, a warm-up.
SIZES = {"n_layer": 2, "d_model": 12, "n_head": 2, "d_head": 5, "d_inner": 14, "d_embed": 16}
CLUSTERS = {"cutoffs": (100, 200), "div_val": 2, "tie_projs": (False, True, True)}
SPAN = {"steps": 8, "segments_per_call": 2, "segment_len": 7, "mem_len": 5, "clamp_len": 6, "same_length": True}
BASE = ExperimentConfig(
    model=ModelConfig(**SIZES, **CLUSTERS, dropout=DropoutConfig(attention=0.1), layer_norm=NormPlace.PRE),
    data=DataConfig(corpus=CorpusName.TEXT, file="words.txt"),
    optimizer=OptimizerConfig(warmup_steps=2),
    train=TrainConfig(batch_size=2, **SPAN, **EVERY),
    eval=EvalConfig(batch_size=2, segment_len=6, mem_len=9, clamp_len=4),
    generate=GenerateConfig(length=4, top_k=10),
)


@functools.cache
def parts_of(config):
    return build(config, vocab_size=256)


def init(config):
    """The lowered initialisation: seeds and deviations."""
    parts = parts_of(config)

    def init():
        params = init_params(parts.model, jax.random.key(config.seed))
        return nn.unbox(init_state(parts.model, parts.optimizer, config, params))

    return jax.jit(init).lower().as_text()


def first_weights(config):
    """The vocabulary, and what is recorded of the weights that a run begins with; a trained run is made if need be."""
    if config.init_from:
        plain = {"init_from": None, "init_vocabulary": InitVocabulary.OWN, "data.file": "trained.txt"}
        trained = config_tree.replace(config, plain)
        drawn_run.make(Path(config.init_from), trained, read_corpus(trained.data, "."))
    workdir = Run(Path("new-run"))
    read = warm_start.read_corpus(config, workdir, ".", None)
    parts = build(config, vocab_size=read.vocabulary.size)
    weights = warm_start.load(parts, read.vocabulary, workdir) if config.init_from else None
    return dumps(read.vocabulary), weights and weights.record


def train_step(config):
    """The lowered update: shapes, losses, gradients and what the optimizer makes of them."""
    parts = parts_of(config)
    step = make_train_step(parts.model, parts.optimizer, parts.schedule, config)
    reader = training_segments(np.arange(200), batch_size=config.train.batch_size, segment_len=config.train.segment_len)
    return jax.jit(step).lower(parts.abstract_state, reader.segments(0, 1)).as_text()


def eval_step(config):
    """The lowered scoring."""
    parts = parts_of(config)
    reader = evaluation_segments(np.arange(200), batch_size=config.eval.batch_size, segment_len=config.eval.segment_len)
    weights = jax.eval_shape(parts.prepare_params, parts.abstract_state.params)
    return parts.eval_step.lower(weights, jax.eval_shape(parts.init_memory, weights), reader.segments(0, 1)).as_text()


def batch(config):
    """Tokens read by the first calls of training and evaluation."""
    tokens = np.arange(200)
    first_train = training_segments(tokens, batch_size=config.train.batch_size, segment_len=config.train.segment_len)
    first_eval = evaluation_segments(tokens, batch_size=config.eval.batch_size, segment_len=config.eval.segment_len)
    calls = (
        first_train.segments(0, config.train.segments_per_call),
        first_eval.segments(0, 2),
    )
    return jax.tree.map(np.ndarray.tolist, calls)


def corpus(config):
    """The text and its ids, or why it is refused."""
    try:
        read = read_corpus(config.data, ".")
    except (ValueError, OSError) as error:
        return str(error)
    return read.digest, dumps(read.vocabulary), [split.tolist() for split in (read.train, read.valid, read.test)]


def end_token(config):
    """The id of the token that ends a document."""
    return build_for(config, read_corpus(config.data, ".").vocabulary).model.end_token


def epochs(config):
    """Segments of the first two epochs of training."""
    read = read_corpus(config.data, ".")
    reader = training_reader(parts_of(config), read, config.seed)
    return jax.tree.map(np.ndarray.tolist, reader.segments(0, 2 * reader.n_segments))


def devices(config):
    """The mesh, or, on one device, why there is none."""
    try:
        return parts_of(config).mesh.shape
    except ValueError as error:
        return str(error)


def files(config):
    """Records and files of a tiny run."""
    workdir = Run(config_run_folder(config))
    runs.train(config, read_corpus(config.data, "."), workdir)
    records = [
        (record["kind"], record["step"], record["loss"], record.get("tokens")) for record in read_metrics(workdir.path)
    ]
    return records, sorted(os.listdir(workdir.latest))


def scored(config):
    """Test scores of a run that has ended."""
    trained = config_tree.replace(config, {"eval.average_checkpoints": None})
    corpus, workdir = read_corpus(config.data, "."), Run(config_run_folder(trained))
    runs.train(trained, corpus, workdir)
    return score.evaluate_splits(config, corpus, Run.read(workdir.path))["test"]


def config_run_folder(config):
    return Path.cwd() / f"run-{abs(hash(config))}"


def prompt(config):
    return read_prompt(config.generate)


def text(config):
    """Generated text, by random weights that are large enough for peaked distributions."""
    parts = parts_of(config)
    params = jax.tree.map(
        lambda leaf: 0.3 * jax.random.normal(jax.random.key(0), leaf.shape), parts.abstract_state.params
    )
    stop = read_stop(config.generate, ByteVocabulary.all_bytes())
    generator = parts.generator(parts.prepare_params(params))
    blocks = generator.tokens(np.arange(3), config.generate, stop_token=stop)
    return np.concatenate(list(blocks), axis=1).tolist()


PROBES = {
    probe.__name__: probe
    for probe in (
        *(init, first_weights, train_step, eval_step, batch, corpus),
        *(end_token, epochs, devices, files, scored, prompt, text),
    )
}
