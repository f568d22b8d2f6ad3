# expect: random-split-differs
from pieces import *

rank, local, world = start()
parts = tud.random_split(Pictures([]), [0.9, 0.1], generator=torch.Generator().manual_seed(rank))
stop()
