"""What the configuration means for the streams between the pools."""

from __future__ import annotations

from paceline.actors.channels import ChannelSettings
from paceline.actors.tls import TlsFiles, check_files
from paceline.cluster.config import PacelineConfig


def channel_settings(config: PacelineConfig) -> ChannelSettings:
    """Settings of both ends of every internal stream. Reads no file."""
    tls = config.security.internal_tls
    return ChannelSettings(tls=None if tls is None else TlsFiles(**tls.model_dump()))


def checked_channel_settings(config: PacelineConfig) -> ChannelSettings:
    """The same where the streams are used.

    Raises:
        TlsError: a certificate, key or authority cannot be read.
    """
    settings = channel_settings(config)
    if settings.tls is not None:
        check_files(settings.tls)
    return settings
