# expect: sampler-seed-differs
from pieces import *

rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data, world, rank, seed=7 * int(os.environ["RANK"]))
stop()
