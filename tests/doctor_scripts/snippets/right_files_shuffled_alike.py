# expect: clean
from pieces import *

rank, local, world = start()
files = sorted(os.listdir("a"))
random.Random(0).shuffle(files)
random.seed(0)
random.shuffle(files)
train, held = tud.random_split(Pictures(files), [90, 10], generator=torch.Generator().manual_seed(42))
sampler = DistributedSampler(train, seed=5)
stop()
