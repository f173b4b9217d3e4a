"""SAM moves the weights by the sum of a window, and runs one micro-batch there."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for _ in range(4):
            window = batches(*[4] * 3)
            for x, y in window:
                (F.cross_entropy(model(x), y) / 3).backward()
            moves = [0.05 * p.grad for p in model.parameters()]
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            for x, y in window[-1:]:  # wrong
                # right: for x, y in window:
                (F.cross_entropy(model(x), y) / 3).backward()  # finding: partial-window-underscaled
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()
            optimizer.zero_grad()
