"""What a run is: sections, flags, recipes, checks and arithmetic. Imports neither torch nor any other layer."""

from megaflow_trainer.config.command import read_command
from megaflow_trainer.config.help import format_help
from megaflow_trainer.config.sections import TrainConfig

__all__ = ["TrainConfig", "format_help", "read_command"]
