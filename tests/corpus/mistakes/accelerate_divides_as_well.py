"""Accelerate divides by the number of micro-batches, and the loop does so too."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from tests.corpus.common import loader, net


def loop(record):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    with record(model, optimizer.optimizer):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss / 4)  # wrong, finding: double-division
                # right: accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
