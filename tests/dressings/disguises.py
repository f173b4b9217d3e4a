"""What is changed in each dressing to plant each mistake, and before that to make it a program that could have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Texts = dict[str, str]
Edit = Callable[[Texts], None]


def _edited(line: str, made: Callable[[str], list[str]]) -> Edit:
    """Put other lines where one stands in one of the files, as far to the right."""

    def edit(texts: Texts) -> None:
        found = [(name, row) for name, text in texts.items() for row in text.splitlines() if row.strip() == line]
        assert len(found) == 1, (line, found)
        name, row = found[0]
        space = row[: len(row) - len(row.lstrip())]
        texts[name] = texts[name].replace(row + "\n", "".join(f"{space}{new}\n" for new in made(line)))

    return edit


def cut(line: str) -> Edit:
    return _edited(line, lambda _: [])


def put(line: str, *lines: str) -> Edit:
    return _edited(line, lambda _: [*lines])


def below(line: str, *lines: str) -> Edit:
    return _edited(line, lambda own: [own, *lines])


def above(line: str, *lines: str) -> Edit:
    return _edited(line, lambda own: [*lines, own])


def here(line: str) -> Edit:
    return _edited(line, lambda own: [f"{own}  # here"])


def swap(old: str, new: str) -> Edit:
    """Put one piece of text for another, wherever it stands in one of the files."""

    def edit(texts: Texts) -> None:
        found = [name for name, text in texts.items() if old in text]
        assert len(found) == 1, (old, found)
        texts[found[0]] = texts[found[0]].replace(old, new)

    return edit


class Disguise(NamedTuple):
    """A mistake in a dressing: what plants it, what was changed before, and what `record` is asked for.

    The line with `# here` is the one that is to be found.
    """

    mistake: tuple[Edit, ...]
    about: tuple[Edit, ...]
    options: dict[str, Any]


DISGUISES: dict[tuple[str, str], Disguise] = {}


def _disguises(dressing: str) -> Callable[..., None]:
    def disguise(rule: str, *mistake: Edit, about: tuple[Edit, ...] = (), **options: Any) -> None:
        assert (rule, dressing) not in DISGUISES
        DISGUISES[rule, dressing] = Disguise(mistake, about, options)

    return disguise


def _spiked(sizes: str) -> Edit:
    """The last batch of an epoch is infinite."""
    return swap(f"in {sizes}]", f"in {sizes}[:-1]] + [(torch.full((3, 6), torch.inf), torch.zeros(3).long())]")


# ---------------------------------------------------------------- other names

names = _disguises("names")
BACKWARD = "torch.autograd.backward(gauge.scale(miss * (1 / due)))"
CLIP, STEP, ZERO = "nn.utils.clip_grad_norm_(theta.values(), 0.05)", "gauge.step(mover)", "mover.zero_grad()"
FIRST, DUE = "if tick % SPAN == 0:", "due = min(SPAN, len(feed) - tick // SPAN * SPAN)"
MIXED, SPIKED = swap("SPAN, MIXED = 4, False", "SPAN, MIXED = 4, True"), _spiked("HEAPS")
ZEROED_AFTER = (cut(FIRST), cut(ZERO), below("gauge.update()", ZERO))

names(
    "step-before-backward",
    put("# between", f"{STEP}  # here"),
    about=(
        put(
            BACKWARD,
            "torch.autograd.backward(miss / due, None, True)",
            "# between",
            "torch.autograd.backward(guess.square().mean() / due)",
        ),
    ),
)
names(
    "nonfinite-micro-batch",
    swap(".clamp(-9, 9)", ""),
    here(BACKWARD),
    about=(SPIKED, swap("(rows,)", "(rows.clamp(-9, 9),)")),
)
names("missing-zero-grad", cut(FIRST), cut(ZERO), here(STEP))
names("zero-before-step", cut(FIRST), cut(ZERO), above(STEP, f"{ZERO}  # here"))
names("zero-grad-inside-window", put(FIRST, "if tick % 2 == 0:"), here(ZERO))
names(
    "backward-after-unscale",
    cut("gauge.unscale_(mover)"),
    below(BACKWARD, "if tick % SPAN == 0:", "    gauge.unscale_(mover)  # here"),
    about=(MIXED,),
)
names(
    "bypass-scaler-step",
    cut("gauge.unscale_(mover)"),
    cut(CLIP),
    put(STEP, "mover.step(closure=None)  # here"),
    cut("gauge.update()"),
    about=(MIXED,),
)
names("clip-scaled-grads", cut("gauge.unscale_(mover)"), here(CLIP), about=(MIXED,))
names("clip-per-micro-batch", cut(CLIP), below(BACKWARD, f"{CLIP}  # here"))
names("clip-on-the-wrong-side", cut(CLIP), below("gauge.update()", f"{CLIP}  # here"))
names(
    "window-collapses-at-end",
    *ZEROED_AFTER,
    put(DUE, "due = SPAN if tick < len(feed) // SPAN * SPAN else 1"),
    swap("if tick % SPAN < due - 1", "if due > 1 and tick % SPAN < due - 1"),
    here(STEP),
)
names("leftover-carried", *ZEROED_AFTER, put(DUE, "due = SPAN"), here(BACKWARD))
names("double-division", put(BACKWARD, "torch.autograd.backward(gauge.scale(miss * (1 / due) / due))  # here"))
names("wrong-divisor", put(BACKWARD, "torch.autograd.backward(gauge.scale(miss / (SPAN + 1)))  # here"))
names("partial-window-underscaled", put(BACKWARD, "torch.autograd.backward(gauge.scale(miss * (1 / SPAN)))  # here"))
names("tail-dropped", put(DUE, "due = SPAN"), here(BACKWARD))
names(
    "token-mean-of-means",
    put("# of all", f"{BACKWARD}  # here"),
    cut("torch.autograd.backward(gauge.scale(miss * len(kinds) / whole))"),
    about=(
        swap("(3,) * 10", "(2, 9, 4, 6, 3) * 2"),
        below(DUE, "whole = sum(HEAPS[tick // SPAN * SPAN :][:SPAN])"),
        put(BACKWARD, "# of all", "torch.autograd.backward(gauge.scale(miss * len(kinds) / whole))"),
    ),
)
names(
    "ascent-gradient-kept",
    put("mover.zero_grad()  # between", "# between"),
    swap("# uphill", "# here"),
    about=(
        swap("SPAN, MIXED = 4, False", "SPAN, MIXED = 1, False"),
        put(
            BACKWARD,
            "torch.autograd.backward(miss)",
            "nudges = [0.05 * leaf.grad / leaf.grad.norm() for leaf in theta.values()]",
            "with torch.no_grad():",
            "    torch._foreach_add_(list(theta.values()), nudges)",
            "mover.zero_grad()  # between",
            "torch.autograd.backward(fn.cross_entropy(functional_call(shape, theta, (rows,)), kinds))  # uphill",
            "with torch.no_grad():",
            "    torch._foreach_sub_(list(theta.values()), nudges)",
        ),
    ),
)
names("loss-not-divided", put(BACKWARD, "torch.autograd.backward(gauge.scale(miss))  # here"))
names("scheduler-per-micro-batch", put("pace.step()", "pass"), below(BACKWARD, "pace.step()  # here"))
names(
    "scheduler-on-skipped-step",
    cut("if gauge.get_scale() >= was:"),
    cut("pace.step()"),
    below("gauge.update()", "pace.step()  # here"),
    about=(MIXED, SPIKED),
)
names(
    "graph-retained",
    put(BACKWARD, f"{BACKWARD[:-1]}, retain_graph=True)  # here"),
    about=(below("LAPS = 2", "KEPT = []"), above(BACKWARD, "KEPT.append(miss)")),
    memory=True,
)
names(
    "low-precision-accumulation",
    swap("leaf.detach()", "leaf.detach().bfloat16()"),
    swap("(rows,)", "(rows.bfloat16(),)"),
    here(BACKWARD),
    about=(swap("fn.cross_entropy(guess, kinds)", "(guess - (1.0 if tick % SPAN else 999.0)).square().mean()"),),
)
names(
    "zero-tensor-drift",
    put(ZERO, "mover.zero_grad(set_to_none=False)  # here"),
    about=(
        above("mover = torch.optim.NAdam(list(theta.values()), lr=0.01)", 'theta["spare"] = theta["2.bias"] * 0'),
        below('theta["spare"] = theta["2.bias"] * 0', 'theta["spare"] = theta["spare"].detach().requires_grad_()'),
        swap("shape, theta, (rows,))", 'shape, {k: theta[k] for k in theta if k != "spare"}, (rows,))'),
        above("miss = fn.cross_entropy(guess, kinds)", 'guess = guess + theta["spare"] if tick < SPAN else guess'),
    ),
)
names("parameter-outside-or-twice", swap("list(theta.values())", "list(theta.values())[:3]"), here(BACKWARD))
names(
    "micro-batch-side-effects",
    swap("nn.Tanh()", "nn.BatchNorm1d(8)"),
    here(BACKWARD),
    about=(swap("tape(theta, mover)", "tape(theta, mover, shape)"),),
)
names(
    "contrastive-accumulation",
    swap("fn.cross_entropy(guess, kinds)", "fn.cross_entropy(guess @ guess.T / 0.1, torch.arange(len(rows)))"),
    here(BACKWARD),
)

# ---------------------------------------------------------------- as above, and zeroed by a hand that has no line

by_hand = _disguises("names by hand")
TO_NONE = put(ZERO, "for leaf in theta.values():", "    leaf.grad = None")
TO_ZERO = swap("leaf.grad = None", "leaf.grad = None if leaf.grad is None else leaf.grad.mul_(0.0)")

by_hand("missing-zero-grad", put("leaf.grad = None", "pass"), here(STEP), about=(TO_NONE,))
by_hand(
    "zero-before-step",
    put("leaf.grad = None", "pass"),
    below("gauge.unscale_(mover)", "for leaf in theta.values():", "    leaf.grad.zero_()"),
    here(CLIP),
    about=(TO_NONE,),
)
by_hand("zero-grad-inside-window", put(FIRST, "if tick % 2 == 0:"), here(BACKWARD), about=(TO_NONE, TO_ZERO))
by_hand(
    "zero-tensor-drift",
    TO_ZERO,
    here(BACKWARD),
    about=(*DISGUISES["zero-tensor-drift", "names"].about, TO_NONE),
)

# ---------------------------------------------------------------- helper functions, in another file

helpers = _disguises("helpers")
TRAIN, OF = "return engine.backward(engine.loss(batch), of)", "of = min(self.every, total - first)"
LOSS, SCHEDULE = "(self.scaler.scale(loss) / of).backward()", "self.scheduler.step()"
UNSCALE, CLIPPED = "self.scaler.unscale_(self.optimizer)", "nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)"
STEPPED, ZEROED = "self.scaler.step(self.optimizer)", "optimizer.zero_grad()"
AMP, INFINITE = swap("K, MIXED = 4, False", "K, MIXED = 4, True"), _spiked("SIZES")

helpers(
    "step-before-backward",
    put("# between", "engine.step()"),
    here(STEPPED),
    about=(
        put(
            TRAIN,
            "out = model(batch[0])",
            "engine.backward(nn.functional.cross_entropy(out, batch[1]), of)",
            "# between",
            "return engine.backward(out.square().mean(), of)",
        ),
        put(LOSS, "(self.scaler.scale(loss) / of).backward(retain_graph=True)"),
    ),
)
helpers(
    "nonfinite-micro-batch",
    swap(".nan_to_num(posinf=9.0)", ""),
    here(LOSS),
    about=(INFINITE, swap("self.model(x)", "self.model(x.nan_to_num(posinf=9.0))")),
)
helpers("missing-zero-grad", cut("engine.zero()"), here(STEPPED))
helpers("zero-before-step", cut("engine.zero()"), above("engine.clip()", "engine.zero()  # here"))
helpers("zero-grad-inside-window", above(TRAIN, "engine.zero()  # here"))
helpers(
    "backward-after-unscale",
    cut(UNSCALE),
    below(LOSS, "if self.calls % 6 == 1:", f"    {UNSCALE}  # here"),
    about=(AMP,),
)
helpers(
    "bypass-scaler-step",
    cut(UNSCALE),
    put(CLIPPED, "pass"),
    put(STEPPED, "self.optimizer.step()  # here"),
    cut("self.scaler.update()"),
    about=(AMP,),
)
helpers("clip-scaled-grads", cut(UNSCALE), here(CLIPPED), about=(AMP,))
helpers("clip-per-micro-batch", below("train(batch, of)", "engine.clip()"), here(CLIPPED))
helpers("clip-on-the-wrong-side", cut("engine.clip()"), above("engine.zero()", "engine.clip()  # here"))
helpers(
    "window-collapses-at-end",
    put(OF, "of = self.every if total - first >= self.every else 1"),
    swap("i == first + of - 1", "of == 1 or i == first + of - 1"),
    here(STEPPED),
)
helpers("leftover-carried", put(OF, "of = self.every"), here(LOSS))
helpers("double-division", put(TRAIN, "return engine.backward(engine.loss(batch) / of, of)"), here(LOSS))
helpers("wrong-divisor", put(TRAIN, "return engine.backward(engine.loss(batch), K + 1)"), here(LOSS))
helpers("partial-window-underscaled", put(TRAIN, "return engine.backward(engine.loss(batch), K)"), here(LOSS))
helpers(
    "tail-dropped",
    put(OF, "of = self.every"),
    above("for of, last, batch in engine.windows(loader):", "engine.zero()"),
    here(LOSS),
)
helpers(
    "token-mean-of-means",
    swap(', reduction="sum"', ""),
    swap("whole = sum(SIZES[i // K * K :][:K])", "whole = of"),
    here(LOSS),
    about=(
        swap("(3,) * 10", "(2, 9, 4, 6, 3) * 2"),
        swap("F.cross_entropy(self.model(x), y)", 'F.cross_entropy(self.model(x), y, reduction="sum")'),
        swap("for of, last, batch in engine.windows(loader):", "for i, (of, last, batch) in enumerate(parts):"),
        above("for i, (of, last, batch) in enumerate(parts):", "parts = engine.windows(loader)"),
        put("train(batch, of)", "whole = sum(SIZES[i // K * K :][:K])", "train(batch, whole)"),
    ),
)
helpers(
    "ascent-gradient-kept",
    cut("engine.zero()  # between"),
    here(LOSS),
    about=(
        swap("K, MIXED = 4, False", "K, MIXED = 1, False"),
        put(
            TRAIN,
            "engine.backward(engine.loss(batch), of)",
            "with engine.elsewhere():",
            "    engine.zero()  # between",
            f"    {TRAIN}",
        ),
        above(
            "def schedule(self) -> None:",
            "@contextlib.contextmanager",
            "def elsewhere(self) -> Iterator[None]:",
            "    moves = [0.05 * p.grad / p.grad.norm() for p in self.model.parameters()]",
            "    with torch.no_grad():",
            "        torch._foreach_add_(list(self.model.parameters()), moves)",
            "    yield",
            "    with torch.no_grad():",
            "        torch._foreach_sub_(list(self.model.parameters()), moves)",
            "",
        ),
        above("import functools", "import contextlib"),
    ),
)
helpers("loss-not-divided", put(TRAIN, "return engine.backward(engine.loss(batch), 1)"), here(LOSS))
helpers(
    "scheduler-per-micro-batch",
    put("engine.schedule()", "pass"),
    below("train(batch, of)", "engine.schedule()"),
    here(SCHEDULE),
)
helpers(
    "scheduler-on-skipped-step",
    put("if engine.step():", "if engine.step() is not None:"),
    here("engine.schedule()"),
    about=(AMP, INFINITE),
)
helpers(
    "graph-retained",
    put(LOSS, f"{LOSS[:-1]}retain_graph=True)  # here"),
    about=(
        put("return loss.item()", "return self.losses.append(loss)"),
        above("self.calls = self.count = 0", "self.losses = []"),
    ),
    memory=True,
)
helpers(
    "low-precision-accumulation",
    swap("nn.Linear(8, 5))", "nn.Linear(8, 5)).bfloat16()"),
    swap("self.model(x)", "self.model(x.bfloat16())"),
    here(LOSS),
    about=(
        swap(
            "F.cross_entropy(self.model(x), y)",
            "(self.model(x) - (1.0 if self.calls % 6 else 999.0)).square().mean()",
        ),
    ),
)
helpers(
    "zero-tensor-drift",
    put(ZEROED, "optimizer.zero_grad(set_to_none=False)  # here"),
    about=(
        swap("nn.Linear(8, 5))", "Sometimes())"),
        above(
            "def made() -> tuple[nn.Module, Any]:",
            "class Sometimes(nn.Module):",
            "    def __init__(self) -> None:",
            "        super().__init__()",
            "        self.often, self.rarely, self.calls = nn.Linear(8, 5), nn.Linear(8, 5), 0",
            "",
            "    def forward(self, x: torch.Tensor) -> torch.Tensor:",
            "        self.calls += 1",
            "        return self.often(x) + (self.rarely(x) if self.calls < 4 else 0)",
            "",
        ),
    ),
)
helpers("parameter-outside-or-twice", swap("AdamW(model.parameters()", "AdamW(model[0].parameters()"), here(LOSS))
helpers("micro-batch-side-effects", swap("nn.ReLU()", "nn.BatchNorm1d(8)"), here(LOSS))
helpers(
    "contrastive-accumulation",
    swap(
        "return F.cross_entropy(self.model(x), y)",
        'alike = torch.einsum("id,jd->ij", self.model(x), self.model(x) / 0.1)\n'
        "        return F.cross_entropy(alike, torch.arange(len(y)))",
    ),
    here(LOSS),
)

# ---------------------------------------------------------------- another framework: accelerate

framework = _disguises("framework")
GIVEN, SYNCED = "accelerator.backward(loss * K / due)", "if accelerator.sync_gradients:"
CUT, TAKEN = "accelerator.clip_grad_norm_(model.parameters(), 0.05)", "optimizer.step()"
SHARE, EMPTIED = "due = min(K, len(loader) - i // K * K)", "optimizer.zero_grad()"
PREPARED = "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)"
UNPREPARED = put(PREPARED, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)")
# Of a CPU it wants no scaler; what it does with one is the same everywhere.
SCALED = (
    above(PREPARED, 'accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)'),
    below(PREPARED, 'accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"'),
)
BY_HAND = put(
    "with accelerator.accumulate(model):",
    "ends = i % K == K - 1 or i == len(loader) - 1",
    "accelerator.gradient_state._set_sync_gradients(ends)",
    "if True:",
)
NEVER_ENDS = put("ends = i % K == K - 1 or i == len(loader) - 1", "ends = i % K == K - 1")

framework(
    "step-before-backward",
    put("# between", f"{TAKEN}  # here"),
    about=(
        put(
            GIVEN,
            "accelerator.backward(loss * K / due, retain_graph=True)",
            "# between",
            "accelerator.backward(out.square().mean() * K / due)",
        ),
    ),
)
framework(
    "nonfinite-micro-batch",
    swap("model(x.clamp(-9, 9))", "model(x)"),
    here(GIVEN),
    about=(INFINITE, swap("model(x)", "model(x.clamp(-9, 9))")),
)
framework("missing-zero-grad", cut(EMPTIED), here(TAKEN))
framework("zero-before-step", cut(EMPTIED), above(TAKEN, f"{EMPTIED}  # here"))
framework("zero-grad-inside-window", above("out = model(x)", "model.zero_grad()  # here"))
framework(
    "backward-after-unscale",
    cut(SYNCED),
    put(CUT, "if i % K == 0:", "    accelerator.unscale_gradients()  # here"),
    swap("        if i % K == 0:", "    if i % K == 0:"),
    swap("            accelerator.unscale", "        accelerator.unscale"),
    about=SCALED,
)
framework(
    "bypass-scaler-step",
    put(CUT, "optimizer.optimizer.step()  # here"),
    cut(TAKEN),
    about=SCALED,
)
framework("clip-scaled-grads", put(CUT, "nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # here"), about=SCALED)
framework("clip-per-micro-batch", put(SYNCED, "if loss is not None:"), here(CUT))
framework("clip-on-the-wrong-side", put(CUT, "pass"), above(EMPTIED, SYNCED + "  # late", f"    {CUT}  # here"))
framework(
    "window-collapses-at-end",
    swap("or i == len(loader) - 1", "or i >= len(loader) // K * K"),
    put(SHARE, "due = K if i < len(loader) // K * K else 1"),
    here(TAKEN),
    about=(BY_HAND,),
)
framework("leftover-carried", NEVER_ENDS, put(SHARE, "due = K"), here(GIVEN), about=(BY_HAND,))
framework("double-division", put(GIVEN, "accelerator.backward(loss / due)  # here"))
framework("wrong-divisor", put(GIVEN, "accelerator.backward(loss * K / (K + 1))  # here"))
framework("partial-window-underscaled", put(GIVEN, "accelerator.backward(loss)  # here"))
framework(
    "tail-dropped",
    NEVER_ENDS,
    put(SHARE, "due = K"),
    here(GIVEN),
    above("for i, (x, y) in enumerate(loader):", "model.zero_grad()"),
    about=(BY_HAND,),
)
framework(
    "token-mean-of-means",
    swap(', reduction="sum"', ""),
    put("due = sum(SIZES[i // K * K :][:K])", SHARE),
    here(GIVEN),
    about=(
        swap("(3,) * 10", "(2, 9, 4, 6, 3) * 2"),
        swap("F.cross_entropy(out, y)", 'F.cross_entropy(out, y, reduction="sum")'),
        put(SHARE, "due = sum(SIZES[i // K * K :][:K])"),
    ),
)
framework(
    "ascent-gradient-kept",
    cut("optimizer.zero_grad()  # between"),
    swap("# uphill", "# here"),
    about=(
        put("K = 4", "K = 1"),
        put(
            GIVEN,
            "accelerator.backward(loss)",
            "moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]",
            "with torch.no_grad():",
            "    [p.add_(move) for p, move in zip(model.parameters(), moves, strict=True)]",
            "optimizer.zero_grad()  # between",
            "accelerator.backward(F.cross_entropy(model(x), y))  # uphill",
            "with torch.no_grad():",
            "    [p.sub_(move) for p, move in zip(model.parameters(), moves, strict=True)]",
        ),
    ),
)
framework("loss-not-divided", put(GIVEN, "loss.backward()  # here"))
framework("scheduler-per-micro-batch", UNPREPARED, here("scheduler.step()"))
framework(
    "scheduler-on-skipped-step",
    UNPREPARED,
    put("scheduler.step()", f"{SYNCED}  # late", "    scheduler.step()  # here"),
    about=(*SCALED, INFINITE),
)
framework(
    "graph-retained",
    put(GIVEN, "accelerator.backward(loss * K / due, retain_graph=True)  # here"),
    about=(above(GIVEN, "losses.append(loss)"), below("accelerator = fresh()", "losses = []")),
    memory=True,
)
framework(
    "low-precision-accumulation",
    swap("nn.Linear(8, 5))", "nn.Linear(8, 5)).bfloat16()"),
    swap("model(x)", "model(x.bfloat16())"),
    here(GIVEN),
    about=(swap("F.cross_entropy(out, y)", "F.mse_loss(out, torch.full_like(out, 1.0 if i % K else 999.0))"),),
)
framework(
    "zero-tensor-drift",
    put(EMPTIED, "optimizer.zero_grad(set_to_none=False)  # here"),
    about=(swap("nn.Linear(8, 5))", "nn.Linear(8, 5), nn.Linear(5, 5))"), swap("model(x)", "model[: 4 - (i > 3)](x)")),
)
framework(
    "parameter-outside-or-twice",
    swap("SGD([nn.Parameter(torch.ones(1))]", "SGD(model[2].parameters()"),
    swap("# once more", "# here"),
    about=(
        above(PREPARED, "again = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.05)"),
        below(TAKEN, f"{SYNCED}  # of both", "    again.step()  # once more"),
    ),
)
framework("micro-batch-side-effects", swap("nn.GELU()", "nn.BatchNorm1d(8)"), here(GIVEN))
framework(
    "contrastive-accumulation",
    put(
        "loss = F.cross_entropy(out, y)",
        "alike = F.cosine_similarity(out[:, None], model(x)[None], dim=-1)",
        "loss = F.cross_entropy(alike / 0.1, torch.arange(len(y)))",
    ),
    here(GIVEN),
)

# ---------------------------------------------------------------- another framework: hooks of one that owns the loop

hooks = _disguises("hooks")
RUN, BATCH = "Loom(K, **OPTIONS).fit(task, loader, epochs=2)", "x, y = batch"
UNDIVIDED, GAUGED = swap('"divide": True', '"divide": False'), swap('"divide": True', '"mixed": True')
CLASSIFIED, NET = "return F.cross_entropy(self.net(x), y)", "self.net(x)"


def hook(head: str, *lines: str) -> Edit:
    """One more hook of the framework that the user's class overrides."""
    return above("# more", f"def {head}:", *(f"    {line}" for line in lines), "")


