"""Defines the whole command line of `fuyou`. Each command imports what it runs, so that --help is fast."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fuyou_cli import __version__
from fuyou_cli.core.errors import FuyouError, UsageError

from . import error_screen
from .console import STDOUT, drop_result, lost_result, prepare_streams, tell_errors, write_result

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe

_EPILOG = """
\b
Exit codes:
  0 ok   1 failed   2 usage or recipe error   3 does not fit
  4 out of memory or disk   130 stopped, at most one finished step lost

\b
Environment:
  FUYOU_OFFLOAD_DIR     where stores go, unless the recipe says
  FUYOU_DEBUG=1         show tracebacks
  HF_TOKEN, HF_HOME     access to the hub, and its local cache
  NO_COLOR              plain text
  CUDA_VISIBLE_DEVICES  which GPU
"""

# ---- arguments that several commands share ----------------------------------------------------------------------------

_RECIPE_HELP = "A recipe file, or the name of a shipped one (default: ./recipe.yaml)."
_OVERRIDES_HELP = "Change keys of the recipe, e.g. optimizer.lr=3e-6; key=null clears one."


def _complete_recipe(incomplete: str) -> list[str]:
    """Lists shipped recipes and the recipes in this folder, for shell completion."""
    from fuyou_cli.recipe.named import shipped_recipes

    local = (str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern))
    return sorted(name for name in (*shipped_recipes(), *local) if name.startswith(incomplete))


def _complete_key(incomplete: str) -> list[str]:
    """Lists the keys of a recipe, for shell completion."""
    from fuyou_cli.recipe.rules import known_keys

    keys = known_keys()
    leaves = (key for key in keys if not any(other.startswith(f"{key}.") for other in keys))
    return [f"{key}=" for key in leaves if key.startswith(incomplete)]


_option = partial(typer.Option, show_default=False)  # one without a default that is worth showing
_Recipe = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.", autocompletion=_complete_recipe)]
_OptionalRecipe = Annotated[str | None, typer.Argument(help=_RECIPE_HELP, show_default=False, autocompletion=_complete_recipe)]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", help=_OVERRIDES_HELP, show_default=False, autocompletion=_complete_key),
]
_Trace = Annotated[
    Path | None, _option("--trace", metavar="FILE", help="Write a trace of the newest steps, for ui.perfetto.dev.")
]
_Json = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]


# ---- commands ---------------------------------------------------------------------------------------------------------


# Rich help takes as long to import as everything else together.
app = typer.Typer(
    name="fuyou",
    help="Fine-tune Hugging Face models that do not fit the machine: in full or with an adapter, exactly, on one device.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show and copy the shipped recipes.")
app.add_typer(recipes, name="recipes")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        write_result(f"fuyou {__version__}")
        raise typer.Exit


@app.command()
def finetune(
    recipe: _Recipe,
    overrides: _Overrides = None,
    dry_run: Annotated[bool, _option("--dry-run", help="Only show the plan; measure nothing.")] = False,
    assume_rates: Annotated[bool, _option("--assume-rates", help="Assume rates instead of measuring a new machine.")] = False,
    accept_changes: Annotated[
        bool, _option("--accept-changes", help="Resume with another lr, weight_decay, eps, schedule, max_steps or epochs.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Also show each step's traffic and waits.")] = False,
    trace: _Trace = None,
    nproc: Annotated[
        int | None, _option("--nproc", metavar="N", help="Train in N processes on this box (train.nproc).")
    ] = None,
) -> None:
    """Fine-tune a model as a recipe says.

    Run the same command again to resume a stopped run.
    """
    if dry_run and trace is not None:
        raise UsageError("--dry-run and --trace cannot be used together", hint="a trace needs steps that ran")
    from fuyou_cli.training.peers import is_shown_elsewhere, place_of

    loaded = _loaded_recipe(recipe, overrides, shown=not is_shown_elsewhere(os.environ))
    count = loaded.recipe.train.nproc if nproc is None else nproc
    if count < 1:
        raise UsageError(f"there is no run of {count} processes", hint="--nproc takes 2 or more; leave it out for one")
    if dry_run:
        return _plan(loaded, dry_run=True, verbose=verbose, ranks=count)
    if count != 1 and place_of(os.environ) is None:
        from .launch import options_of, run_ranks

        options = {
            "--assume-rates": assume_rates, "--accept-changes": accept_changes, "--verbose": verbose, "--trace": trace
        }  # fmt: skip
        return run_ranks(loaded.recipe, count, ["finetune", recipe, *(overrides or []), *options_of(options)])
    from .finetune import run_finetune

    return run_finetune(loaded, measure=not assume_rates, accept_changes=accept_changes, verbose=verbose, trace=trace)


@app.command()
def quickstart(overrides: _Overrides = None) -> None:
    """See it work on a small model.

    Makes a model, fine-tunes it in less memory than its states need, and compares the losses with plain PyTorch. Needs no
    network and no GPU.
    """
    from .recipe_commands import run_quickstart

    if code := run_quickstart(overrides or []):
        raise typer.Exit(code)


@app.command()
def init(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write; it must not exist.")] = Path(
        "recipe.yaml"
    ),
    model: Annotated[str | None, _option(help="A folder, or a hub id.")] = None,
    data: Annotated[str | None, _option(help="A file of jsonl, json, csv, parquet or txt.")] = None,
    memory: Annotated[str | None, _option(help="RAM it may take: 16GiB, 50%, auto.")] = None,
    directory: Annotated[
        str | None, _option("--dir", help="A folder on the fastest drive, for what RAM does not hold.")
    ] = None,
) -> None:
    """Write a first recipe.

    Asks for the model, the data and the memory; with --model and --data it asks nothing.
    """
    from .recipe_commands import run_init

    run_init(target, model=model, data=data, memory=memory, directory=directory)


@app.command()
def plan(
    recipe: _OptionalRecipe = None,
    overrides: _Overrides = None,
    dry_run: Annotated[bool, _option("--dry-run", help="Measure nothing; assume unknown rates.")] = False,
    hardware: Annotated[
        str | None,
        _option(
            metavar="FILE|PARTS", help="Plan for another machine, e.g. rtx4090,2xgen4,128GiB. 4xrtx4090: a rank for each card."
        ),
    ] = None,
    boxes: Annotated[int, _option("--boxes", metavar="N", help="Plan for N such boxes that train the model together.")] = 1,
    link: Annotated[
        str | None, _option("--link", metavar="RATE", help="What connects them: 10GbE (the default), 25GbE, 1.2GB/s.")
    ] = None,
    json_output: _Json = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Also show every stage, and where rates come from.")] = False,
) -> None:
    """Show what a run needs, and whether it fits.

    Shows where everything is kept and how long a step takes; if it does not fit, the changes that help. Trains nothing. The
    first plan on a machine measures it (about a minute). Exit code 3 when the run does not fit.
    """
    loaded = _loaded_recipe(recipe, overrides)
    ranks = loaded.recipe.train.nproc
    options: dict[str, Any] = {"boxes": boxes, "link": link, "json_output": json_output, "verbose": verbose, "ranks": ranks}
    _plan(loaded, dry_run=dry_run, hardware=hardware, **options)


@app.command()
def bench(
    recipe: Annotated[
        str | None, typer.Argument(help="Also measure the block and head of this recipe.", show_default=False)
    ] = None,
    overrides: _Overrides = None,
    quick: Annotated[bool, typer.Option("--quick/--full", help="Quick: 15 s (with a recipe a minute), 2 GB written.")] = True,
    json_output: _Json = False,
    directory: Annotated[
        Path | None, _option("--dir", help="The folder whose drive is measured (default: the recipe's).")
    ] = None,
    sustained: Annotated[
        bool, _option("--sustained", help="Also write until the drive slows down: many GB, asks first.")
    ] = False,
    layers: Annotated[
        bool, _option("--layers", help="Only measure the recipe's layers, as the first plan of a recipe does.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    model: Annotated[
        str | None, _option(metavar="8b|13b|70b|175b|RECIPE", help="Train a model of these shapes instead.")
    ] = None,
    batch: Annotated[str | None, _option(metavar="8,16,...", help="With --model: batch sizes.")] = None,
) -> None:
    """Measure this machine, or with --model how fast it trains.

    Measures matrix products, layers, the drive and the update. Later plans use the result. With --model it trains a few steps
    of a few blocks on random weights and tokens, adds the other blocks, and leaves nothing behind.
    """
    if model is not None:
        from .bench_model import parsed_batch_sizes, run_model_bench

        words = [*([] if recipe is None else [recipe]), *(overrides or [])]  # --model takes no recipe
        sizes = parsed_batch_sizes(batch)
        run_model_bench(model, words, batch_sizes=sizes, directory=directory, json_output=json_output)
        return
    if batch is not None:
        raise UsageError("--batch is for --model", hint="name a shape: fuyou bench --model 8b")
    if layers and sustained:
        raise UsageError("--layers measures no drive, --sustained does: use only one of them")
    loaded = _loaded_recipe(recipe, overrides) if recipe is not None else None
    _before_torch(loaded.recipe.offload.device if loaded is not None else "auto")
    from .bench import run_bench

    run_bench(directory, quick=quick, json_output=json_output, loaded=loaded, sustained=sustained, layers=layers, yes=yes)


@app.command()
def validate(
    recipe: _OptionalRecipe = None,
    overrides: _Overrides = None,
    json_output: _Json = False,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the recipe with every default.")] = False,
) -> None:
    """Check a recipe, and show all wrong keys and values at once.

    Once there are none, shows keys that contradict each other. Reads neither the model nor the data.
    """
    from .recipe_commands import run_validate

    run_validate(recipe, overrides or [], json_output=json_output, show_config=show_config)


@app.command()
def schema(
    reference: Annotated[bool, _option("--reference", help="A page in Markdown instead: every key and its default.")] = False,
) -> None:
    """Print the JSON Schema of recipes, for editors.

    Write it to a file, and name the file in a recipe's first line: `# yaml-language-server: $schema=FILE`. The editor then
    completes keys, explains them and marks mistakes.
    """
    from .recipe_commands import run_schema

    run_schema(as_reference=reference)


@app.command()
def data(
    recipe: _OptionalRecipe = None,
    overrides: _Overrides = None,
    number: Annotated[int, typer.Option("-n", min=0, help="Rows to show, in the order of training.")] = 2,
    json_output: _Json = False,
) -> None:
    """Show the data of a recipe as the model will see it.

    Counts what is read, cut and left out, and why; shows how long samples are, and the first rows of training with what of them
    is trained. Makes the rows as `fuyou finetune` does. Needs the tokenizer, but neither the model's weights nor a GPU.
    """
    from .data_command import run_data

    run_data(_loaded_recipe(recipe, overrides).recipe, number=number, json_output=json_output)


@app.command("eval")
def evaluate(
    source: Annotated[str, typer.Argument(metavar="MODEL|STORE|OUTPUT", help="A model, a run's store, or a run's output_dir.")],
    recipe: _OptionalRecipe = None,
    overrides: _Overrides = None,
    choices: Annotated[str | None, typer.Option(hidden=True)] = None,
    json_output: _Json = False,
) -> None:
    """Show the loss of a model on the eval sets of a recipe.

    Loss and perplexity of each set of dataset.eval, and of the samples that dataset.eval_fraction holds back. The weights pass
    through memory: the model may be larger than offload.max_memory.cpu. Trains and writes nothing. For questions with
    choices, and other tasks: fuyou lm-eval.
    """
    if choices is not None:
        raise UsageError(
            "fuyou eval --choices is gone: lm-evaluation-harness scores questions with choices",
            hint="fuyou lm-eval --model_args pretrained=MODEL --tasks TASK; a task may be a YAML file that reads your JSONL",
        )
    loaded = _loaded_recipe(recipe, overrides)
    _before_torch(loaded.recipe.offload.device)
    from .inference_commands import run_eval

    run_eval(source, loaded.recipe, json_output=json_output)


@app.command("lm-eval", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on a model larger than memory.

    Takes the arguments of its own command lm_eval, and adds a model: `fuyou lm-eval --model_args pretrained=MODEL,memory=8GiB
    --tasks hellaswag`. MODEL is a model, a run's store or its output_dir. `fuyou lm-eval run --help` shows all arguments,
    `fuyou lm-eval ls tasks` the tasks. Needs `pip install "fuyou[lm-eval]"`.
    """
    words = context.args
    if words in ([], ["-h"], ["--help"]):
        typer.echo(context.get_help())
        return
    _before_torch()
    from .inference_commands import run_lm_eval

    run_lm_eval(words)


