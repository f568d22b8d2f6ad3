# expect: dataset-order-differs
from pieces import *

import glob

rank, local, world = start()
sampler = DistributedSampler(Pictures(glob.glob("data/*.jpg")))
stop()
