"""Loops with one mistake each, on the line that names the rule; `scripts.py` makes their right twins."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from tests.corpus.common import batches, loader, net, sgd, trained


def a_bare_loss_beside_a_divided_one(model, x, y):
    out = model(x)
    (F.cross_entropy(out, y) / 4 + out.square().mean()).backward()  # wrong, finding: loss-not-divided
    # right: (F.cross_entropy(out, y) / 4 + out.square().mean() / 4).backward()


def a_clip_by_hand_after_each_backward(model, x, y, i):
    (F.cross_entropy(model(x), y) / 4).backward()  # finding: uneven-shares
    length = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad *= (0.01 / length).clamp(max=1.0)  # wrong
        # right: p.grad *= (0.01 / length if i % 4 == 3 else torch.ones(())).clamp(max=1.0)


def a_clip_of_a_generator_that_was_read(record):
    """The optimizer has read the parameters, and the clip finds none."""
    model = net()
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    # right: parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with record(model, optimizer):
        for x, y in batches(*[8] * 4):
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)  # finding: clip-of-nothing
            optimizer.step()
            optimizer.zero_grad()


def a_closure_that_is_zeroed_outside_it(record):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with record(model, optimizer):
        for x, y in batches(*[8] * 4):

            def closure(x=x, y=y):
                # right: optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.zero_grad()
            optimizer.step(closure)  # finding: missing-zero-grad


def a_closure_that_never_zeroes(record):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with record(model, optimizer):
        for x, y in batches(*[8] * 4):

            def closure(x=x, y=y):
                # right: optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)  # finding: missing-zero-grad


def a_function_that_trains_and_zeroes_before(record):
    def train(model, own, x, y):
        own.zero_grad()  # wrong, finding: zero-grad-inside-window
        (F.cross_entropy(model(x), y) / 4).backward()

    with trained(record) as (model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            train(model, optimizer, x, y)
            if i % 4 == 3:
                optimizer.step()  # wrong
                # right: optimizer.step(); optimizer.zero_grad()


def a_function_that_zeroes_called_at_the_windows_end_and_inside_it(record):

    def zero(of):
        of.zero_grad()

    def finish(optimizer):
        optimizer.step()
        zero(optimizer)

    with trained(record) as (model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            zero(optimizer)  # wrong, finding: zero-grad-inside-window
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                finish(optimizer)


def a_gan_that_accumulates_both_losses_in_turns(record):
    """The generator's last micro-batch reaches the judge when the judge has been zeroed."""
    maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    of_maker, of_judge = (torch.optim.Adam(each.parameters()) for each in (maker, judge))
    bce, yes, no = F.binary_cross_entropy_with_logits, torch.ones(8, 1), torch.zeros(8, 1)
    with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
        for _ in range(4):
            # right: of_judge.zero_grad()
            for _ in range(2):
                fake = maker(torch.randn(8, 2)).detach()
                ((bce(judge(torch.randn(8, 4)), yes) + bce(judge(fake), no)) / 2).backward()
            of_judge.step()
            of_judge.zero_grad()
            of_maker.zero_grad()
            for _ in range(2):
                (bce(judge(maker(torch.randn(8, 2))), yes) / 2).backward()  # finding: gan-gradient-leak
            of_maker.step()


def a_gan_that_zeroes_each_player_after_its_step_alone(record):
    """The first step of the judge reads one leaked loss, the later ones two."""
    maker, judge = nn.Linear(2, 2), nn.Linear(2, 1)
    makes, judges = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (maker, judge))
    with record(maker, judge, makes, judges):
        for i in range(8):
            fake = maker(torch.randn(3, 2))
            ((judge(fake.detach()).mean() - judge(torch.randn(3, 2)).mean()) / 2).backward()
            if i % 2:
                judges.step()
                judges.zero_grad()
            # right: judge.requires_grad_(False)
            (-judge(fake).mean() / 2).backward()  # finding: gan-gradient-leak
            # right: judge.requires_grad_(True)
            if i % 2:
                makes.step()
                makes.zero_grad()


