"""The callbacks of frameworks: what they say goes to the framework's logger, and they never disturb the training."""

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accumviz.integrations import FirstSteps
from accumviz.recorder import patches

UNDIVIDED = {"accumviz/findings": 1, "accumviz/smallest_sum_of_shares": 4.0, "accumviz/largest_sum_of_shares": 4.0}
RIGHT = {"accumviz/findings": 0, "accumviz/smallest_sum_of_shares": 1.0, "accumviz/largest_sum_of_shares": 1.0}


def train(first: FirstSteps | None, *, by: float = 1.0, steps: int = 6) -> tuple[nn.Module, list[dict[str, float]]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged: list[dict[str, float]] = []
    if first is not None:
        first.begin(0, model, optimizer)
    for step in range(1, steps + 1):
        for _ in range(4):
            (model(torch.randn(2, 3)).square().mean() / by).backward()
        optimizer.step()
        optimizer.zero_grad()
        if first is not None:
            first.stepped(step, logged.append)
    if first is not None:
        first.end(logged.append)
    return model, logged


@pytest.mark.parametrize(("by", "numbers"), [(1.0, UNDIVIDED), (4.0, RIGHT)])
@pytest.mark.parametrize("steps", [3, 100])
def test_the_first_steps_are_judged_once_and_training_is_the_same(by: float, numbers: Any, steps: int) -> None:
    said: list[str] = []
    model, logged = train(FirstSteps(steps, said.append), by=by)
    alone, _ = train(None, by=by)
    assert torch.equal(model.weight, alone.weight)
    assert logged == [numbers]
    (text,) = said
    assert ("loss-not-divided" in text) == (by == 1)
    assert f", {min(steps, 6)} steps)" in text
    assert not patches.listening


def test_what_cannot_be_judged_has_no_number() -> None:
    said: list[str] = []
    logged: list[dict[str, float]] = []
    first = FirstSteps(3, said.append)
    first.begin(0, nn.Linear(3, 1))
    first.end(logged.append)
    assert logged == [{}]
    assert "no verdict" in said[0]


def test_what_fails_is_said_once_and_the_training_goes_on() -> None:
    said: list[str] = []
    first = FirstSteps(2, said.append)
    first.begin(0, "no model")
    model, logged = train(first)
    assert torch.equal(model.weight, train(None)[0].weight)
    assert logged == []
    (text,) = said
    assert text.startswith("accumviz records no more: TypeError: ")

    def broken(_: object) -> None:
        raise RuntimeError("the disk is full")

    first = FirstSteps(1, broken)
    first.begin(0, model, torch.optim.SGD(model.parameters(), lr=0.1))
    first.stepped(1, broken)
    first.stepped(2, broken)
    assert not patches.listening


def test_a_training_that_begins_anew_is_recorded_anew() -> None:
    said: list[str] = []
    first = FirstSteps(2, said.append)
    first.begin(0, nn.Linear(3, 1))
    _, logged = train(first, by=4.0)
    assert logged == [RIGHT]
    assert ", 2 steps)" in said[0]


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((3,), index / 64), "labels": torch.tensor([1.0])}


class Regression(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.by = nn.Linear(3, 1), by

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": nn.functional.mse_loss(out, labels) / self.by, "logits": out}


@pytest.mark.filterwarnings("ignore")  # of the framework's own making
@pytest.mark.parametrize(("by", "findings", "total"), [(1.0, 0, 1.0), (4.0, 1, 0.25)])
def test_in_transformers_numbers_are_in_the_trainers_history_and_the_report_in_its_log(
    by: float, findings: int, total: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    from accumviz.integrations.transformers import TrainerCheck

    transformers.utils.logging.enable_propagation()

    def trained(*, checked: bool) -> Any:
        settings = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=6,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(Regression(by), settings, train_dataset=Data())
        if checked:
            trainer.add_callback(TrainerCheck(trainer, steps=4))
        trainer.train()
        return trainer

    with caplog.at_level(logging.WARNING):
        trainer = trained(checked=True)
    (row,) = [row for row in trainer.state.log_history if "accumviz/findings" in row]
    assert (row["step"], row["accumviz/findings"], row["accumviz/largest_sum_of_shares"]) == (4, findings, total)
    assert caplog.text.count("accumviz, of the steps so far:\nReport: ") == 1
    assert ("double-division" in caplog.text) == bool(findings)
    assert torch.equal(trainer.model.layer.weight, trained(checked=False).model.layer.weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("by", "findings", "total"), [(1.0, 0, 1.0), (4.0, 1, 0.25)])
def test_in_lightning_numbers_go_to_its_loggers_and_the_report_to_its_log(
    by: float, findings: int, total: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    from accumviz.integrations.lightning import LightningCheck

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Regression(by)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(*callbacks: Any) -> Any:
        module, logger = Module(), CSVLogger(str(tmp_path))
        trainer = lightning.Trainer(
            max_steps=6,
            accumulate_grad_batches=4,
            accelerator="cpu",
            logger=logger,
            callbacks=[*callbacks],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(Data(), batch_size=2))
        return module, Path(logger.log_dir) / "metrics.csv"

    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        logging.getLogger("lightning.pytorch").propagate = True
        module, file = trained(LightningCheck(steps=4))
    (row,) = csv.DictReader(file.read_text("utf-8").splitlines())
    numbers = [float(row[name]) for name in ("step", "accumviz/findings", "accumviz/largest_sum_of_shares")]
    assert numbers == [4, findings, total]
    assert caplog.text.count("accumviz, of the steps so far:\nReport: ") == 1
    assert ("double-division" in caplog.text) == bool(findings)
    assert torch.equal(module.inner.layer.weight, trained()[0].inner.layer.weight)
