"""What all GPU kernels share: arrays, the compiler, the device."""
