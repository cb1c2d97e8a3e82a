"""Counts where the host waits for the device, on a machine without one.

:mod:`.device` stands in for a GPU: tensors stay on the CPU, but each is known to be the host's or the device's, and
whatever would make the host wait is recorded with the code that asked for it. :mod:`.run` does so for the steps of a
training run. CUDA's own rules are those of ``torch.cuda.set_sync_debug_mode``, and a copy from pageable memory.
"""
