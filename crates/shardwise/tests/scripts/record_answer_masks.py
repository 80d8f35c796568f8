"""Records which tokens of conversations transformers attributes to the assistant, for tests/models/conversations.rs.

    python record_answer_masks.py > ../data/answer_masks.jsonl
"""

import json
import pathlib

from transformers import AutoTokenizer

MODELS = pathlib.Path(__file__).parent.parent / "conformance/data/models"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALKS = [
    [("user", "How many heads?"), ("assistant", "Nine heads, of 8 features.")],
    [("system", "Be brief."), ("user", "Zürich?"), ("assistant", "日本語 🙂 and more"), ("user", "x"), ("assistant", "y\n\nz")],
    [("user", "a"), ("assistant", ""), ("user", "again"), ("assistant", " spaces ")],
]

for model in ("llama_gqa", "qwen2"):
    tokenizer = AutoTokenizer.from_pretrained(MODELS / model)
    for talk in TALKS:
        messages = [{"role": role, "content": content} for role, content in talk]
        found = tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
        )
        print(json.dumps({"model": model, "template": TEMPLATE, "messages": messages,
                          "ids": found["input_ids"], "mask": found["assistant_masks"]}))