def a_gan_whose_judge_is_zeroed_too_early(record):
    """The generator's loss stays in the judge's gradients until the judge steps."""
    maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    of_maker, of_judge = (torch.optim.Adam(each.parameters()) for each in (maker, judge))
    bce, yes, no = F.binary_cross_entropy_with_logits, torch.ones(8, 1), torch.zeros(8, 1)
    with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
        for _ in range(4):
            # right: of_judge.zero_grad()
            fake = maker(torch.randn(8, 2))
            loss = bce(judge(torch.randn(8, 4)), yes) + bce(judge(fake.detach()), no)
            loss.backward()
            of_judge.step()
            of_judge.zero_grad()
            of_maker.zero_grad()
            bce(judge(fake), yes).backward()  # finding: gan-gradient-leak
            of_maker.step()


def a_gan_whose_steps_come_after_both_backwards(record):
    """The judge's loss reaches the maker, which has not stepped yet."""
    maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    of_maker, of_judge = (torch.optim.Adam(each.parameters()) for each in (maker, judge))
    with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
        for _ in range(4):
            fakes = [maker(torch.randn(8, 2)) for _ in range(2)]
            of_maker.zero_grad()
            for fake in fakes:
                ((F.softplus(-judge(fake)).mean() + fake.square().mean()) / 2).backward(retain_graph=True)
            of_judge.zero_grad()
            for fake in fakes:
                # right: fake = fake.detach()
                real = torch.randn(8, 4)
                (
                    (F.softplus(judge(fake)) + F.softplus(-judge(real))).mean() / 2
                ).backward()  # finding: gan-gradient-leak
            of_maker.step()
            of_judge.step()


def a_layer_that_no_optimizer_has(record):
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    # right: optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()  # finding: parameter-outside-or-twice
            optimizer.step()
            optimizer.zero_grad()


def a_loss_that_is_infinite(record):
    with trained(record) as (model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 8)):
            loss = F.cross_entropy(model(x), y)
            if i == 5:
                loss = loss * float("inf")  # wrong
            loss.backward()  # finding: nonfinite-micro-batch
            if i == 5:
                break
            optimizer.step()
            optimizer.zero_grad()
        optimizer.step()


def a_method_that_clips_called_after_the_one_that_steps(record):
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

    with trained(record) as (model, optimizer):
        Trainer(model, optimizer).fit()


def clips_the_critic_for_the_policy(record):
    """Of a trunk with two heads, the critic's is clipped, whose gradients the critic's step has read."""
    trunk, policy, critic = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(16, 1)
    of_policy = torch.optim.SGD([*trunk.parameters(), *policy.parameters()], lr=0.01)
    of_critic = torch.optim.SGD([*trunk.parameters(), *critic.parameters()], lr=0.01)
    with record(trunk, policy, critic, of_policy, of_critic):
        for x, y in batches(*[8] * 4):
            of_critic.zero_grad()
            critic(trunk(x)).square().mean().backward()
            nn.utils.clip_grad_norm_([*trunk.parameters(), *critic.parameters()], 0.1)
            of_critic.step()
            of_policy.zero_grad()
            F.cross_entropy(policy(trunk(x)), y).backward()
            nn.utils.clip_grad_norm_(critic.parameters(), 0.1)  # wrong, finding: clip-on-the-wrong-side
            # right: nn.utils.clip_grad_norm_([*trunk.parameters(), *policy.parameters()], 0.1)
            of_policy.step()


def a_mixture_of_two_undivided(model, x, y):
    out = model(x)
    loss = 0.7 * F.cross_entropy(out, y) + 0.3 * out.square().mean()  # wrong
    # right: loss = 0.25 * 0.7 * F.cross_entropy(out, y) + 0.25 * 0.3 * out.square().mean()
    loss.backward()  # finding: loss-not-divided


def a_schedule_for_each_micro_batch(record):
    with trained(record) as (model, optimizer):
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()  # wrong, finding: scheduler-per-micro-batch
            # right: if i % 4 == 3: schedule.step()


