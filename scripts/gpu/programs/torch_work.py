"""PyTorch, deterministic: training a transformer and a convnet, inference, CUDA graphs, torch.compile. Knows nothing of ebb."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
from torch import nn
from torch.nn import functional as F

import works

torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
torch.backends.cudnn.deterministic = True
# Attention by plain matrix products: its gradient is the same each time.
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):
    torch.backends.cuda.enable_cudnn_sdp(False)


def one_hot(tokens, words, dtype):
    return (tokens.unsqueeze(-1) == torch.arange(words, device=tokens.device)).to(dtype)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, width=512, layers=4, words=4096, heads=8, length=512):
        super().__init__()
        self.words = words
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.read = nn.Parameter(torch.randn(words, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        # A product with one-hot rows instead of a lookup: the gradient of a lookup adds in any order.
        x = one_hot(tokens, self.words, self.read.dtype) @ self.read
        x = self.blocks(x + self.place[: tokens.shape[1]])
        return self.norm(x) @ self.read.t()


class Convnet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        layers, before = [], 3
        for i in range(6):
            after = width * 2 ** (i // 2)
            layers += [nn.Conv2d(before, after, 3, stride=2 if i % 2 else 1, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            before = after
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(before, 100)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def loss_of(model, tokens):
    out = model(tokens)[:, :-1].float()
    return -(F.log_softmax(out, -1) * one_hot(tokens[:, 1:], out.shape[-1], out.dtype)).sum(-1).mean()


def numpy_of(model, *more):
    return [p.detach().float().cpu().numpy() for p in model.state_dict().values()] + [t.detach().float().cpu().numpy() for t in more]


def seeded(make):
    torch.manual_seed(5)
    with torch.device("cuda"):
        return make()


def tokens_of(words, batch=16, length=128):
    return torch.randint(0, words, (batch, length), device="cuda")


def train(steps, wrap=lambda model: model, layers=4, lengths=(64, 96, 128, 160, 192)):
    model = seeded(lambda: Transformer(layers=layers))
    forward = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for i in steps:
        # Lengths change, so that the allocator has work.
        loss = loss_of(forward, tokens_of(4096, length=lengths[i % len(lengths)]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            losses.append(loss.detach().clone())
    return numpy_of(model, torch.stack(losses))


def convnet(steps):
    model = seeded(Convnet).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for i in steps:
        x = torch.randn(64 + 16 * (i % 3), 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return numpy_of(model)


@torch.inference_mode()
def infer(steps):
    model = seeded(lambda: Transformer(width=1024, layers=8)).to(torch.bfloat16).eval()
    total = torch.zeros(4096, device="cuda", dtype=torch.float64)
    copied = []
    for i in steps:
        out = model(tokens_of(4096, batch=1 + i % 8, length=16 + 16 * (i % 7)))
        total += out[:, -1].double().sum(0)
        if i % 50 == 0:
            copied.append(out[0, -1, :64].float().cpu())
    return [total.cpu().numpy()] + [c.numpy() for c in copied]


def graphs(steps):
    model = seeded(lambda: Transformer(layers=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    tokens = tokens_of(4096)

    def once():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = once()
    losses = []
    for i in steps:
        tokens.copy_(tokens_of(4096))
        graph.replay()
        if i % 10 == 0:
            losses.append(loss.detach().clone())  # allocates between two replays
    return numpy_of(model, torch.stack(losses))


def compile_default(steps):
    return train(steps, torch.compile, layers=2, lengths=(128,))


def compile_overhead(steps):
    model = seeded(lambda: Transformer(layers=2)).to(torch.bfloat16).eval()
    fast = torch.compile(model, mode="reduce-overhead")
    total = torch.zeros(4096, device="cuda", dtype=torch.float64)
    with torch.no_grad():
        for _ in steps:
            out = fast(tokens_of(4096))
            total += out[:, -1].double().sum(0)
    fewer = works.Steps(0, max(10, steps.done // 4))
    trained = train(fewer, lambda model: torch.compile(model, mode="reduce-overhead"), layers=2, lengths=(128,))
    return [total.cpu().numpy(), *trained]


if __name__ == "__main__":
    works.run_all({
        "train": train, "convnet": convnet, "infer": infer, "graphs": graphs, "compile": compile_default, "reduce-overhead": compile_overhead,
    }, works.options())
