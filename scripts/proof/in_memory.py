#!/usr/bin/env python3
"""Trains the other side: a plain PyTorch loop with everything in memory, on the rows and in the order of fuyou's run.

    python scripts/proof/in_memory.py --model DIR --rows DIR --batch 16 --micro 4 --steps 3 --out steps.jsonl
    (with --compute-alone: forward, recompute and backward, no optimizer; one JSON line per step)

It has bf16 weights and gradients, float32 masters and moments. torch's fused AdamW runs one parameter at a time on the gradient
in float32, so that only one such copy exists, and the master is copied back. The head's logits are whole. With
--float32-gradients each micro-batch's gradients are added to float32 sums. With --rank it trains peft's adapter on every linear
layer, in bf16 with float32 masters as ours is.

Our weights and states rest in memory advised for huge pages. So the proof scripts start this loop with
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 (glibc >= 2.35): what malloc maps for it is advised as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

BETAS, EPSILON = (0.9, 0.999), 1e-8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="tokenised rows of a fuyou run")
    parser.add_argument("--batch", type=int, required=True, help="rows per step")
    parser.add_argument("--micro", type=int, required=True, help="rows computed at once")
    parser.add_argument("--length", type=int, default=512, help="tokens a row has at most")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2, help="0: as many as torch takes")
    parser.add_argument("--seed", type=int, default=42, help="of the order of rows")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, help="global norm")
    parser.add_argument("--compute-alone", action="store_true")
    parser.add_argument("--device", default="cpu", help="that computes and holds everything (default: cpu)")
    parser.add_argument("--float32-gradients", action="store_true", help="micro-batches are summed in float32, as ours are")
    parser.add_argument(
        "--deterministic", action="store_true", help="only kernels that repeat their result, as train.deterministic"
    )
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    parser.add_argument("--rank", type=int, default=0, help="of a LoRA adapter that alone is trained (default: everything is)")
    parser.add_argument("--experts", help="transformers' implementation of a mixture's experts (default: its own choice)")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


class MasterAdamW:
    """Runs AdamW on float32 masters of bf16 parameters; weights of one dimension do not decay."""

    def __init__(self, parameters, *, lr: float, weight_decay: float, float32_gradients: bool = False) -> None:
        import torch

        self.parameters = list(parameters)
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizers = [
            torch.optim.AdamW(
                [master], lr=lr, betas=BETAS, eps=EPSILON, weight_decay=weight_decay if master.dim() > 1 else 0.0, fused=True
            )
            for master in self.masters
        ]
        if float32_gradients:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(_add_to, master))

    def clip(self, norm: float) -> None:
        """Clips by the global norm of what has been summed."""
        import torch

        torch.nn.utils.clip_grad_norm_([one for one in (*self.parameters, *self.masters) if one.grad is not None], norm)

    def step(self) -> None:
        import torch

        with torch.no_grad():
            for parameter, master, optimizer in zip(self.parameters, self.masters, self.optimizers, strict=True):
                if parameter.grad is not None:
                    master.grad = parameter.grad.float()
                    parameter.grad = None
                if master.grad is None:
                    continue
                optimizer.step()
                master.grad = None
                parameter.copy_(master)


def _add_to(master, parameter) -> None:
    """Adds a micro-batch's gradient once it is complete."""
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def train(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from fuyou_cli.data.batches import Sampler, collate
    from fuyou_cli.data.rows import Rows

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(options.deterministic)
    rows = Rows(options.rows)
    sampler = Sampler(len(rows), batch_size=options.batch, shuffle=True, seed=options.seed)
    ways = {"attn_implementation": "sdpa"} | ({"experts_implementation": options.experts} if options.experts else {})
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, **ways)
    model.to(options.device)
    model.config.use_cache = False
    if options.rank:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=options.rank, target_modules=linear_of_blocks(model), task_type="CAUSAL_LM")
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
        model.enable_input_require_grads()
    model.train()
    if not options.no_checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = None
    if not options.compute_alone:
        optimizer = MasterAdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=options.lr,
            weight_decay=options.weight_decay,
            float32_gradients=options.float32_gradients,
        )
    with options.out.open("w", encoding="utf-8") as out:
        for step in range(options.steps):
            batch = collate(rows, sampler.batch(step), pad_id=rows.summary.pad_id, max_len=options.length)
            begin, cpu = time.perf_counter(), time.process_time()
            loss = one_step(model, optimizer, batch, options)
            if options.device != "cpu":
                torch.cuda.synchronize()
            record = {
                "step": step + 1,
                "loss": loss,
                "seconds": time.perf_counter() - begin,
                "cpu_seconds": time.process_time() - cpu,
                "batch_tokens": batch.tokens,
                "peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "peak_device": torch.cuda.max_memory_allocated() if options.device != "cpu" else 0,
            }
            out.write(json.dumps(record) + "\n")
            out.flush()


def linear_of_blocks(model) -> str | list[str]:
    """Returns what an adapter's `all-linear` means to us: peft's own word takes experts and routers in as well."""
    import torch

    if not hasattr(model.config, "num_experts"):
        return "all-linear"
    linear = [name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return sorted({*linear} - {"lm_head"})


def one_step(model, optimizer: MasterAdamW | None, batch, options: argparse.Namespace) -> float:
    """Makes one step over all micro-batches. Returns the mean loss over the step's labels."""

    ids, labels = (tensor.to(options.device) for tensor in batch.tensors())
    total = 0.0
    for begin in range(0, options.batch, options.micro):
        part = slice(begin, begin + options.micro)
        output = model(input_ids=ids[part], labels=labels[part], num_items_in_batch=batch.label_tokens, use_cache=False)
        output.loss.backward()
        total += output.loss.item()
    if optimizer is None:
        model.zero_grad(set_to_none=True)
        return total
    if options.clip is not None:
        optimizer.clip(options.clip)
    optimizer.step()
    return total


def main() -> int:
    options = arguments()
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