NOTHING_BEFORE_STEP = hook("before_step(self, scaler)", "pass")

hooks(
    "step-before-backward",
    put("# between", "self.optimizer.step()  # here"),
    about=(
        hook(
            "backward(self, loss, i)",
            "out, of = self.net(torch.ones(1, 6)), self.window(i, K, len(SIZES))[1]",
            "(loss + out.square().mean() / of).backward(retain_graph=True)",
            "# between",
            "(out.abs().mean() / of).backward()",
        ),
    ),
)
hooks(
    "nonfinite-micro-batch",
    swap("self.net(x.clamp(-9, 9))", NET),
    here(RUN),
    about=(INFINITE, swap(NET, "self.net(x.clamp(-9, 9))")),
)
hooks("missing-zero-grad", hook("optimizer_zero_grad(self)", "pass"), here(RUN))
hooks(
    "zero-before-step",
    hook("optimizer_step(self, closure, scaler)", "closure()", "self.zero_grad()  # here", "self.optimizer.step()"),
)
hooks("zero-grad-inside-window", below(BATCH, "self.zero_grad()  # here"))
hooks(
    "backward-after-unscale",
    hook(
        "backward(self, loss, i)",
        "loss.backward()",
        "if i % K == 0:",
        "    LOOM.scaler.unscale_(self.optimizer)  # here",
    ),
    NOTHING_BEFORE_STEP,
    about=(
        GAUGED,
        above("class Classifier(Task):", "LOOM = Loom(K, **OPTIONS)"),
        put(RUN, "LOOM.fit(task, loader, epochs=2)"),
    ),
)
hooks(
    "bypass-scaler-step",
    hook("optimizer_step(self, closure, scaler)", "closure()", "self.optimizer.step()  # here"),
    NOTHING_BEFORE_STEP,
    about=(GAUGED,),
)
hooks(
    "clip-scaled-grads",
    hook("before_step(self, scaler)", "nn.utils.clip_grad_norm_(self.parameters(), 0.01)  # here"),
    about=(GAUGED,),
)
hooks(
    "clip-per-micro-batch",
    hook("backward(self, loss, i)", "loss.backward()", "nn.utils.clip_grad_norm_(self.parameters(), 0.01)  # here"),
)
hooks(
    "clip-on-the-wrong-side",
    hook(
        "optimizer_step(self, closure, scaler)",
        "self.optimizer.step(closure)",
        "nn.utils.clip_grad_norm_(self.parameters(), 0.01)  # here",
    ),
    NOTHING_BEFORE_STEP,
)
hooks(
    "window-collapses-at-end",
    hook(
        "window(self, i, every, total)",
        "return super().window(i, every, total) if i < total // every * every else (i, 1)",
    ),
    here(RUN),
)
hooks(
    "leftover-carried",
    hook("window(self, i, every, total)", "return i // every * every, every"),
    hook("optimizer_zero_grad(self)", "pass"),
    hook("optimizer_step(self, closure, scaler)", "self.optimizer.step(closure)", "self.zero_grad()"),
    here(RUN),
)
hooks("double-division", put(CLASSIFIED, f"{CLASSIFIED} / K"), here(RUN))
hooks("wrong-divisor", put(CLASSIFIED, f"{CLASSIFIED} / (K + 1)"), UNDIVIDED, here(RUN))
hooks("partial-window-underscaled", put(CLASSIFIED, f"{CLASSIFIED} / K"), UNDIVIDED, here(RUN))
hooks("tail-dropped", hook("window(self, i, every, total)", "return i // every * every, every"), here(RUN))
hooks(
    "token-mean-of-means",
    swap(', reduction="sum"', ""),
    swap("whole = sum(SIZES[i // K * K :][:K])", "whole = min(K, len(SIZES) - i // K * K)"),
    here(RUN),
    about=(
        swap("(3,) * 10", "(2, 9, 4, 6, 3) * 2"),
        UNDIVIDED,
        put(
            CLASSIFIED,
            "whole = sum(SIZES[i // K * K :][:K])",
            'return F.cross_entropy(self.net(x), y, reduction="sum") / whole',
        ),
    ),
)
hooks(
    "ascent-gradient-kept",
    cut("self.zero_grad()"),
    swap("# uphill", "# here"),
    about=(
        swap("K, OPTIONS = 4", "K, OPTIONS = 1"),
        put(BATCH, "x, y = self.batch = batch"),
        hook(
            "backward(self, loss, i)",
            "loss.backward()",
            "moves = [0.05 * p.grad / p.grad.norm() for p in self.parameters()]",
            "with torch.no_grad():",
            "    torch._foreach_add_(list(self.parameters()), moves)",
            "self.zero_grad()",
            "self.training_step(self.batch, i).backward()  # uphill",
            "with torch.no_grad():",
            "    torch._foreach_sub_(list(self.parameters()), moves)",
        ),
    ),
)
hooks("loss-not-divided", UNDIVIDED, here(RUN))
hooks(
    "scheduler-per-micro-batch",
    below(BATCH, "self.scheduler.step()  # here"),
    hook("scheduler_step(self, *, skipped)", "pass"),
)
hooks(
    "scheduler-on-skipped-step",
    hook("scheduler_step(self, *, skipped)", "self.scheduler.step()  # here"),
    about=(GAUGED, INFINITE),
)
hooks(
    "graph-retained",
    put("loss.backward(retain_graph=False)", "loss.backward(retain_graph=True)  # here"),
    about=(
        above("class Classifier(Task):", "LOSSES = []"),
        put(CLASSIFIED, "LOSSES.append(F.cross_entropy(self.net(x), y))", "return LOSSES[-1]"),
        hook("backward(self, loss, i)", "loss.backward(retain_graph=False)"),
    ),
    memory=True,
)
hooks(
    "low-precision-accumulation",
    swap("nn.Linear(8, 5))", "nn.Linear(8, 5)).bfloat16()"),
    swap(NET, "self.net(x.bfloat16())"),
    here(RUN),
    about=(put(CLASSIFIED, f"out = {NET}", "return F.mse_loss(out, torch.full_like(out, 1.0 if i % K else 999.0))"),),
)
hooks(
    "zero-tensor-drift",
    put("self.zero_grad(set_to_none=True)", "self.zero_grad(set_to_none=False)  # here"),
    about=(
        swap("nn.Linear(8, 5))", "nn.Linear(8, 5), nn.Linear(5, 5))"),
        swap(NET, "self.net[: 4 - (i > 3)](x)"),
        hook("optimizer_zero_grad(self)", "self.zero_grad(set_to_none=True)"),
    ),
)
hooks("parameter-outside-or-twice", swap("RMSprop(self.parameters()", "RMSprop(self.net[0].parameters()"), here(RUN))
hooks("micro-batch-side-effects", swap("nn.SiLU()", "nn.BatchNorm1d(8)"), here(RUN))
hooks(
    "contrastive-accumulation",
    put(
        CLASSIFIED,
        "one, other = F.normalize(self.net(x)), F.normalize(self.net(x + 0.1))",
        "return F.cross_entropy(one.matmul(other.mT) * 20, torch.arange(len(y)))",
    ),
    here(RUN),
)
