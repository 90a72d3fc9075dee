"""`isles export` and `isles sample`: what a run has trained, for others to serve and for a person to read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.common import Json, err, path_given, print_json, say
from isles.errors import UsageError

if TYPE_CHECKING:
    import torch

    from isles.data import Tokenizer

Checkpoint = Annotated[
    int | None, typer.Option("--checkpoint", help="Step of the checkpoint to use; the newest when left out.")
]

MIN_TEMPERATURE = 1e-3  # below it a quotient overflows, and nothing but the likeliest token is drawn anyway


def load_run(folder: Path, step: int | None) -> tuple[torch.nn.Module, torch.Tensor, Tokenizer, int]:
    """A run's model, its global parameters in the model's own layout, its tokenizer and the step they are from."""
    from isles.data import load_tokenizer
    from isles.model import Layout, remap
    from isles.simulator import RunFolder

    run = RunFolder(folder)
    model, values, at = run.load_model(step)
    trained_as = Layout.from_dict(run.read_run()["layout"])
    return model, remap(values, trained_as, Layout.of(model)), load_tokenizer(str(run.tokenizer.resolve()), folder), at


def load_for_sampling(folder: Path, step: int | None) -> tuple[torch.nn.Module, Tokenizer]:
    """A model with its weights, from a run's folder or an exported one."""
    from isles.data import load_tokenizer
    from isles.model import FlatParameters, Layout, load_exported

    if (folder / "run.json").exists():
        model, values, tokenizer, _ = load_run(folder, step)
        FlatParameters(model, Layout.of(model)).copy_from(values, 0, values.numel())
        return model, tokenizer
    if (folder / "config.json").exists():
        return load_exported(folder), load_tokenizer(str(folder.resolve()), folder)
    raise UsageError(
        f"{folder} is neither a run's folder nor an exported model; name the --out of `isles simulate` or `isles export`"
    )


def register(app: typer.Typer) -> None:
    @app.command()
    def export(
        folder: Annotated[
            Path, typer.Argument(metavar="DIR", parser=path_given, help="A run's folder (the --out of `isles simulate`).")
        ],
        to: Annotated[Path, typer.Option("--out", metavar="HF_DIR", parser=path_given, help="Folder to write.")],
        checkpoint: Checkpoint = None,
        as_json: Json = False,
    ) -> None:
        """Write a folder that transformers loads: weights in safetensors, config and tokenizer."""
        from isles.model import check_export_target, export_model

        check_export_target(to)  # before the run is read, which takes a while
        model, values, tokenizer, step = load_run(folder, checkpoint)
        export_model(model, values, tokenizer.save, to, eos_id=tokenizer.eos_id)
        if as_json:
            print_json({"path": str(to), "step": step, "parameters": values.numel()})
        else:
            say(
                f"wrote {to} (step {step}, {values.numel():,} parameters); transformers loads it with from_pretrained({str(to)!r})"
            )

    @app.command()
    def sample(
        folder: Annotated[Path, typer.Argument(metavar="DIR", parser=path_given, help="A run's folder or an exported model.")],
        prompt: Annotated[str, typer.Option("--prompt", help="Text to go on from.")] = "",
        max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=1_000_000, help="New tokens at most.")] = 200,
        temperature: Annotated[
            float, typer.Option("--temperature", min=0.0, max=100.0, help="0 always takes the likeliest token.")
        ] = 0.8,
        top_k: Annotated[
            int, typer.Option("--top-k", min=0, help="Choose among this many likeliest tokens; 0 among all.")
        ] = 40,
        seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the choice.")] = 0,
        checkpoint: Checkpoint = None,
        as_json: Json = False,
    ) -> None:
        """Let a trained model write."""
        from isles.model import generate

        if 0 < temperature < MIN_TEMPERATURE:
            raise UsageError(
                f"--temperature is 0 or at least {MIN_TEMPERATURE}, not {temperature}; 0 takes the likeliest token"
            )
        model, tokenizer = load_for_sampling(folder, checkpoint)
        text = generate(model, tokenizer, prompt, max_new_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed)
        if as_json:
            print_json({"prompt": prompt, "text": text, "seed": seed, "temperature": temperature, "top_k": top_k})
        else:
            err.print(f"{folder}, temperature {temperature}, seed {seed}", style="dim", soft_wrap=True)
            say(text)
