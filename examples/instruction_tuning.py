"""Fine-tune a causal language model on padded answers of very different lengths, prompts masked with -100."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

VOCABULARY, PAD, IGNORED = 64, 0, -100
GRADIENT_ACCUMULATION_STEPS = 4


class CausalLM(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return self.lm_head(self.encoder(self.embedding(input_ids), mask=mask, is_causal=True))


def make_examples(count: int) -> list[dict[str, torch.Tensor]]:
    examples = []
    for answer in torch.randint(2, 40, (count,)).tolist():
        input_ids = torch.randint(1, VOCABULARY, (8 + answer,))
        labels = input_ids.clone()
        labels[:8] = IGNORED
        examples.append({"input_ids": input_ids, "labels": labels})
    return examples


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": pad_sequence([e["input_ids"] for e in examples], batch_first=True, padding_value=PAD),
        "labels": pad_sequence([e["labels"] for e in examples], batch_first=True, padding_value=IGNORED),
    }


def compute_loss(model, batch, reduction="mean"):
    logits = model(batch["input_ids"])[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def main():
    torch.manual_seed(0)
    loader = DataLoader(make_examples(48), batch_size=2, collate_fn=collate)
    model = CausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    window = []
    for step, batch in enumerate(loader, 1):
        window.append(batch)
        if len(window) < GRADIENT_ACCUMULATION_STEPS:
            continue
        answers = sum((each["labels"][:, 1:] != IGNORED).sum() for each in window)
        for micro_batch in window:
            loss = compute_loss(model, micro_batch) / GRADIENT_ACCUMULATION_STEPS
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        window.clear()
        print(f"batch {step}: a step on {answers} tokens of answers")


if __name__ == "__main__":
    main()
