"""Relations between the lengths of a recurrence, which training and evaluation share."""

from typing import Protocol

from txl_jax.config.settings import require


class Lengths(Protocol):
    """The lengths of a training or evaluation recurrence."""

    @property
    def segment_len(self) -> int:
        """L."""

    @property
    def mem_len(self) -> int:
        """M."""

    @property
    def stride(self) -> int | None:
        """New tokens of a segment; None: all."""

    @property
    def same_length(self) -> bool:
        """Returns whether every query sees the same number of keys."""


def validate_lengths(group: str, lengths: Lengths) -> None:
    """Raises `UserError` for lengths of the group named `group` that cannot go together."""
    require(
        lengths.stride is None or lengths.stride <= lengths.segment_len,
        f"{group}.stride is {lengths.stride} and {group}.segment_len is {lengths.segment_len}; the stride lies between "
        "1 and that, or is none for all of it",
    )
    require(
        not (lengths.stride and lengths.mem_len),
        f"{group}.stride is {lengths.stride} and {group}.mem_len is {lengths.mem_len}; tokens that a segment reads "
        "again are not to be remembered too, so give one of them",
    )
    require(
        not lengths.same_length or lengths.mem_len > 0,
        f"{group}.same_length is on and {group}.mem_len is {lengths.mem_len}; the window would be empty",
    )
