"""Defines `fuyou generate`, whose options are many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .arguments import Json


def generate(
    source: Annotated[str, typer.Argument(metavar="MODEL|STORE|OUTPUT", help="A model, a run's store, or its output_dir.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="The text to continue; several: as with --file.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Rows with a prompt or messages; JSON lines go to stdout.", show_default=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message; without one, a conversation.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="At most so many (default: 256).", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="Draw tokens instead of the likeliest.", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest of this share.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many tokens.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Prompts at once: the weights are read once for all of them.")] = 8,
    memory: Annotated[str, typer.Option(help="RAM for the whole process: 16GiB, 50%, auto.")] = "auto",
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], typer.Option(help="What to compute in.")] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")] = "auto",
    json_output: Json = False,
) -> None:
    """Let a model write.

    The model may be larger than memory: its weights stay in RAM as far as --memory goes, and the rest is read once for each
    token, for all prompts of a batch.
    """
    from fuyou_cli.inference.generate_options import GenerateOptions

    from .generate import run_generate

    asked = GenerateOptions(
        prompts=tuple(prompts or ()), file=file, chat=chat, new=max_new_tokens, temperature=temperature, top_p=top_p,
        top_k=top_k, seed=seed, batch_size=batch_size, memory=memory, dtype=dtype, device=device, json_output=json_output,
    )  # fmt: skip
    run_generate(source, asked)
