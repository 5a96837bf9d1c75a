"""All errors that a user can meet, in named kinds.

An error says what is wrong, where (the layer's dotted path, the file), and what to do about it.
"""


class MaxGainError(Exception):
    """What all errors of this package derive from; the command line answers one with a sentence and exit code 2.

    `field` names the option that is wrong, where there is one.
    """

    def __init__(self, *args: object, field: str = "") -> None:
        super().__init__(*args)
        self.field = field


class BoundError(MaxGainError, ValueError):
    """A bound (gamma, lambda, ...) that is not a positive number, or that says nothing about some layer."""


class ChoiceError(MaxGainError, ValueError):
    """Losses from which no gamma can be chosen."""


class NormError(MaxGainError, ValueError):
    """A p that does not name a norm."""


class PatternError(MaxGainError, ValueError):
    """A glob over layer names that matches nothing."""


class UnsupportedLayerError(MaxGainError, TypeError):
    """A layer whose linear part cannot be measured or rescaled."""


class NothingToConstrainError(MaxGainError, ValueError):
    """A model without a layer to work on."""


class AttachError(MaxGainError, ValueError):
    """An optimizer that cannot be attached: attached already, or it holds none of the constrained weights."""


class ScriptingError(MaxGainError, AttributeError):
    """A watched model was given to torch.jit.script, which compiles the hooks of a model."""


class StateError(MaxGainError, ValueError):
    """A state that belongs to another model or constraint."""


class MissingExtraError(MaxGainError, ImportError):
    """A feature whose optional dependency is not installed."""


class FileError(MaxGainError):
    """A file that is no regular file, is too large, or does not hold what it should."""


class MissingFileError(FileError):
    """A file that is not there."""


class DataError(MaxGainError):
    """A data set that is missing, short or wrong."""


class RecipeError(MaxGainError):
    """A recipe that makes no sense."""


class RegulariserError(MaxGainError):
    """A regulariser that does not exist, or a combination that makes no sense."""


class CheckpointError(MaxGainError):
    """A checkpoint that is missing, damaged, or of another run."""


class RunError(MaxGainError):
    """A run that cannot go on: the loss is no longer a number, the disk is full."""


class FolderInUseError(RunError):
    """A folder that another process is at work in."""


class MeasurementWarning(UserWarning):
    """Something was measured that could not be used, or was not measured at all."""
