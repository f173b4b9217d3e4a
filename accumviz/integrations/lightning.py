"""Check a Trainer of Lightning while it trains: `Trainer(callbacks=[LightningCheck()])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from accumviz.integrations import FirstSteps


class LightningCheck(Callback):  # type: ignore[misc] # it may not be installed
    """Record a Trainer's first `steps`; the report goes to the log of Lightning, numbers to the Trainer's loggers."""

    def __init__(self, steps: int = 100) -> None:
        self._first = FirstSteps(steps, rank_zero_info)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record."""
        model = trainer.model  # where there are ranks, the wrapper that averages
        self._first.begin(trainer.global_step, model, *trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Judge after the last of the steps."""
        self._first.stepped(trainer.global_step, _log_of(trainer))

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Judge a training that was shorter, or cut short."""
        self._first.end(_log_of(trainer))

    on_exception = on_train_end


def _log_of(trainer: Any) -> Any:
    def log(numbers: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)

    return log