@app.command()
def doctor(
    json_output: _Json = False, directory: Annotated[Path | None, _option("--dir", help="The folder a store would use.")] = None
) -> None:
    """Check this machine.

    Shows what works, what does not, and how to fix it. Exit code 1 if something must be fixed.
    """
    from .doctor import run_doctor

    if not run_doctor(directory, json_output=json_output):
        raise typer.Exit(error_screen.FAILED)


@app.command()
def report(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's output_dir, its recipe, or its log.jsonl.")],
    json_output: _Json = False,
    html: Annotated[Path | None, _option(metavar="FILE", help="Write one page that opens in any browser.")] = None,
) -> None:
    """Show what a run did.

    Shows loss, learning rate and speed over the steps, memory, the ssd and its wear, and predictions next to measurements.
    Works during a run too.
    """
    from .stores import run_report

    run_report(source, json_output=json_output, html=html)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="STORE|RECIPE|OUTPUT", help="A run's store, recipe or output_dir.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    overrides: _Overrides = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="Type of the weights (default: the recipe's, or what the run computed in)."),
    ] = None,
    merged: Annotated[bool, _option("--merged", help="Merge an adapter into its model, and write the whole model.")] = False,
) -> None:
    """Write a trained model, or an adapter for peft.

    Streams the store to safetensors that `from_pretrained` loads.
    """
    from .stores import run_export

    run_export(source, out, overrides or [], dtype=dtype, merged=merged)


