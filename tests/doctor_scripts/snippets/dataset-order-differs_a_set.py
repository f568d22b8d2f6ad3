# expect: dataset-order-differs
from pieces import *

rank, local, world = start()
names = list({name.lower() for name in ["a", "b"]})
sampler = DistributedSampler(Pictures(names))
stop()
