"""generate.py as a user runs it: the same answers from every kind of checkpoint, Hugging Face's own, and one sentence for bad input."""

import json
import os
import shutil
import signal
import tarfile
import time
from pathlib import Path

import pytest
import torch

from tests.jobs.harness import Launcher, read_jsonl

SCRIPT = "generate.py"
ASKED = [
    {"prompt": "What is 3 + 4?"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sing"}]},
    {"prompt": "a"},
]
ENDS = [0, 2]  # <|endoftext|> and <|im_end|>


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ASKED))
    return path


def rows(jobs: Launcher, checkpoint: Path, *options: str, **how) -> list[dict]:
    return read_jsonl(jobs.start(SCRIPT, "--checkpoint", str(checkpoint), *options, **how).finish(120).output)


def hf_answers(folder: Path, new: int) -> list[tuple[list[int], list[float]]]:
    """transformers' greedy ids, and the log-probs of a teacher-forced pass, one prompt at a time."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    answers = []
    for line in ASKED:
        messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        whole = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=new, do_sample=False,
            eos_token_id=ENDS, pad_token_id=0,
        )  # fmt: skip
        with torch.no_grad():
            logprobs = model(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        answer = whole[0, len(ids) :]
        answers.append((answer.tolist(), logprobs.gather(1, answer[:, None])[:, 0].tolist()))
    return answers


def test_greedy_answers_are_hugging_faces_from_every_kind_of_checkpoint(shared_jobs, tiny_model, prompts, tmp_path):
    """A Hugging Face folder, a compressed archive, a run."""
    with tarfile.open(tmp_path / "model.nemo", "w:gz") as tar:
        tar.add(tiny_model, arcname=".")
    hf = tiny_model.parent / "hf"
    step = tmp_path / "run" / "checkpoints" / "step_000003"
    step.mkdir(parents=True)
    (step / "actor").symlink_to(tiny_model)
    (step / "COMMITTED").write_text('{"step": 3, "validation": null}')
    sources = [hf, tmp_path / "model.nemo", tmp_path / "run"]
    options = ("--prompts", str(prompts), "--greedy", "--max_output_len", "40", "--dtype", "float32")
    found = [rows(shared_jobs, source, *options) for source in sources]
    assert all(other == found[0] for other in found[1:])
    assert not [p for p in hf.iterdir() if "nemo" in p.name]
    for line, asked, (ids, logprobs) in zip(found[0], ASKED, hf_answers(hf, 40), strict=True):
        assert line["token_ids"] == ids and line["logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert line["finish_reason"] == ("stop" if ids[-1] in ENDS else "length")
        assert line["prompt"] == asked.get("prompt", asked.get("messages"))
    assert [(line["index"], line["sample"]) for line in found[0]] == [(0, 0), (1, 0), (2, 0)]


def test_sampling_from_standard_input(shared_jobs, tiny_model, prompts):
    """Samples differ from each other, and are a function of the seed alone; what has to wait for a row comes out the same."""
    hf = tiny_model.parent / "hf"
    options = ("--num_samples", "3", "--max_output_len", "6", "--temperature", "0.9", "--top_k", "50", "--seed", "4")
    first = rows(shared_jobs, hf, *options, stdin=str(prompts))
    job = shared_jobs.start(
        SCRIPT, "--checkpoint", str(hf), *options, "--prompts", str(prompts), "--max_batch_size", "2"
    )
    second = read_jsonl(job.finish(120).output)
    assert [(line["index"], line["sample"]) for line in second] == [(i, k) for i in range(3) for k in range(3)]
    assert [line["token_ids"] for line in second] == [line["token_ids"] for line in first]
    assert len({tuple(line["token_ids"]) for line in first}) > 6
    tokens = sum(len(line["token_ids"]) for line in first)
    assert f"9/9 responses, {tokens} tokens in " in job.stderr and "tokens/s" in job.stderr


def test_raw_prompts_and_stop_strings(shared_jobs, tiny_model):
    """Without the template the model continues the text itself; the stop string is the last of the text."""
    hf = tiny_model.parent / "hf"
    options = ("--prompt", "What is 3 + 4?", "--raw", "--greedy", "--max_output_len", "30")
    (free,) = rows(shared_jobs, hf, *options)
    stop = free["text"][3:5]
    (stopped,) = rows(shared_jobs, hf, *options, "--stop", "not in it", "--stop", stop)
    until = free["text"].index(stop) + 2
    assert stopped["text"] == free["text"][:until] and stopped["finish_reason"] == "stop"
    assert stopped["token_ids"] == free["token_ids"][: len(stopped["token_ids"])]


def test_bad_input_gets_a_sentence(shared_jobs, tiny_model, prompts, tmp_path):
    hf = tiny_model.parent / "hf"
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"prompt": "a"}\n{oops\n{"prompt": 7}\n')
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "b" * 250}) + "\n")
    bare = tmp_path / "bare"
    shutil.copytree(hf, bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "chat_template"}))
    cases = [
        ((hf, "--prompts", lines), (f"{lines}:2: is not JSON", f"{lines}:3: `prompt` is a JSON number", "2 of 3 lines")),
        ((hf,), ("standard input is empty",)),
        ((hf, "--prompt", " "), ("--prompt: `prompt` is empty",)),
        ((hf, "--prompts", long, "--max_output_len", "9"), (f"{long}:2: the prompt has", "--max_output_len=9 leaves 247")),
        ((hf, "--prompts", prompts, "--raw"), (f"{prompts}:2: `messages` need the chat template",)),
        ((hf, "--prompt", "a", "--top_p", "1.5"), ("top_p=1.5",)),
        ((bare, "--prompt", "a"), ("has no chat template: pass --raw",)),
        ((prompts.parent, "--prompt", "a"), ("is none of: a converted checkpoint",)),
    ]  # fmt: skip
    started = [(shared_jobs.start(SCRIPT, "--checkpoint", *map(str, options)), texts) for options, texts in cases]
    for job, texts in started:
        assert job.wait(120) == [2], job.tail()
        assert job.stdout == "" and job.stderr.startswith("error: ") and "Traceback" not in job.stderr, job.tail()
        for text in texts:
            assert text in job.stderr, job.tail()


def test_greedy_excludes_what_only_sampling_has(shared_jobs, tiny_model):
    job = shared_jobs.start(SCRIPT, "--checkpoint", str(tiny_model), "--greedy", "--temperature", "0.5")
    assert job.wait(60) == [2] and "generate.py: error: --greedy gives one response" in job.stderr


# Far more than a test waits for: only the reader or Ctrl-C ends it.
ENDLESS = ("--prompt", "a", "--num_samples", "200000", "--max_output_len", "3", "--max_batch_size", "4")


def test_a_closed_pipe_ends_it_quietly(shared_jobs, tiny_model, tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    job = shared_jobs.start(SCRIPT, "--checkpoint", str(tiny_model.parent / "hf"), *ENDLESS, stdout=fifo)
    received, until = b"", time.monotonic() + 100
    while b"\n" not in received and time.monotonic() < until:
        time.sleep(0.05)
        received += read_some(reader)
    os.close(reader)
    assert json.loads(received.split(b"\n")[0])["index"] == 0
    assert job.wait(100) == [0], job.errors.read_text()
    assert "Traceback" not in job.stderr and "BrokenPipe" not in job.stderr


def read_some(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 16)
    except BlockingIOError:
        return b""


def test_ctrl_c_ends_it_quietly(shared_jobs, tiny_model):
    job = shared_jobs.start(SCRIPT, "--checkpoint", str(tiny_model.parent / "hf"), *ENDLESS)
    until = time.monotonic() + 100
    while b"\n" not in job.output.read_bytes() and time.monotonic() < until:
        time.sleep(0.05)
    job.signal(signal.SIGINT)
    assert job.wait(100) == [130], job.tail()
    assert "interrupted" in job.stderr and "Traceback" not in job.stderr
    assert all(json.loads(line) for line in job.stdout.splitlines())
