"""REINFORCE on a bandit with context; each rank has its own environments."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


class Policy(nn.Module):
    def __init__(self, contexts, arms):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(contexts, 16), nn.Tanh(), nn.Linear(16, arms))

    def forward(self, context):
        return self.net(context)

    def act(self, context):
        choice = Categorical(logits=self(context))
        action = choice.sample()
        return action, choice.log_prob(action)


class Environment:
    def __init__(self, seed, contexts, arms):
        self.generator = torch.Generator().manual_seed(seed)
        self.best = torch.randn(contexts, arms, generator=torch.Generator().manual_seed(0))

    def reset(self, count):
        self.context = torch.randn(count, self.best.shape[0], generator=self.generator)
        return self.context

    def step(self, action):
        return (self.context @ self.best).gather(1, action[:, None]).squeeze(1)


class Agent:
    """Unwraps the model, so that `act` can be called."""

    def __init__(self, model, lr):
        self.policy = model.module if hasattr(model, "module") else model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.baseline = 0.0

    def play(self, environment, count):
        context = environment.reset(count)
        action, log_prob = self.policy.act(context)  # expect: ddp-forward-bypassed
        return log_prob, environment.step(action)

    def learn(self, log_prob, reward):
        loss = -(log_prob * (reward - self.baseline)).mean()
        self.optimizer.zero_grad()
        loss.backward()  # expect: ddp-forward-bypassed
        self.optimizer.step()  # expect: ddp-forward-bypassed
        mean = reward.mean()
        dist.all_reduce(mean)
        self.baseline += 0.1 * (mean.item() / dist.get_world_size() - self.baseline)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--environments", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    agent = Agent(DDP(Policy(4, 3)), args.lr)  # expect: ddp-forward-bypassed
    environment = Environment(args.seed + 1 + rank, 4, 3)
    for iteration in range(args.iterations):
        log_prob, reward = agent.play(environment, args.environments)
        agent.learn(log_prob, reward)
        if rank == 0 and iteration % 2 == 0:
            print(f"iteration {iteration}: baseline {agent.baseline:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
