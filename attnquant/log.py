"""The log, below the name of MAX's pipelines: MAX prints no other's lines."""

from __future__ import annotations

import logging

LOGGER = "max.pipelines.attnquant"

log = logging.getLogger(LOGGER)
