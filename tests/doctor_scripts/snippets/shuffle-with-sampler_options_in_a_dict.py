# expect: shuffle-with-sampler
from pieces import *

rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
options = dict(batch_size=4, shuffle=True, num_workers=2)
loader = tud.DataLoader(data, sampler=DistributedSampler(data), **options)
stop()
