"""The training core: knows torch.nn and no file."""
