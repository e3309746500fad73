"""Fine-tune a causal language model of Hugging Face with LoRA (peft); save adapter and tokenizer in the Hub's layout.

lockstep train examples/finetune.py --devices 2 --precision bf16 --clip 1
lockstep train examples/finetune.py --devices 4 --precision bf16 --clip 1 --reproducible 8   # the bits of one GPU

Nothing is downloaded: the texts are Python's standard library, and the model has random weights. With a model of the
Hub, these take the place of `base` and `tokenizer`, and LORA needs no modules_to_save:

    AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B-Base")
    AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B-Base")
"""

import math
import os
import sysconfig
from functools import cache
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import lockstep

ADAPTER = Path(os.environ.get("ADAPTER", "runs/adapter"))
MAX_TOKENS, VOCABULARY, NUM_TEST = 64, 1024, 128
# modules_to_save trains the embeddings too, since those of the base are random.
LORA = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM")


@cache
def texts() -> list[str]:
    """Return the top-level functions and classes of the standard library, in a fixed random order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [part.strip() for file in files for part in file.read_text(errors="replace").split("\n\n\n")]
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0))
    return [parts[index] for index in order if len(parts[index]) > 40]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that was trained on the texts; the same on every rank."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts(), VOCABULARY, special_tokens=["<end>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>", pad_token="<end>")


def samples(part: slice) -> list[list[int]]:
    """Return the tokens of each text: between a few and MAX_TOKENS."""
    return tokenizer()(texts()[part], truncation=True, max_length=MAX_TOKENS)["input_ids"]


def base() -> nn.Module:
    """Return the model to fine-tune, with the same random weights in each call."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def collate(batch: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens, and 1 where they are not padding, both (batch, time)."""
    rows = [torch.tensor(tokens) for tokens in batch]
    return pad_sequence(rows, batch_first=True), pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
    """Return the sum over all predicted tokens and their number: ranks with more tokens count more."""
    tokens, mask = batch
    logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].float()
    targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    return lockstep.Loss(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), mask[:, 1:].sum())


@torch.no_grad()
def export(model: nn.Module) -> None:
    """Save adapter and tokenizer; load both as a user of them would, and print the perplexity of what was loaded."""
    for part in (model, tokenizer()):
        part.save_pretrained(ADAPTER)
    loaded, words = PeftModel.from_pretrained(base(), ADAPTER).eval(), AutoTokenizer.from_pretrained(ADAPTER)
    found = loss(loaded, collate(words(texts()[:NUM_TEST], truncation=True, max_length=MAX_TOKENS)["input_ids"]))
    print(f"{ADAPTER}, loaded again: perplexity {math.exp(found.total / found.count):.2f}")


task = lockstep.Task(
    name="finetune",
    model=lambda: get_peft_model(base(), LORA),
    dataset=lambda: samples(slice(NUM_TEST, None)),
    eval_dataset=lambda: samples(slice(NUM_TEST)),
    collate=collate,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    global_batch_size=32,
    after=export,
)
