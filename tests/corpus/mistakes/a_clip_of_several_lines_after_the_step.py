"""A clip of several lines after the step."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()  # wrong
            torch.nn.utils.clip_grad_norm_(  # finding: clip-on-the-wrong-side
                model.parameters(),
                # a comment of the user's
                max_norm=0.01,
            )
            optimizer.zero_grad()  # wrong
            # right: optimizer.step(); optimizer.zero_grad()
