"""Identity of a training's samples: a resumed run compares it with the checkpoint's to detect changed data.

A checkpoint keeps this description in its run.json:

    count           number of training samples
    order           digest that is equal for equal samples in an equal order, for any `count`
    sources         `Source` (gpt_dataset.py) of each dataset; comparisons ignore its name
    valid, test     order and count of the held-out samples
    per_prompt      completions per prompt times the passes over them, if completions are sampled; otherwise 1

Digests depend on the data and not on its path, so moved files are still the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megazpp.data.gpt_dataset import Source

HELD_OUT = ("valid", "test")


class Identified(Protocol):
    """A dataset that can be described."""

    def order(self) -> str:
        """Return a digest of the samples in their order."""
        ...

    def sources(self) -> list[Source]:
        """Return the sources of the samples."""
        ...


def describe_samples(
    datasets: tuple[Identified | None, ...], counts: tuple[int, ...], *, per_prompt: int = 1
) -> dict[str, Any]:
    """Describe the data for training, validation and test as the module's docstring says, in JSON types.

    Args:
        datasets: datasets for training, validation and test; None where there is none.
        counts: samples that a whole run takes from the first, and that an evaluation takes from each other one.
        per_prompt: completions per prompt times the passes over them.
    """
    train, *held_out = datasets
    if train is None:
        return {}
    found = {"count": counts[0], "order": train.order(), "sources": [list(source) for source in train.sources()]}
    for use, dataset, count in zip(HELD_OUT, held_out, counts[1:], strict=True):
        found[use] = None if dataset is None else [dataset.order(), count]
    return found | {"per_prompt": per_prompt}


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any], others: Sequence[str]) -> list[str]:
    """Return lines about data that has other tokens than before under the same name.

    Args:
        before: description of the checkpoint.
        now: description of this run.
        others: other known changes. Without any, changed held-out data is reported as well.
    """
    if not _both_known(before, now):
        return []
    known = {source.name: source.digest for source in _sources(before)}
    names = [source.name for source in _sources(now) if known.get(source.name, source.digest) != source.digest]
    found = [f"the tokens of {name} are not the same" for name in names]
    held_out = [use for use in HELD_OUT if before.get(use) != now.get(use)]
    return found or ([f"the data for {' and '.join(held_out)} is not the same"] if held_out and not others else [])


def same_sources(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether both descriptions are complete and name the same tokens in the same shares."""
    own, theirs = ([(source.digest, source.share) for source in _sources(each)] for each in (now, before))
    return _both_known(before, now) and own == theirs and all(before.get(use) == now.get(use) for use in HELD_OUT)


def what_follows(before: Mapping[str, Any], now: Mapping[str, Any], consumed: int) -> str:
    """Return a line about a resumed run: how many samples repeat or are skipped if data or sizes have changed.

    The numbers are expected values. They assume that two orders of the same samples are independent.

    Args:
        before: description of the data in the checkpoint.
        now: description of this run's data.
        consumed: samples consumed by the checkpoint's run.
    """
    if not _both_known(before, now):
        return (
            f"from here on samples may come in another order: some of the {consumed:,} samples consumed so far may "
            "repeat, and others may be skipped"
        )
    done, place = consumed // before["per_prompt"], consumed // now["per_prompt"]
    if done != place:
        text = f"{done - place:,} prompts repeat" if place < done else f"{place - done:,} prompts are skipped"
    elif now["order"] == before["order"]:
        text = "the samples come in the same order: none repeats, and none is skipped"
    else:
        text = _reordered(before, now, done)
    for use, name in zip(HELD_OUT, ("validation", "the test"), strict=True):
        theirs, own = before.get(use), now.get(use)
        if theirs and own and theirs != own:
            sizes = f"{own[1]:,} samples, was over {theirs[1]:,}"
            text += f"; {name} is over {'other samples' if theirs[1] == own[1] else sizes}"
    return text


def _reordered(before: Mapping[str, Any], now: Mapping[str, Any], consumed: int) -> str:
    known = {source.digest: source for source in _sources(before)}
    left, repeated, skipped, new = max(0, now["count"] - consumed), 0.0, 0.0, list[str]()
    reordered = False
    for source in _sources(now):
        earlier = known.get(source.digest)
        if earlier is None:
            new.append(source.name)
        elif earlier.order == source.order:  # with another share, the source continues at another place
            moved = consumed * (source.share - earlier.share)
            skipped += max(0.0, moved)
            repeated += min(left * source.share, max(0.0, -moved))
        else:
            reordered = True
            repeated += left * source.share * min(1.0, consumed * earlier.share / max(1, earlier.epoch))
    parts = []
    if repeated >= 0.5 or reordered:
        parts.append(f"about {repeated:,.0f} of the {left:,} samples to come repeat earlier ones")
    if skipped >= 0.5 or reordered:
        parts.append("others are skipped" if reordered else f"about {skipped:,.0f} samples are skipped")
    if new:
        parts.append(f"samples of {', '.join(new)} may repeat or be skipped, how many is not known")
    return f"from here on samples come in another order: {'; '.join(parts) or 'none repeats'}"


def _both_known(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return "order" in before and "order" in now


def _sources(description: Mapping[str, Any]) -> Sequence[Source]:
    return [Source(*values) for values in description.get("sources", ())]
