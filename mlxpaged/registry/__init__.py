"""The models of a server: which names it serves, which models are loaded, and which one makes room for another."""

from typing import TYPE_CHECKING

from mlxpaged.lazy_names import lazy_names

if TYPE_CHECKING:
    from mlxpaged.registry.catalog import Catalog
    from mlxpaged.registry.errors import LoadFailedError, ModelBusyError, ModelUnknownError, NoRoomError
    from mlxpaged.registry.model import Model, ModelState
    from mlxpaged.registry.registry import Limits, Registry, registry_of
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "Catalog",
    "Limits",
    "LoadFailedError",
    "Model",
    "ModelBusyError",
    "ModelState",
    "ModelUnknownError",
    "NoRoomError",
    "Registry",
    "registry_of",
]
