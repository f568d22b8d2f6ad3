"""The doctor: finds the data-parallel mistakes in anybody's raw PyTorch script, by reading it and by running it.

`reading` looks at the source alone and never imports or runs it; `watching` runs it under a few workers with hooks and
looks at what they did. Both give `findings.Finding`s of the rules in `rules`; `examine` puts them together. Nothing is
imported here: a watched rank starts with what it needs itself.
"""

__all__: list[str] = []
