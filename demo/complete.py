# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Completes Python code with a saved model: python demo/complete.py demo/out/model "def mean(values):" """

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, logging, pipeline, set_seed

import diff_transformer  # noqa: F401  (registers the model with the Auto classes)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="a folder written by save_pretrained")
parser.add_argument("prompt", help="Python code to complete")
text = "default: %(default)s; a token is about 3.5 characters"
parser.add_argument("--max-new-tokens", type=int, default=64, help=text)
args = parser.parse_args()

logging.disable_progress_bar()  # for loading the weights
set_seed(0)
generator = pipeline(
    "text-generation",
    model=AutoModelForCausalLM.from_pretrained(args.model),
    tokenizer=AutoTokenizer.from_pretrained(args.model),
    device="cpu",
)
config = GenerationConfig(max_new_tokens=args.max_new_tokens, do_sample=True, temperature=0.5, top_p=0.95)
print(generator(args.prompt, generation_config=config, return_full_text=False)[0]["generated_text"])
