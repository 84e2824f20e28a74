"""Real arithmetic for the stand-in: Hugging Face's model of config.json on the CPU, one whole forward pass a token."""

import asyncio
import json

import torch

from tensorrt_llm._contract import Record


class Generator:
    def __init__(self, folder, dtype):
        from transformers import AutoConfig, AutoModelForCausalLM

        assert not list(folder.glob("*.safetensors")), "dummy weights: none are read"
        config = json.loads((folder / "config.json").read_text())
        self.folder = folder
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(getattr(torch, dtype)).eval()
        tied = self.model.config.tie_word_embeddings
        state = self.model.state_dict()
        self.manifest = {n: tuple(t.shape) for n, t in state.items() if not (tied and n == "lm_head.weight")}
        self.stop_words = {}

    def load(self, tensors):
        dtype = self.model.dtype
        wrong = [name for name, tensor in tensors.items() if tensor.dtype != dtype]
        assert not wrong, f"{wrong[0]} is not {dtype}"
        self.model.load_state_dict(tensors, strict=False)

    async def generate(self, prompt, settings):
        """token_ids, logprobs (best token first, then the sampled one) and finish_reason; as TensorRT-LLM ends a response."""
        random = torch.Generator().manual_seed(settings.seed or 0)
        tokens, logprobs, reason = [], [], "length"
        stops = [[token] for token in settings.stop_token_ids or []] + self._words(settings.stop or [])
        while len(tokens) < settings.max_tokens and reason == "length":
            await asyncio.sleep(0)  # others run between two tokens
            with torch.inference_mode():
                scores = self.model(torch.tensor([prompt + tokens])).logits[0, -1].float()
            token, entry = self._choose(scores, settings, random)
            if token == settings.end_id:
                reason = "stop"
                break  # an end token is not part of token_ids
            tokens, logprobs = [*tokens, token], [*logprobs, entry]
            ended = [stop for stop in stops if tokens[-len(stop) :] == stop]
            if ended:
                reason = "stop"
                if not settings.include_stop_str_in_output:
                    tokens = tokens[: -len(ended[0])]
        given = logprobs if settings.logprobs else None
        return Record(token_ids=tokens, logprobs=given, finish_reason=reason)

    def _words(self, texts):
        if not texts:
            return []
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(self.folder))
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    @staticmethod
    def _choose(scores, settings, random):
        greedy = settings.temperature == 0
        logprobs = (scores if greedy else scores / settings.temperature).log_softmax(-1)
        best = int(scores.argmax())
        if greedy:
            token = best
        else:
            assert settings.top_k == 0 and settings.top_p == 1.0 and 0 <= settings.seed < 2**63
            token = int(torch.multinomial(logprobs.exp(), 1, generator=random))
        entry = {best: Record(logprob=float(logprobs[best]), rank=1)}
        entry[token] = Record(logprob=float(logprobs[token]), rank=1 + int((logprobs > logprobs[token]).sum()))
        return token, entry
