"""The networks: Transformer-XL and recurrent baselines.

Training, evaluation and inference accept `AnyModel`.
"""

from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.modules.transformer_xl import TransformerXL

AnyModel = TransformerXL | RecurrentModel
