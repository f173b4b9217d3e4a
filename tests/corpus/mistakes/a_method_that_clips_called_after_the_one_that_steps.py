"""A method that clips, called after the one that steps."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.common import batches, net


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)

    def step(self):
        self.optimizer.step()

    def fit(self):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(self.model(x), y).backward()
            # right: self.clip()
            self.step()
            self.clip()  # wrong, finding: clip-on-the-wrong-side
            self.optimizer.zero_grad()


def loop(record):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        Trainer(model, optimizer).fit()
