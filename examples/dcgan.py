"""Train a generator and a discriminator of images, in turns, each step on two micro-batches."""

import torch
from torch import nn

LATENT, ACCUMULATION = 8, 2


def make_generator() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 16, 4),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 1, 4),
        nn.Flatten(0),
    )


def main() -> None:
    torch.manual_seed(999)
    criterion = nn.BCEWithLogitsLoss()
    netG, netD = make_generator(), make_discriminator()
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real_label, fake_label = torch.ones(8), torch.zeros(8)
    for iteration in range(4):
        # Update D: maximize log(D(x)) + log(1 - D(G(z)))
        for _ in range(ACCUMULATION):
            real = torch.rand(8, 1, 8, 8)
            fake = netG(torch.randn(8, LATENT, 1, 1))
            errD = criterion(netD(real), real_label) + criterion(netD(fake.detach()), fake_label)
            (errD / ACCUMULATION).backward()
        optimizerD.step()
        optimizerD.zero_grad()

        # Update G: maximize log(D(G(z)))
        for _ in range(ACCUMULATION):
            fake = netG(torch.randn(8, LATENT, 1, 1))
            errG = criterion(netD(fake), real_label)
            (errG / ACCUMULATION).backward()
        optimizerG.step()
        optimizerG.zero_grad()
        print(f"[{iteration}/4] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")


if __name__ == "__main__":
    main()
