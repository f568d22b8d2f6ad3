"""The building blocks in plain torch, as people write them. Each has a twin of the same name one folder up."""
