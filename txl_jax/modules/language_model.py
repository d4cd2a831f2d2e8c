"""The language models that training, evaluation and inference take."""

from txl_jax.modules.lstm import LSTM
from txl_jax.modules.transformer_xl import TransformerXL

LanguageModel = TransformerXL | LSTM
