"""Questions as people type them: the book's own search answers each within its first five results."""

import re
from typing import Any
from urllib.parse import quote

from tests.conftest import ROOT

FIRST = 5
# What is typed, and the title of what answers it: a section, a symptom or a question.
ANSWERED = {
    # from forums, issues and tutorials
    "why do we need zero_grad()?": "Why do we need to call zero_grad?",
    "Trying to backward through the graph a second time": "A second backward through the same graph",
    "when to use retain_graph=True": "When should I use retain_graph=True?",
    "model.zero_grad() or optimizer.zero_grad()?": "model.zero_grad() or optimizer.zero_grad()?",
    "where to put zero_grad": "Where to put zero_grad",
    ".grad is None after backward": "Why is .grad None?",
    "why loss / accumulation_steps": "Why divide the loss by the accumulation steps?",
    "last batch gradient accumulation remainder": "The last batches of an epoch do not fill a window",
    "loss curves differ with gradient accumulation": "The loss curve with accumulation is different",
    "num_items_in_batch token average": "Texts: weigh tokens",
    "batch normalization with gradient accumulation": "BatchNorm, dropout, LSTM",
    "gradient clipping before or after accumulation": "Clip once, before the step",
    "unscale_() has already been called on this optimizer": "Gradient scaler and accumulation: unscale once",
    "lr scheduler gradient accumulation num_training_steps": "Number of training steps for the scheduler",
    "scale learning rate with gradient accumulation": "Which learning rate when I accumulate?",
    "no_sync forward inside or outside": "no_sync has no effect under DDP",
    "FSDP gradient accumulation out of memory": "FSDP: memory rises under no_sync",
    "multiply loss by world size DDP": "Does DDP sum or average gradients?",
    "modified by an inplace operation": "Modified by an inplace operation",
    "GAN zero_grad order detach": "GAN: detach the fake? In which order",
    "memory increases every iteration total_loss += loss": "Memory grows with every step",
    "multiple losses backward separately or sum": "loss1.backward() and loss2.backward()",
    "CLIP contrastive loss gradient accumulation": "Contrastive losses need the whole batch",
    "accumulate gradients in fp32 when training in bf16": "Why accumulate in fp32",
    "skip batch nan gradient accumulation": "The loss is NaN in one micro-batch",
    "is gradient accumulation slower": "Is gradient accumulation slower?",
    "does the huggingface trainer already divide the loss": "Does your trainer divide already?",
    "lstm hidden state detach between batches": "RNN or LSTM: detach the hidden state",
    "set_to_none=True what does it do": "None or zero: set_to_none",
    "gradient accumulation loop example": "Which is the correct gradient accumulation loop?",
    # new ones
    "how many gradient accumulation steps should I use": "How many gradient accumulation steps",
    "how to check that gradient accumulation is correct": "How can I test or check",
    "gradient accumulation with GradScaler amp": "Gradient scaler and accumulation: unscale once",
    "weights not updating after optimizer.step()": "The loss does not move, the weights are not updated",
    "loss.item() slow on gpu": "Timing on a GPU: wait for the queue",
    "micro batch vs mini batch vs batch size": "What is the difference between batch size, micro-batch",
    "gradient checkpointing vs gradient accumulation": "Micro-batches, checkpoints, or both?",
    "what is a leaf tensor": "Which tensors get a gradient",
    "adam optimizer memory bytes per parameter": "How much memory that is in a real model",
    "training hangs at end of epoch ddp": "Training hangs at the end of an epoch",
    # asked in issues and forums, and not looked for when the table of symptoms was written
    "update EMA with gradient accumulation": "Update the EMA, log, evaluate or save",
    "resume from checkpoint in the middle of gradient accumulation": "Save a checkpoint, or resume from it",
    "OOM when increasing gradient accumulation steps": "more accumulation steps run out of memory",
    "are accumulated gradients summed or averaged": "Are accumulated gradients summed or averaged?",
    "training loss is not comparable to validation loss with gradient accumulation": "The loss in the log is K times",
    "different gradients large batch vs accumulated mini-batches": "The loss curve with accumulation is different",
    "gradient accumulation with two optimizers": "Gradient accumulation with two optimizers",
    "optimizer step in backward hook with gradient accumulation": "A step inside the backward",
    "LoRA does not reduce memory": "LoRA or frozen layers do not reduce the memory, or by little",
    "deepspeed zero 2 gradient accumulation worse results": "DeepSpeed, ZeRO stage 2",
}


def found(page: Any, query: str) -> Any:
    """The links of a search's results."""
    page.goto(page.url.partition("?")[0] + f"?q={quote(query)}")
    links = page.locator("#search-results ul.search li a")
    links.first.wait_for()
    return links


def test_questions_as_people_type_them_are_answered_in_the_first_five_results(visit: Any) -> None:
    page = visit("search.html")
    titles = {question: found(page, question).all_inner_texts()[:FIRST] for question in ANSWERED}
    assert len(ANSWERED) == 50
    assert {one: titles[one] for one, answer in ANSWERED.items() if not any(answer in t for t in titles[one])} == {}


def test_search_leads_from_what_one_sees_to_its_symptom(visit: Any) -> None:
    text = (ROOT / "symptoms.md").read_text("utf-8")
    rows = re.findall(r"^\* - (?!What you see|Question)(.*)", text, re.MULTILINE)
    page = visit("search.html")
    assert len(rows) > 40
    hrefs = "all => all.slice(0, 3).map(one => one.href)"
    leads = {row: found(page, row.replace("`", "").strip()).evaluate_all(hrefs) for row in rows}
    assert {row: links for row, links in leads.items() if "symptoms.html" not in " ".join(links)} == {}


def test_a_search_finds_an_error_message_says_which_word_is_nowhere_and_takes_markup_as_text(visit: Any) -> None:
    page = visit("search.html")
    told, message = page.locator("#search-count"), "Trying to backward through the graph a second"
    for words, says in ((f"{message} time", "with “Trying"), (f"{message} thyme", "No section has all of")):
        assert "A second backward" in " ".join(found(page, words).all_inner_texts()[:2])
        assert says in told.inner_text()
    page.goto(page.url.partition("?")[0] + "?q=%3Cimg%20src%3Dx%3E(")
    page.wait_for_function("document.getElementById('search-count').textContent")
    assert "<img src=x>(" in told.inner_text()
    assert page.locator("article img").count() == 0
