"""What the two jobs must agree on before a request is served, compared once at connect."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Mapping, Optional

from aligner.serving import protocol
from aligner.serving.protocol import ProtocolError

NO_REWARD = "none"


@dataclass(frozen=True)
class Contract:
    """One side's view. The actor's max_length is what it will send at most; the critic's is what it takes.

    reward_kind: what the critic job scores with ("none": nothing). run_id names the run. step: last step applied; None on
    the actor's side is not compared (it restores the critic next). What one side alone knows is None on the other: the actor's rows a
    train step and an inference request (at most), the critic's rows a mini-batch and a request (at most), its head, its type and the
    updates that its weights have had (weight_version). reward_normalisation: how the actor scales scores; on the critic's side
    what its process was trained on last."""

    tokenizer_fingerprint: str
    chat_template: str
    vocab_size: int
    max_length: int
    reward_kind: str
    run_id: str
    step: Optional[int] = None
    train_rows: Optional[int] = None
    infer_rows: Optional[int] = None
    mini_batch_size: Optional[int] = None
    max_rows: Optional[int] = None
    head: Optional[str] = None
    dtype: Optional[str] = None
    weight_version: Optional[int] = None
    reward_normalisation: Optional[str] = None
    protocol: int = protocol.VERSION

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> "Contract":
        """From a status or a hello request. Raises ProtocolError naming a key that is missing or of another type."""
        values = {"protocol": protocol.VERSION, **{k: v for k, v in mapping.items() if k in _TYPES}}
        for name, kinds in _TYPES.items():
            if name not in values and type(None) not in kinds:
                raise ProtocolError(f"hello lacks {name}")
            if not isinstance(values.get(name), kinds) or isinstance(values.get(name), bool):
                raise ProtocolError(
                    f"hello: {name} must be {' or '.join(k.__name__ for k in kinds)}, not {values.get(name)!r}"
                )
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_TYPES: dict[str, tuple[type, ...]] = {
    "tokenizer_fingerprint": (str,),
    "chat_template": (str,),
    "vocab_size": (int,),
    "max_length": (int,),
    "reward_kind": (str,),
    "run_id": (str,),
    **dict.fromkeys(
        ("step", "train_rows", "infer_rows", "mini_batch_size", "max_rows", "weight_version"), (int, type(None))
    ),
    **dict.fromkeys(("head", "dtype", "reward_normalisation"), (str, type(None))),
    "protocol": (int,),
}
assert set(_TYPES) == {f.name for f in fields(Contract)}


def version_of(mapping: Mapping[str, Any]) -> int:
    """The protocol version that a hello states. Raises ProtocolError."""
    version = mapping.get("protocol")
    if not isinstance(version, int):
        raise ProtocolError(f"hello: protocol must be an integer, not {version!r}")
    return version


def version_problem(*, actor: int, critic: int, job: str = "critic") -> Optional[str]:
    """Why two protocol versions do not work together; None where they do. The only check that must work between any two versions."""
    if actor == critic:
        return None
    older = "actor" if actor < critic else job
    return (
        f"the actor job speaks protocol version {actor}, the {job} job version {critic}: "
        f"run both from one release (the {older} job is older)"
    )


def problems(actor: Contract, critic: Contract) -> list[str]:
    """Every mismatch, each with what to change. Empty where the jobs fit."""
    version = version_problem(actor=actor.protocol, critic=critic.protocol)
    if version is not None:
        return [version]  # the other fields may mean something else
    found = []
    if actor.tokenizer_fingerprint != critic.tokenizer_fingerprint:
        found.append(
            f"the tokenizers differ (actor {actor.tokenizer_fingerprint[:12]}, the other job {critic.tokenizer_fingerprint[:12]}): "
            "convert both model.checkpoint folders from models with one tokenizer"
        )
    if actor.vocab_size != critic.vocab_size:
        found.append(
            f"the unpadded vocabularies differ (actor {actor.vocab_size}, the other job {critic.vocab_size}): "
            "use model.checkpoint folders of one family in both jobs"
        )
    if actor.max_length > critic.max_length:
        found.append(
            f"the actor sends up to {actor.max_length} tokens a row, the other job takes {critic.max_length}: lower "
            "engine.max_input_len + engine.max_output_len, or give that job a model.checkpoint with more positions"
        )
    if actor.reward_kind != critic.reward_kind:
        found.append(
            f"the actor expects the other job to score with reward.kind={actor.reward_kind}, it scores with "
            f"{critic.reward_kind}: set reward.kind, reward.parts and reward.place alike in both jobs"
        )
    if actor.run_id != critic.run_id:
        found.append(
            f"the actor job is run '{actor.run_id}', the other job serves run '{critic.run_id}': set run.name alike in both jobs"
        )
    if actor.step is not None and actor.step != critic.step:
        found.append(
            f"the actor is at step {actor.step}, the critic at step {critic.step}: restore the pair of step {actor.step}"
        )
    return found + _row_problems(actor, critic)


def _row_problems(actor: Contract, critic: Contract) -> list[str]:
    """Found here, before a step is generated, and not when its train request is refused."""
    found = []
    if None not in (actor.train_rows, critic.mini_batch_size) and actor.train_rows % critic.mini_batch_size:
        found.append(
            f"the actor trains on {actor.train_rows} rows a step (ppo.rollout_batch_size * ppo.samples_per_prompt), which is not a "
            f"multiple of the critic's critic.mini_batch_size={critic.mini_batch_size}: set that to a divisor of the rows"
        )
    if None not in (actor.infer_rows, critic.max_rows) and actor.infer_rows > critic.max_rows:
        found.append(
            f"the actor sends {actor.infer_rows} rows an inference request (critic.infer_batch_size), the other job takes "
            f"{critic.max_rows} (serving.max_rows): lower the one or raise the other"
        )
    return found


def warnings(actor: Contract, critic: Contract) -> list[str]:
    """Differences that are allowed, but seldom meant."""
    found = []
    if actor.chat_template != critic.chat_template:
        found.append(
            "the chat templates of the two jobs' tokenizers differ; the critic sees token ids only, so values are not affected"
        )
    now, before = actor.reward_normalisation, critic.reward_normalisation
    if None not in (now, before) and now != before:
        found.append(
            f"the actor scales scores by ppo.reward_scale={now}, and what the critic was trained on last was ppo.reward_scale={before}: "
            "its values are off until it has learned the new scale"
        )
    return found
