"""`model.no_sync()`, as of DistributedDataParallel, for a model of several ranks."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator

from torch import nn

from infinity.grads.gradients import Gradients


class NoSync:
    """Makes the contexts in which the gradients of a backward stay on their rank.

    In ZeRO's stages 0 and 1 that is what they do anyway, up to `step()` or to the backward that
    ``Config(accumulation)`` says is the last; in the context it does not count as that. In stages 2 and 3 no
    rank has room for its whole gradients: they are added up at once, and a warning says so, once.
    """

    def __init__(self, model: nn.Module, gradients: Gradients, stage: int) -> None:
        self._model = weakref.ref(model)
        self._gradients = weakref.ref(gradients)
        self._stage = stage
        self._warned = False
        model.__dict__["no_sync"] = self

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Return the context."""
        if self._stage >= 2 and not self._warned:
            self._warned = True
            warnings.warn(
                f"no_sync() does nothing in ZeRO's stage {self._stage}: each rank keeps its share of the "
                "gradients alone, so they are added up in every backward. Config(zero_stage=1) adds them up "
                "once in a step.",
                RuntimeWarning,
                stacklevel=3,
            )
        gradients = self._gradients()
        before = gradients is not None and gradients.apart
        try:
            if gradients is not None:
                gradients.apart = True
            yield
        finally:
            if gradients is not None:
                gradients.apart = before

    def remove(self) -> None:
        """Take it off the model."""
        model = self._model()
        if model is not None:
            model.__dict__.pop("no_sync", None)
