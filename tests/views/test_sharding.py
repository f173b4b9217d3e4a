"""The stripes of two ranks as data: what a window sends and holds, what a moment says, what stands there unscripted."""

import pytest

from accumviz.book.memory import Sharding, ShardMoment


def moments(sync: bool = True, reshard: bool = True) -> list[ShardMoment]:
    """Two micro-batches of one layer of 8 bytes on two ranks: its shard, gathered, whole gradient, averaged one."""
    window: list[ShardMoment] = []
    averaged = waiting = 0
    for k in (1, 2):
        held = [(0, waiting), (8, waiting)]
        window += [(f"forward {k}", [(4, gathered, grad, averaged)], 20) for gathered, grad in held]
        between = [(0, waiting)] if reshard else []
        for gathered, grad in [*between, (8, waiting), (8, 8)]:
            window.append((f"backward {k}", [(4, gathered, grad, averaged)], 28))
        if sync or k == 2:
            averaged, waiting = 4, 0
        else:
            waiting = 8
        window.append((f"backward {k}", [(4, 0, waiting, averaged)], 24))
    return [*window, ("step", [(4, 0, 0, 0)], 8)]


def made() -> Sharding:
    settings = [(reshard, sync) for reshard in (True, False) for sync in (True, False)]
    runs = {(reshard, sync): [moments(sync, reshard)] * 2 for reshard, sync in settings}
    return Sharding(runs, ddp=40)


shards = pytest.fixture(made, name="shards")


@pytest.mark.parametrize(
    ("setting", "counts"),
    [((True, True), (4, 2, 4)), ((True, False), (4, 1, 8)), ((False, True), (2, 2, 4)), ((False, False), (2, 1, 8))],
)
def test_a_window_counts_what_it_sends_and_the_gradients_that_wait(
    shards: Sharding, setting: tuple[bool, bool], counts: tuple[int, int, int]
) -> None:
    assert shards.counts(setting) == counts


def test_a_rank_holds_its_own_stripe_always_and_the_other_one_while_it_is_gathered(shards: Sharding) -> None:
    lanes = shards.lanes((True, True))
    (first,), (second,), (memory,) = lanes.values()
    assert dict(first.shapes)["own av-rank-0"] == "M0 0h13v1h-13z"
    assert dict(second.shapes)["own av-rank-1"] == "M0 1h13v1h-13z"
    assert dict(first.shapes)["lent av-rank-1"].startswith("M1 1h1v1h-1zM3 1h2v1h-2z")
    assert dict(first.shapes)["whole"] == "M4 2h1v2h-1zM10 2h1v2h-1z"
    assert dict(first.shapes)["averaged"] == "M5 4h7v1h-7z"
    assert dict(memory.shapes)["ddp"] == "M0 0h13", "DDP takes the most of all"


def test_a_moment_says_what_has_changed_and_what_is_held(shards: Sharding) -> None:
    said = shards.content["runs"][3]["moments"]
    assert said[0] == "forward 1: nothing has changed. Rank 0 holds 20 B."
    assert said[1] == "forward 1: layer 1 is gathered. Rank 0 holds 20 B."
    assert said[-1] == "step: zero_grad frees the gradient of layer 1. Rank 0 holds 8 B."


def test_without_scripts_a_picture_and_a_sentence_for_each_setting_say_the_same(shards: Sharding) -> None:
    text = shards.to_html().partition("<script")[0]
    assert text.count("<svg") == 3
    assert "4 all-gathers, 2 reduce-scatters. Between the micro-batches, a rank holds 4 B of gradients." in text
    last = "<li>reshard_after_forward=True, the last micro-batch averages: 4 all-gathers, 1 reduce-scatter."
    assert f"{last} Between the micro-batches, a rank holds 8 B of gradients. At most it holds 28 B;" in text
