"""Chat templates that write what those of the families write, where user and assistant take turns: Llama 3 (BOS in the template, texts
trimmed), Qwen 2.5 and SmolLM2 (ChatML with a system message of their own), Qwen 3 (the last turn alone has a place for thoughts)."""

LLAMA3 = (
    "{{- bos_token }}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n' + system + '<|eot_id|>' }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + (message['content'] | trim) + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)


def chatml(system: str) -> str:
    """With a system message for conversations that have none."""
    return (
        "{% for message in messages %}"
        "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n"
        + system
        + "<|im_end|>\\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


SMOLLM2 = chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face")
QWEN25 = chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")

QWEN3 = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' and loop.last %}"
    "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA_SPECIALS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# name -> how the tokenizer of the family is made
FAMILIES = {
    "llama3": {
        "specials": LLAMA_SPECIALS,
        "bos": "<|begin_of_text|>",
        "eos": "<|eot_id|>",
        "adds_bos": True,
        "chat_template": LLAMA3,
    },
    "qwen2.5": {"specials": CHATML_SPECIALS, "eos": "<|im_end|>", "chat_template": QWEN25},
    "smollm2": {
        "specials": CHATML_SPECIALS,
        "bos": "<|im_start|>",
        "eos": "<|im_end|>",
        "chat_template": SMOLLM2,
    },
}
END = {"llama3": "<|eot_id|>", "qwen2.5": "<|im_end|>", "smollm2": "<|im_end|>"}
