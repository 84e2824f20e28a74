"""Sample from a model: a converted checkpoint (folder or .nemo), a Hugging Face folder, a run (runs/NAME) or one of its checkpoints.

python generate.py --checkpoint runs/demo --prompt "What is 3 + 4?"
python generate.py --checkpoint DIR --prompts prompts.jsonl --temperature 0.8 --num_samples 4 > samples.jsonl

Prompts are JSON lines with `prompt` or `messages`, from a file or standard input. Answers are JSON lines on standard output in the order
of the prompts, written as soon as they and all before them have finished; progress is on standard error."""

import argparse
import os
import sys
from pathlib import Path

from aligner.runtime.errors import UserError, run_main


def text(value: str) -> str:
    value.encode()  # a byte that is no UTF-8 is a UnicodeEncodeError, which argparse tells as a wrong value
    return value


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="what to sample from")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", type=text, metavar="TEXT", help="one prompt")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines; without either, standard input")
    add("--raw", action="store_true", help="no chat template: the text, with the tokenizer's BOS if it adds one")
    add("--system", type=text, metavar="TEXT", help="system message of conversations that have none")
    add("--greedy", action="store_true", help="the likeliest token each time")
    add("--temperature", type=float, metavar="T", help="default 1")
    add("--top_k", type=int, default=0, metavar="K", help="of the K likeliest tokens; 0: all")
    add("--top_p", type=float, default=1.0, metavar="P", help="of the fewest tokens that have this share")
    add("--min_p", type=float, default=0.0, metavar="P", help="of tokens of this share of the likeliest's probability")
    add(
        "--repetition_penalty", type=float, default=1.0, metavar="R", help="above 1: tokens seen before are less likely"
    )
    add("--stop", type=text, action="append", default=[], metavar="TEXT", help="ends a response; may be repeated")
    add("--min_output_len", type=int, default=0, metavar="N", help="no stop before N tokens")
    add(
        "--max_output_len",
        type=int,
        metavar="N",
        help="tokens of a response; default 256, or what the model has room for",
    )
    add("--num_samples", type=int, default=1, metavar="N", help="responses a prompt")
    add("--seed", type=int, default=0, metavar="S", help="the same seed gives the same responses")
    add("--max_batch_size", type=int, default=64, metavar="N", help="responses decoded at once (default 64)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights and cache")
    args = parser.parse_args()
    if args.greedy and (args.temperature is not None or args.num_samples > 1):
        parser.error("--greedy gives one response a prompt: leave --temperature and --num_samples out")
    for name in ("num_samples", "max_batch_size", "max_output_len"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, is {value}")
    return args


def records_of(args: argparse.Namespace) -> list:
    from aligner.data.prompts import parse_prompts, prompt_record, read_prompts

    if args.prompt is not None:
        return [prompt_record(args.prompt, "--prompt")]
    if args.prompts is not None:
        return read_prompts(args.prompts)
    if sys.stdin.isatty():
        print("reading prompts from standard input, one JSON object a line; Ctrl-D ends them", file=sys.stderr)
    return parse_prompts(sys.stdin.buffer.read(), "standard input")


def main() -> int:
    args = parsed()
    records = records_of(args)  # before torch is imported: a malformed line is told at once
    from aligner.parallel.startup import detect_launch, shutdown
    from aligner.rollout.offline import Sampler

    if (ranks := detect_launch(os.environ).world_size) > 1:
        raise UserError(f"generate.py runs as one process, this is one of {ranks}: start it without torchrun or srun")
    sampling = {
        "temperature": 0.0 if args.greedy else 1.0 if args.temperature is None else args.temperature,
        "stop_strings": tuple(args.stop),
        **{name: getattr(args, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty", "seed")},
        **{name: getattr(args, name) for name in ("min_output_len", "max_output_len")},
    }
    sampler = Sampler(args.checkpoint, raw=args.raw, system=args.system, samples=args.num_samples, sampling=sampling)
    try:
        sampler.run(records, max_batch_size=args.max_batch_size, dtype=args.dtype, out=sys.stdout.buffer)
    except (
        BrokenPipeError
    ):  # `| head` has seen enough; what is buffered goes nowhere, so that nothing complains at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    shutdown()
    return 0


if __name__ == "__main__":
    run_main(main)
