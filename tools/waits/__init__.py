"""Count device synchronizations on a machine without a device.

:mod:`.device` simulates a GPU: tensors stay on the CPU, but each belongs to the host or to the device, and every
operation that would block the host is recorded with the code that called it. :mod:`.run` does so for the steps of a
training run. The rules are those of ``torch.cuda.set_sync_debug_mode``, plus copies from pageable memory.
"""
