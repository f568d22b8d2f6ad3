# expect: random-split-differs
from pieces import *


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


rank, local, world = start()
seed_everything(1 + rank)
train, held = tud.random_split(Pictures([]), [90, 10])
stop()
