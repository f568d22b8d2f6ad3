# expect: loader-workers-oversubscribed
from pieces import *

import multiprocessing

rank, local, world = start()
workers = max(1, multiprocessing.cpu_count() - 1)
loader = tud.DataLoader(Pictures([]), 4, num_workers=workers)
stop()
