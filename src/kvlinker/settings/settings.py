"""Puts the settings of a kvlinker process together, and says where their values come from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.tenants import SHARED_TENANT, Quota, Quotas, tenant_of_key
from kvlinker.settings.audit import AuditSettings
from kvlinker.settings.engine import EngineSettings
from kvlinker.settings.fleet import FleetSettings
from kvlinker.settings.linking import LinkingSettings
from kvlinker.settings.model import ModelSettings
from kvlinker.settings.server import ServerSettings
from kvlinker.settings.storage import StorageSettings

VARIABLE_PREFIX = "KVLINKER_"
CONFIG_FILE_VARIABLE = "KVLINKER_CONFIG"


class Settings(
    ServerSettings,
    AuditSettings,
    FleetSettings,
    StorageSettings,
    EngineSettings,
    LinkingSettings,
    ModelSettings,
):
    """Everything that can be configured. Sizes take units, such as ``4GiB``.

    The bases stand in the reverse of the order in which their fields are read and listed: pydantic
    begins with the last, and a field's validator sees those before it.
    """

    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    @property
    def quotas(self) -> Quotas:
        default = Quota(
            self.tenant_quota_bytes, self.tenant_quota_caches, self.tenant_quota_pinned_bytes
        )
        quotas = Quotas(default)
        own = {}
        for name, quota in self.tenant_quotas.items():
            tenant = name if name == SHARED_TENANT else tenant_of_key(name)
            own[tenant] = replace(quotas.of(tenant), **quota.model_dump(exclude_none=True))
        return replace(quotas, own=own)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = os.environ.get(CONFIG_FILE_VARIABLE)
        try:
            if file and not Path(file).is_file():
                raise InvalidRequestError(f"{CONFIG_FILE_VARIABLE} names no file: {file}")
            toml = TomlConfigSettingsSource(settings_cls, file)
        except OSError as error:
            raise InvalidRequestError(
                f"{CONFIG_FILE_VARIABLE} names a file that cannot be read: {error}"
            ) from error
        return init_settings, env_settings, toml
