"""Check the Trainer of Transformers while it trains: `trainer.add_callback(TrainerCheck(trainer))`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from accumviz.integrations import FirstSteps


class TrainerCheck(TrainerCallback):  # type: ignore[misc] # it may not be installed
    """Record a Trainer's first `steps`; the report goes to the log of Transformers, numbers to `trainer.log`."""

    def __init__(self, trainer: Any, steps: int = 100) -> None:
        self._trainer = trainer
        self._first = FirstSteps(steps, logging.get_logger(__name__).warning)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Begin to record."""
        self._first.begin(state.global_step, self._trainer.model_wrapped, optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge after the last of the steps."""
        self._first.stepped(state.global_step, self._trainer.log)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Judge a training that was shorter."""
        self._first.end(self._trainer.log)
