"""mlxpaged: one model, many clients, one Mac."""

from importlib.metadata import PackageNotFoundError, version

from mlxpaged import mlx_settings
from mlxpaged.cpu import blas

blas.prepare()
mlx_settings.prepare()

try:
    __version__ = version("mlxpaged")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"
