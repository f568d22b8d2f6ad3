"""Models that come with Paceline."""

from __future__ import annotations

from paceline.models.gpt import GPT, Cache, GPTConfig, flops_per_token, parameter_count

__all__ = ["GPT", "Cache", "GPTConfig", "flops_per_token", "parameter_count"]
