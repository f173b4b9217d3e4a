"""Train a small convolutional network on images, with a one-cycle schedule and a validation after each epoch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_dataset(size: int) -> TensorDataset:
    labels = torch.randint(10, (size,))
    images = torch.randn(size, 1, 16, 16) + labels[:, None, None, None] / 5
    return TensorDataset(images, labels)


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def train_one_epoch(model, loader, criterion, optimizer, scheduler, accumulation_steps):
    model.train()
    for step, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(images), labels) / accumulation_steps
        loss.backward()
        if (step + 1) % accumulation_steps == 0:
            optimizer.step()
            scheduler.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return hits / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulation-steps", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    train_loader = DataLoader(make_dataset(192), batch_size=args.batch_size, shuffle=True)
    valid_loader = DataLoader(make_dataset(64), batch_size=64)
    model = make_model()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total_steps = args.epochs * len(train_loader) // args.accumulation_steps
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)
    for epoch in range(args.epochs):
        train_one_epoch(model, train_loader, criterion, optimizer, scheduler, args.accumulation_steps)
        print(f"epoch {epoch}: accuracy {evaluate(model, valid_loader):.2f}")


if __name__ == "__main__":
    main()
