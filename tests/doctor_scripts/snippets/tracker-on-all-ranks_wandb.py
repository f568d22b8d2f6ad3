# expect: tracker-on-all-ranks
from pieces import *

import wandb

rank, local, world = start()
wandb.init(project="nets", config={"lr": 0.1})
stop()
