"""Real frameworks, where they are installed: transformers' Trainer and Lightning, healthy and with one mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accumviz as av

K = 4
pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks say of themselves, and of each other


def told(ledger: Any) -> list[tuple[str, str]]:
    found = [one for one in av.check(ledger).findings if one.severity != "note"]
    return [(one.rule, one.source) for one in found]


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("", []),
        ("zero-grad-inside-window", [("zero-grad-inside-window", "model.zero_grad()")]),
        ("token-mean-of-means", [("token-mean-of-means", "return super().training_step(model, *args, **kwargs)")]),
    ],
)
def test_transformers_trainer(mistake: str, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small))
    data = []
    for i in range(44):
        ids = torch.randint(1, 50, (32,))
        data.append({"input_ids": ids, "labels": ids.where(torch.arange(32) < (3, 20, 7, 31)[i % 4], -100)})

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if mistake == "zero-grad-inside-window":
                model.zero_grad()
            return super().training_step(model, *args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if mistake == "token-mean-of-means":
                return model(**inputs).loss
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=K,
        num_train_epochs=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=data)
    if mistake == "token-mean-of-means":
        trainer.model_accepts_loss_kwargs = False
    with av.record(model) as recording:
        trainer.train()
    assert told(recording) == expected, av.check(recording)


@pytest.mark.parametrize(
    ("mistake", "many", "expected"),
    [
        ("", 24, []),
        ("double-division", 24, ["double-division"]),
        # Lightning divides the last window by K, too: it has been open with them for years.
        ("", 22, ["partial-window-underscaled"]),
    ],
)
def test_lightning(mistake: str, many: int, expected: list[str]) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    torch.manual_seed(0)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 5)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            return loss / K if mistake == "double-division" else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(2 * many, 8), torch.randint(0, 5, (2 * many,)))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", accumulate_grad_batches=K, gradient_clip_val=0.1, **quiet
    )
    model = Module()
    with av.record(model) as recording:
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
    assert [rule for rule, _ in told(recording)] == expected, av.check(recording)
