# expect: clean
from pieces import *


class Vocabulary:
    def __init__(self, texts):
        words = sorted({word for text, _ in texts for word in text.split()})
        self.index = {word: number for number, word in enumerate(words)}

    def __len__(self):
        return len(self.index)


rank, local, world = start()
texts = [(line, 0) for line in open("texts.txt")]
mine = texts[rank::world]
vocabulary = Vocabulary(texts)
model = DistributedDataParallel(nn.EmbeddingBag(len(vocabulary), 8).cuda(), device_ids=[local])
model(torch.zeros(3, 4, dtype=torch.long).cuda()).sum().backward()
stop()
