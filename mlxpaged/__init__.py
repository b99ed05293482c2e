"""mlxpaged: one model, many clients, one Mac."""

from mlxpaged import mlx_settings, open_files
from mlxpaged.cpu import blas

blas.prepare()
mlx_settings.prepare()
open_files.prepare()

__version__: str


def __getattr__(name: str) -> str:
    """`__version__`, read when it is needed: importlib.metadata takes five times as long as the start of Python."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mlxpaged")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"
