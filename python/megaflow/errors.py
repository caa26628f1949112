"""Every error that megaflow raises on purpose.

Each class is a child of `MegaflowError` and of the builtin that a caller would catch anyway. The message is one or more
sentences that name the file, the place, what was expected, what was found, and the remedy. The Rust core raises
the same classes.
"""


def first_line(error: BaseException) -> str:
    """What an error says first, for a sentence that tells its kind too; some say nothing."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


def tell_break(error: BaseException, package: str) -> str:
    """What is said behind the name of a package that could not be imported: nothing if it is missing itself."""
    if isinstance(error, ModuleNotFoundError) and (error.name or package).split(".")[0] == package.split(".")[0]:
        return ""
    return f", which is there and does not load ({type(error).__name__}: {first_line(error)})"


class MegaflowError(Exception):
    """Base of all errors that a user, a file or a cluster can cause."""


class ConfigError(MegaflowError, ValueError):
    """A setting is wrong, or contradicts another one."""


class ShapeError(MegaflowError, ValueError):
    """Tensors whose shapes must agree do not."""


class DataFormatError(MegaflowError, ValueError):
    """A file does not hold what its format promises: an input record, an `.idx`, a `.bin`, a sidecar."""


class TokenizerError(MegaflowError, ValueError):
    """A tokenizer cannot be loaded, or cannot do what was asked of it."""


class MissingFileError(MegaflowError, FileNotFoundError):
    """A file or folder that was named does not exist."""


class FileAccessError(MegaflowError, OSError):
    """A file exists but cannot be read or written: permission, full disk, read error."""


class OutputBusyError(FileAccessError):
    """Another job is writing the same output."""


class SampleIndexError(MegaflowError, IndexError):
    """A document or sample position lies outside the dataset."""


class NoDocumentsError(MegaflowError, ValueError):
    """The input holds no document at all, so nothing was written."""


class CheckpointError(MegaflowError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit this run."""


class ForkError(MegaflowError, RuntimeError):
    """An object with threads was used in a forked child, where its threads do not exist."""
