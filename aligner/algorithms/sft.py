"""Supervised fine-tuning behind the loop of aligner/algorithms/supervised.py: cross entropy of what the assistant wrote, and samples."""

import logging
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import torch

from aligner.algorithms.engine_sync import EngineSync
from aligner.algorithms.generation import Generation, sampling_fields
from aligner.algorithms.records import sample_rows
from aligner.algorithms.supervised import Evaluation
from aligner.algorithms.validation import VALIDATION_STREAM
from aligner.config.jobs import SFTConfig
from aligner.data.batch import Request, Rollouts, Sample
from aligner.data.conversations import Example
from aligner.data.interfaces import RolloutEngine
from aligner.data.tokenizer import Tokenizer
from aligner.models.sft import Likelihood, SFTBatch, SFTModel
from aligner.models.trainable import Saving
from aligner.parallel.topology import Topology

log = logging.getLogger(__name__)


def collate_examples(examples: Sequence[Example], pad_id: int) -> SFTBatch:
    """Right-padded to the longest."""
    lengths = torch.tensor([len(example) for example in examples])
    width = max(2, int(lengths.max()))
    tokens = torch.full((len(examples), width), pad_id)
    mask = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example)] = example.ids
        mask[row, : len(example)] = example.mask
    return SFTBatch(tokens, lengths, mask)


class Generations:
    """Responses of the rollout engine to the prompts of held-out rows, with the model's present weights. Collective."""

    def __init__(
        self, config: SFTConfig, topology: Topology, tokenizer: Tokenizer, model: SFTModel, engine: RolloutEngine
    ) -> None:
        self.config, self.topology, self.tokenizer, self.engine = config, topology, tokenizer, engine
        self._said = False
        self.sync = EngineSync(engine, model, topology, every=config.refit.sync_every)
        self.generation = Generation(
            engine=engine,
            critic=None,
            reward=None,
            topology=topology,
            chunk_size=config.engine.max_batch_size,
            pad_id=tokenizer.pad_id,
            answer_deadline=config.engine.timeout,
        )

    def run(self, held_out: Sequence[Example], version: int) -> Optional[tuple[Rollouts, dict[int, Sample]]]:
        """To the first validation.generations rows whose prompts fit the engine; None where none does. version: of the weights, such that
        equal ones have equal weights."""
        longest, wanted = self.config.engine.max_input_len, self.config.validation.generations
        chosen = [row for row in held_out if row.answer_at <= longest][:wanted]
        if len(chosen) < wanted and not self._said:
            self._said = True
            log.warning("%d of %d held-out prompts, of validation.generations=%d, have at most engine.max_input_len=%d tokens",
                        len(chosen), len(held_out), wanted, longest)  # fmt: skip
        if not chosen:
            return None
        samples = {i: Sample(row.ids[: row.answer_at].tolist(), row.prompt, row.origin) for i, row in enumerate(chosen)}
        offloads = self.config.engine.offload_during_training
        if offloads:
            self.engine.resume()
        self.sync.catch_up(version)
        rollouts, _ = self.generation.run(self._requests(samples), samples, critic_step=None)
        rollouts.certificate = self.sync.certificate
        if offloads:
            self.engine.pause()
            self.sync.forget()
        return rollouts, samples

    def _requests(self, samples: Mapping[int, Sample]) -> list[Request]:
        return [
            Request(
                sample_id=i,
                prompt_ids=sample.prompt_ids,
                max_output_len=self.config.engine.max_output_len,
                **sampling_fields(self.config.validation),
                stop_token_ids=self.tokenizer.end_token_ids,
                seed=self.config.run.seed,
                stream=VALIDATION_STREAM,
            )
            for i, sample in samples.items()
        ]


class SFTLearner:
    """A Learner of Examples. Held-out rows are read in batches of batch_size."""

    def __init__(
        self, model: SFTModel, tokenizer: Tokenizer, *, batch_size: int, generations: Optional[Generations]
    ) -> None:
        self.model, self.tokenizer, self.batch_size, self.generations = model, tokenizer, batch_size, generations

    def collate(self, rows: Sequence[Example]) -> SFTBatch:
        return collate_examples(rows, self.tokenizer.pad_id)

    def train(self, batch: SFTBatch) -> dict[str, float]:
        return self.model.train(batch)

    def evaluate(self, rows: Sequence[Example]) -> Evaluation:
        """Perplexity and accuracy of the held-out tokens, and what the model says to their prompts."""
        found = Likelihood()
        for first in range(0, len(rows), self.batch_size):
            found += self.model.likelihood(self.collate(rows[first : first + self.batch_size]))
        metrics, tokens = found.metrics(), self.tokens(rows)
        evaluation = Evaluation({**metrics, "rows": float(len(rows))}, quality=-metrics["loss"], tokens=tokens)
        answered = self.generations and self.generations.run(rows, self.model.step_count)
        return with_responses(evaluation, *answered, self.tokenizer) if answered else evaluation

    def tokens(self, rows: Sequence[Example]) -> int:
        return sum(len(row) for row in rows)

    def save(self, folder: Path, *, extra: Mapping[str, Any], beside: bool) -> Saving:
        return self.model.save(folder, extra=extra, beside=beside)

    def load(self, folder: Path) -> dict[str, Any]:
        return self.model.load(folder)


def with_responses(
    evaluation: Evaluation, rollouts: Rollouts, samples: dict[int, Sample], tokenizer: Tokenizer
) -> Evaluation:
    """The same with the mean length of the responses, the share that ended by itself, and the responses as rows."""
    metrics = {
        "response_length": float(rollouts.mask.sum(1).float().mean()),
        "finished": 1.0 - float(rollouts.truncated.float().mean()),
    }
    rows: Iterator[dict[str, Any]] = sample_rows(rollouts, samples, None, tokenizer)
    tokens = evaluation.tokens + int(rollouts.lengths.sum())
    return Evaluation({**evaluation.metrics, **metrics}, evaluation.quality, tokens, rows)


def build_model(config: SFTConfig, topology: Topology) -> SFTModel:
    train = config.train
    packed = (train.micro_batch_tokens or config.data.max_length) if config.sft.packing else None
    return SFTModel(
        config.model,
        config.optim,
        topology,
        micro_batch_size=train.micro_batch_size,
        micro_batch_tokens=train.micro_batch_tokens,
        packed_tokens=packed,
    )
