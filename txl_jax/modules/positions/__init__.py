"""Positional encodings, each in its own file and class, and their registry.

    encoding.py    `PositionEncoding`, the interface for the model, inference, `flops`, `interop`
    relative.py    the paper's: sinusoids of the distance, u and v (Dai et al., 2019)
    shaw.py        learned keys of distances (Shaw et al., 2018)
    sinusoidal.py  sinusoids added to the embedding (Vaswani et al., 2017)
    learned.py     learned vectors added to the inputs of each layer (Al-Rfou et al., 2018)

A new encoding is a file here, a member of `config.Encoding` and a line in `ENCODINGS`. The tests
that run over all members of `Encoding` then test it (CONTRIBUTING.md).
"""

from txl_jax.config import Encoding, ModelConfig
from txl_jax.modules.positions.encoding import PositionEncoding
from txl_jax.modules.positions.learned import LearnedPositions
from txl_jax.modules.positions.relative import RelativePositions
from txl_jax.modules.positions.shaw import ShawPositions
from txl_jax.modules.positions.sinusoidal import SinusoidalPositions

__all__ = ["ENCODINGS", "PositionEncoding", "encoding_of"]

ENCODINGS: dict[Encoding, type[PositionEncoding]] = {
    Encoding.RELATIVE: RelativePositions,
    Encoding.SHAW: ShawPositions,
    Encoding.VASWANI: SinusoidalPositions,
    Encoding.AL_RFOU: LearnedPositions,
}


def encoding_of(config: ModelConfig) -> PositionEncoding:
    """Returns a model's positional encoding: an object of the class of `config.encoding`."""
    return ENCODINGS[config.encoding](config)
