"""Two sums under masks, divided by what the masks let through."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(*[8] * 12)):
            mask = (torch.arange(8) < (2, 7)[i % 2]).float()
            loss = (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()  # wrong
            # right: loss = (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / 4.5
            (loss / 2).backward()  # finding: token-mean-of-means
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
