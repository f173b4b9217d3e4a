"""FSDP1's shards clipped to the norm of each rank's own."""

import torch
import torch.nn.functional as F

from tests.corpus.of_ranks import batches, fsdp1, net


def loop(record):
    model = fsdp1(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for i, (x, y) in enumerate(batches(8)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # wrong, finding: fsdp1-local-clip
                # right: model.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
