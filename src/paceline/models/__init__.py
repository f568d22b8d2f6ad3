"""Models that come with Paceline, and a loss for large vocabularies."""

from __future__ import annotations

from paceline.models.gpt import GPT, Cache, GPTConfig, flops_per_token, parameter_count
from paceline.models.loss import chunked_cross_entropy

__all__ = ["GPT", "Cache", "GPTConfig", "chunked_cross_entropy", "flops_per_token", "parameter_count"]
