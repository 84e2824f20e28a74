"""Which tokens of a conversation the assistant wrote, found exactly: the ids are those of the whole conversation, and what comes before
a turn is what a model is given when it has to write that turn.

A template without {% generation %} is rendered for each turn up to its opening and up to its end; where the ids of either are no
beginning of the whole conversation's, the tokens cannot be told apart, and the conversation is refused."""

from dataclasses import dataclass

from aligner.config.supervised import LossOn
from aligner.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Turns:
    """ids of a conversation, and spans (start, end) of the turns to learn: each ends with an end token."""

    ids: list[int]
    spans: list[tuple[int, int]]


def learned_turns(tokenizer: Tokenizer, messages: list[dict[str, str]], loss_on: LossOn) -> Turns:
    """messages: with the system's message already before them, user and assistant in turn, the assistant last.

    Raises ValueError with the reason where a turn's tokens cannot be told, or where it has no end token."""
    if tokenizer.marks_generation:
        ids, spans = _marked(tokenizer, messages)
    else:
        ids, spans = _found(tokenizer, messages, loss_on)
    spans = [_to_the_end(tokenizer, ids, *span) for span in spans]
    return Turns(ids, spans[-1:] if loss_on is LossOn.last_turn else spans)


def _marked(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[tuple[int, int]]]:
    ids, inside = tokenizer.marked(messages)
    edges = [at for at in range(len(ids) + 1) if (at > 0 and inside[at - 1]) != (at < len(ids) and inside[at])]
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    turns = sum(message["role"] == "assistant" for message in messages)
    if len(spans) != turns:
        raise ValueError(
            f"the chat template marks {len(spans)} of the {turns} turns of the assistant by {{% generation %}}"
        )
    return ids, spans


def _found(
    tokenizer: Tokenizer, messages: list[dict[str, str]], loss_on: LossOn
) -> tuple[list[int], list[tuple[int, int]]]:
    at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if loss_on is LossOn.last_turn:
        at = at[-1:]
    whole = tokenizer.rendered(messages, opens=False)
    texts = [whole]
    for i in at:
        texts.append(tokenizer.rendered(messages[:i], opens=True))
        texts.append(whole if i == len(messages) - 1 else tokenizer.rendered(messages[: i + 1], opens=False))
    unique = list(dict.fromkeys(texts))  # the last turn ends where the whole does
    encoded = dict(zip(unique, tokenizer.encode_rendered(unique), strict=True))
    ids, *parts = (encoded[text] for text in texts)
    for number, part in enumerate(parts):
        if ids[: len(part)] != part:
            raise ValueError(_why_not(tokenizer, texts[0], texts[1 + number], at[number // 2], opens=number % 2 == 0))
    return ids, [(len(start), len(end)) for start, end in zip(parts[::2], parts[1::2], strict=True)]


def _why_not(tokenizer: Tokenizer, whole: str, part: str, message: int, *, opens: bool) -> str:
    where = f"the {'opening' if opens else 'end'} of messages[{message}]"
    if not whole.startswith(part):
        advice = "it writes earlier turns otherwise than the last one; set data.loss_on=last_turn, or use a template with {% generation %}"
        return (
            f"the chat template of {tokenizer.folder} does not write {where} as the whole conversation has it: {advice}"
        )
    return (
        f"{where} and what follows it share a token, so that it cannot be told which tokens the assistant wrote: remove spaces and line "
        "breaks from the edges of the messages"
    )


def _to_the_end(tokenizer: Tokenizer, ids: list[int], start: int, end: int) -> tuple[int, int]:
    """The span up to its last end token: what the template writes after it (a line break in ChatML) no model is asked to write. A span
    that ends just before one takes it in."""
    ends = set(tokenizer.end_token_ids)
    if end < len(ids) and ids[end] in ends and ids[end - 1] not in ends:
        return start, end + 1
    last = max((at for at in range(start, end) if ids[at] in ends), default=None)
    if last is None:
        names = ", ".join(tokenizer.decode([i], skip_special=False) for i in tokenizer.end_token_ids)
        raise ValueError(
            f"the chat template of {tokenizer.folder} writes no end token ({names}) after the assistant's turn: a model would never "
            "learn to stop"
        )
    return start, last + 1
