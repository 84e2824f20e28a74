"""convert_nemo_to_trtllm.py as a user runs it: a .nemo archive in, a checkpoint, a build script and a Hugging Face folder out."""

import json
import os
import subprocess
import tarfile

import pytest
import torch
from safetensors.torch import load_file

SIZES = ("--max_batch_size=4", "--max_input_len=100", "--max_output_len=28")


def convert(jobs, *arguments):
    return jobs.start("convert_nemo_to_trtllm.py", *map(str, arguments))


@pytest.fixture(scope="module")
def converted(shared_jobs, tiny_model, tmp_path_factory):
    """(output folder, the job) of a .nemo archive over two tensor and two pipeline ranks."""
    folder = tmp_path_factory.mktemp("trtllm")
    with tarfile.open(folder / "tiny.nemo", "w") as tar:
        tar.add(tiny_model, arcname=".")
    grid = ("--tp_size=2", "--pp_size=2", "--dtype=float16", "--quantization=int8")
    places = (f"--nemo_checkpoint={folder}/tiny.nemo", f"--output_dir={folder}/out")
    return folder / "out", convert(shared_jobs, *places, *grid, *SIZES).finish()


def test_checkpoint_of_every_rank(converted, tiny_model):
    """Written rules, on the second rank of the second stage: layers 2 and 3, heads 2 and 3, key-value head 1, half of the vocabulary."""
    out, _ = converted
    assert sorted(path.name for path in out.glob("rank*")) == [f"rank{n}.safetensors" for n in range(4)]
    hf = {n: t.half() for n, t in load_file(tiny_model.parent / "hf" / "model.safetensors").items()}
    found = load_file(out / "rank3.safetensors")
    at = "model.layers.2.self_attn."
    q, k, v = (hf[f"{at}{name}_proj.weight"] for name in "qkv")  # heads of 8 rows
    assert torch.equal(found["transformer.layers.0.attention.qkv.weight"], torch.cat([q[16:], k[8:], v[8:]]))
    assert torch.equal(found["transformer.layers.0.attention.dense.weight"], hf[f"{at}o_proj.weight"][:, 16:])
    assert torch.equal(found["transformer.layers.1.mlp.gate.weight"], hf["model.layers.3.mlp.up_proj.weight"][32:])
    head = found["lm_head.weight"]  # 259 entries, tied: 130 rows a rank
    assert torch.equal(head[:-1], hf["model.embed_tokens.weight"][130:]) and not head[-1].any() and len(head) == 130
    assert "transformer.vocab_embedding.weight" not in found
    first = load_file(out / "rank0.safetensors")
    assert torch.equal(first["transformer.vocab_embedding.weight"], hf["model.embed_tokens.weight"])
    assert "lm_head.weight" not in first and "transformer.ln_f.weight" not in first


def test_hugging_face_folder_loads_and_says_the_same(converted, tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, _ = converted
    model = AutoModelForCausalLM.from_pretrained(out / "hf")
    source = AutoModelForCausalLM.from_pretrained(tiny_model.parent / "hf").half()
    assert model.dtype is torch.float16
    theirs = dict(source.named_parameters())
    assert all(torch.equal(p, theirs[n]) for n, p in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    assert tokenizer.decode(tokenizer("1+1=")["input_ids"]) == "1+1="


def test_build_script_runs_trtllm_build_with_the_shapes(converted, tmp_path):
    """A trtllm-build on PATH writes down what it is called with."""
    out, job = converted
    tool = tmp_path / "trtllm-build"
    tool.write_text('#!/bin/sh\npwd\nfor word in "$@"; do echo "$word"; done\n')
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    called = subprocess.run([out / "build.sh"], env=environment, capture_output=True, text=True, timeout=60, check=True)
    where, *words = called.stdout.split()
    assert where == str(out.resolve())
    flags = dict(zip(words[::2], words[1::2]))
    assert flags == {
        "--checkpoint_dir": ".",
        "--output_dir": "engine",
        "--gemm_plugin": "auto",
        "--max_batch_size": "4",
        "--max_input_len": "100",
        "--max_seq_len": "128",
        "--max_num_tokens": "8192",
    }
    said = json.loads((out / "build.json").read_text())
    assert said["command"][1:] == words and said["world_size"] == 4 and said["quantization"] == "int8"
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == "W8A16" and config["dtype"] == "float16"
    assert f"{out}/build.sh" in job.stdout and job.stderr.strip().endswith("26/26")


def test_refusals_leave_nothing(converted, shared_jobs, tiny_model, tmp_path):
    out, _ = converted
    wrong = ("--tp_size=3", "--pp_size=3", *SIZES)
    places = (f"--nemo_checkpoint={tiny_model}", f"--output_dir={tmp_path}/new")
    jobs = [convert(shared_jobs, *places, *wrong), convert(shared_jobs, *places[:1], f"--output_dir={out}", *SIZES)]
    assert [job.wait() for job in jobs] == [[2], [2]]
    assert "num_attention_heads must be a multiple of --tp_size: 4 is not one of 3" in jobs[0].stderr
    assert "num_layers must be a multiple of --pp_size: 4 is not one of 3" in jobs[0].stderr
    assert "exists and is not an empty folder" in jobs[1].stderr
    assert not any("Traceback" in job.stderr for job in jobs) and list(tmp_path.iterdir()) == []
