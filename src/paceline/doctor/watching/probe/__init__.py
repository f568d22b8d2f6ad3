"""What runs inside each rank: hooks on torch that tell what the script does, and change nothing of it.

Nothing in here draws a random number, starts a thread, or communicates with other ranks.
"""

__all__: list[str] = []
