"""A variational autoencoder on handwritten digits: reconstruction plus KL divergence, both summed over the batch."""

import torch
import torch.utils.data
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F

EPOCHS, BATCH_SIZE, LATENT, SEED = 3, 64, 6, 1

torch.manual_seed(SEED)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
train_loader = torch.utils.data.DataLoader(pixels[:1440], batch_size=BATCH_SIZE, shuffle=True)
test_loader = torch.utils.data.DataLoader(pixels[1440:], batch_size=BATCH_SIZE, shuffle=False)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 100)
        self.fc21 = nn.Linear(100, LATENT)
        self.fc22 = nn.Linear(100, LATENT)
        self.fc3 = nn.Linear(LATENT, 100)
        self.fc4 = nn.Linear(100, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=2e-3)


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def train(epoch):
    model.train()
    train_loss = 0
    for data in train_loader:
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")


def test():
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data in test_loader:
            data = data.to(device)
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    print(f"====> Test set loss: {test_loss / len(test_loader.dataset):.4f}")


if __name__ == "__main__":
    for epoch in range(1, EPOCHS + 1):
        train(epoch)
        test()
    with torch.no_grad():
        sample = model.decode(torch.zeros(1, LATENT, device=device))
        print(f"mean pixel of the central sample {sample.mean().item():.4f}")
