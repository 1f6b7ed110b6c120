"""Describe the samples of a training run. A resumed run compares its description with the checkpoint's.

The comparison shows whether the data has changed, and how many samples then repeat or are skipped. A checkpoint stores
the description as a JSON object in its run.json:

    count           number of training samples that the whole run takes
    order           digest of the samples in their order. Another `count` changes the digest only if it changes the
                    order of the samples, for example by another number of epochs
    sources         `Source` (data/gpt_dataset.py) of each dataset
    valid, test     digest and number of the held-out samples; null without such data
    per_prompt      number of training samples per prompt if the run samples completions; otherwise 1. It is the number
                    of completions per prompt, times the number of optimization passes over them

Digests depend on the content of the data, not on its path. Moved or renamed files are therefore still the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megazpp.data.gpt_dataset import Source

HELD_OUT = ("valid", "test")


class Identified(Protocol):
    """A dataset whose samples can be compared with the samples of an earlier run."""

    def order(self) -> str:
        """Return a digest of the dataset's samples in their order."""
        ...

    def sources(self) -> list[Source]:
        """Return a description of each dataset that a blend combines, or of the only dataset."""
        ...


def describe_samples(
    datasets: tuple[Identified | None, ...], counts: tuple[int, ...], *, per_prompt: int = 1
) -> dict[str, Any]:
    """Describe the data of a run as a JSON object, which a checkpoint stores to detect changed data at resume.

    Args:
        datasets: datasets for training, validation and test; None for missing data.
        counts: number of samples that the whole run takes for training, and that one evaluation takes for validation
            and for the test.
        per_prompt: training samples per prompt: completions per prompt times optimization passes over them.
    Returns:
        The object that the docstring of data/identity.py describes. It has no `count`, `order` and `sources` if there
        is no training dataset.
    """
    train, *held_out = datasets
    found: dict[str, Any] = {}
    if train is not None:
        found = {"count": counts[0], "order": train.order(), "sources": [list(source) for source in train.sources()]}
    for use, dataset, count in zip(HELD_OUT, held_out, counts[1:], strict=True):
        found[use] = None if dataset is None else [dataset.order(), count]
    return found | {"per_prompt": per_prompt}


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any], others: Sequence[str]) -> list[str]:
    """Return a message for each dataset that has the same name as in the checkpoint, but other tokens.

    Args:
        before: description of the data in the checkpoint; see `describe_samples`.
        now: description of the data of the resumed run.
        others: messages about changed flags. They can explain changed validation and test data, so such data is only
            reported if `others` is empty and no dataset has changed.
    """
    if not _both_known(before, now):
        return []
    known = {source.name: source.digest for source in _sources(before)}
    names = [source.name for source in _sources(now) if known.get(source.name, source.digest) != source.digest]
    found = [f"the tokens of {name} are not the same" for name in names]
    held_out = [use for use in HELD_OUT if before.get(use) != now.get(use)]
    return found or ([f"the data for {' and '.join(held_out)} is not the same"] if held_out and not others else [])


def same_sources(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if a resumed run has the checkpoint's data: datasets, their fractions, and validation and test data.

    The result is False if one of the descriptions is incomplete, because an older version has written it.
    """
    own, theirs = ([(source.digest, source.share) for source in _sources(each)] for each in (now, before))
    return _both_known(before, now) and own == theirs and all(before.get(use) == now.get(use) for use in HELD_OUT)


def what_follows(before: Mapping[str, Any], now: Mapping[str, Any], consumed: int) -> str:
    """Return a message for a resumed run with changed data or sizes: how many training samples repeat or are skipped.

    The numbers are expected values. They assume that two orders of the same samples are independent.

    Args:
        before: description of the data in the checkpoint; see `describe_samples`.
        now: description of the data of the resumed run.
        consumed: number of training samples that the run had consumed when it wrote the checkpoint.
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
    """Return the message for a resumed run whose training samples come in another order than before the checkpoint.

    The message has the expected numbers of samples that repeat and of samples that are skipped. `before`, `now` and
    `consumed` are the arguments of `what_follows`.
    """
    known = {source.digest: source for source in _sources(before)}
    left, repeated, skipped, new = max(0, now["count"] - consumed), 0.0, 0.0, list[str]()
    reordered = False
    for source in _sources(now):
        earlier = known.get(source.digest)
        if earlier is None:
            new.append(source.name)
        elif earlier.order == source.order:  # only the dataset's fraction of all training samples differs
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
