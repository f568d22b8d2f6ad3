# expect: sampler-seed-differs
from pieces import *

rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data, seed=int(time.time()))
stop()
