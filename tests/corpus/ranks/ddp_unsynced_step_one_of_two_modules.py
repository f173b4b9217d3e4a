"""ddp-unsynced-step: one of two modules."""

import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from tests.corpus.of_ranks import batches, replicated


def loop(record):
    body, head = replicated(nn.Linear(4, 6)), replicated(nn.Linear(6, 3))
    optimizer = SGD([*body.parameters(), *head.parameters()], lr=0.1)
    with record(body=body, head=head, optimizer=optimizer):
        for i, (x, y) in enumerate(batches(8)):
            head.require_backward_grad_sync = i % 4 == 3
            body.require_backward_grad_sync = i % 4 == 0  # wrong
            # right: body.require_backward_grad_sync = i % 4 == 3
            (F.cross_entropy(head(body(x)), y) / 4).backward()  # finding: ddp-unsynced-step
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
