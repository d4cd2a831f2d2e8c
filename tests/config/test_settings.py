"""Tests of the declaration of settings: paths, what a resumed run may change, and what a trained run keeps."""

from txl_jax.config import ExperimentConfig
from txl_jax.config import settings as config_tree


def test_files_are_marked_as_paths():
    paths = {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.path}
    texts = {f"data.{name}" for name in ("file", "train", "valid", "test", "tokenizer.vocab_file", "tokenizer.hf_file")}
    assert paths == texts | {"generate.prompt_file", "init_from"}
    # Other weights are another run, wherever they are; a text is compared by its digest.
    assert texts <= {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.free_on_resume}


def test_a_resumed_run_may_change_what_leaves_the_trajectory_alone():
    free = {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.free_on_resume}
    for group in ("mesh", "eval", "generate"):
        assert {name for name in config_tree.to_dict(ExperimentConfig()) if name.startswith(f"{group}.")} <= free
    names = ("log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "patience")
    assert {name for name in free if name.startswith("train.")} == {f"train.{name}" for name in names}
    assert {name for name in free if name.startswith("model.")} == {"model.attention"}
    for group in ("compat", "optimizer", "regularization", "average"):
        assert not any(name.startswith(f"{group}.") for name in free)


def test_a_trained_run_keeps_what_makes_its_token_ids():
    shaping = {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.shapes_tokens}
    names = ("kind", "newlines", "line_mark", "min_count", "vocab_size")
    assert shaping == {f"data.tokenizer.{name}" for name in names} | {"data.reset_at"}
