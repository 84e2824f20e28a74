"""The verifier of a worker from its spec (source.verifier_spec), and several with weights. Standard library only at import."""

from typing import Any, NamedTuple, Protocol

from aligner.rewards.maths import MathsVerifier
from aligner.rewards.text import ExactVerifier, FormatVerifier, RegexVerifier
from aligner.rewards.verifiers import FunctionVerifier, TaskVerifier, finite_number


class Verifier(Protocol):
    """See verifiers.py. One that has preload() is given the time before the first request for slow imports."""

    def prepare(self, sample: dict[str, Any]) -> Any: ...

    def score(self, prepared: Any, response: str, sample: dict[str, Any]) -> dict[str, float]: ...


def build_verifier(spec: dict[str, Any]) -> Verifier:
    """Raises ValueError for what cannot be built: the user's file, say."""
    kind = spec["kind"]
    if kind == "parts":
        shared = {name: spec[name] for name in ("allow_eval", "timeout")}
        return PartsVerifier([Part(p["name"], p["weight"], build_verifier({**p, **shared})) for p in spec["parts"]])
    if kind == "function":
        return FunctionVerifier(spec["function"])
    if kind == "maths":
        settings = {name: spec[name] for name in ("answer_field", "extract", "timeout")}
        return MathsVerifier(**settings, final=spec["final_answer"])
    if kind == "exact":
        return ExactVerifier(**{name: spec[name] for name in ("answer_field", "extract", "ignore_case")})
    if kind == "regex":
        return RegexVerifier(pattern=spec["pattern"])
    if kind == "format":
        return FormatVerifier(pattern=spec["pattern"], template=spec["template"])
    if kind != "task":
        raise ValueError(f"{kind} is no verifier")
    return TaskVerifier(**{name: spec[name] for name in ("answer", "format_credit", "allow_eval")})


class Part(NamedTuple):
    name: str
    weight: float
    verifier: Verifier


class PartsVerifier:
    """reward = sum of weight * reward of the parts. Recorded: NAME (the part's reward, without its weight), NAME/... (its own parts),
    and `accuracy` of the first part that has one."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    def preload(self) -> None:
        for part in self._parts:
            if hasattr(part.verifier, "preload"):
                part.verifier.preload()

    def prepare(self, sample: dict[str, Any]) -> list[Any]:
        return [part.verifier.prepare(sample) for part in self._parts]

    def score(self, prepared: list[Any], response: str, sample: dict[str, Any]) -> dict[str, float]:
        total, recorded = 0.0, {}
        for part, ready in zip(self._parts, prepared, strict=True):
            scored = part.verifier.score(ready, response, sample)
            reward = scored.pop("reward")
            total += part.weight * reward
            recorded |= {part.name: reward, **{f"{part.name}/{name}": value for name, value in scored.items()}}
            if "accuracy" in scored:
                recorded.setdefault("accuracy", scored["accuracy"])
        if finite_number(total) is None:
            raise TypeError(f"the weighted sum {total!r} of {recorded!r} is not finite in float32")
        return {"reward": total, **recorded}
