"""The whole road on this machine: a base model, SFT, a reward model, PPO with a served critic, RL without a critic, one report.

    python launch/local/pipeline.py --model .cache/SmolLM2-135M-Instruct

Each stage is an entry script in a process of its own; its settings are in conf/pipeline_*.yaml, and --sft, --reward-model, --actor,
--critic and --critic-free add overrides. Everything is in runs/pipeline: one run folder a job, data/ and answers/ between them,
stages.json, summary.json and report.html. The same command goes on where it was broken off; what is complete is not repeated."""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pipeline_data as data  # noqa: E402 - beside this file
import pipeline_report as report  # noqa: E402

from aligner.config.jobs import ActorConfig  # noqa: E402 - the repository need not be installed
from aligner.config.load import load  # noqa: E402
from aligner.runtime.checkpoint_folder import CheckpointFolder  # noqa: E402
from aligner.runtime.durable import write_durably  # noqa: E402
from aligner.runtime.errors import UserError, run_main  # noqa: E402
from aligner.runtime.metrics import read_jsonl  # noqa: E402
from aligner.runtime.progress import duration  # noqa: E402

JOBS = ("sft", "reward-model", "actor", "critic", "critic-free")
PAIRS = {"train": "pairs", "validation": "pairs_held_out"}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="converted checkpoint of the base model")
    parser.add_argument("--folder", type=Path, default=Path("runs/pipeline"))
    parser.add_argument("--demonstrations", type=int, default=32, help="for SFT")
    parser.add_argument("--pair-problems", type=int, default=400, help="problems that the SFT model answers for pairs")
    parser.add_argument("--samples", type=int, default=10, help="answers to each of them")
    parser.add_argument("--pairs", type=int, default=5, help="pairs a problem at most, to train the reward model on")
    parser.add_argument("--held-out", type=int, default=280, help="problems that every stage is evaluated on")
    parser.add_argument("--answers", type=int, default=4, help="sampled answers to each of them")
    for job in JOBS:
        parser.add_argument(f"--{job}", nargs="*", default=[], metavar="OVERRIDE")
    return parser.parse_args(argv)


@dataclass
class Stage:
    name: str
    title: str
    run: Callable[[], None]


