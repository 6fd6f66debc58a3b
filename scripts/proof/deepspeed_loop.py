#!/usr/bin/env python3
"""Trains a few steps with DeepSpeed's ZeRO-3, optimizer and parameters on a drive: the other side of compare_faults.py and, on
a GPU, of gpu_check.

    python scripts/proof/deepspeed_loop.py --model DIR --nvme DIR --out FILE --last 6 [--checkpoints DIR --save TAG]

It is run by a Python that has DeepSpeed and torch (for --lora peft, too), and imports nothing of fuyou. Rows are random tokens,
the same for a step in every run. Step numbers continue where `--first` says, because DeepSpeed does not say which step it
loaded. FILE gets JSON lines: one per step with its loss and seconds, and one for each other action. On a CPU the configuration
is ds_train.py's: buffers as small as the model allows. On a GPU reads and writes of states are pipelined, which needs more
buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

_BALLAST = 1 << 20
_PIPELINED = 12  # buffers: with fewer DeepSpeed stops at an assertion


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--nvme", type=Path, required=True, help="folder that is swapped to")
    parser.add_argument("--checkpoints", type=Path, help="folder of --load and --save")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--load", help="tag of a checkpoint, before the first step")
    parser.add_argument("--save", help="tag of a checkpoint, after the last step")
    parser.add_argument("--save-again", action="store_true", help="the same tag twice")
    parser.add_argument("--fill", type=Path, help="a file that fills its disk, made before the first step")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of all linear layers alone, by peft")
    parser.add_argument("--in-memory", action="store_true", help="nothing is offloaded")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--torch-adam", action="store_true", help="torch's AdamW: DeepSpeed compiles nothing")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=2, help="of a step, computed at once (default: 2)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a row (default: 32)")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    os.environ.update(DS_ACCELERATOR=options.device, OMP_NUM_THREADS=str(options.threads), LOCAL_SIZE="1")
    if "RANK" not in os.environ:  # of several: compare_boxes.py
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000)
        )
    path = Path(str(options.out).format(os.environ["RANK"]))
    with path.open("w", encoding="utf-8") as out:

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
    if options.torch_adam:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for ranks that share a box
    deepspeed.init_distributed("nccl" if options.device == "cuda" else "gloo", verbose=False)
    config = AutoConfig.from_pretrained(options.model)
    settings = settings_of(config, options)
    tell(deepspeed=deepspeed.__version__)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear"))
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=learning)
    if options.load:
        path, _ = engine.load_checkpoint(str(options.checkpoints), tag=options.load)
        tell(loaded=path is not None)
    if options.fill:
        fill(options.fill)
    for step in range(options.first, options.last + 1):
        torch.manual_seed(step + 10**6 * int(os.environ["RANK"]))  # every rank has rows of its own
        ids = torch.randint(0, config.vocab_size, (options.rows, options.length)).to(options.device)
        begin = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        value = loss.item()
        if options.device == "cuda":
            torch.cuda.synchronize()
        tell(step=step, loss=value, seconds=time.perf_counter() - begin)
    for _ in range(1 + options.save_again if options.save else 0):
        engine.save_checkpoint(str(options.checkpoints), tag=options.save)
        tell(saved=options.save)


def settings_of(config, options) -> dict[str, object]:
    largest, on_gpu = config.vocab_size * config.hidden_size, options.device == "cuda"
    zero: dict[str, object] = {
        "stage": 3, "overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": largest,
        "sub_group_size": largest, "stage3_max_live_parameters": largest, "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 1000,
    }  # fmt: skip
    if not options.in_memory:
        drive = {"device": "nvme", "nvme_path": str(options.nvme), "buffer_count": 5, "pin_memory": True}
        pipelined = {"buffer_count": _PIPELINED, "pipeline_read": True, "pipeline_write": True} if on_gpu else {}
        zero["offload_optimizer"] = {**drive, **pipelined}
        zero["offload_param"] = {**drive, "buffer_size": largest, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": options.rows,
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32 if on_gpu else 8, "intra_op_parallelism": 4 if on_gpu else 1},
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": options.torch_adam}},
        "bf16": {"enabled": options.dtype == "bfloat16"},
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
