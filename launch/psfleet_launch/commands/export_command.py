"""`psfleet export`: a model's weights alone, in few bytes, in files that other programs read."""

from typing import get_args

import click

from psfleet.settings.choices import ExportFormat, RowForm


@click.command()
@click.argument("model")
@click.argument("out")
@click.option(
    "--format",
    "kind",
    type=click.Choice(get_args(ExportFormat)),
    default="safetensors",
    show_default=True,
    help="Kind of the file of arrays; onnx and faiss: safetensors, and a graph or an index beside it.",
)
@click.option(
    "--rows",
    type=click.Choice(get_args(RowForm)),
    help="Form of the rows; else float32, or that of the export.",
)
@click.option("--checkpoint", metavar="FOLDER", help="The snapshot with the weights.")
@click.option(
    "--features", metavar="FILE", help="A TOML file of the inputs, to come with the export."
)
@click.option(
    "--min-count",
    type=click.FloatRange(0),
    default=0,
    metavar="N",
    help="Leave out rows that were shown less often.",
)
def export(
    model: str,
    out: str,
    kind: str,
    rows: str | None,
    checkpoint: str | None,
    features: str | None,
    min_count: float,
) -> int:
    """Write the weights of MODEL to the folder OUT, without optimizer state.

    MODEL is the folder of an inference model, or MODULE:NAME, whose weights --checkpoint has. psfleet serve
    takes OUT as the model, or as the checkpoint of MODULE:NAME.
    """
    from psfleet.serving import model_export

    model_export.export(
        model,
        out,
        kind,  # type: ignore[arg-type]  # the option's choices
        rows,  # type: ignore[arg-type]
        checkpoint=checkpoint,
        features=features,
        min_count=min_count,
    )
    print(out)
    return 0