def a_schedule_made_for_the_micro_batches(record):
    """It steps once a window, and the last window of each epoch is short."""
    model, optimizer = sgd()
    data = batches(*[2] * 10)
    steps = 2 * len(data)  # wrong
    # right: steps = 2 * 3
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    with record(model, optimizer):
        for _ in range(2):
            for i, (x, y) in enumerate(data):
                (F.cross_entropy(model(x), y) / (4 if i < 8 else 2)).backward()
                if i % 4 == 3 or i == 9:
                    optimizer.step()
                    schedule.step()  # finding: schedule-too-long
                    optimizer.zero_grad()


def a_short_window(record):
    with trained(record) as (model, optimizer):
        for _ in range(2):
            data = loader(12)
            for i, (x, y) in enumerate(data):
                size = 4  # wrong
                # right: size = 4 if i < 4 else 2
                (F.cross_entropy(model(x), y) / size).backward()  # finding: partial-window-underscaled
                if i % 4 == 3 or i == len(data) - 1:
                    optimizer.step()
                    optimizer.zero_grad()


def a_step_of_the_scaler_and_one_more(record):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with trained(record) as (model, optimizer):
        for x, y in batches(*[2] * 8):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.step()  # wrong, finding: gradient-applied-twice


def a_step_one_micro_batch_too_early(model, optimizer, x, y, i):
    (F.cross_entropy(model(x), y) / 4).backward()  # finding: wrong-divisor
    if i % 3 == 2:  # wrong
        # right: if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()


def a_sum_that_begins_anew_in_each_window_of_which_each_backward_runs_all_so_far(record):
    with trained(record) as (model, optimizer):
        total = 0
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            total = total + F.cross_entropy(model(x), y) / 4  # wrong
            # right: total = F.cross_entropy(model(x), y) / 4
            total.backward(retain_graph=True)  # finding: graph-retained
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                total = 0


def a_sum_for_a_log_with_its_graph_of_which_each_backward_runs_all_so_far(record):
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer):
        total_loss = 0
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y) / 4
            total_loss += loss  # wrong
            # right: total_loss += loss.detach()
            total_loss.backward(retain_graph=True)  # wrong, finding: graph-retained
            # right: loss.backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def a_tail_that_is_zeroed(record):
    with trained(record) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            data = loader(12)
            for i, (x, y) in enumerate(data):
                size = 4 if i < 4 else 2
                (F.cross_entropy(model(x), y) / size).backward()  # finding: tail-dropped
                last = i % 4 == 3  # wrong
                # right: last = i % 4 == 3 or i == len(data) - 1
                if last:
                    optimizer.step()
                    optimizer.zero_grad()


def accelerate_divides_as_well(record):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = sgd()
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    with record(model, optimizer.optimizer):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss / 4)  # wrong, finding: double-division
                # right: accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


def an_encoder_that_two_optimizers_have(record):
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


def clipped_after_each_backward(model, x, y, i):
    (F.cross_entropy(model(x), y) / 4).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # wrong, finding: clip-per-micro-batch
    # right: if i % 4 == 3: nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clipped_and_left_to_the_step_to_unscale(record):
    with trained(record) as (model, optimizer):
        s = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for x, y in batches(*[8] * 4):
            s.scale(F.cross_entropy(model(x), y)).backward()
            # right: s.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # finding: clip-scaled-grads
            s.step(optimizer)
            s.update()
            optimizer.zero_grad()


def clipped_before_it_is_unscaled(record):
    with trained(record) as (model, optimizer):
        s = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for x, y in batches(*[8] * 4):
            s.scale(F.cross_entropy(model(x), y)).backward()
            # right: s.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # finding: clip-scaled-grads
            s.unscale_(optimizer)  # wrong
            s.step(optimizer)
            s.update()
            optimizer.zero_grad()


