"""`model.no_sync()`, as in DistributedDataParallel, for a model on several ranks."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator

from torch import nn

from infinity.grads.gradients import Gradients


class NoSync:
    """Makes the contexts in which the gradients of a backward stay on their rank.

    In ZeRO stages 0 and 1 gradients stay there anyway, until `step()` or the last backward of
    ``Config(accumulation)``; a backward in the context does not count as the last. In stages 2 and 3 no
    rank has room for its whole gradients: the engine reduces them at once, and warns about this, once.
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
                f"no_sync() does nothing in ZeRO stage {self._stage}: each rank keeps only its shard of the "
                "gradients, so the engine reduces them in every backward. Config(zero_stage=1) reduces them "
                "once in a step.",
                RuntimeWarning,
                stacklevel=3,
            )
        gradients = self._gradients()
        with gradients.no_sync() if gradients is not None else contextlib.nullcontext():
            yield

    def remove(self) -> None:
        """Take it off the model."""
        model = self._model()
        if model is not None:
            model.__dict__.pop("no_sync", None)
