"""How large is a convolution? Its operator norm three ways: from its explicit matrix, by us, by torch's spectral_norm.

``torch.nn.utils.parametrizations.spectral_norm`` divides a kernel by the norm of the kernel reshaped to a matrix, which
knows nothing of stride, padding and input size. ``operator_norms`` iterates with the layer's own forward and transpose.

    python examples/conv_norm.py
"""

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from maxgain import operator_norms

SIZE = 32


def explicit_matrix(kernel: np.ndarray, size: int, stride: int, padding: int) -> csr_matrix:
    """The matrix of a convolution with zero padding of square images: an entry for each tap that meets a pixel."""
    outputs, channels, height, width = kernel.shape
    out = (size + 2 * padding - height) // stride + 1
    o, c, i, j, y, x = np.meshgrid(*map(np.arange, (*kernel.shape, out, out)), indexing="ij", sparse=True)
    from_y, from_x = y * stride + i - padding, x * stride + j - padding
    shape = (outputs, channels, height, width, out, out)
    met = np.broadcast_to((from_y >= 0) & (from_y < size) & (from_x >= 0) & (from_x < size), shape)
    rows = np.broadcast_to((o * out + y) * out + x, shape)[met]
    columns = np.broadcast_to((c * size + from_y) * size + from_x, shape)[met]
    values = np.broadcast_to(kernel[..., None, None], shape)[met]
    return csr_matrix((values, (rows, columns)), shape=(outputs * out**2, channels * size**2))


def compare(size: int = SIZE) -> tuple[float, float, float]:
    """The norm of one strided convolution: by the SVD of its matrix, by operator_norms, as spectral_norm takes it."""
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False)
    matrix = explicit_matrix(conv.weight.detach().double().numpy(), size, stride=2, padding=1)
    by_svd = svds(matrix, k=1, return_singular_vectors=False, rng=0).item()
    ours = operator_norms(conv, torch.zeros(1, 64, size, size)).norms[""]
    before = conv.weight.detach().clone()
    spectral_norm(conv, n_power_iterations=200)
    theirs = (before.norm() / conv.weight.norm()).item()
    return by_svd, ours, theirs


def main() -> None:
    by_svd, ours, theirs = compare()
    print(f"64 → 64 convolution, 3×3, stride 2, zero padding, {SIZE}×{SIZE} input")
    for what, norm in {"SVD of the explicit matrix": by_svd, "operator_norms": ours, "spectral_norm": theirs}.items():
        print(f"{what:28}{norm:.6f}  ({100 * (norm / by_svd - 1):+.4f} %)")


if __name__ == "__main__":
    main()
