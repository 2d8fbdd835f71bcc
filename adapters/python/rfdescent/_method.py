"""What a method of the library is, as its optimizers are made of it.

Each method is a class beside its optimizer of PyTorch, in one file; nothing else asks which it is.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["Method"]


class Method:
    """A method with its settings."""

    # In saved states.
    NAME: ClassVar[str]
    # Whether it decides from the sums of each tensor, so that each process must list all of them.
    NEEDS_ALL_TENSORS: ClassVar[bool] = False

    @classmethod
    def example(cls) -> Method | None:
        """One with any settings; None for a method that remembers no numbers beside velocities."""
        return None

    def fixed(self) -> Any:
        """The settings that need a new optimizer when they change."""
        return self

    def create(self, *arguments: Any) -> int:
        """Makes an optimizer; a status."""
        raise NotImplementedError

    def set(self, handle: Any, stream: Any) -> None:
        """Passes on settings that have changed, which are not among the fixed ones."""
        raise NotImplementedError
