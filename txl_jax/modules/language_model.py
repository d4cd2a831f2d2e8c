"""The union of the language models that training, evaluation and inference accept."""

from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.modules.transformer_xl import TransformerXL

LanguageModel = TransformerXL | RecurrentModel
