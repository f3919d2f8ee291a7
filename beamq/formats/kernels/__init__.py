"""Fast kernels that give the same bytes as the plain torch of `formats`; see `cpu`."""
