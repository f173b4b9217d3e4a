"""One epoch of gradient accumulation: the loop of chapter 5 of *Where Gradients Go*."""

from itertools import islice

from torch import nn


def epoch(loader, model, loss_sum, optimizer, scheduler, K=4):
    batches, log = iter(loader), []
    while window := list(islice(batches, K)):
        count = sum(y.ne(-100).sum() for _, y in window)
        total = 0
        for x, y in window:
            loss = loss_sum(model(x), y) / count
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        log.append((total, norm, scheduler.get_last_lr()[0], count))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return log
