"""Frame-wise speech labels from padded utterances."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 2
FEATURES, PHONES = 6, 5


class Utterances(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, 20, (count,), generator=generator).tolist()
        self.frames = [torch.randn(length, FEATURES, generator=generator) for length in lengths]

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, index):
        frames = self.frames[index]
        return frames, frames[:, :PHONES].argmax(1)


def collate(batch):
    frames, phones = zip(*batch)
    lengths = torch.tensor([len(f) for f in frames])
    return pad_sequence(frames, batch_first=True), pad_sequence(phones, batch_first=True), lengths


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(FEATURES, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, PHONES)

    def forward(self, frames):
        return self.out(self.gru(frames)[0])


def masked_loss(logits, phones, lengths):
    mask = torch.arange(phones.shape[1]) < lengths[:, None]
    per_frame = nn.functional.cross_entropy(logits.transpose(1, 2), phones, reduction="none")
    return (per_frame * mask).sum() / mask.sum()  # expect: unequal-weight-average


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Utterances(80)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler, collate_fn=collate)
    model = DDP(Recogniser())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, (frames, phones, lengths) in enumerate(loader):
            loss = masked_loss(model(frames), phones, lengths)
            optimizer.zero_grad()
            loss.backward()  # expect: unequal-weight-average
            optimizer.step()
            if step % 5 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}")  # expect: print-on-all-ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