def clipped_while_scaled_after_each_backward(record):
    with trained(record) as (model, optimizer):
        s = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            s.scale(F.cross_entropy(model(x), y) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # wrong, finding: clip-scaled-grads
            # right: if i % 4 == 3: s.unscale_(optimizer); nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if i % 4 == 3:
                s.step(optimizer)
                s.update()
                optimizer.zero_grad()


def divided_by_one_more_than_there_are(model, x, y):
    (F.cross_entropy(model(x), y) / 5).backward()  # wrong, finding: wrong-divisor
    # right: (F.cross_entropy(model(x), y) / 4).backward()


def divided_by_the_place_in_the_window(model, x, y, i):
    (F.cross_entropy(model(x), y) / (i % 4 + 1)).backward()  # wrong, finding: uneven-shares
    # right: (F.cross_entropy(model(x), y) / 4).backward()


def divided_in_the_last_micro_batch_of_each_window_only(model, x, y, i):
    loss = F.cross_entropy(model(x), y)
    if i % 4 == 3:
        loss = loss / 4  # wrong
    # right: loss = loss / 4
    loss.backward()  # finding: uneven-shares


def divided_twice(model, x, y):
    loss = F.cross_entropy(model(x), y) / 4
    (loss / 4).backward()  # wrong, finding: double-division
    # right: loss.backward()


def functions_without_a_name_in_the_wrong_order(record):
    with trained(record) as (model, optimizer):
        zero, step = lambda: optimizer.zero_grad(), lambda: optimizer.step()
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            zero()  # wrong, finding: zero-before-step
            step()
            # right: zero()


def gradients_divided_after_each_backward(model, x, y, i):
    F.cross_entropy(model(x), y).backward()  # finding: uneven-shares
    for p in model.parameters():
        p.grad /= 4  # wrong
        # right: p.grad /= 4 if i % 4 == 3 else 1


def graphs_kept_in_a_list(record):
    losses = []
    with trained(record, memory=True) as (model, optimizer):
        for x, y in batches(*[8] * 8):
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)  # wrong, finding: graph-retained
            # right: loss.backward()
            losses.append(loss)  # wrong
            # right: losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()


def layers_replaced_after_the_optimizer_was_made(model, optimizer, x, y, i):
    model = net() if i == 6 else model  # wrong
    F.cross_entropy(model(x), y).backward()  # finding: parameter-outside-or-twice
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 9.0)
    optimizer.step()
    optimizer.zero_grad()


def means_of_unequal_lengths(model, x, y, sizes=(3, 11, 5, 7)):
    loss = F.cross_entropy(model(x), y)  # wrong
    (loss / 4).backward()  # wrong, finding: token-mean-of-means
    # right: loss = F.cross_entropy(model(x), y, reduction='sum')
    # right: (loss / 26).backward()


def never_zeroed(model, optimizer, x, y, i):
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 3:
        optimizer.step()  # wrong, finding: missing-zero-grad
        # right: optimizer.step(); optimizer.zero_grad()


