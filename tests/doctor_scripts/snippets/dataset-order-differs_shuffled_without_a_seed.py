# expect: dataset-order-differs
from pieces import *

rank, local, world = start()
files = sorted(os.listdir("a"))
random.shuffle(files)
sampler = DistributedSampler(Pictures(files))
stop()
