"""Means of unequal lengths."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[3, 11, 5, 7] * 4)):
            loss = F.cross_entropy(model(x), y)  # wrong
            (loss / 4).backward()  # wrong, finding: token-mean-of-means
            # right: loss = F.cross_entropy(model(x), y, reduction='sum')
            # right: (loss / 26).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