@app.command()
def generate(
    source: Annotated[str, typer.Argument(metavar="MODEL|STORE|OUTPUT", help="A model, a run's store, or its output_dir.")],
    prompts: Annotated[
        list[str] | None, _option("--prompt", metavar="TEXT", help="The text to continue; several: as with --file.")
    ] = None,
    file: Annotated[Path | None, _option(help="Rows with a prompt or messages; JSON lines go to stdout.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message; without one, a conversation.")] = False,
    max_new_tokens: Annotated[int | None, _option(help="At most so many (default: 256).")] = None,
    temperature: Annotated[float | None, _option(help="Draw tokens instead of the likeliest.")] = None,
    top_p: Annotated[float | None, _option(help="Draw from the likeliest of this share.")] = None,
    top_k: Annotated[int | None, _option(help="Draw from so many tokens.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Prompts at once: the weights are read once for all of them.")] = 8,
    memory: Annotated[str, typer.Option(help="RAM for the whole process: 16GiB, 50%, auto.")] = "auto",
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], typer.Option(help="What to compute in.")] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")] = "auto",
    json_output: _Json = False,
) -> None:
    """Let a model write.

    The model may be larger than memory: its weights stay in RAM as far as --memory goes, and the rest is read once for each
    token, for all prompts of a batch.
    """
    _before_torch(device)
    from .inference_commands import GenerateOptions, run_generate

    asked = GenerateOptions(
        prompts=tuple(prompts or ()), file=file, chat=chat, new=max_new_tokens, temperature=temperature, top_p=top_p,
        top_k=top_k, seed=seed, batch_size=batch_size, memory=memory, dtype=dtype, device=device, json_output=json_output,
    )  # fmt: skip
    run_generate(source, asked)


