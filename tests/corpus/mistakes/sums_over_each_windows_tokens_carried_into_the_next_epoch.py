"""Sums over each window's tokens, carried into the next epoch."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        sizes = [3, 5, 7, 2, 6, 4]
        for _ in range(3):
            for i, (x, y) in enumerate(batches(*sizes)):
                tokens = sum(sizes[i // 4 * 4 : i // 4 * 4 + 4])
                loss = F.cross_entropy(model(x), y, reduction="sum") / tokens
                loss.backward()  # finding: leftover-carried
                if i % 4 == 3:  # wrong
                    # right: if i % 4 == 3 or i == 5:
                    optimizer.step()
                    optimizer.zero_grad()
