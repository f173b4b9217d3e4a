"""fsdp2-zero-keeps-unsharded: plain."""

import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import batches, net, sharded


def loop(record):
    model = sharded(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()  # finding: fsdp2-zero-keeps-unsharded
            for i, (x, y) in enumerate(batches(6)):
                last = i % 4 == 3  # wrong
                # right: last = i in (3, 5)
                model.set_requires_gradient_sync(last)
                loss = F.cross_entropy(model(x), y) / (4 if i < 4 else 2)
                loss.backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
