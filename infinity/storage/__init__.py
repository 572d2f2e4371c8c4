"""Bytes under integer ids, on host memory and NVMe."""
