"""Each backward retains its graph, and the losses are kept."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with record(model, optimizer, memory=True):
        for x, y in batches(*[8] * 8):
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)  # wrong, finding: graph-retained
            # right: loss.backward()
            losses.append(loss)  # wrong
            # right: losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
