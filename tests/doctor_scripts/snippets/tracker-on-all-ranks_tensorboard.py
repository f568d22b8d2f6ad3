# expect: tracker-on-all-ranks
from pieces import *

from torch.utils.tensorboard import SummaryWriter

rank, local, world = start()
writer = SummaryWriter("runs")
stop()
