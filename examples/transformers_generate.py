"""The same through transformers' own ``model.generate``, with one more argument."""

from pathlib import Path
from pydoc_data.topics import topics

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import triforce_tree

pair = Path(triforce_tree.__file__).parent / "pair"
model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(pair / "target")

# Arguments that transformers does not pass on to ``custom_generate`` are given here.
hierarchical = triforce_tree.custom_generate(
    draft=pair / "draft",
    tokenizer=tokenizer,
    streamer=TextStreamer(tokenizer, skip_prompt=True),
    stop_strings=["\n\n\n"],
)
inputs = tokenizer(topics["import"], return_tensors="pt")
model.generate(**inputs, custom_generate=hierarchical, max_new_tokens=128, do_sample=False)
