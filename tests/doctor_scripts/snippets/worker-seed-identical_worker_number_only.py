# expect: worker-seed-identical
from pieces import *


def init(worker):
    random.seed(1234 + worker)


rank, local, world = start()
loader = tud.DataLoader(Pictures([]), 4, num_workers=2, worker_init_fn=init)
stop()
