# expect: dataset-order-differs
from pieces import *

rank, local, world = start()
np.random.seed(100 + dist.get_rank())
files = sorted(os.listdir("a"))
np.random.shuffle(files)
data = Pictures(files[:100])
sampler = DistributedSampler(data)
stop()
