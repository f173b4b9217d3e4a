"""Train an LSTM on a stream of words, with truncated backpropagation through time, clipping and plain SGD."""

import torch
from torch import nn

VOCABULARY, BPTT, ACCUMULATION, CLIP = 50, 10, 4, 0.25


class RNNModel(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.LSTM(width, width, num_layers=2)
        self.decoder = nn.Linear(width, VOCABULARY)

    def forward(self, words, hidden=None):
        output, hidden = self.rnn(self.encoder(words), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def repackage_hidden(hidden):
    """Detach hidden states from their history."""
    return tuple(state.detach() for state in hidden)


def get_batch(source, start):
    return source[start : start + BPTT], source[start + 1 : start + 1 + BPTT].flatten()


def train(model, train_data, criterion, optimizer):
    model.train()
    hidden = None
    for batch, start in enumerate(range(0, len(train_data) - 1, BPTT)):
        data, targets = get_batch(train_data, start)
        output, hidden = model(data, hidden)
        hidden = repackage_hidden(hidden)
        loss = criterion(output, targets)
        (loss / ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if (batch + 1) % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def main():
    torch.manual_seed(1111)
    frequencies = 1 / torch.arange(1, VOCABULARY + 1)
    words = torch.multinomial(frequencies, 8 * (16 * BPTT + 1), replacement=True)
    train_data = words.view(-1, 8)
    model = RNNModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=20)
    loss = train(model, train_data, nn.CrossEntropyLoss(), optimizer)
    print(f"end of epoch 1: loss {loss:.2f}")


if __name__ == "__main__":
    main()