@app.command()
def verify(
    source: Annotated[Path, typer.Argument(metavar="STORE", help="A run's store, a folder with one, or its output_dir.")],
    json_output: _Json = False,
) -> None:
    """Read a store and check it.

    Compares everything committed, and frozen weights in the model's own files, with their checksums. Exit code 1 when
    something is damaged.
    """
    from .stores import run_verify

    if not run_verify(source, json_output=json_output):
        raise typer.Exit(error_screen.FAILED)


@app.command()
def clean(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of stores (offload.dir), one store, or a run's output_dir.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove store files from a drive.

    Lists the files that manifests in DIR name, and asks before it removes them. Removes nothing else.
    """
    from .stores import run_clean

    run_clean(directory, yes=yes)


# ---- fuyou recipes ---------------------------------------------------------------------------------------------------

_ShippedName = Annotated[str, typer.Argument(help="A name from `recipes ls`.", autocompletion=_complete_recipe)]


@recipes.command("ls")
def recipes_ls(json_output: _Json = False) -> None:
    """List the shipped recipes."""
    from .recipe_commands import run_ls

    run_ls(json_output=json_output)


@recipes.command("show")
def recipes_show(name: _ShippedName, json_output: _Json = False) -> None:
    """Print a shipped recipe."""
    from .recipe_commands import run_show

    run_show(name, json_output=json_output)


@recipes.command("cp")
def recipes_cp(
    name: _ShippedName,
    target: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")] = Path("recipe.yaml"),
) -> None:
    """Copy a shipped recipe, for editing."""
    from .recipe_commands import run_cp

    run_cp(name, target)


# ---- what the commands call ------------------------------------------------------------------------------------------


def _loaded_recipe(recipe: str | None, overrides: Sequence[str] | None, *, shown: bool = True) -> LoadedRecipe:
    """Loads the recipe of a command line, and shows its notes, unless another process does. Raises RecipeErrors if it has
    errors, UsageError if there is none."""
    from fuyou_cli.recipe.named import refuse_unmade

    from .recipe_commands import loaded_with_notes

    loaded = loaded_with_notes(recipe, overrides or [], shown=shown)
    refuse_unmade(loaded)
    return loaded


def _before_torch(device: str = "auto") -> None:
    """Sets what libraries read when they are loaded."""
    from fuyou_cli.core.process import settle_allocator, settle_libraries

    settle_allocator()
    settle_libraries(device=device)


def _plan(loaded: LoadedRecipe, **options: Any) -> None:
    from fuyou_cli.core.process import uncollected, uncollected_at_exit

    from .plan_command import run_plan

    with uncollected():
        fits = run_plan(loaded, **options)
        uncollected_at_exit()
    if not fits:
        raise typer.Exit(error_screen.DOES_NOT_FIT)


# typer brings its own copy of click, so the error's class is taken from its public subclass
_BadUsage: type[Exception] = typer.BadParameter.__bases__[0]


def _speak_utf8() -> None:
    """Begins anew in Python's UTF-8 mode where the locale's encoding is another: names in recipes are UTF-8."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        os.environ["PYTHONUTF8"] = "1"  # for processes that this one starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code. Shows a traceback only if FUYOU_DEBUG asks for it."""
    if arguments is None:
        _speak_utf8()
    prepare_streams()
    sys.excepthook = error_screen.excepthook
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # not app(...): it would replace our exception hook with its own
        command = typer.main.get_command(app)
        code = command.main(args=words, prog_name="fuyou", standalone_mode=False) or 0
        sys.stdout.flush()
        if code == error_screen.INTERRUPTED:  # the library has caught it
            code = error_screen.report(KeyboardInterrupt())
    except _BadUsage as error:
        tell_errors()
        code = error_screen.report_usage(error, words)
    except OSError as error:
        tell_errors()
        if (lost := lost_result(error)) is not None:
            code = error_screen.report(lost)
        elif error.errno == errno.EPIPE and not hasattr(error, "__notes__"):  # the reader (head, less) has closed the pipe
            drop_result()
            code = error_screen.FAILED
        else:
            code = error_screen.report(error)
            if error.filename == STDOUT:
                drop_result()
    except (FuyouError, KeyboardInterrupt, MemoryError, RuntimeError) as error:
        tell_errors()
        code = error_screen.report(error)
    sys.exit(code)