class Pipeline:
    """The stages in order, and which of them are complete."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, args.folder
        self.config = load(ActorConfig, self._critic_free_overrides("base"), "pipeline_verifier")
        self.record = self.folder / "stages.json"

    def stages(self) -> Iterator[Stage]:
        yield Stage("problems", "draw problems, write demonstrations", self.problems)
        yield Stage("evaluate_base", "evaluate the base model", lambda: self.evaluate("base", self.args.model))
        yield Stage("sft", "supervised fine-tuning", self.sft)
        yield Stage("evaluate_sft", "evaluate it", lambda: self.evaluate("sft", self.trained("sft")))
        yield Stage("pairs", "sample pairs from it, labelled by the verifier", self.pairs)
        yield Stage("reward_model", "train the reward model on them", self.reward_model)
        yield Stage("ppo", "PPO with a served critic, rewarded by the reward model", self.ppo)
        yield Stage("evaluate_ppo", "evaluate it", lambda: self.evaluate("ppo", self.trained("ppo")))
        yield Stage("critic_free", "RL without a critic, rewarded by the verifier", self.critic_free)
        yield Stage(
            "evaluate_critic_free", "evaluate it", lambda: self.evaluate("critic_free", self.trained("critic_free"))
        )

    def run(self) -> None:
        stages = list(self.stages())
        for number, stage in enumerate(stages, 1):
            done = self.read_record().get(stage.name, {})
            where = f"[{number}/{len(stages)}] {stage.title}"
            if done.get("complete"):
                print(f"{where}: complete ({duration(done['seconds'])})", flush=True)
                continue
            print(where, flush=True)
            with self.timed(stage.name):
                stage.run()
        self.report()

    # The stages

    def problems(self) -> None:
        sizes = data.Sizes(self.args.demonstrations, self.args.pair_problems, self.args.held_out)
        data.write_problems(self.folder / "data", self.config.data, seed=self.config.run.seed, sizes=sizes)

    def sft(self) -> None:
        shown = self.folder / "data/demonstrations.jsonl"
        self.script(
            "train_sft.py",
            "pipeline_sft",
            [*self.of_run("sft", self.args.model), f"data.train={shown}", *self.args.sft],
        )

    def pairs(self) -> None:
        prompts, answers = self.folder / "data/pair_prompts.jsonl", self.folder / "answers/pairs.jsonl"
        how = ["--num_samples", str(self.args.samples), "--seed", str(self.config.run.seed)]
        self.generate(self.trained("sft"), prompts, answers, how)
        judged = data.judge(prompts, answers, self.config.reward)
        found, held_out = data.pairs(judged, most=self.args.pairs, seed=self.config.run.seed)
        asked = list(dict.fromkeys(pair["prompt"] for pair in found))
        right = sum(row["right"] for row in judged) / len(judged)
        told = f"{len(found)} pairs of {len(asked)} problems, {len(held_out)} held out"
        print(f"  {len(judged)} answers, {right:.0%} right: {told}", flush=True)
        if not held_out:
            raise UserError(
                "the SFT model's answers give too few pairs of right and wrong ones: raise --pair-problems or --samples"
            )
        for name, rows in zip(PAIRS.values(), (found, held_out), strict=True):
            data.write_lines(self.folder / f"data/{name}.jsonl", rows)
        data.write_lines(self.folder / "data/ppo_prompts.jsonl", ({"prompt": prompt} for prompt in asked))

    def reward_model(self) -> None:
        pairs = [f"data.{kind}={self.folder}/data/{name}.jsonl" for kind, name in PAIRS.items()]
        settings = [*self.of_run("reward_model", self.trained("sft")), *pairs, *self.args.reward_model]
        self.script("train_reward_model.py", "pipeline_reward_training", settings)

    def ppo(self) -> None:
        reward_model = self.trained("reward_model")
        both = [
            f"run.dir={self.folder}",
            "run.name=ppo",
            "reward.kind=model",
            "reward.standardise=true",
            f"reward.checkpoint={reward_model}",
        ]
        self.execute(
            *("launch/local/ppo.py", "--actor-config", "pipeline_ppo_actor", "--critic-config", "pipeline_ppo_critic"),
            *("--critic-log", str(self.folder / "ppo/logs/critic.out"), "--both", *both),
            *("--actor", f"model.checkpoint={self.trained('sft')}"),
            *(f"data.prompts={self.folder}/data/ppo_prompts.jsonl", *self.args.actor),
            *("--critic", f"model.checkpoint={reward_model}", *self.args.critic),
        )

    def critic_free(self) -> None:
        self.script("train_ppo_actor.py", "pipeline_verifier", self._critic_free_overrides(self.trained("sft")))

    def _critic_free_overrides(self, checkpoint: Any) -> list[str]:
        return [*self.of_run("critic_free", checkpoint), *self.args.critic_free]

    def evaluate(self, name: str, checkpoint: Path) -> None:
        """Answers as the policy gives them (temperature 1), and the likeliest one."""
        prompts = self.folder / "data/held_out.jsonl"
        sampled = ["--num_samples", str(self.args.answers), "--seed", str(self.config.run.seed)]
        for kind, how in (("sampled", sampled), ("greedy", ["--greedy"])):
            answers = self.folder / f"answers/{name}_{kind}.jsonl"
            self.generate(checkpoint, prompts, answers, how)
            judged = data.judge(prompts, answers, self.config.reward)
            data.write_lines(self.folder / f"answers/{name}_{kind}_judged.jsonl", judged)
            print(f"  {sum(row['right'] for row in judged)} of {len(judged)} right, {kind}", flush=True)

    def report(self) -> None:
        record = self.read_record()
        spent = {name: entry["seconds"] for name, entry in record.items()}
        found = []
        for name in report.TITLES:
            sampled, greedy = (
                read_jsonl(self.folder / f"answers/{name}_{kind}_judged.jsonl") for kind in ("sampled", "greedy")
            )
            own = {"ppo": ("pairs", "reward_model", "ppo")}.get(name, (name,))
            seconds = sum(spent.get(part, 0.0) for part in (*own, f"evaluate_{name}"))
            found.append(report.Evaluated(name, sampled, greedy, seconds))
        page = report.write(self.folder, found, self.facts(spent))
        for stage in found:
            low, high = stage.interval
            told = f"{stage.accuracy:.3f} ({low:.3f} to {high:.3f}), greedy {stage.greedy_accuracy:.3f}"
            print(f"{stage.name:12} {told}, {duration(stage.seconds)}")
        print(f"{duration(sum(spent.values()))} in all; report: {page}", flush=True)

    def facts(self, spent: dict[str, float]) -> dict[str, str]:
        task = ", ".join(f"{key} {value}" for key, value in self.config.data.task_config.items())
        told = {"task": f"{self.config.data.task} ({task})", "model": str(self.args.model)}
        told["demonstrations"] = str(len(read_jsonl(self.folder / "data/demonstrations.jsonl")))
        told["preference pairs"] = str(len(read_jsonl(self.folder / "data/pairs.jsonl")))
        validated = [row for row in read_jsonl(self.folder / "reward_model/metrics.jsonl") if "val/accuracy" in row]
        if validated:
            told["reward model's accuracy on held-out pairs"] = f"{validated[-1]['val/accuracy']:.3f}"
        return told | {f"time of {name}": duration(seconds) for name, seconds in spent.items()}

    # What they share

    def of_run(self, name: str, checkpoint: Any) -> list[str]:
        return [f"run.dir={self.folder}", f"run.name={name}", f"model.checkpoint={checkpoint}"]

    def trained(self, name: str) -> Path:
        """The newest checkpoint of a run of the pipeline: the model that it made."""
        steps = CheckpointFolder(self.folder / name / "checkpoints")
        newest = steps.newest()
        if newest is None:
            raise UserError(f"{steps.path} holds no committed checkpoint: delete {self.record} and start again")
        (folder,) = [path for path in steps.step(newest).iterdir() if path.is_dir() and path.name != "critic"]
        return folder

    def generate(self, checkpoint: Path, prompts: Path, answers: Path, how: list[str]) -> None:
        answers.parent.mkdir(parents=True, exist_ok=True)
        beside = answers.with_suffix(".tmp")
        length = str(self.config.engine.max_output_len)
        with beside.open("wb") as out:
            asked = ("--checkpoint", str(checkpoint), "--prompts", str(prompts), "--raw", "--max_output_len", length)
            self.execute("generate.py", *asked, *how, stdout=out)
        beside.replace(answers)

    def script(self, name: str, config: str, overrides: list[str]) -> None:
        self.execute(name, "--config-name", config, *overrides)

    def execute(self, script: str, *arguments: str, stdout: Any = None) -> None:
        """A script of the repository; raises UserError with its exit code where it fails. A signal to this process ends it too."""
        process = subprocess.Popen([sys.executable, str(ROOT / script), *arguments], stdout=stdout)
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C reached the script too, which saves and ends
            with contextlib.suppress(KeyboardInterrupt):
                process.terminate()
                process.wait()
            raise
        if code:
            raise UserError(
                f"{script} ended with exit code {code}; what it said is above. The same command goes on from here"
            )

    def read_record(self) -> dict[str, Any]:
        return json.loads(self.record.read_text()) if self.record.is_file() else {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds to the stage's record, also where it fails; it is complete where it does not."""
        began, complete = time.monotonic(), False
        try:
            yield
            complete = True
        finally:
            record = self.read_record()
            before = record.get(name, {}).get("seconds", 0.0)
            record[name] = {"seconds": round(before + time.monotonic() - began, 2), "complete": complete}
            write_durably(self.record, json.dumps(record, indent=2).encode() + b"\n")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Raises UserError where another pipeline works in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another pipeline works in {folder}: wait for it, or give --folder") from None
        yield


def main(argv: Optional[list[str]] = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    args.model, args.folder = args.model.absolute(), args.folder.absolute()
    os.chdir(ROOT)
    if not (args.model / "model_config.yaml").is_file():
        raise UserError(f"--model {args.model} is no converted checkpoint: convert_hf_to_nemo.py makes one")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))  # `execute` ends the script that runs
    with alone(args.folder):
        Pipeline(args).run()
    return 0


if __name__ == "__main__":
    run_main(main)
