"""Which parts of a fleet's strategy a torch model trains with; the others are refused."""

from psfleet.errors import ConfigError, UsageError
from psfleet.settings.environment import plan_file
from psfleet.stages.links import here
from psfleet.strategy import PipelineSettings, Settings

__all__ = ["check_strategy", "pipeline_of"]

_OTHER_OPTIMIZERS = {
    "dgc": "amp halves the bytes of gradients",
    "lars": "train with an optimizer of torch.optim",
    "lamb": "train with an optimizer of torch.optim",
}


def check_strategy(settings: Settings, *, cut: bool) -> None:
    """Refuse what psfleet.torch cannot do.

    Args:
        settings: The strategy that counts.
        cut: The model is trained by psfleet.torch.Pipeline.

    Raises:
        ConfigError: The strategy has a part that torch's optimizers have no counterpart for.
        UsageError: It asks for a pipeline and the script does not train with one.
    """
    for part, instead in _OTHER_OPTIMIZERS.items():
        if getattr(settings, part) is not None:
            raise ConfigError(
                f"the strategy part {part!r} puts an optimizer of psfleet in place of the script's, "
                f"and psfleet.torch has none for it; leave it out ({instead})"
            )
    if settings.recompute is not None and settings.recompute.memory_budget:
        raise ConfigError(
            f"recompute memory_budget is {settings.recompute.memory_budget!r}, and psfleet.torch "
            "does not measure a torch model's activations; name modules in checkpoints, or neither"
        )
    if plan_file():
        raise UsageError(
            "psfleet plan measures programs of psfleet, and this script trains a torch model; "
            "run it with psfleet-launch"
        )
    asked = settings.pipeline or PipelineSettings()
    if not cut and (here().processes > 1 or asked.micro_batches > 1):
        raise UsageError(
            f"the strategy asks for a pipeline of {asked.stages} stages and {asked.micro_batches} "
            "micro-batches, and this model is not cut; train an nn.Sequential with "
            "psfleet.torch.Pipeline"
        )


def pipeline_of(settings: Settings) -> PipelineSettings:
    """The pipeline that is asked for; one stage and one micro-batch where nobody asks.

    Raises:
        ConfigError: psfleet.torch cannot run it.
    """
    asked = settings.pipeline or PipelineSettings()
    if asked.schedule == "zero-bubble":
        raise ConfigError(
            "pipeline schedule zero-bubble splits each backward in two, which torch's autograd can "
            "do only by computing parts of it twice; use 1f1b, gpipe or interleaved"
        )
    if max(asked.copies, default=1) > 1:
        raise ConfigError(
            f"pipeline copies is {asked.copies}, and a stage of a torch model has one process; "
            "leave copies out"
        )
    return asked
