# expect: worker-seed-identical
from pieces import *

rank, local, world = start()
loader = tud.DataLoader(Pictures([]), 4, num_workers=2, worker_init_fn=lambda w: np.random.seed(0))
stop()
