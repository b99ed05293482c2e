"""One model on several machines: a process for each rank, which `ClusterEngine` starts, watches and starts anew.

The server's process has HTTP, and no weights. Rank 0 has the scheduler, the sampler and its share of the model; the
other ranks have their shares, and make the calls that rank 0 sends them. MLX's distributed backends carry the tensors.
"""
