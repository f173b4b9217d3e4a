"""Never zeroed."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()  # wrong, finding: missing-zero-grad
                # right: optimizer.step(); optimizer.zero_grad()
