"""An encoder that two optimizers have, of which each steps on one gradient."""

import torch
import torch.nn.functional as F

from tests.corpus.common import batches, net


def loop(record):
    model = net()
    of_encoder = torch.optim.Adam(model[:2].parameters(), lr=0.01)
    of_all = torch.optim.Adam(model.parameters(), lr=0.01)
    # right: of_all = torch.optim.Adam(model[2].parameters(), lr=0.01)
    with record(model, of_encoder, of_all):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            of_encoder.step()
            of_all.step()  # finding: gradient-applied-twice
            model.zero_grad()
