"""Models by their names: those that are served, and those that are only on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import ModelNotFoundError
from mlxpaged.models.files.kinds import Kind
from mlxpaged.models.sources.short_names import LATEST, full_name, without_address
from mlxpaged.models.sources.source import source_path
from mlxpaged.registry.catalog import Catalog, Found
from mlxpaged.registry.errors import ModelUnknownError
from mlxpaged.registry.model import Model
from mlxpaged.registry.profile import Profile


class Names:
    """Belongs to the event loop. models: served, by name; `find` adds those that are only on this machine, and drops
    those whose files are gone. The others: as Registry has them."""

    def __init__(
        self,
        models: dict[str, Model],
        aliases: Mapping[str, str],
        profiles: Mapping[str, Profile],
        catalog: Catalog,
        base: EngineConfig,
    ) -> None:
        self._models, self._aliases, self._profiles = models, aliases, profiles
        self._catalog, self._base = catalog, base

    @property
    def default(self) -> Model:
        return next(iter(self._models.values()))

    def served(self, name: str | None) -> Model | None:
        """The model of this name, if it is served; the default one for None. The name may be MODEL:ADAPTER."""
        if name is None:
            return self.default
        found = self._served(without_address(name))
        return None if found is None else found[0]

    def adapter_in(self, name: str | None) -> str | None:
        """The adapter of a model's name; None if it has none."""
        found = None if name is None else self._served(without_address(name))
        return None if found is None else found[1]

    def profile_in(self, name: str | None) -> Profile | None:
        """The profile of this name, if it is that of one."""
        name = "" if name is None else without_address(name)
        return self._profiles.get(name) or self._profiles.get(name.removesuffix(LATEST))

    def _served(self, name: str) -> tuple[Model, str | None] | None:
        if (profile := self.profile_in(name)) is not None:
            name = profile.model
        for each in (name, name.removesuffix(LATEST)):
            if (model := self._models.get(self._aliases.get(each, each))) is not None:
                return model, None
            base, _, adapter = each.rpartition(":")
            model = self._models.get(self._aliases.get(base, base))
            if model is not None and adapter in model.adapters:
                return model, adapter
        return None

    async def find(self, name: str | None, any_directory: bool = False) -> Model:
        """Find a model, and serve it from now on if it is only on this machine. any_directory: whether the name may be
        an absolute path. Raises ModelUnknownError."""
        if (model := self.served(name)) is not None:
            if not model.is_gone:
                return model
            del self._models[model.name]
        assert name is not None
        found = await asyncio.to_thread(self._on_disk, name, any_directory)
        if found is None:
            raise ModelUnknownError(name)
        return self._served_as(found) or self._models.setdefault(found.name, self._model_of(found))

    def _on_disk(self, name: str, any_directory: bool) -> Found | None:
        self._look_at_files()
        for each in dict.fromkeys((name, name.removesuffix(LATEST))):
            is_path = any_directory and each.startswith(("/", "~"))
            if (found := self._catalog.find_directory(each) if is_path else self._catalog.find(each)) is not None:
                return found
        return None

    def _served_as(self, found: Found) -> Model | None:
        """The served model of this directory: it is not loaded twice if a request gives it another name."""
        return next((model for model in self._models.values() if is_same(model, found)), None)

    def _look_at_files(self) -> None:
        """Reads what the files of served models say. Those of a loaded one are where they were."""
        for model in list(self._models.values()):
            is_known = model.engine is not None and model.found is not None
            model.look(None if is_known else self._catalog.find_source(model.config.model))

    async def look(self) -> None:
        """Read what the files of served models say, as far as they have changed."""
        await asyncio.to_thread(self._look_at_files)

    async def on_disk(self) -> list[Model]:
        """The models on this machine that are not served yet. Reads what the files of those that are say, and serves
        those no more that were deleted."""

        def look() -> list[Model]:
            self._look_at_files()
            models = [self._model_of(found) for found in self._catalog.all()]
            for model in models:
                model.look(None)
            return models

        models = await asyncio.to_thread(look)
        for gone in [model for model in self._models.values() if model.is_gone]:
            del self._models[gone.name]
        is_served = {each.name for each in models if each.found is not None and self._served_as(each.found) is not None}
        return [each for each in models if each.name not in self._models and each.name not in is_served]

    def _model_of(self, found: Found) -> Model:
        config = dataclasses.replace(
            self._base,
            model=str(found.path),
            served_model_name=found.name,
            tool_parser=None,
            chat_template=None,
            reranker=False,
            only_embeds=found.kind is Kind.EMBEDDING,
        )
        return Model(found.name, config, found=found, is_found=True)


def is_same(model: Model, found: Found) -> bool:
    """Whether the files of a model are these."""
    source = model.config.model
    try:
        if found.path == model.path_on_disk or full_name(source) == found.name:
            return True
        return Path(source_path(source) or source).expanduser().samefile(found.path)
    except (OSError, RuntimeError, ModelNotFoundError):  # there is no such file, or no such user: a repository
        return False