def one_autocast_around_the_whole_loop(record):
    """One autocast spans steps, and keeps the 16-bit copies of the weights from before them."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    around, inside = torch.autocast("cpu", torch.bfloat16), nullcontext()
    # right: around, inside = inside, around
    with record(model, optimizer), around:
        for i, (x, y) in enumerate(loader()):
            with inside:
                loss = F.cross_entropy(model(x), y) / 4
            loss.backward()  # finding: weights-frozen-by-autocast
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def one_of_two_optimizers_never_zeroed(record):
    """Both learn from each loss, and the other one steps first."""
    image, text = nn.Linear(8, 5), nn.Linear(8, 5)
    of_image, of_text = (torch.optim.AdamW(each.parameters()) for each in (image, text))
    with record(image, text, of_image, of_text):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(image(x) + text(x), y) / 4).backward()
            if i % 4 == 3:
                of_image.step()
                of_text.step()  # finding: missing-zero-grad
                of_image.zero_grad()
                # right: of_text.zero_grad()


def one_of_two_optimizers_zeroed_between_the_backward_and_its_step_which_the_other_uses(record):
    with trained(record) as (model, _):
        one, two = (torch.optim.SGD(model[n].parameters(), lr=0.01) for n in (0, 2))
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            one.zero_grad()  # wrong, finding: zero-before-step
            one.step()
            # right: one.zero_grad()
            two.step()
            two.zero_grad()


def steps_on_all_but_the_last(model, optimizer, x, y, i):
    """The condition is the wrong way round: it steps on all micro-batches but the last of a window."""
    loss = F.cross_entropy(model(x), y) / 4
    loss.backward()  # finding: sums-differ
    last = i % 4 != 3  # wrong
    # right: last = i % 4 == 3
    if last:
        optimizer.step()
        optimizer.zero_grad()


def steps_smaller_than_the_rounding_of_the_weights(record):
    """The whole model is in bfloat16, and each step is rounded away."""
    model = net().bfloat16()
    # right: model = net()
    for p in model.parameters():
        torch.nn.init.ones_(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    with record(model, optimizer):
        for x, y in loader():
            F.cross_entropy(model(x.to(model[0].weight.dtype)), y).backward()
            optimizer.step()  # finding: step-lost-in-rounding
            optimizer.zero_grad()


def sums_carried_into_the_next_epoch(record):
    with trained(record) as (model, optimizer):
        for _ in range(3):
            for i, (x, y) in enumerate(batches(*[2] * 6)):  # wrong
                # right: for i, (x, y) in enumerate(batches(*[2] * 8)):
                loss = F.cross_entropy(model(x), y, reduction="sum") / 8
                loss.backward()  # finding: leftover-carried
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()


def sums_divided_by_their_own_lengths(model, x, y, sizes=(3, 11, 5, 7)):
    loss = F.cross_entropy(model(x), y, reduction="sum")
    (loss / len(y) / 4).backward()  # wrong, finding: token-mean-of-means
    # right: (loss / 26).backward()


def sums_over_each_windows_tokens_carried_into_the_next_epoch(record):
    with trained(record) as (model, optimizer):
        sizes = [3, 5, 7, 2, 6, 4]
        for _ in range(3):
            for i, (x, y) in enumerate(batches(*sizes)):
                tokens = sum(sizes[i // 4 * 4 : i // 4 * 4 + 4])
                loss = F.cross_entropy(model(x), y, reduction="sum") / tokens
                loss.backward()  # finding: leftover-carried
                if i % 4 == 3:  # wrong
                    # right: if i % 4 == 3 or i == 5:
                    optimizer.step()
                    optimizer.zero_grad()


def two_losses_divided_twice(model, x, y):
    out = model(x)
    loss = (F.cross_entropy(out, y) + 0.1 * out.square().mean()) / 4
    (loss / 4).backward()  # wrong, finding: double-division
    # right: loss.backward()


def undivided(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()  # wrong, finding: loss-not-divided
    # right: (loss / 4).backward()


def undivided_sum_of_two(model, x, y):
    out = model(x)
    (F.cross_entropy(out, y) + 0.0 * out.square().mean()).backward()  # wrong, finding: loss-not-divided
    # right: (F.cross_entropy(out, y) + 0.0 * out.square().mean()).div(4).backward()


def undivided_sums_over_their_own_lengths(model, x, y, sizes=(6, 6, 6, 6)):
    loss = F.cross_entropy(model(x), y, reduction="sum") / len(y)  # wrong
    # right: loss = F.cross_entropy(model(x), y, reduction="sum") / (4 * len(y))
    loss.backward()  # finding: loss-not-divided


def unscaled_before_the_last_backward(record):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with trained(record) as (model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            if i % 4 == 3:
                scaler.unscale_(optimizer)  # wrong, finding: backward-after-unscale
            scaler.scale(F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                # right: scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


def windows_that_grow(record):
    with trained(record) as (model, optimizer):
        for size in (2, 2, 2, 4, 4, 4):
            for x, y in batches(*[2] * size):
                (F.cross_entropy(model(x), y) / 2).backward()  # wrong, finding: sums-differ
                # right: (F.cross_entropy(model(x), y) / size).backward()
            optimizer.step()
            optimizer.zero_grad()


def zeroed_inside_the_window(model, optimizer, x, y, i):
    optimizer.zero_grad()  # wrong, finding: zero-grad-inside-window
    # right:
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 3:
        optimizer.step()  # wrong
        # right: optimizer.step(); optimizer.zero_grad()
