#!/usr/bin/env python3
"""Trains a few steps with DeepSpeed's ZeRO-3, optimizer and parameters on a drive: the other side of compare_faults.py.

    python scripts/proof/deepspeed_loop.py --model DIR --nvme DIR --checkpoints DIR --out FILE --last 6 [--save TAG]

It is run by a Python that has DeepSpeed and torch, and imports nothing of fuyou. Rows are random tokens, the same for a step in
every run. Step numbers continue where `--first` says, because DeepSpeed does not say which step it loaded. FILE gets JSON
lines: one per step with its loss, and one for each other action. The configuration is ds_train.py's: buffers as small as the
model allows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

ROWS, LENGTH = 2, 32
_BALLAST = 1 << 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--nvme", type=Path, required=True, help="folder that is swapped to")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--load", help="tag of a checkpoint, before the first step")
    parser.add_argument("--save", help="tag of a checkpoint, after the last step")
    parser.add_argument("--save-again", action="store_true", help="the same tag twice")
    parser.add_argument("--fill", type=Path, help="a file that fills its disk, made before the first step")
    parser.add_argument("--in-memory", action="store_true", help="nothing is offloaded")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    os.environ.update(
        DS_ACCELERATOR="cpu", OMP_NUM_THREADS=str(options.threads), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000),
    )  # fmt: skip
    with options.out.open("w", encoding="utf-8") as out:

        def tell(**what: object) -> None:
            out.write(json.dumps(what) + "\n")
            out.flush()

        try:
            train(options, tell)
        except BaseException as error:
            tell(error=f"{type(error).__name__}: {error}"[:2000])
            raise
    return 0


def train(options, tell) -> None:
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    options.nvme.mkdir(parents=True, exist_ok=True)
    deepspeed.init_distributed("gloo", verbose=False)
    config = AutoConfig.from_pretrained(options.model)
    settings = settings_of(config, options)
    tell(deepspeed=deepspeed.__version__)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    model.train()
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())
    if options.load:
        path, _ = engine.load_checkpoint(str(options.checkpoints), tag=options.load)
        tell(loaded=path is not None)
    if options.fill:
        fill(options.fill)
    for step in range(options.first, options.last + 1):
        torch.manual_seed(step)
        ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        tell(step=step, loss=loss.item())
    for _ in range(1 + options.save_again if options.save else 0):
        engine.save_checkpoint(str(options.checkpoints), tag=options.save)
        tell(saved=options.save)


def settings_of(config, options) -> dict[str, object]:
    largest = config.vocab_size * config.hidden_size
    zero: dict[str, object] = {
        "stage": 3, "overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": largest,
        "sub_group_size": largest, "stage3_max_live_parameters": largest, "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 1000,
    }  # fmt: skip
    if not options.in_memory:
        drive = {"device": "nvme", "nvme_path": str(options.nvme), "buffer_count": 5, "pin_memory": True}
        zero["offload_optimizer"] = drive
        zero["offload_param"] = {**drive, "buffer_size": largest, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1},
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }


def fill(path: Path) -> None:
    """Fills the disk until no block is left."""
    size = _BALLAST
    with path.open("wb", buffering=0) as file:
        while size >= 512:
            try:
                if file.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2
        os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main())
