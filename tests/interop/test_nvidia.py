"""Tests of NVIDIA's checkpoints: names, settings and the vocabulary that lies in them."""

import dataclasses

import jax
import numpy as np
import pytest

from support import foreign, tiny, torch_bytes
from txl_jax.config import AttentionWindow
from txl_jax.data.tokens.word_vocabulary import WordVocabulary
from txl_jax.interop import formats, leaves
from txl_jax.interop.formats import Format

# Its u and v are shared by all layers.
CONFIGS = {name: {k: v for k, v in changes.items() if k != "untie_r"} for name, changes in foreign.CONFIGS.items()}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_a_checkpoint(changes, tmp_path):
    config, params = foreign.make("pytorch", **changes)
    torch_bytes.write_zip(tmp_path / "checkpoint_best.pt", foreign.nvidia_checkpoint(config, params))
    assert formats.recognise(tmp_path) is Format.NVIDIA
    found = formats.read(tmp_path)
    again = leaves.to_tree(found.params)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    for name in ("n_layer", "n_head", "d_head", "d_embed", "cutoffs", "div_val", "tie_projs", "tie_weight"):
        assert getattr(found.config, name) == getattr(config, name), name
    window = AttentionWindow.MEM_LEN_PLUS_ONE
    assert found.compat == dataclasses.replace(tiny.compat_config("pytorch"), same_length_window=window)
    assert found.eval_config == dataclasses.replace(foreign.LENGTHS, segment_len=3)
    assert isinstance(found.vocabulary, WordVocabulary) and found.vocabulary.words == foreign.WORDS
